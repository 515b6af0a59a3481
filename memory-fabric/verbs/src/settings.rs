//! What users may set of RDMA connections, and the limits of each value.

use crate::device::{DeviceChoice, Mtu};
use std::net::IpAddr;

/// The timeout is 4.096 us times two to the power of this (InfiniBand Architecture Specification,
/// volume 1, section 9.7.6.1.3): 67 ms.
pub const TIMEOUT_EXPONENT: u8 = 14;
/// Limits of the exponent: 4 ms, below which a busy peer is only slow, and 2 s, of which two end the
/// time in which a silent connection is given up.
pub const TIMEOUT_EXPONENTS: (u8, u8) = (10, 19);
/// Retries of a request. The field has three bits; SoftRoCE (`rdma_rxe`) treats 7 as unlimited.
pub const RETRIES: u8 = 6;
/// Retries of a request to a peer that is not ready. 7 would be unlimited.
pub const NOT_READY_RETRIES: u8 = 6;
/// Retries of a request to a peer that pages on demand: unlimited.
pub const NOT_READY_RETRIES_PAGING: u8 = 7;
/// Limit of a service level, which has four bits.
pub const SERVICE_LEVEL_MAX: u8 = 15;

/// WRITEs of up to so many bytes carry them. The messages of nodes fit, and SoftRoCE (512 bytes) and
/// adapters with `mlx5` take as many.
pub const INLINE_BYTES: u16 = 220;
/// Limit of that. Requests have room for it, whether it is used or not.
pub const INLINE_BYTES_MAX: u16 = 1024;

/// How a thread waits for completions.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Waiting {
    /// It polls for a while, and then sleeps until an event.
    #[default]
    Event,
    /// It polls without sleeping, as long as requests are outstanding.
    Poll,
}

/// How often a request is repeated.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Retries {
    /// After how long without an answer: 4.096 us times two to the power of this.
    pub timeout_exponent: u8,
    /// How often.
    pub count: u8,
    /// How often to a peer that is not ready; 7 is unlimited.
    pub not_ready: u8,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            timeout_exponent: TIMEOUT_EXPONENT,
            count: RETRIES,
            not_ready: NOT_READY_RETRIES,
        }
    }
}

/// What users may set of RDMA connections. A value that is `None` is found by the device.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Settings {
    /// The device.
    pub device: DeviceChoice,
    /// Its port.
    pub port: Option<u8>,
    /// Index of the address of this end in the port's table.
    pub gid_index: Option<u8>,
    /// The largest payload of a packet.
    pub mtu: Option<Mtu>,
    /// The partition (P_Key): an entry of the port's table; by default its first one.
    pub partition: Option<u16>,
    /// The service level: InfiniBand's, or the priority in tags of a VLAN.
    pub service_level: u8,
    /// The traffic class of RoCE version 2: six bits of DSCP, and two of ECN.
    pub traffic_class: u8,
    /// How often a request is repeated.
    pub retries: Retries,
    /// Limit of outstanding requests of a connection; `None` for as many as a transport has.
    pub depth: Option<u16>,
    /// Limit of bytes that a WRITE carries; `None` for [`INLINE_BYTES`], 0 for none.
    pub inline_bytes: Option<u16>,
    /// Size of the buffer for prefetched pages, in pages; `None` for the default.
    pub staging_pages: Option<usize>,
    /// How threads wait for completions.
    pub waiting: Waiting,
    /// Addresses of ports that the other end may have beside the address by which it is connected by
    /// TCP; on InfiniBand global identifiers, in the same form.
    pub peers: Vec<IpAddr>,
}

impl From<DeviceChoice> for Settings {
    fn from(device: DeviceChoice) -> Self {
        Self {
            device,
            ..Self::default()
        }
    }
}
