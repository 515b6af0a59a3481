//! Metrics for Prometheus, made from the status when they are asked for.
//!
//! There is no second set of counters: a scrape looks at what `ssi-hv status` looks at, and at the
//! pager's histograms. `docs/metrics.md` has every metric; tests hold it, the example dashboard and
//! the example alert rules to what is made here.

mod families;
mod node;
mod vm;

pub use vm::{FaultTimes, starting, vm};

pub use node::node;

/// What the format is called in an answer of HTTP: the text format of Prometheus, version 0.0.4.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[cfg(test)]
mod tests;
