//! Where a VM's memory is: the answer to `GET /v1/placement`.

use serde::{Deserialize, Serialize};

/// The places of a VM's memory on donors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PlacementStatus {
    /// Copies of each page on donors: 1 or 2.
    pub copies: u32,
    /// Memory of the guest with its home on this host.
    pub home_here_bytes: u64,
    /// Every donor, those included that joined later or have left.
    pub donors: Vec<DonorPlaced>,
    /// How much memory is where.
    pub held: Vec<Held>,
    /// Memory that has one copy only, of two.
    pub degraded_bytes: u64,
    /// Memory with both copies in one zone.
    pub in_one_zone_bytes: u64,
    /// Memory that has moved because of its heat.
    pub moved_by_heat_bytes: u64,
}

/// A donor's part.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DonorPlaced {
    /// The donor.
    pub node: u32,
    /// Its address; `null` for the slab of `--transport loopback`.
    pub address: Option<String>,
    /// Its zone; `null` for a donor that is one by itself.
    pub zone: Option<String>,
    /// `in-use`; `out`, if it cannot be reached or is lost; `left`, if its lease has ended.
    pub state: String,
    /// Class of its link: `rdma`, `fast-tcp` or `slow`; `null` for that slab.
    pub tier: Option<String>,
    /// Time to fetch a page, as measured, in microseconds; `null` for that slab.
    pub page_us: Option<f64>,
    /// Memory that it lends to the VM.
    pub lent_bytes: u64,
    /// How much of it is the home of memory, or its copy that is read first.
    pub home_bytes: u64,
    /// How much of it is the other copy of memory.
    pub copy_bytes: u64,
    /// How much of it is free for more.
    pub free_bytes: u64,
    /// How much of the memory with its home there had 16 faults or more in its block of 2 MiB in the
    /// last 10 to 20 s; `null` with two copies and with pieces.
    pub hot_bytes: Option<u64>,
    /// The rest of it; `null` as well.
    pub cold_bytes: Option<u64>,
}

/// Memory with its copies at the same donors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Held {
    /// The donors, one for each copy, whether or not the copy is valid.
    pub nodes: Vec<u32>,
    /// How much memory.
    pub bytes: u64,
}
