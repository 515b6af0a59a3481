//! What the commands are asked for.
//!
//! Settings (`RunSettings`, `NodeSettings`) are what flags and files say: each value is well-formed.
//! Parsing them gives a configuration (`RunConfig`, `NodeConfig`), whose values are within their
//! limits and agree with each other and with this host. The two steps have different errors.

pub mod address;
pub mod allow;
pub mod choice;
pub mod compute;
pub mod cpu_list;
pub mod disk;
pub mod file;
pub mod gids;
mod local_memory;
pub mod membership;
mod nearest;
pub mod net;
mod node;
pub mod node_arg;
pub mod planned;
pub mod policy;
mod privileges;
mod protection;
pub mod rate;
pub mod rdma;
mod redundancy;
mod redundancy_error;
pub mod resolver;
mod run;
mod sealing;
mod settings;
pub mod stripes;
mod text;
pub mod validation;
mod validation_error;
pub mod vsock;

pub use ssi_hv_api::name;

pub use self::choice::{
    Choice, HugePages, Numa, OnReboot, Placement, Prefetching, Switch, VcpuPolicy,
};
pub use self::node::{DEFAULT_LEASE_SECONDS, NodeConfig, NodeSettings};
pub use self::privileges::PrivilegesError;
pub use self::protection::Protection;
pub use self::redundancy_error::RedundancyError;
pub use self::run::{ResolvedDonor, RunConfig, resolved_donor};
pub use self::settings::RunSettings;
pub use self::validation::ValidationError;
use crate::machine::VCPUS_MAX;
use crate::size::ByteSize;

/// Bytes per page.
pub const PAGE_SIZE_BYTES: u64 = 4096;
/// Minimum memory of a guest: a stock kernel with an initramfs does not boot with less.
pub const GUEST_MEMORY_MIN: ByteSize = ByteSize::from_mib(64);
/// Limit of a guest's memory: the page map links pages by 32-bit numbers, so 16 TiB is out of
/// reach, and half of that leaves room for the hole below 4 GiB and for markers.
pub const GUEST_MEMORY_MAX: ByteSize = ByteSize::from_mib(8 << 20);
/// Minimum local memory: less holds neither the working set of a booting kernel nor the evictor's
/// reserve.
pub const LOCAL_MEMORY_MIN: ByteSize = ByteSize::from_mib(16);
/// Limit of vCPUs, from the machine.
pub const CPUS_MAX: u8 = VCPUS_MAX;
/// Limit of donors of one guest: each costs connections and threads at both ends.
pub const DONORS_MAX: usize = 64;
/// Limit of `--donor-grace`, in seconds: after a pause of more than an hour, a restart is better.
pub const DONOR_GRACE_SECONDS_MAX: u32 = 3600;

/// Limit of the copies of a page.
pub const REPLICAS_MAX: u32 = 2;
/// Limit of `--timeout`, in seconds: a week.
pub const TIMEOUT_SECONDS_MAX: u32 = 7 * 24 * 3600;
/// Default of `--memory`.
pub const DEFAULT_MEMORY: ByteSize = ByteSize::from_mib(1024);
/// Default of `--donor-grace`, in seconds.
pub const DEFAULT_DONOR_GRACE_SECONDS: u32 = 30;

#[cfg(test)]
mod tests;
