//! Runs scenarios on testbeds.
//!
//! A scenario that fails because a testbed host hung (its heartbeat stopped, or the emulator carried
//! nothing more on one of its links: emulation is not perfect) is run again on a new testbed; each
//! restart is reported, and a scenario that passed only then counts as flaky.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;

use super::repeat::{self, Attempt, Hang};
use super::{Context, Plan, Result, Scenario};
use crate::share::Share;
use crate::summary::{Outcome, Summary};
use crate::testbed::{Host, HostImage, Testbed, TestbedConfig};

/// More testbeds than this gain nothing: the longest scenario is then what takes the time.
const BEDS_MAX: usize = 4;
/// What a testbed host takes beside its own memory, at most.
const EMULATOR_MIB: u64 = 600;

/// Runs scenarios on testbeds.
#[derive(Debug)]
pub struct Runner {
    config: TestbedConfig,
    image: HostImage,
    share: Share,
    beds: usize,
    until: Option<SystemTime>,
}

impl Runner {
    /// Makes everything ready that a plan needs; testbeds start when the first scenario needs them. Without a number
    /// of `beds` there are as many as CPUs and free memory are enough for.
    ///
    /// # Errors
    /// Fails when kernels or images cannot be had.
    pub fn prepare(workspace: &Path, beds: Option<usize>, plan: &Plan) -> anyhow::Result<Self> {
        let mut share = Share::prepare(workspace)?;
        let image = HostImage::prepare(workspace)?;
        let logs = workspace.join("target/testbed/e2e");
        let mut config = TestbedConfig::two_hosts(&share.dir, logs);
        if plan.needs_distro() {
            config.disk = share.add_distro(workspace);
        }
        let beds = match beds {
            Some(beds) => beds,
            None => beds_that_fit(&config)?,
        };
        Ok(Self {
            config,
            image,
            share,
            beds: beds.clamp(1, BEDS_MAX),
            until: None,
        })
    }

    /// Has scenarios left out, and failed, that have not begun by then, in seconds since 1970.
    #[must_use]
    pub fn until(self, seconds: Option<u64>) -> Self {
        let until = seconds.map(Duration::from_secs);
        let until = until.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
        Self { until, ..self }
    }

    /// Runs scenarios and records how each ended.
    pub fn run(&self, plan: &Plan, summary: &mut Summary) {
        for scenario in &plan.long {
            let reason = format!("it takes minutes: target/release/e2e {}", scenario.name);
            summary.add(scenario.name, Outcome::Skipped(reason), Duration::ZERO);
        }
        let queue = Mutex::new(VecDeque::from(plan.together.clone()));
        let beds = self.beds.min(plan.together.len());
        let summary = Mutex::new(summary);
        let mut first = Lane::new(self, 1, &summary);
        for scenario in &plan.alone {
            first.run(scenario);
        }
        std::thread::scope(|scope| {
            for number in 2..=beds {
                let (queue, summary) = (&queue, &summary);
                scope.spawn(move || Lane::new(self, number, summary).run_all(queue));
            }
            first.run_all(&queue);
        });
    }
}

/// How many testbeds this machine carries.
fn beds_that_fit(config: &TestbedConfig) -> anyhow::Result<usize> {
    let info = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let free_kib = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .context("no MemAvailable in /proc/meminfo")?;
    let host_mib = u64::from(config.memory_mib) + EMULATOR_MIB;
    let fit = free_kib / 1024 / (host_mib * config.hosts as u64);
    let cpus = std::thread::available_parallelism()?.get();
    Ok(cpus.min(usize::try_from(fit)?))
}

/// A testbed and the thread that uses it: its hosts end with that thread.
struct Lane<'a, 's> {
    runner: &'a Runner,
    number: usize,
    summary: &'a Mutex<&'s mut Summary>,
    testbed: Option<Testbed>,
    /// How many times a testbed was started.
    starts: usize,
}

impl<'a, 's> Lane<'a, 's> {
    fn new(runner: &'a Runner, number: usize, summary: &'a Mutex<&'s mut Summary>) -> Self {
        Self {
            runner,
            number,
            summary,
            testbed: None,
            starts: 0,
        }
    }

    fn summary(&self) -> MutexGuard<'a, &'s mut Summary> {
        lock(self.summary)
    }

