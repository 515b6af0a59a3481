//! What a node registers of itself: public facts only.

use std::sync::Arc;

use fabric_identity::Name;
use memory_fabric::donor::server::Donor;
use memory_fabric::rdma::DeviceChoice;
use ssi_hv_membership::{Carrier, EtcdError, MEMBER_SCHEMA, Member, Registration};

use crate::config::NodeConfig;
use crate::config::address::HostPort;
use crate::config::membership::{Membership, MembershipError};

/// Why a node is not registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// As it is configured, it cannot.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The host has no thread left.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

/// Registers a node until the result is dropped.
///
/// # Errors
///
/// Fails when its settings cannot be used. An etcd that is away is no error.
pub fn register(
    config: &NodeConfig,
    membership: &Membership,
    donor: &Arc<Donor>,
) -> Result<Registration, RegisterError> {
    let endpoints = membership.endpoints()?;
    let name = name_of(membership, donor)?;
    let described = described(config, membership, donor);
    let donor = Arc::downgrade(donor);
    let describe = move || {
        // At the end of the node nothing is free.
        let donor = donor.upgrade();
        let free = donor.map_or(0, |donor| donor.pool().free_bytes());
        Member {
            free_bytes: free,
            ..described.clone()
        }
    };
    Ok(Registration::start(&endpoints, &name, describe)?)
}

/// Returns the name in the certificate, or the one that was given, or that of the host.
fn name_of(membership: &Membership, donor: &Donor) -> Result<Name, MembershipError> {
    let given = membership.member.name.clone();
    if let Some(credentials) = donor.credentials() {
        let certified = credentials.current().subject().holder.name.clone();
        return match given {
            Some(given) if given != certified => {
                Err(MembershipError::NotCertified { given, certified })
            }
            _ => Ok(certified),
        };
    }
    if let Some(given) = given {
        return Ok(given);
    }
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().to_lowercase();
    host.parse().map_err(|_| MembershipError::NoName(host))
}

fn described(config: &NodeConfig, membership: &Membership, donor: &Donor) -> Member {
    let member = &membership.member;
    let listening = HostPort::from(donor.address());
    let has_udp = cfg!(feature = "udp");
    let has_rdma = cfg!(feature = "rdma") && config.rdma != DeviceChoice::None;
    let carriers = [
        (true, Carrier::Tcp),
        (has_udp, Carrier::Udp),
        (has_rdma, Carrier::Rdma),
    ];
    let carriers = carriers.into_iter().filter(|(is_there, _)| *is_there);
    Member {
        schema: MEMBER_SCHEMA,
        address: member.address.as_ref().unwrap_or(&listening).to_string(),
        transports: carriers.map(|(_, carrier)| carrier).collect(),
        memory_bytes: donor.pool().bytes(),
        free_bytes: 0,
        zone: member.zone.as_ref().map(ToString::to_string),
        cpus: config.cpus,
        certificates: donor.credentials().is_some(),
        fingerprint: donor.fingerprint().map(|shown| shown.to_string()),
        release: env!("CARGO_PKG_VERSION").to_owned(),
        wire: fabric_wire::VERSION,
    }
}
