//! Runs scenarios on testbeds.
//!
//! A scenario is run again on a new testbed if a testbed host hung: its heartbeat stopped, or the
//! emulator carried nothing more on one of its links. Each restart is reported, and a scenario that
//! passed only then counts as flaky.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;

use super::repeat::{self, Attempt, Hang};
use super::system_calls::SeenRecords;
use super::{Context, Hosts, Plan, Result, Scenario, health};
use crate::share::Share;
use crate::summary::{Outcome, Summary};
use crate::testbed::{Host, HostImage, HostKernel, Testbed, TestbedConfig};

/// More testbeds than this gain nothing: the longest scenario then determines the duration.
const BEDS_MAX: usize = 4;
/// Total memory of a testbed's hosts.
const BED_MIB: u32 = 6000;
/// Upper bound of an emulator's memory in addition to its host's.
const EMULATOR_MIB: u64 = 600;

/// Runs scenarios on testbeds.
#[derive(Debug)]
pub struct Runner {
    /// Configuration of all testbeds.
    config: TestbedConfig,
    images: Vec<(HostKernel, HostImage)>,
    share: Share,
    beds: usize,
    until: Option<SystemTime>,
}

impl Runner {
    /// Prepares everything that a plan needs; testbeds start when the first scenario needs them.
    /// The default number of `beds` is what CPUs and available memory allow.
    ///
    /// # Errors
    /// Fails when kernels or images are not available.
    pub fn prepare(workspace: &Path, beds: Option<usize>, plan: &Plan) -> anyhow::Result<Self> {
        let mut share = Share::prepare(workspace)?;
        let mut images: Vec<(HostKernel, HostImage)> = Vec::new();
        for kernel in plan.scenarios().map(|scenario| scenario.hosts.kernel) {
            if images.iter().all(|(other, _)| *other != kernel) {
                images.push((kernel, HostImage::prepare(workspace, kernel)?));
            }
        }
        if images
            .iter()
            .any(|(kernel, _)| *kernel == HostKernel::Linux6_12)
        {
            share.add_newer_kernel(workspace)?;
        }
        let logs = workspace.join("target/testbed/e2e");
        let mut config = TestbedConfig::two_hosts(&share.dir, logs);
        if plan.needs_distro() {
            config.disk = share.add_distro(workspace);
        }
        let beds = match beds {
            Some(beds) => beds,
            None => beds_that_fit(plan)?,
        };
        Ok(Self {
            config,
            images,
            share,
            beds: beds.clamp(1, BEDS_MAX),
            until: None,
        })
    }

    /// Does not start scenarios after this time, in seconds since 1970. The essential ones count as
    /// failed then, and the others as skipped.
    #[must_use]
    pub fn until(self, seconds: Option<u64>) -> Self {
        let until = seconds.map(Duration::from_secs);
        let until = until.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
        Self { until, ..self }
    }

    /// Returns the image of a kernel.
    fn image(&self, kernel: HostKernel) -> &HostImage {
        let mut images = self.images.iter();
        match images.find(|(other, _)| *other == kernel) {
            Some((_, image)) => image,
            None => panic!("no image of {kernel:?} was prepared"),
        }
    }

    /// Returns a scenario's name in the summary, which includes its hosts' kernel, such as 6.12.
    fn label(&self, scenario: &Scenario) -> String {
        let release = &self.image(scenario.hosts.kernel).release;
        let version: Vec<_> = release.splitn(3, '.').take(2).collect();
        format!("{} on {}", scenario.name, version.join("."))
    }

    /// Runs scenarios and records their results.
    pub fn run(&self, plan: &Plan, summary: &mut Summary) {
        for scenario in &plan.long {
            let reason = format!("it takes minutes: target/release/e2e {}", scenario.name);
            summary.add(
                &self.label(scenario),
                Outcome::Skipped(reason),
                Duration::ZERO,
            );
        }
        let summary = Mutex::new(summary);
        let mut lanes: Vec<_> = (1..=self.beds)
            .map(|number| Lane::new(self, number, &summary))
            .collect();
        in_sequence(&mut lanes, &plan.bed);
        in_parallel(&mut lanes, &plan.essential, Late::Fails);
        in_sequence(&mut lanes, &plan.alone);
        in_parallel(&mut lanes, &plan.together, Late::Skips);
    }
}

/// How a scenario counts for whose start the time was too short.
#[derive(Clone, Copy, Debug)]
enum Late {
    /// Its property had to be tested.
    Fails,
    /// Another run tests it.
    Skips,
}

/// Runs scenarios one at a time. The hosts of other testbeds end, since they use CPU time too.
fn in_sequence(lanes: &mut [Lane<'_, '_>], scenarios: &[Scenario]) {
    let Some((first, others)) = lanes.split_first_mut() else {
        return;
    };
    if !scenarios.is_empty() {
        for lane in others {
            lane.testbed = None;
        }
    }
    for scenario in scenarios {
        first.run(scenario, Late::Skips);
    }
}