    fn run_all(&mut self, queue: &Mutex<VecDeque<Scenario>>) {
        let next = || lock(queue).pop_front();
        while let Some(scenario) = next() {
            self.run(&scenario);
        }
    }

    fn run(&mut self, scenario: &Scenario) {
        let no_product = scenario.needs_product && !self.runner.share.has_product();
        if let Some(outcome) = why_not(no_product, self.runner.until, SystemTime::now()) {
            self.summary().add(scenario.name, outcome, Duration::ZERO);
            return;
        }
        let begin = Instant::now();
        let shared = self.summary;
        let restarted = |reason: &str| lock(shared).restart(scenario.name, reason);
        let ended = repeat::until_it_counts(|| self.attempt(scenario), restarted);
        let mut summary = self.summary();
        summary.add(scenario.name, ended.outcome, begin.elapsed());
        for note in ended.notes {
            summary.note(scenario.name, &note);
        }
        if let Some(reason) = ended.flaky {
            summary.flaky(scenario.name, &reason);
        }
    }

    /// Runs a scenario once. A testbed on which it failed is not used again: neither a hang nor the
    /// state that a failed scenario leaves may fail the next one.
    fn attempt(&mut self, scenario: &Scenario) -> Attempt {
        let (result, notes) = self.try_once(scenario);
        let hang = result
            .as_ref()
            .err()
            .and_then(|error| Hang::of(error).or_else(|| self.find_hang()));
        if result.is_err() {
            self.testbed = None;
        }
        Attempt {
            result,
            notes,
            hang,
        }
    }

    fn try_once(&mut self, scenario: &Scenario) -> (Result, Vec<String>) {
        if let Err(error) = self.start_if_needed() {
            return (Err(error), Vec::new());
        }
        let Some(testbed) = &self.testbed else {
            unreachable!("it was just started")
        };
        let artifacts = self.runner.config.logs.join(scenario.name);
        let context = Context {
            testbed,
            share: &self.runner.share,
            artifacts,
            notes: RefCell::default(),
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
            let mut config = self.runner.config.clone();
            let name = format!("bed{}-start{}", self.number, self.starts);
            config.logs = config.logs.join(name);
            let testbed = Testbed::start(&config, &self.runner.image);
            self.testbed = Some(testbed.context("testbed")?);
        }
        Ok(())
    }

    /// What of the testbed hung, although the scenario's error does not say so.
    fn find_hang(&self) -> Option<Hang> {
        let testbed = self.testbed.as_ref()?;
        let mut checks = testbed.hosts().iter().map(Host::check_health);
        if let Some(error) = checks.find_map(std::result::Result::err) {
            return Some(Hang::Host(error.to_string()));
        }
        match testbed.stuck_link() {
            Ok(None) => None,
            Ok(Some((a, b))) => Some(Hang::Link(a, b)),
            // The check fails on a host that does not run a command.
            Err(error) => Some(Hang::Host(error.to_string())),
        }
    }
}

/// What comes of a scenario that is not run, if it is not. That there was no time for it is a failure: nobody knows
/// then whether it holds.
fn why_not(no_product: bool, until: Option<SystemTime>, now: SystemTime) -> Option<Outcome> {
    if no_product {
        let reason = "no ssi-hv in target/release: run cargo build --release -p ssi-hv";
        return Some(Outcome::Skipped(reason.into()));
    }
    let is_late = until.is_some_and(|until| now >= until);
    let reason = "it had not begun when the time for all was over: see --until";
    is_late.then(|| Outcome::Failed(reason.into()))
}

fn lock<'s, T>(mutex: &'s Mutex<T>) -> MutexGuard<'s, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_not_begun_in_time_fails_and_says_why() {
        let now = SystemTime::now();
        let later = now + Duration::from_secs(1);
        assert!(why_not(false, None, now).is_none());
        assert!(why_not(false, Some(later), now).is_none());
        let late = why_not(false, Some(now), now);
        assert!(matches!(late, Some(Outcome::Failed(why)) if why.contains("--until")));
        let missing = why_not(true, Some(later), now);
        assert!(matches!(missing, Some(Outcome::Skipped(why)) if why.contains("cargo build")));
    }
}
