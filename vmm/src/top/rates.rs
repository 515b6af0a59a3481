//! Growth rates of counters.

use crate::status::screen::shared::requested;
use crate::status::{NodeNow, VmStatus};

/// Rates per second between two answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub remote: f64,
    pub zero: f64,
    pub minor: f64,
    pub write_protect: f64,
    pub evictions: f64,
    pub cancelled: f64,
    pub stalled: f64,
    pub ahead: f64,
    /// Fraction of prefetched pages that were used, of those whose use was decided in the period;
    /// `None` without any.
    pub ahead_used: Option<f64>,
    /// One for each node that existed before, in the order of the later answer.
    pub nodes: Vec<NodeRates>,
}

/// Pages per second to and from a node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct NodeRates {
    pub fetched: f64,
    pub written_back: f64,
    /// Of a node with vCPUs: requests for pages, pages that came and went, and pages that were lost
    /// early.
    pub requests: f64,
    pub received: f64,
    pub sent: f64,
    pub early: f64,
}

/// Faults that needed another node.
fn remote(status: &VmStatus) -> u64 {
    match &status.coherence {
        Some(coherence) => requested(&coherence.total),
        None => status.faults.remote.count,
    }
}

impl Rates {
    /// Uses the VM's own clock, which was read together with its counters. Returns `None` when no
    /// time has passed, or the guest was rebooted.
    pub fn between(before: &VmStatus, after: &VmStatus) -> Option<Self> {
        let seconds = after.uptime_s - before.uptime_s;
        if seconds <= 0.0 || before.pid != after.pid || before.boot.restarts != after.boot.restarts
        {
            return None;
        }
        let rate = |of: fn(&VmStatus) -> u64| {
            #[allow(clippy::cast_precision_loss, reason = "a number to look at")]
            let grown = of(after).saturating_sub(of(before)) as f64;
            grown / seconds
        };
        let (used, wasted) = (rate(|s| s.prefetch.used), rate(|s| s.prefetch.wasted));
        let nodes = after.nodes.iter().map(|now| {
            let then = before.nodes.iter().find(|then| then.node.id == now.node.id);
            then.map_or_else(NodeRates::default, |then| {
                NodeRates::between(then, now, seconds)
            })
        });
        Some(Self {
            remote: rate(remote),
            zero: rate(|s| s.faults.zero.count),
            minor: rate(|s| s.faults.minor.count),
            write_protect: rate(|s| s.faults.write_protect.count),
            evictions: rate(|s| s.evictions.total),
            cancelled: rate(|s| s.evictions.cancelled),
            stalled: rate(|s| s.stalled_for_memory),
            ahead: rate(|s| s.prefetch.issued),
            ahead_used: (used + wasted > 0.0).then(|| used / (used + wasted)),
            nodes: nodes.collect(),
        })
    }
}

impl NodeRates {
    fn between(then: &NodeNow, now: &NodeNow, seconds: f64) -> Self {
        let rate = |of: fn(&NodeNow) -> u64| {
            #[allow(clippy::cast_precision_loss, reason = "a number to look at")]
            let grown = of(now).saturating_sub(of(then)) as f64;
            grown / seconds
        };
        Self {
            fetched: rate(|now| now.node.pages_fetched),
            written_back: rate(|now| now.node.pages_written_back),
            requests: rate(|now| now.node.transfers.as_ref().map_or(0, requested)),
            received: rate(|now| now.node.transfers.map_or(0, |t| t.pages_received)),
            sent: rate(|now| now.node.transfers.map_or(0, |t| t.pages_sent)),
            early: rate(|now| now.node.transfers.map_or(0, |t| t.early_losses)),
        }
    }
}

/// Rounds a rate to a whole number.
pub(super) fn whole(rate: f64) -> u64 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and a conversion to an integer stays in its range"
    )]
    let whole = rate.round() as u64;
    whole
}
