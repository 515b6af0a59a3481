//! How pages travel to each donor, and why: the answer to `GET /v1/transport`.

use serde::{Deserialize, Serialize};

use crate::report::{PathUsed, TransportUsed};

/// The transports of a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TransportStatus {
    /// The value of `--transport`.
    pub asked: String,
    /// What was selected at the start, of all donors.
    pub selected: TransportUsed,
    /// Every donor with connections, those included that joined later.
    pub donors: Vec<DonorTransport>,
}

/// How pages travel from and to one donor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DonorTransport {
    /// The donor.
    pub node: u32,
    /// Its address.
    pub address: String,
    /// How pages that vCPUs wait for travel now: `rdma`, `tcp` or `udp`.
    pub faults_now: String,
    /// Why the path was selected, in words for people.
    pub reason: String,
    /// Why there is no RDMA connection, in words for people; `null` where none was tried.
    pub rdma_refusal: Option<String>,
    /// What was selected and measured, and the tier.
    pub path: PathUsed,
    /// What the pager does because of the tier and the bandwidth.
    pub policy: PolicyUsed,
    /// The newest RDMA connection for faults; `null` where there was none.
    pub rdma: Option<RdmaEnds>,
}

/// What the pager does on a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PolicyUsed {
    /// The largest window of a stream that is fetched ahead, in pages.
    pub window_pages: u32,
    /// Limit of pages in one request.
    pub run_pages: u32,
    /// Limit of prefetched pages in flight.
    pub in_flight_pages: u32,
    /// Pages before compression is first tried.
    pub compression_first_pages: u32,
    /// The longest time between such trials, in milliseconds.
    pub compression_rest_ms_max: u64,
}

/// Both ends of an RDMA connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RdmaEnds {
    /// The device of this host.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// `ethernet` or `infiniband`.
    pub link: String,
    /// Index of `gid` in the table of the port.
    pub gid_index: u8,
    /// The address of this end.
    pub gid: String,
    /// The address of the donor's end.
    pub donor_gid: String,
    /// The local identifier of this end; 0 on Ethernet.
    pub lid: u16,
    /// The local identifier of the donor's end; 0 on Ethernet.
    pub donor_lid: u16,
    /// The largest payload of a packet that this port, the donor's port and the settings allow.
    pub mtu_bytes: u16,
    /// Index of the partition in the table of the port.
    pub partition_index: u16,
    /// The service level.
    pub service_level: u8,
    /// The traffic class; on Ethernet only.
    pub traffic_class: u8,
    /// Limit of outstanding requests.
    pub depth: u16,
    /// A request without an answer is repeated after 4.096 us times two to the power of this.
    pub timeout_exponent: u8,
    /// How often a request is repeated.
    pub retries: u8,
    /// Whether the thread polls for completions without sleeping.
    pub polls: bool,
    /// READs that the donor's adapter answers at once.
    pub reads_answered: u8,
}