/// Runs scenarios on all testbeds. The hosts of the first one stay for what follows, as this thread
/// does; those of the others would end with their threads, unnoticed.
fn in_parallel(lanes: &mut [Lane<'_, '_>], scenarios: &[Scenario], late: Late) {
    let queue = Mutex::new(VecDeque::from(scenarios.to_vec()));
    let queue = &queue;
    let Some((first, others)) = lanes.split_first_mut() else {
        return;
    };
    std::thread::scope(|scope| {
        for lane in others.iter_mut().take(scenarios.len().saturating_sub(1)) {
            scope.spawn(move || {
                lane.run_all(queue, late);
                lane.testbed = None;
            });
        }
        first.run_all(queue, late);
    });
}

/// Returns how many testbeds this machine can run.
fn beds_that_fit(plan: &Plan) -> anyhow::Result<usize> {
    let info = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let free_kib = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .context("no MemAvailable in /proc/meminfo")?;
    let hosts_max = plan.scenarios().map(|s| s.hosts.count).max().unwrap_or(0);
    let bed_mib = u64::from(BED_MIB) + EMULATOR_MIB * hosts_max as u64;
    let fit = free_kib / 1024 / bed_mib;
    let cpus = std::thread::available_parallelism()?.get();
    Ok(cpus.min(usize::try_from(fit)?))
}

/// A testbed and the thread that uses it: its hosts end with that thread.
struct Lane<'a, 's> {
    runner: &'a Runner,
    number: usize,
    summary: &'a Mutex<&'s mut Summary>,
    testbed: Option<(Hosts, Testbed)>,
    /// What its hosts' kernels have reported of system calls.
    records: SeenRecords,
    /// Number of testbeds started.
    starts: usize,
    /// Processor time that emulators have used for the current scenario, including their boots.
    used: Duration,
}

impl<'a, 's> Lane<'a, 's> {
    fn new(runner: &'a Runner, number: usize, summary: &'a Mutex<&'s mut Summary>) -> Self {
        Self {
            runner,
            number,
            summary,
            testbed: None,
            records: SeenRecords::default(),
            starts: 0,
            used: Duration::ZERO,
        }
    }

    fn summary(&self) -> MutexGuard<'a, &'s mut Summary> {
        lock(self.summary)
    }

    fn run_all(&mut self, queue: &Mutex<VecDeque<Scenario>>, late: Late) {
        loop {
            let running = self.testbed.as_ref().map(|(hosts, _)| *hosts);
            let next = take_next(&mut lock(queue), running);
            match next {
                Some(scenario) => self.run(&scenario, late),
                None => return,
            }
        }
    }

    fn run(&mut self, scenario: &Scenario, late: Late) {
        let label = self.runner.label(scenario);
        let no_product = scenario.needs_product && !self.runner.share.has_product();
        if let Some(outcome) = why_not(no_product, self.runner.until, SystemTime::now(), late) {
            self.summary().add(&label, outcome, Duration::ZERO);
            return;
        }
        let begin = Instant::now();
        self.used = Duration::ZERO;
        let shared = self.summary;
        let restarted = |reason: &str| lock(shared).restart(&label, reason);
        let ended = repeat::until_it_counts(|| self.attempt(scenario), restarted);
        let mut summary = self.summary();
        let used = format!(", {:.1}s of CPU", self.used.as_secs_f64());
        summary.add_with(&label, ended.outcome, begin.elapsed(), &used);
        for note in ended.notes {
            summary.note(&label, &note);
        }
        if let Some(reason) = ended.flaky {
            summary.flaky(&label, &reason);
        }
    }

    /// Runs a scenario once. A testbed on which a scenario failed is not reused, so that neither a
    /// hang nor the remaining state affects the next scenario.
    fn attempt(&mut self, scenario: &Scenario) -> Attempt {
        let (result, notes) = self.try_once(scenario);
        let hang = result
            .as_ref()
            .err()
            .and_then(|error| Hang::of(error).or_else(|| self.find_hang()));
        let mut hosts = None;
        if result.is_err() {
            let testbed = self.testbed.take();
            hosts = testbed.map(|(_, testbed)| health::of_hosts(&testbed));
        }
        Attempt {
            result,
            notes,
            hang,
            hosts,
        }
    }

