//! The end-to-end scenarios and what runs them.
//!
//! One testbed is booted for all. A scenario that fails because a testbed host hung (its
//! heartbeat stopped: the emulation of nested virtualisation is not perfect) is run again on
//! a new testbed, at most [`RESTARTS_MAX`] times, and each restart is reported.

mod bed;
mod boot;
mod cli;
mod compression;
mod disks;
mod faults;
mod free_pages;
mod guest;
mod network;
mod rdma;
mod status;
mod vsock;

pub(crate) use bed::add_rxe;
pub(crate) use guest::parse_faultprobe;
pub(crate) use rdma::processor_ticks;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::share::Share;
use crate::summary::{Outcome, Summary};
use crate::testbed::{HostImage, Testbed, TestbedConfig, TestbedError};

/// How often one scenario gets a new testbed.
const RESTARTS_MAX: usize = 2;

/// How a scenario that did not fail ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// What it tests holds.
    Pass,
    /// It could not be tried, and why.
    Skip(String),
}

/// What scenarios return.
pub type Result = anyhow::Result<Verdict>;

/// What a scenario works with.
#[derive(Debug)]
pub struct Context<'a> {
    /// Two hosts.
    pub testbed: &'a Testbed,
    /// What they boot guests from.
    pub share: &'a Share,
    /// Where files from hosts may go; named after the scenario.
    pub artifacts: PathBuf,
    notes: std::cell::RefCell<Vec<String>>,
}

impl Context<'_> {
    /// Adds a line to the summary, such as a measured ratio.
    pub fn note(&self, text: impl Into<String>) {
        self.notes.borrow_mut().push(text.into());
    }
}

/// One scenario.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Its name, by which it is chosen.
    pub name: &'static str,
    /// What holds if it passes.
    pub about: &'static str,
    /// Whether it runs `ssi-hv`.
    pub needs_product: bool,
    /// The scenario.
    pub run: fn(&Context<'_>) -> Result,
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scenario")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// All scenarios, in the order in which they run.
#[must_use]
pub fn scenarios() -> Vec<Scenario> {
    [
        bed::SCENARIOS,
        cli::SCENARIOS,
        boot::SCENARIOS,
        faults::SCENARIOS,
        status::SCENARIOS,
        free_pages::SCENARIOS,
        compression::SCENARIOS,
        rdma::SCENARIOS,
        disks::SCENARIOS,
        network::SCENARIOS,
        vsock::SCENARIOS,
    ]
    .concat()
}

/// Runs scenarios on testbeds.
#[derive(Debug)]
pub struct Runner {
    config: TestbedConfig,
    image: HostImage,
    share: Share,
    testbed: Option<Testbed>,
    /// How many times a testbed was started.
    starts: usize,
}

impl Runner {
    /// Makes everything ready, and starts the testbed when the first scenario needs it.
    ///
    /// # Errors
    /// Fails when kernels or images cannot be had.
    pub fn prepare(workspace: &Path) -> anyhow::Result<Self> {
        let share = Share::prepare(workspace)?;
        let image = HostImage::prepare(workspace)?;
        let logs = workspace.join("target/testbed/e2e");
        Ok(Self {
            config: TestbedConfig::two_hosts(&share.dir, logs),
            image,
            share,
            testbed: None,
            starts: 0,
        })
    }

    /// Runs one scenario and records how it ended.
    pub fn run(&mut self, scenario: &Scenario, summary: &mut Summary) {
        if scenario.needs_product && !self.share.has_product() {
            let reason = "no ssi-hv in target/release: run cargo build --release -p ssi-hv";
            summary.add(
                scenario.name,
                Outcome::Skipped(reason.into()),
                Duration::ZERO,
            );
            return;
        }
        let begin = Instant::now();
        let mut restarts = 0;
        loop {
            let (result, notes) = self.attempt(scenario);
            let hung = result
                .as_ref()
                .err()
                .is_some_and(|e| is_hung_host(e) || self.is_bed_hung());
            if let (true, Err(error)) = (hung, &result) {
                self.testbed = None;
                if restarts < RESTARTS_MAX {
                    restarts += 1;
                    summary.restart(scenario.name, &first_line(&format!("{error:#}")));
                    continue;
                }
            }
            let outcome = match result {
                Ok(Verdict::Pass) => Outcome::Passed,
                Ok(Verdict::Skip(reason)) => Outcome::Skipped(reason),
                Err(error) => {
                    // Whatever state a failed scenario leaves must not fail the next one.
                    self.testbed = None;
                    Outcome::Failed(format!("{error:#}"))
                }
            };
            summary.add(scenario.name, outcome, begin.elapsed());
            for note in notes {
                summary.note(scenario.name, &note);
            }
            return;
        }
    }

    fn attempt(&mut self, scenario: &Scenario) -> (Result, Vec<String>) {
        if let Err(error) = self.start_if_needed() {
            return (Err(error), Vec::new());
        }
        let Some(testbed) = &self.testbed else {
            unreachable!("it was just started")
        };
        let artifacts = self.config.logs.join(scenario.name);
        let context = Context {
            testbed,
            share: &self.share,
            artifacts,
            notes: std::cell::RefCell::default(),
        };
        if let Err(error) = std::fs::create_dir_all(&context.artifacts) {
            return (Err(error.into()), Vec::new());
        }
        let result = (scenario.run)(&context);
        (result, context.notes.into_inner())
    }

    fn start_if_needed(&mut self) -> anyhow::Result<()> {
        if self.testbed.is_none() {
            self.starts += 1;
            // Each start keeps its logs, so that a hung host can be looked at afterwards.
            let mut config = self.config.clone();
            config.logs = config.logs.join(format!("start{}", self.starts));
            self.testbed = Some(Testbed::start(&config, &self.image).context("testbed")?);
        }
        Ok(())
    }

    fn is_bed_hung(&self) -> bool {
        let hosts = self
            .testbed
            .as_ref()
            .map(Testbed::hosts)
            .unwrap_or_default();
        hosts.iter().any(|host| host.check_health().is_err())
    }
}

/// Whether the emulation is to blame, and the scenario may be run again.
fn is_hung_host(error: &anyhow::Error) -> bool {
    if error.chain().any(|e| e.is::<guest::GuestStalled>()) {
        return true;
    }
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<TestbedError>())
        .any(TestbedError::is_hung_host)
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_plain() {
        let mut names: Vec<_> = scenarios().iter().map(|s| s.name).collect();
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
    fn a_hung_host_is_recognised_below_other_context() {
        let hung = TestbedError::HostHung {
            host: 1,
            silent: Duration::ZERO,
            log: String::new(),
        };
        assert!(is_hung_host(
            &anyhow::Error::new(hung).context("while booting")
        ));
        assert!(!is_hung_host(&anyhow::anyhow!("wrong number")));
    }
}
