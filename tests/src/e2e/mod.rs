//! The end-to-end scenarios and their runner.
//!
//! Scenarios that compare times run first, one at a time. The others run in parallel on a few
//! testbeds, since a scenario uses little more than one CPU.

mod bed;
mod boot;
mod cli;
mod compression;
mod control;
mod cpus;
mod disks;
mod distro;
mod donor;
mod exec;
mod fault_kinds;
mod faults;
mod free_pages;
mod guest;
mod hotplug;
mod huge_shmem;
mod irqchip;
mod native_demo;
mod network;
mod numa;
mod prometheus;
mod rdma;
mod rdma_faults;
mod rdma_removed;
mod reads;
mod repeat;
mod runner;
mod stall;
mod status;
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
pub(crate) use rdma::processor_ticks;
pub use runner::Runner;
pub use torture::{PageTransport, Torture};

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

/// Scenarios to run, each group in its order.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Scenarios that compare times: nothing runs in parallel with them.
    pub alone: Vec<Scenario>,
    /// Scenarios that may run in parallel.
    pub together: Vec<Scenario>,
    /// Scenarios that take so long that they run only by name.
    pub long: Vec<Scenario>,
}

impl Plan {
    /// Returns all scenarios.
    #[must_use]
    pub fn all() -> Self {
        // The long ones start early, so that no testbed waits for another at the end.
        let together = [
            compression::SCENARIOS,
            free_pages::SCENARIOS,
            faults::SCENARIOS,
            huge_shmem::SCENARIOS,
            reads::SCENARIOS,
            rdma::SCENARIOS,
            rdma_removed::SCENARIOS,
            rdma_faults::SCENARIOS,
            udp::SCENARIOS,
            transports::SCENARIOS,
            status::SCENARIOS,
            three_hosts::SCENARIOS,
            control::SCENARIOS,
            hotplug::SCENARIOS,
            tour::SCENARIOS,
            up::SCENARIOS,
            disks::SCENARIOS,
            native_demo::SCENARIOS,
            network::SCENARIOS,
            numa::SCENARIOS,
            vsock::SCENARIOS,
            exec::SCENARIOS,
            boot::SCENARIOS,
            cpus::SCENARIOS,
            irqchip::SCENARIOS,
            cli::SCENARIOS,
            stall::SCENARIOS,
            working_set::SCENARIOS,
        ];
        let alone = [
            bed::SCENARIOS,
            boot::MEASURED,
            fault_kinds::MEASURED,
            rdma::MEASURED,
            transports::MEASURED,
        ];
        Self {
            alone: alone.concat(),
            together: together.concat(),
            long: distro::SCENARIOS.to_vec(),
        }
    }

    /// Returns whether any scenario boots a whole distribution.
    #[must_use]
    pub fn needs_distro(&self) -> bool {
        let boots_it = |s: &Scenario| distro::SCENARIOS.iter().any(|other| other.name == s.name);
        self.alone.iter().chain(&self.together).any(boots_it)
    }

    /// Keeps the scenarios whose names contain one of `parts`, including the long ones.
    #[must_use]
    pub fn named(mut self, parts: &[String]) -> Self {
        self.alone.append(&mut self.long);
        for kind in [&mut self.alone, &mut self.together] {
            kind.retain(|s| parts.iter().any(|part| s.name.contains(part.as_str())));
        }
        self
    }

    /// Iterates over all scenarios.
    pub fn scenarios(&self) -> impl Iterator<Item = &Scenario> {
        self.alone.iter().chain(&self.together).chain(&self.long)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_plain() {
        let plan = Plan::all();
        let mut names: Vec<_> = plan.scenarios().map(|s| s.name).collect();
        assert!(names.iter().all(|n| {
            n.chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        }));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_long_scenario_runs_by_its_name_only() {
        let plan = Plan::all();
        let is_long = |s: &Scenario| s.name == "distro_work_tcp";
        assert!(plan.long.iter().any(is_long) && !plan.alone.iter().any(is_long));
        assert!(!plan.needs_distro());
        let named = plan.named(&["distro_work_tcp".into()]);
        assert!(named.long.is_empty() && named.alone.iter().any(is_long));
        assert!(named.needs_distro());
    }

    #[test]
    fn scenarios_are_chosen_by_parts_of_their_names() {
        let plan = Plan::all().named(&["rdma_p".into(), "vsock".into()]);
        let names: Vec<_> = plan.scenarios().map(|s| s.name).collect();
        assert_eq!(names, ["rdma_probe", "vsock"]);
    }
}
