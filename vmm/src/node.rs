//! Status, counters and metrics of a node that lends memory.

use std::sync::Arc;
use std::time::Instant;

use memory_fabric::donor::server::Donor;
use ssi_hv_metrics::CONTENT_TYPE;

use crate::control_socket::route::{Answer, Route, answer, text};
use crate::status::{NodeCounters, NodeStatus, observed};

/// What a node's control socket and its metrics read.
#[derive(Clone, Debug)]
pub struct NodeState {
    /// Start time of its process.
    pub started: Instant,
    /// The donor, which counts leases and pages.
    pub donor: Arc<Donor>,
}

impl NodeState {
    /// Returns its current status.
    #[must_use]
    pub fn status(&self) -> NodeStatus {
        NodeStatus {
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            counters: counters(&self.donor),
        }
    }
}

/// Requests to a node.
pub const ROUTES: &[Route<NodeState>] = &[
    Route::look("/v1/status", |state, _| answer(200, &state.status())),
    Route::look("/v1/report", |state, _| {
        answer(200, &counters(&state.donor))
    }),
    Route::look("/v1/metrics", of_node),
];

/// Returns the counters of a donor.
pub fn counters(donor: &Donor) -> NodeCounters {
    let pool = donor.pool();
    let pages = pool.status();
    NodeCounters {
        schema: crate::report::SCHEMA,
        listen: donor.address().to_string(),
        memory_bytes: pool.bytes(),
        lent_bytes: pool.lent_bytes(),
        leases: pool.leases(),
        leases_granted: pool.granted.get(),
        leases_expired: pool.expired.get(),
        pages_read: pages.pages_read,
        pages_written: pages.pages_written,
        pages_dropped: pages.pages_dropped,
        rdma: observed::node_rdma(donor),
    }
}

/// Requests to `node --metrics`.
pub const METRICS: &[Route<NodeState>] = &[Route::look("/metrics", of_node)];

/// Returns the current metrics of a node.
fn of_node(state: &NodeState, _: &[u8]) -> Answer {
    text(CONTENT_TYPE, ssi_hv_metrics::node(&state.status()))
}
