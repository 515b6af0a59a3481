//! Where the memory that is not here comes from: leases and links.

use super::{
    DonorAddress, FabricConfig, FabricError, FabricEvent, FabricObserver, LOOPBACK_LEASE,
    Redundancy, TransportKind, replicas,
};
use crate::control::ControlError;
use crate::donor::pool::Pool;
use crate::homes::{BLOCK_BYTES, LocalNode};
use crate::link::{Leased, Link, LinkConfig, LinkPort, describe, while_kept};
use crate::page::PAGE_SHIFT;
use crate::stream::Carrier;
use crate::transport::udp::Fingerprint;
use crate::wire::{Refusal, TrafficClass};
use fabric_identity::ExpectedNode;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

/// Where the memory that is not here comes from.
pub(super) enum Sources {
    None,
    Loopback(Box<Pool>, u64),
    Donors(Vec<Leased>),
}

impl Sources {
    /// Leases for the node `local`, which is that of the configuration.
    pub(super) fn obtain(
        config: &FabricConfig,
        local: &LocalNode,
        guest_bytes: u64,
    ) -> Result<Self, FabricError> {
        if config.transport == TransportKind::Loopback {
            let bytes = guest_bytes.next_multiple_of(BLOCK_BYTES);
            return Ok(Self::Loopback(
                Box::new(Pool::new(bytes, LOOPBACK_LEASE)),
                bytes,
            ));
        }
        Ok(Self::Donors(lease(config, local, guest_bytes, false)?))
    }

    /// Address and bytes of each loan.
    pub(super) fn lent(&self) -> Vec<(Option<SocketAddr>, u64)> {
        match self {
            Self::None => Vec::new(),
            Self::Loopback(_, bytes) => vec![(None, *bytes)],
            Self::Donors(leases) => leases
                .iter()
                .map(|leased| (Some(leased.address()), leased.grant().bytes))
                .collect(),
        }
    }
}

/// Leases for the node `local` from all donors of the configuration. With `omits_full`, a donor without
/// a size of its own that has no memory left is left out.
pub(super) fn lease(
    config: &FabricConfig,
    local: &LocalNode,
    guest_bytes: u64,
    omits_full: bool,
) -> Result<Vec<Leased>, FabricError> {
    let mut leases: Vec<Leased> = Vec::new();
    let (guest_pages, local_pages) = (guest_bytes >> PAGE_SHIFT, config.local_bytes >> PAGE_SHIFT);
    let home_here = config.local_use.home_here(guest_pages, local_pages);
    let mut missing = (guest_pages - home_here) << PAGE_SHIFT;
    let mut donors_left = config.donors.len() as u64;
    let zones = replicas::zones_of(&config.donors);
    for (at, (&node, donor)) in config.nodes.donors.iter().zip(&config.donors).enumerate() {
        // Whole blocks: the unit of homes.
        let blocks = missing.div_ceil(BLOCK_BYTES).div_ceil(donors_left.max(1));
        let remote_bytes = (guest_pages - home_here) << PAGE_SHIFT;
        let share = match config.redundancy {
            Redundancy::None => blocks.max(1) * BLOCK_BYTES,
            Redundancy::Copies => replicas::share(remote_bytes, &zones, at),
            Redundancy::Stripes(layout) => {
                replicas::striped_share(remote_bytes, layout, zones.len())
            }
        };
        donors_left -= 1;
        let link = LinkConfig {
            local: local.clone(),
            node,
            address: donor.address,
            carrier: carrier(config, donor)?,
            vm: config.vm.clone(),
            bytes: donor.bytes.unwrap_or(share),
            or_less: donor.bytes.is_none(),
            grace: config.grace,
        };
        let leased = while_kept(&mut leases, || {
            obtain(config.transport, donor.fingerprint, link)
        });
        let source = |source| FabricError::Donor {
            address: donor.address,
            source,
        };
        let leased = match leased {
            Err(ControlError::Refused {
                refusal: Refusal::NoMemory,
                ..
            }) if omits_full && donor.bytes.is_none() => continue,
            leased => leased.map_err(source)?,
        };
        missing = missing.saturating_sub(leased.grant().bytes);
        leases.push(leased);
    }
    Ok(leases)
}

/// Returns what the connections to a donor are made of.
pub(super) fn carrier(config: &FabricConfig, donor: &DonorAddress) -> Result<Carrier, FabricError> {
    let Some(credentials) = &config.credentials else {
        return Ok(Carrier::Tcp);
    };
    let name = donor.name.clone();
    Ok(Carrier::Tls(ExpectedNode {
        credentials: Arc::clone(credentials),
        name: name.ok_or(FabricError::Unnamed(donor.address))?,
    }))
}

/// Obtains a lease: over UDP when that is asked for, and with `auto` when there is no way by TCP.
pub(super) fn obtain(
    transport: TransportKind,
    fingerprint: Option<Fingerprint>,
    config: LinkConfig,
) -> Result<Leased, ControlError> {
    let over_udp = LinkConfig {
        // What has certificates of the cluster is never replaced by what has none.
        carrier: match &config.carrier {
            Carrier::Tls(node) => Carrier::Quic(node.clone()),
            _ => Carrier::Udp(fingerprint),
        },
        ..config.clone()
    };
    if transport == TransportKind::Udp {
        return Leased::obtain(over_udp);
    }
    match Leased::obtain(config) {
        Err(ControlError::Connect(address, by_tcp)) if transport == TransportKind::Auto => {
            let leased = Leased::obtain(over_udp).map_err(|error| {
                let by_udp = match error {
                    ControlError::Connect(_, by_udp) => by_udp.to_string(),
                    other => describe(&other),
                };
                let both = format!("by TCP: {by_tcp}; by UDP: {by_udp}");
                ControlError::Connect(address, io::Error::new(by_tcp.kind(), both))
            })?;
            tracing::warn!("donor {address} is not reached by TCP, but by UDP");
            Ok(leased)
        }
        obtained => obtained,
    }
}

pub(super) fn connect(
    leased: Leased,
    classes: &[(TrafficClass, &EventFd)],
    observer: FabricObserver,
) -> Result<(Link, Vec<LinkPort>), FabricError> {
    let address = leased.address();
    let classes = notifiers(classes)?;
    let observer = Arc::new(move |event| observer(FabricEvent::Link(event)));
    leased
        .start(classes, observer)
        .map_err(|source| FabricError::Donor { address, source })
}

/// Returns each class with its own descriptor of the notifier that wakes the class's thread.
pub(super) fn notifiers(
    classes: &[(TrafficClass, &EventFd)],
) -> Result<Vec<(TrafficClass, EventFd)>, FabricError> {
    let classes: io::Result<Vec<_>> = classes
        .iter()
        .map(|&(class, wake)| Ok((class, wake.try_clone()?)))
        .collect();
    classes.map_err(|error| FabricError::System("duplicate an eventfd", error))
}
