//! Connections to a node, and who uses it.

use super::rdma::InUse;
use serde::{Deserialize, Serialize};

/// Connections to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeConnections {
    /// Connections that have shown no lease yet.
    pub waiting: u64,
    /// Connections of leases.
    pub established: u64,
    /// Of these, control connections that have no thread of their own.
    #[serde(default)]
    pub resting: u64,
    /// Bytes that the buffers of all connections may occupy, and the limit.
    #[serde(default)]
    pub buffers: InUse,
    /// Those that were dropped, since the start.
    pub dropped: ConnectionsDropped,
}

/// Connections that a node dropped before they had shown a lease, by the reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ConnectionsDropped {
    /// Too many waited from one address.
    pub address: u64,
    /// Too many waited.
    pub total: u64,
    /// Nothing was received in time.
    pub silent: u64,
    /// No certificate was accepted, or the handshake was broken off.
    pub handshake: u64,
    /// Too many connections of leases were open.
    pub full: u64,
}

/// What a member of the cluster uses of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MemberUse {
    /// Its role and name.
    pub identity: String,
    /// Memory of its leases, until it is unmapped.
    pub bytes: u64,
    /// Its leases.
    pub leases: u64,
    /// Its connections.
    pub connections: u64,
    /// Memory of its leases that is registered for RDMA.
    pub pinned_bytes: u64,
}
