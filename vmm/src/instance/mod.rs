//! A running VM: its boot, its supervision, changes at run time, and its reports.

mod certificates;
mod console_file;
mod devices;
mod drain_routes;
mod drains;
mod errors;
mod exec;
mod failing;
mod follow;
mod free_memory;
mod hotplug;
mod hotplug_routes;
mod joining;
mod links;
mod listen;
mod lost_node;
mod members;
mod memory;
mod metrics;
mod move_routes;
mod nodes;
mod numa;
mod observe;
mod placement;
mod placing;
mod rebalance;
mod rebalance_routes;
#[cfg(test)]
mod routes_tests;
mod run;
mod run_error;
mod sandbox;
mod seen;
mod supervisor;
mod timeline;
mod transports;
mod vm;
mod vm_routes;
mod working_set;

pub(crate) use self::memory::{donor_address, guest_memory};
pub use self::observe::percentiles;
pub use self::run::run;
pub use self::supervisor::LATE_END_TIME_MAX;
pub(crate) use self::supervisor::lost_memory;
pub(crate) use self::timeline::distribution;
