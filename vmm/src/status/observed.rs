//! The parts of a status that come from the fabric, as types of the API.

use memory_fabric::donor::rdma::{PairAddress, RdmaConnection};
use memory_fabric::donor::server::Donor;
use memory_fabric::heat::{BlockHeat, Heat};
use memory_fabric::rdma::usage;
use memory_fabric::rdma::{DeviceUsage, Usage, pinned_bytes};

use super::heat::{BlockStatus, ExtentStatus, HeatStatus};
use super::rdma::{DeviceInUse, Endpoint, Endpoints, InUse, NodeRdma, RdmaResources};
use super::{ConnectionsDropped, MemberUse, NodeConnections};

/// Converts the fabric's heat map.
#[must_use]
pub fn heat(heat: &Heat) -> HeatStatus {
    let extents = heat.extents.iter().map(|extent| ExtentStatus {
        first_page: extent.pages.first.number(),
        pages: extent.pages.count,
        home: extent.home.0.into(),
        blocks: extent.blocks.iter().map(block).collect(),
    });
    HeatStatus {
        block_pages: heat.block_pages,
        pages: heat.pages,
        pages_looked_at: heat.pages_looked_at,
        extents: extents.collect(),
    }
}

fn block(heat: &BlockHeat) -> BlockStatus {
    BlockStatus {
        pages: heat.pages,
        looked_at: heat.looked_at,
        resident: heat.resident,
        leaving: heat.leaving,
        arriving: heat.arriving,
        remote: heat.remote,
        untouched: heat.untouched,
        dirty: heat.dirty,
        recent_faults: heat.recent_faults,
    }
}

/// Returns the RDMA resources that this process uses. Calls no verb and takes no lock that a caller
/// of verbs holds.
#[must_use]
pub fn rdma_resources() -> RdmaResources {
    RdmaResources {
        pinned_bytes: in_use(pinned_bytes()),
        resources: usage().into_iter().map(device).collect(),
    }
}

/// Returns the RDMA resources of this donor.
#[must_use]
pub fn node_rdma(donor: &Donor) -> NodeRdma {
    let (connections, active) = donor.rdma_connections();
    NodeRdma {
        used: rdma_resources(),
        connections: in_use(connections),
        endpoints: active.into_iter().map(endpoints).collect(),
    }
}

/// Returns the connections of this donor.
#[must_use]
pub fn node_connections(donor: &Donor) -> NodeConnections {
    let (waiting, established) = donor.waiting_and_established();
    let count = |count| u64::try_from(count).unwrap_or(u64::MAX);
    let dropped = donor.dropped();
    NodeConnections {
        waiting: count(waiting),
        established: count(established),
        resting: count(donor.resting()),
        buffers: in_use(donor.buffers()),
        dropped: ConnectionsDropped {
            address: dropped.address.get(),
            total: dropped.total.get(),
            silent: dropped.silent.get(),
            handshake: dropped.handshake.get(),
            full: dropped.full.get(),
        },
    }
}

/// Returns what each member uses of this donor, by name.
#[must_use]
pub fn members(donor: &Donor) -> Vec<MemberUse> {
    let used = donor.pool().accounts().map(|accounts| accounts.used());
    let used = used.into_iter().flatten();
    let mut members: Vec<_> = used
        .map(|(holder, used)| MemberUse {
            identity: holder.to_string(),
            bytes: used.bytes,
            leases: used.leases,
            connections: used.connections,
            pinned_bytes: used.pinned_bytes,
        })
        .collect();
    members.sort_by(|one, other| one.identity.cmp(&other.identity));
    members
}

fn in_use(usage: Usage) -> InUse {
    InUse {
        in_use: usage.in_use,
        limit: usage.limit,
    }
}

fn device(usage: DeviceUsage) -> DeviceInUse {
    DeviceInUse {
        device: usage.device,
        queue_pairs: in_use(usage.queue_pairs),
        completion_queues: in_use(usage.completion_queues),
        memory_regions: in_use(usage.memory_regions),
        protection_domains: in_use(usage.protection_domains),
    }
}

fn endpoints(connection: RdmaConnection) -> Endpoints {
    Endpoints {
        vm: connection.vm,
        class: format!("{:?}", connection.class).to_lowercase(),
        peer: connection.peer.to_string(),
        device: connection.device,
        here: endpoint(&connection.here),
        there: endpoint(&connection.there),
    }
}

fn endpoint(end: &PairAddress) -> Endpoint {
    Endpoint {
        queue_pair: end.queue_pair,
        address: end.address.to_string(),
        lid: end.lid,
    }
}
