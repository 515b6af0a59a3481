//! Metrics for Prometheus, computed from the status on request.
//!
//! There is no second set of counters: a scrape reads what `ssi-hv status` reads, and the pager's
//! histograms. `docs/metrics.md` lists every metric; tests compare it, the example dashboard and
//! the example alert rules with this code.

mod donors;
mod families;
mod node;
mod replicas;
mod shared;
mod vm;

pub use donors::DonorTimes;
pub use shared::NodeTimes;
pub use vm::{FaultTimes, starting, vm};

pub use node::node;

/// Content type of the text format of Prometheus, version 0.0.4.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[cfg(test)]
mod tests;
