//! End-to-end tests of SSI-HV and their infrastructure.
//!
//! - [`testbed`]: emulated hosts with KVM, userfaultfd and software RDMA, connected by a network
//!   that can be cut and slowed down.
//! - [`cargo`]: cargo's own checks, counted together with the scenarios, and [`test_binaries`].
//! - [`share`]: the directory of everything that hosts and guests boot.
//! - [`bench`]: the cost of remote memory, natively and compared with swap over the network.
//! - [`demo`]: one guest on two hosts, for presentation.
//! - [`distro`]: a whole distribution as the guest of demo and scenarios.
//! - [`e2e`]: the scenarios; [`summary`] has their results.
//! - [`licences`]: checks dependencies against `deny.toml`.
//! - [`native`]: checks of the product that need no emulated hosts.
//! - [`processor`]: processor time of checks, and idle time of stages.
//! - [`published`]: the schemas that all JSON output must match.
//! - [`rdma_tool`]: many RDMA connections, and RDMA failures, without a guest.
//! - [`cleanup`]: removes processes and directories however a run ends.
//! - `boundaries`: a test of the forbidden dependencies between crates.

pub mod bench;
#[cfg(test)]
mod boundaries;
pub mod cargo;
pub mod cleanup;
pub mod demo;
pub mod distro;
pub mod e2e;
pub mod licences;
pub mod moves;
pub mod native;
pub mod processor;
pub mod published;
pub mod rdma_tool;
pub mod share;
pub mod summary;
mod sys;
pub mod test_binaries;
pub mod testbed;
#[cfg(test)]
mod unsafe_files;
