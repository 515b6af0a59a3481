//! Status, counters and metrics of a node that lends memory.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fabric_identity::{Holder, ReloadError};
use memory_fabric::donor::server::Donor;
use ssi_hv_metrics::CONTENT_TYPE;

use crate::config::policy::{Policy, PolicyError};
use crate::control_socket::protocol::{EvictBody, EvictTarget, Refusal, RefusalCode, ReloadBody};
use crate::control_socket::route::{Answer, Method, Route, Work, answer, text};
use crate::credentials;
use crate::status::{NodeCounters, NodeStatus, observed};

/// What a node's control socket and its metrics read.
#[derive(Clone, Debug)]
pub struct NodeState {
    /// Start time of its process.
    pub started: Instant,
    /// The donor, which counts leases and pages.
    pub donor: Arc<Donor>,
    /// Where its rules are.
    pub policy: Option<Arc<Policy>>,
    /// Held while credentials and rules are read and replaced, so that none are replaced by those that
    /// were read before.
    pub reloading: Arc<Mutex<()>>,
}

/// Why credentials and rules were not replaced. What was in force before still is.
#[derive(Debug, thiserror::Error)]
pub enum RereadError {
    /// The rules cannot be used.
    #[error("no rule was replaced, and no certificate")]
    Policy(#[from] PolicyError),
    /// The credentials cannot be used.
    #[error(transparent)]
    Credentials(#[from] ReloadError),
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
    Route {
        method: Method::Post,
        work: Work::Change,
        refuses: &[RefusalCode::State, RefusalCode::Busy],
        takes_body: true,
        ..Route::look("/v1/evict", evict)
    },
    Route {
        method: Method::Post,
        work: Work::Change,
        refuses: &[RefusalCode::State, RefusalCode::Busy],
        ..Route::look("/v1/security/reload", |state, _| reload_route(state))
    },
];

/// A node without credentials knows no members.
fn without_credentials() -> Refusal {
    let text = "this node was started without --credentials, and knows no members";
    Refusal::new(RefusalCode::State, text.to_owned())
}

fn evict(state: &NodeState, body: &[u8]) -> Answer {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let target: EvictTarget = serde_json::from_slice(body)
        .map_err(|error| malformed(format!("not {{\"identity\": \"ROLE/NAME\"}}: {error}")))?;
    let holder: Result<Holder, _> = target.identity.parse();
    let holder = holder.map_err(|error| malformed(error.to_string()))?;
    if state.donor.credentials().is_none() {
        return Err(without_credentials());
    }
    let evicted = state.donor.evict(&holder);
    let count = |count| u64::try_from(count).unwrap_or(u64::MAX);
    answer(
        200,
        &EvictBody {
            leases: count(evicted.leases),
            bytes: evicted.bytes,
            connections: count(evicted.connections),
        },
    )
}

fn reload_route(state: &NodeState) -> Answer {
    let reloaded = reload(state).map_err(|error| {
        // The whole chain, in one line.
        let text = format!("{:#}", anyhow::Error::from(error));
        Refusal::new(RefusalCode::State, text)
    })?;
    answer(200, &reloaded.ok_or_else(without_credentials)?)
}

/// Reads the credentials of a node again, and its rules; all of those in use stay when one of the
/// new ones cannot be used. Returns `None` when there are none.
///
/// # Errors
///
/// Fails when the new ones cannot be used.
pub fn reload(state: &NodeState) -> Result<Option<ReloadBody>, RereadError> {
    let donor = &state.donor;
    let _alone = state
        .reloading
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    // Before anything is replaced.
    let rules = state.policy.as_ref().map(|policy| policy.read());
    let reloaded = donor.reload(rules.transpose()?)?;
    let (Some(reloaded), Some(shared)) = (reloaded, donor.credentials()) else {
        return Ok(None);
    };
    let count = |count| u64::try_from(count).unwrap_or(u64::MAX);
    let rules = donor.pool().accounts().map(|accounts| accounts.count());
    let body = ReloadBody {
        closed: count(reloaded.connections),
        leases: count(reloaded.leases),
        bytes: reloaded.bytes,
        rules: rules.map(count),
        not_after: shared.current().presented().not_after,
    };
    tracing::warn!(
        closed = body.closed,
        leases = body.leases,
        rules = body.rules,
        "credentials and rules were read again; connections whose certificates are not accepted any \
         more are closed, and members that no rule names are evicted"
    );
    credentials::warn_of_expiry(shared);
    Ok(Some(body))
}

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
        connections: observed::node_connections(donor),
        members: observed::members(donor),
        certificate_not_after: donor
            .credentials()
            .map(|shared| credentials::not_after(shared)),
        rdma: observed::node_rdma(donor),
    }
}

/// Requests to `node --metrics`.
pub const METRICS: &[Route<NodeState>] = &[Route::look("/metrics", of_node)];

/// Returns the current metrics of a node.
fn of_node(state: &NodeState, _: &[u8]) -> Answer {
    text(CONTENT_TYPE, ssi_hv_metrics::node(&state.status()))
}
