//! RDMA resources of a process, and the connections of a node.

use serde::{Deserialize, Serialize};

/// Limited RDMA resources that this process uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RdmaResources {
    /// Memory that is pinned for adapters.
    pub pinned_bytes: InUse,
    /// Every device that is open.
    pub resources: Vec<DeviceInUse>,
}

/// Usage of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct InUse {
    /// By this process.
    pub in_use: u64,
    /// The limit, for the whole host where it is the device's; `null` without a limit.
    pub limit: Option<u64>,
}

/// Resources of a device in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DeviceInUse {
    /// The device.
    pub device: String,
    /// Queue pairs, one per connection.
    pub queue_pairs: InUse,
    /// Completion queues.
    pub completion_queues: InUse,
    /// Registered memory regions.
    pub memory_regions: InUse,
    /// Protection domains, which isolate VMs.
    pub protection_domains: InUse,
}

/// RDMA resources of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeRdma {
    /// The resources in use.
    #[serde(flatten)]
    pub used: RdmaResources,
    /// Number of connections of VMs.
    pub connections: InUse,
    /// Each connection.
    pub endpoints: Vec<Endpoints>,
}

/// Both ends of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Endpoints {
    /// The VM.
    pub vm: String,
    /// Its class: `urgent`, `prefetch` or `bulk`.
    pub class: String,
    /// The origin of the TCP connection that belongs to it.
    pub peer: String,
    /// The local device.
    pub device: String,
    /// This end.
    pub here: Endpoint,
    /// The VM's end.
    pub there: Endpoint,
}

/// One end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Endpoint {
    /// The number of its queue pair.
    pub queue_pair: u32,
    /// The address of its port.
    pub address: String,
    /// The local identifier of its port; 0 on Ethernet.
    pub lid: u16,
}
