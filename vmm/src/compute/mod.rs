//! VMs whose vCPUs are on several hosts: the process of such a VM on each of its nodes, and how it
//! joins the others.
//!
//! The primary is `ssi-hv run`. On each other node the VM has a process of its own, which the node
//! starts, and which ends with the VM.

mod child;
mod clock;
mod host;
mod join;
mod lent;
pub(crate) mod observed;
mod process;
mod protocol;
mod secure_link;

pub use self::child::{ProcessError, VmProcess};
pub use self::clock::{NodeSurvey, survey};
pub use self::host::CpuHost;
pub use self::join::{JoinError, Joined, SILENCE_MAX, Shared, byte_ranges, layout, random_vm};
pub use self::lent::LentCpus;
pub use self::observed::{AtDonors, DonorHere, Observed, SharingReporter, Watched};
pub use self::process::serve;
pub use self::protocol::{Connect, RdmaOfNode};
