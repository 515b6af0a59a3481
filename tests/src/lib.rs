//! End-to-end tests of SSI-HV and what they stand on.
//!
//! - [`testbed`]: emulated hosts with KVM, userfaultfd and software RDMA, linked by a network
//!   that can be cut and slowed down.
//! - [`cargo`]: cargo's own checks, counted together with the scenarios, and [`test_binaries`].
//! - [`share`]: what hosts and guests boot, in one directory.
//! - [`bench`]: what remote memory costs, here and beside swap over the network.
//! - [`demo`]: one guest on two hosts, for people to look at.
//! - [`distro`]: a whole distribution as the guest, for both.
//! - [`e2e`]: the scenarios, and [`summary`], what they came to.
//! - [`licences`]: dependencies, held to `deny.toml`.
//! - [`native`]: checks of the product that need no emulated hosts.
//! - [`published`]: the schemas that all its JSON is held against.
//! - [`rdma_tool`]: many RDMA connections, and RDMA going wrong, without a guest.
//! - [`cleanup`]: nothing stays behind, however a run ends.
//! - `boundaries`: a test that no crate knows what it must not.

pub mod bench;
#[cfg(test)]
mod boundaries;
pub mod cargo;
pub mod cleanup;
pub mod demo;
pub mod distro;
pub mod e2e;
pub mod licences;
pub mod native;
pub mod published;
pub mod rdma_tool;
pub mod share;
pub mod summary;
mod sys;
pub mod test_binaries;
pub mod testbed;
#[cfg(test)]
mod unsafe_files;
