//! Snapshots of the ports of RDMA devices and their addresses.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// A kind of network.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum LinkLayer {
    /// InfiniBand: ports have local identifiers.
    InfiniBand,
    /// RDMA over converged Ethernet: ports have IP addresses.
    Ethernet,
}

/// A 128-bit address of a port.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns the address of a RoCE port with this IP address.
    #[must_use]
    pub fn from_ip(address: IpAddr) -> Self {
        Self(match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        })
    }

    /// Returns the IP address that it represents on Ethernet.
    #[must_use]
    pub fn to_ip(self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self.0)).to_canonical()
    }
}

/// The type of an address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1: one Ethernet, not routable.
    RoceV1,
    /// RoCE version 2: over UDP, routable.
    RoceV2,
}

/// The largest payload of a packet: a power of two.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Mtu(u16);

impl Mtu {
    /// Accepts 256, 512, 1024, 2048 or 4096 bytes.
    #[must_use]
    pub fn from_bytes(bytes: u16) -> Option<Self> {
        (bytes.is_power_of_two() && (256..=4096).contains(&bytes)).then_some(Self(bytes))
    }

    /// Converts its number in verbs (`enum ibv_mtu`: 1 is 256 bytes, 5 is 4096).
    #[cfg(feature = "libibverbs")]
    pub(super) fn from_verbs(number: u32) -> Option<Self> {
        (1..=5).contains(&number).then(|| Self(128 << number))
    }

    /// Returns its number in verbs.
    #[cfg(feature = "libibverbs")]
    pub(crate) fn to_verbs(self) -> u32 {
        self.0.trailing_zeros() - 7
    }

    /// Returns its size in bytes.
    #[must_use]
    pub fn bytes(self) -> u16 {
        self.0
    }
}

/// An address in a port's table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GidEntry {
    /// Its index.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// Its kind.
    pub kind: GidKind,
}

/// Snapshot of a port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortSummary {
    /// The device.
    pub device: String,
    /// Its number there, from 1.
    pub port: u8,
    /// Whether packets can be sent.
    pub active: bool,
    /// Whether it supports reliable connections without a connection manager: iWARP does not.
    pub usable: bool,
    /// Its kind of network.
    pub link: LinkLayer,
    /// Its local identifier.
    pub lid: u16,
    /// The largest payload of a packet.
    pub mtu: Mtu,
    /// Its addresses.
    pub gids: Vec<GidEntry>,
}

impl fmt::Display for PortSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.usable, self.active) {
            (false, _) => "no reliable connections without a manager",
            (true, false) => "down",
            (true, true) => "active",
        };
        write!(f, "{} port {} {state}", self.device, self.port)?;
        let v2 = self.gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
        for entry in v2 {
            write!(f, " {}", entry.gid.to_ip())?;
        }
        Ok(())
    }
}
