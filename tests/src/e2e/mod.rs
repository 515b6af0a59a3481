//! The end-to-end scenarios and their runner.
//!
//! Scenarios that compare times run one at a time. The others run in parallel on a few testbeds,
//! since a scenario uses little more than one CPU. [`Plan`] has their order.

mod bed;
mod boot;
mod cli;
mod compression;
mod control;
mod copies;
mod cpus;
mod disks;
mod distro;
mod donor;
mod drain;
mod exec;
mod fault_kinds;
mod faults;
mod free_pages;
mod guest;
mod health;
mod hotplug;
mod huge_shmem;
mod hundred;
mod irqchip;
mod irqchip_compared;
mod native_demo;
mod network;
mod nodes;
mod nodes_lost;
mod numa;
mod placement;
mod plan;
mod poison;
mod prometheus;
mod random;
mod rdma;
mod rdma_faults;
mod rdma_many;
mod rdma_removed;
mod rdma_sealed;
mod rdma_settings;
mod reads;
mod repeat;
mod runner;
mod ssi;
mod stall;
mod status;
mod system_calls;
mod three_hosts;
mod torture;
mod tour;
mod transports;
mod udp;
mod up;
mod vsock;
mod working_set;

pub(crate) use bed::add_rxe;
pub(crate) use guest::parse_faultprobe;
pub use plan::Plan;
pub(crate) use rdma::processor_ticks;
pub use runner::Runner;
pub use torture::{PageTransport, Replicas, Torture};

use std::path::PathBuf;

use crate::share::Share;
use crate::testbed::{HostKernel, Testbed};

/// Result of a scenario that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The tested property holds.
    Pass,
    /// The scenario could not run, with the reason.
    Skip(String),
}

/// Result type of scenarios.
pub type Result = anyhow::Result<Verdict>;

/// Environment of a running scenario.
#[derive(Debug)]
pub struct Context<'a> {
    /// The hosts that the scenario requests.
    pub testbed: &'a Testbed,
    /// Kernels and programs for guests.
    pub share: &'a Share,
    /// Directory for files from hosts; named after the scenario.
    pub artifacts: PathBuf,
    notes: std::cell::RefCell<Vec<String>>,
}

impl Context<'_> {
    /// Adds a line to the summary, such as a measured ratio.
    pub fn note(&self, text: impl Into<String>) {
        self.notes.borrow_mut().push(text.into());
    }
}

/// Hosts that a scenario needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// Number of hosts.
    pub count: usize,
    /// Their kernel.
    pub kernel: HostKernel,
}

impl Hosts {
    /// Two hosts with the older kernel.
    pub const TWO_6_1: Self = Self::new(2, HostKernel::Linux6_1);
    /// Two hosts with the kernel that most users have.
    pub const TWO_6_12: Self = Self::new(2, HostKernel::Linux6_12);
    /// Three hosts with that kernel: a compute node and two donors.
    pub const THREE_6_12: Self = Self::new(3, HostKernel::Linux6_12);

    const fn new(count: usize, kernel: HostKernel) -> Self {
        Self { count, kernel }
    }
}

/// One scenario.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Its name, which selects it.
    pub name: &'static str,
    /// The property that it tests.
    pub about: &'static str,
    /// Whether it runs `ssi-hv`.
    pub needs_product: bool,
    /// Its hosts.
    pub hosts: Hosts,
    /// Its function.
    pub run: fn(&Context<'_>) -> Result,
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scenario")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
