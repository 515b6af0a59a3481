//! What a process uses of RDMA devices, and which connections a node has.

use std::fmt::Write;

use memory_fabric::donor::rdma::{PairAddress, RdmaConnection};
use memory_fabric::donor::server::Donor;
use memory_fabric::transport::rdma::resources::{DeviceUsage, Usage, pinned_bytes};
use memory_fabric::transport::rdma::usage;
use serde::{Deserialize, Serialize};

use crate::size::ByteSize;

/// What this process uses of what there is only so much of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RdmaResources {
    /// Memory that is pinned for adapters.
    pub pinned_bytes: InUse,
    /// Every device that is open.
    pub resources: Vec<DeviceInUse>,
}

/// What is in use of something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct InUse {
    /// By this process.
    pub in_use: u64,
    /// How much there may be, for the whole host where it is the device's; `null` for no limit.
    pub limit: Option<u64>,
}

/// What is in use of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DeviceInUse {
    /// The device.
    pub device: String,
    /// One for each connection.
    pub queue_pairs: InUse,
    /// Where requests complete.
    pub completion_queues: InUse,
    /// Pieces of memory that it may reach.
    pub memory_regions: InUse,
    /// What keeps VMs apart.
    pub protection_domains: InUse,
}

/// What a node has of RDMA.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeRdma {
    /// What it uses.
    #[serde(flatten)]
    pub used: RdmaResources,
    /// Connections of VMs.
    pub connections: InUse,
    /// Each of them.
    pub endpoints: Vec<Endpoints>,
}

/// Both ends of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Endpoints {
    /// The VM.
    pub vm: String,
    /// What it is for: `urgent`, `prefetch` or `bulk`.
    pub class: String,
    /// Where the TCP connection comes from that goes with it.
    pub peer: String,
    /// The device here.
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

impl RdmaResources {
    /// Looks at this process. Calls no verb, and waits for nobody who does.
    #[must_use]
    pub fn now() -> Self {
        Self {
            pinned_bytes: pinned_bytes().into(),
            resources: usage().into_iter().map(DeviceInUse::from).collect(),
        }
    }

    /// The lines for people; none where there is no device.
    #[must_use]
    pub fn lines(&self) -> String {
        let mut text = String::new();
        for used in &self.resources {
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "rdma       {}: in use {} queue pairs, {} completion queues,\n           \
                 {} regions, {} domains; {} pinned",
                used.device,
                used.queue_pairs.text(),
                used.completion_queues.text(),
                used.memory_regions.text(),
                used.protection_domains.text(),
                ByteSize::from_bytes(self.pinned_bytes.in_use).rounded(),
            );
        }
        text
    }
}

impl NodeRdma {
    /// Looks at this process, whose donor this is.
    #[must_use]
    pub fn of(donor: &Donor) -> Self {
        let (connections, active) = donor.rdma_connections();
        Self {
            used: RdmaResources::now(),
            connections: connections.into(),
            endpoints: active.into_iter().map(Endpoints::from).collect(),
        }
    }
}

impl InUse {
    /// "2 of 10".
    fn text(self) -> String {
        let limit = self.limit.map(|limit| format!(" of {limit}"));
        format!("{}{}", self.in_use, limit.unwrap_or_default())
    }
}

impl From<Usage> for InUse {
    fn from(usage: Usage) -> Self {
        Self {
            in_use: usage.in_use,
            limit: usage.limit,
        }
    }
}

impl From<DeviceUsage> for DeviceInUse {
    fn from(usage: DeviceUsage) -> Self {
        Self {
            device: usage.device,
            queue_pairs: usage.queue_pairs.into(),
            completion_queues: usage.completion_queues.into(),
            memory_regions: usage.memory_regions.into(),
            protection_domains: usage.protection_domains.into(),
        }
    }
}

impl From<RdmaConnection> for Endpoints {
    fn from(connection: RdmaConnection) -> Self {
        Self {
            vm: connection.vm,
            class: format!("{:?}", connection.class).to_lowercase(),
            peer: connection.peer.to_string(),
            device: connection.device,
            here: connection.here.into(),
            there: connection.there.into(),
        }
    }
}

impl From<PairAddress> for Endpoint {
    fn from(end: PairAddress) -> Self {
        Self {
            queue_pair: end.queue_pair,
            address: end.address.to_string(),
            lid: end.lid,
        }
    }
}
