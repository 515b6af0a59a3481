//! Status, counters and metrics of a node that lends memory.

use std::sync::Arc;
use std::time::Instant;

use memory_fabric::donor::server::Donor;
use ssi_hv_metrics::CONTENT_TYPE;

use crate::control_socket::route::{Answer, Route, answer, text};
use crate::status::{NodeCounters, NodeStatus, observed};

/// The observable state of a node.
#[derive(Clone, Debug)]
pub struct Watched {
    /// Start time of its process.
    pub started: Instant,
    /// Its donor.
    pub donor: Arc<Donor>,
}

impl Watched {
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
pub const ROUTES: &[Route<Watched>] = &[
    Route::look("/v1/status", |watched, _| answer(200, &watched.status())),
    Route::look("/v1/report", |watched, _| {
        answer(200, &counters(&watched.donor))
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
pub const METRICS: &[Route<Watched>] = &[Route::look("/metrics", of_node)];

/// Returns the current metrics of a node.
fn of_node(watched: &Watched, _: &[u8]) -> Answer {
    text(CONTENT_TYPE, ssi_hv_metrics::node(&watched.status()))
}