    fn try_once(&mut self, scenario: &Scenario) -> (Result, Vec<String>) {
        let before = match self.start_if_needed(scenario.hosts) {
            Ok(before) => before,
            Err(error) => return (Err(error), Vec::new()),
        };
        let Some((_, testbed)) = &self.testbed else {
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
        testbed.hosts().iter().for_each(Host::forget_silence);
        let mut result = (scenario.run)(&context);
        self.used += testbed.processor_time().saturating_sub(before);
        let mut notes = context.notes.into_inner();
        match self.records.check(testbed) {
            Ok(line) => notes.extend(line),
            // What the scenario noticed of an ended process follows from it.
            Err(error) => {
                result = Err(match result {
                    Err(first) => first.context(format!("{error:#}")),
                    Ok(_) => error,
                });
            }
        }
        (result, notes)
    }

    /// Starts the hosts that a scenario needs, unless they run. Returns the processor time that
    /// they have used for others.
    fn start_if_needed(&mut self, hosts: Hosts) -> anyhow::Result<Duration> {
        if let Some((are, testbed)) = &self.testbed
            && *are == hosts
        {
            return Ok(testbed.processor_time());
        }
        // Hosts of another kind are stopped first, since there is memory for one testbed only.
        self.testbed = None;
        self.starts += 1;
        // Each start keeps its logs, so that a hung host can be analysed later.
        let name = format!("bed{}-start{}", self.number, self.starts);
        let config = TestbedConfig {
            hosts: hosts.count,
            memory_mib: BED_MIB / u32::try_from(hosts.count)?,
            logs: self.runner.config.logs.join(name),
            ..self.runner.config.clone()
        };
        self.records = SeenRecords::default();
        let testbed = Testbed::start(&config, self.runner.image(hosts.kernel));
        self.testbed = Some((hosts, testbed.context("testbed")?));
        Ok(Duration::ZERO)
    }

    /// Returns what hung in the testbed, which the scenario's error may not show.
    fn find_hang(&self) -> Option<Hang> {
        let (_, testbed) = self.testbed.as_ref()?;
        let mut checks = testbed.hosts().iter().map(Host::check_health);
        if let Some(error) = checks.find_map(std::result::Result::err) {
            return Some(Hang::Host(error.to_string()));
        }
        match testbed.stuck_link() {
            Ok(None) => None,
            Ok(Some((a, b))) => Some(Hang::Link(a, b)),
            // The check fails on a host that does not run commands.
            Err(error) => Some(Hang::Host(error.to_string())),
        }
    }
}

/// Takes the next scenario, preferably one for the running hosts, since others take time to boot.
fn take_next(queue: &mut VecDeque<Scenario>, running: Option<Hosts>) -> Option<Scenario> {
    let fits = |scenario: &Scenario| Some(scenario.hosts) == running;
    let at = queue.iter().position(fits).unwrap_or(0);
    queue.remove(at)
}

/// Returns the outcome of a scenario that is not run.
fn why_not(
    no_product: bool,
    until: Option<SystemTime>,
    now: SystemTime,
    late: Late,
) -> Option<Outcome> {
    if no_product {
        let reason = "no ssi-hv in target/release: run cargo build --release -p ssi-hv";
        return Some(Outcome::Skipped(reason.into()));
    }
    let is_late = until.is_some_and(|until| now >= until);
    is_late.then(|| match late {
        Late::Fails => {
            let reason = "essential, and not begun when the time for all was over: see --until";
            Outcome::Failed(reason.into())
        }
        Late::Skips => {
            let reason = "not begun when the time for all was over: see --until";
            Outcome::Skipped(reason.into())
        }
    })
}

fn lock<'s, T>(mutex: &'s Mutex<T>) -> MutexGuard<'s, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_not_begun_in_time_is_skipped_and_fails_if_essential() {
        let now = SystemTime::now();
        let later = now + Duration::from_secs(1);
        for late in [Late::Fails, Late::Skips] {
            assert!(why_not(false, None, now, late).is_none());
            assert!(why_not(false, Some(later), now, late).is_none());
        }
        let failed = why_not(false, Some(now), now, Late::Fails);
        assert!(matches!(failed, Some(Outcome::Failed(why)) if why.contains("--until")));
        let not_run = why_not(false, Some(now), now, Late::Skips);
        assert!(matches!(not_run, Some(Outcome::Skipped(why)) if why.contains("--until")));
        let missing = why_not(true, Some(later), now, Late::Fails);
        assert!(matches!(missing, Some(Outcome::Skipped(why)) if why.contains("cargo build")));
    }

    #[test]
    fn scenarios_for_hosts_that_run_come_first_and_no_scenario_is_left() {
        let scenario = |name, hosts| Scenario {
            name,
            about: "",
            needs_product: false,
            hosts,
            run: |_| Ok(crate::e2e::Verdict::Pass),
        };
        let mut queue = VecDeque::from([
            scenario("a", Hosts::TWO_6_1),
            scenario("b", Hosts::TWO_6_12),
            scenario("c", Hosts::TWO_6_1),
            scenario("d", Hosts::THREE_6_12),
        ]);
        let mut running = None;
        let mut names = Vec::new();
        while let Some(next) = take_next(&mut queue, running) {
            names.push(next.name);
            running = Some(next.hosts);
        }
        assert_eq!(names, ["a", "c", "b", "d"]);
    }
}
