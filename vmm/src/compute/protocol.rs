//! What a node and the process of a VM on it send each other over pipes: one JSON value per line.

use std::io::{self, BufRead, Write};
use std::net::IpAddr;

use memory_fabric::compute::{
    ComputeAuthority, ComputeEnd, ComputeLease, ComputePorts, ComputeRequest, ComputeTable,
};
use memory_fabric::rdma::Settings;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::rdma::RdmaArg;

/// Longest line, bytes: less than a pipe holds, which is 64 KiB, so that nobody waits for the reader.
pub const LINE_BYTES_MAX: usize = 60 << 10;

/// The first line to the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// What the primary asked for.
    pub request: ComputeRequest,
    /// Where to listen.
    pub address: IpAddr,
    /// Whether connections to the other nodes are under TLS.
    pub secured: bool,
    /// What the node allows of RDMA.
    pub rdma: RdmaOfNode,
}

/// What a node allows of RDMA.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RdmaOfNode {
    /// None.
    Off,
    /// The device with the address by which the other end is reached.
    #[default]
    Default,
    /// With these settings.
    Set(RdmaArg),
}

impl RdmaOfNode {
    /// The settings, if there is RDMA.
    #[must_use]
    pub fn settings(&self) -> Option<Settings> {
        match self {
            Self::Off => None,
            Self::Default => Some(Settings::default()),
            Self::Set(given) => Some(given.settings().clone()),
        }
    }
}

/// The second line to the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Connect {
    /// All nodes.
    pub table: ComputeTable,
    /// What it takes over at donors.
    pub leases: Vec<ComputeLease>,
    /// The authorities by which it knows these donors; none without certificates.
    pub authorities: Vec<ComputeAuthority>,
}

/// The lines of the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessMessage {
    /// It listens on these ports.
    Listening(ComputePorts),
    /// It ends.
    Ended(ComputeEnd),
}

/// Writes a line.
pub fn send_line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    // In one call, so that it arrives as a whole.
    to.write_all(&line)?;
    to.flush()
}

/// Reads a line.
pub fn receive_line<T: DeserializeOwned>(from: impl BufRead) -> io::Result<T> {
    let mut line = Vec::new();
    io::Read::take(from, LINE_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
    Ok(serde_json::from_slice(&line)?)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use memory_fabric::compute::{
        AUTHORITIES_BYTES_MAX, AUTHORITIES_MAX, AUTHORITY_BYTES_MAX, COMPUTE_NODES_MAX,
        ComputeMember, LeaseGrant, MEMBER_NAME_BYTES_MAX, Token,
    };
    use memory_fabric::fabric::{DONORS_MAX, check_authorities};

    use super::*;

    #[test]
    fn what_a_node_allows_of_rdma_reaches_its_process() {
        let given: RdmaArg = "device=rxe0,gid-index=3".parse().expect("settings");
        let set = RdmaOfNode::Set(given.clone());
        for rdma in [RdmaOfNode::Off, RdmaOfNode::Default, set.clone()] {
            let mut line = Vec::new();
            send_line(&mut line, &rdma).expect("is written");
            let found: RdmaOfNode = receive_line(line.as_slice()).expect("is read");
            assert_eq!(found, rdma);
        }
        assert_eq!(set.settings().as_ref(), Some(given.settings()));
        assert_eq!(RdmaOfNode::Off.settings(), None);
    }

    /// As many as there can be, with all the bytes that they can have.
    fn authorities() -> Vec<ComputeAuthority> {
        let one = |bytes: usize| ComputeAuthority {
            cluster: "x".repeat(MEMBER_NAME_BYTES_MAX),
            certificate: vec![0xff; bytes],
        };
        let least = AUTHORITIES_MAX - 3;
        let rest = AUTHORITIES_BYTES_MAX - least - 2 * AUTHORITY_BYTES_MAX;
        let long = [AUTHORITY_BYTES_MAX, AUTHORITY_BYTES_MAX, rest].map(one);
        let authorities: Vec<_> = long.into_iter().chain((0..least).map(|_| one(1))).collect();
        check_authorities(&authorities).expect("at the limits");
        let more: Vec<_> = authorities.iter().cloned().chain([one(1)]).collect();
        assert!(check_authorities(&more).is_err());
        authorities
    }

    #[test]
    fn the_longest_table_fits_into_a_line() {
        let address = SocketAddr::from(([0xffff; 8], u16::MAX));
        let node = ComputeMember {
            memory: address,
            vcpus: address,
            lent_bytes: u64::MAX,
            certificate: Some([0xff; 32]),
        };
        let lease = ComputeLease {
            donor: u8::MAX,
            address,
            grant: LeaseGrant {
                token: Token([0xff; 16]),
                bytes: u64::MAX,
                duration_ms: u32::MAX,
            },
            over_udp: false,
            fingerprint: Some([0xff; 32]),
            name: Some("x".repeat(MEMBER_NAME_BYTES_MAX)),
            grace_ms: u32::MAX,
            sealed: false,
            checksum: false,
            compression: Some(false),
        };
        let sent = Connect {
            table: ComputeTable(vec![node; COMPUTE_NODES_MAX]),
            leases: vec![lease; DONORS_MAX],
            authorities: authorities(),
        };
        let mut line = Vec::new();
        send_line(&mut line, &sent).expect("is written");
        assert!(line.len() <= LINE_BYTES_MAX, "{} bytes", line.len());
        let found: Connect = receive_line(line.as_slice()).expect("is read");
        assert_eq!((found.table, found.leases), (sent.table, sent.leases));
        assert_eq!(found.authorities, sent.authorities);
    }
}
