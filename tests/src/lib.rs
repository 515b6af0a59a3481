//! End-to-end tests of SSI-HV and what they stand on.
//!
//! - [`testbed`]: emulated hosts with KVM, userfaultfd and software RDMA, linked by a network
//!   that can be cut and slowed down.
//! - [`cleanup`]: nothing stays behind, however a run ends.

pub mod cleanup;
pub mod testbed;
