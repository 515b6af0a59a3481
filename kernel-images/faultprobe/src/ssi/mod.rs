//! What the CPUs of a guest share, measured and verified from inside: memory, locks and interrupts.
//!
//! A thread on each CPU hands pages to others, takes locks, counts, wakes and interrupts, and runs
//! litmus tests of the memory model. On a machine whose CPUs are on several hosts a transfer of a
//! page may take milliseconds, on one host some hundred nanoseconds: so each part has a share of
//! the time, and the results say how many rounds that were.

pub mod cells;
pub mod exact;
pub mod interrupt;
pub mod machine;
pub mod ordering;
pub mod processes;
pub mod team;
pub mod time;
pub mod transfer;
pub mod work;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::clock::Clock;
use crate::cpu::now_ticks;
use crate::report::{Latency, latency_of};
use cells::{Cells, Pages};
use exact::{Count, Counters, How};
use interrupt::{Calls, Counted, Wakes};
use machine::Machine;
use ordering::{Litmus, Variables};
use team::{Deadline, Team};
use work::{Computed, Rate, Sort};

/// CPU 0 is paired with at most so many others.
const PAIRS_MAX: usize = 8;
/// At most so many CPUs compute alone, one after the other.
const ALONE_MAX: usize = 4;
/// Shares of the time: see [`Probe::share`]. Their sum is that of all parts.
const SHARES: u32 = 24;
/// How long the rate of the counter is measured before deadlines are derived from it.
const RATE_TIME: Duration = Duration::from_millis(50);
/// How long past its deadline a lock is awaited; the other CPU may be preempted while it has it.
const PATIENCE: Duration = Duration::from_secs(20);

/// Rounds between two CPUs.
#[derive(Debug, Serialize)]
pub struct Pair {
    cpus: [usize; 2],
    rounds: usize,
    latency_us: Latency,
}

/// A counter that all CPUs incremented.
#[derive(Debug, Serialize)]
pub struct Counter {
    #[serde(flatten)]
    count: Count,
    /// Until a CPU had incremented after another one.
    latency_us: Latency,
}

/// A litmus test.
#[derive(Debug, Serialize)]
pub struct Ordering {
    test: &'static str,
    /// Whether the variables were on one page.
    one_page: bool,
    /// Writes and reads that were compared.
    rounds: usize,
    /// How often a CPU read a new value of another.
    met: u64,
    violations: u64,
}

/// Messages between two CPUs that carry the time at which they were sent.
#[derive(Debug, Serialize)]
pub struct Times {
    cpus: [usize; 2],
    messages: u64,
    /// Messages that came before they were sent, by the counters of the CPUs.
    early_by_counter: u64,
    /// The same by the kernel's clock.
    early_by_clock: u64,
    /// What the fastest message took, by the counters.
    shortest_us: f64,
}

/// Parts of a computation that CPUs checked for each other.
#[derive(Debug, Serialize)]
pub struct Checked {
    parts: u64,
    wrong: u64,
}

/// The results.
#[derive(Debug, Serialize)]
pub struct Results {
    machine: Machine,
    /// The CPUs that were used.
    cpus: Vec<usize>,
    /// Ownership of a page from CPU to CPU.
    transfers: Vec<Pair>,
    /// From the wake-up of a sleeping thread on another CPU until it runs.
    wakes: Vec<Pair>,
    /// A call of the kernel on another CPU, until that has answered; none where the kernel has no
    /// call that programs can cause.
    calls: Vec<Pair>,
    /// Interrupts that the kernel counted during wake-ups and calls.
    interrupts: Counted,
    ticket_lock: Counter,
    mutex: Counter,
    add: Counter,
    compare_exchange: Counter,
    ordering: Vec<Ordering>,
    /// Whether time goes back from CPU to CPU.
    times: Vec<Times>,
    sorted: Checked,
    rate: Rate,
    /// The same of a process on each CPU.
    process_rate: Rate,
}

/// The printed object.
#[derive(Debug, Serialize)]
pub struct Report {
    ssi: Results,
    /// Contradictions to the memory model, wrong counts and results, interrupts that were lost, and
    /// messages from the future.
    violations: u64,
    verified_bytes: u64,
    corrupt_bytes: u64,
    elapsed_s: f64,
}

impl Report {
    /// Returns whether all CPUs saw one machine.
    pub fn is_sound(&self) -> bool {
        self.violations == 0 && self.corrupt_bytes == 0
    }

    /// Returns the object as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|e| format!("{{\"error\":\"{e}\"}}"))
    }
}

/// Measures the CPUs that this process may use for about so many seconds.
///
/// # Errors
/// Fails when there is one CPU only, or a thread cannot run.
pub fn run(seconds: u64) -> Result<Report, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    run_on(Duration::from_secs(seconds), Pages::new, program)
}

/// Measures memory that `allocate` makes from a number of pages. `program` is this one, for a process
/// on each CPU.
fn run_on<C: Cells>(
    time: Duration,
    allocate: fn(usize) -> C,
    program: PathBuf,
) -> Result<Report, String> {
    let cpus = team::cpus().map_err(|error| format!("which CPUs there are: {error}"))?;
    if cpus.len() < 2 {
        return Err(format!(
            "{} CPU may be used, and --ssi compares 2 or more",
            cpus.len()
        ));
    }
    // The main thread only waits; its output does not have to come from another host.
    team::pin(cpus[0]).map_err(|error| format!("CPU {}: {error}", cpus[0]))?;
    let clock = Clock::start();
    std::thread::sleep(RATE_TIME);
    let ns_per_tick = clock.ns_per_tick();
    let probe = Probe {
        team: Team::on(&cpus).map_err(|error| format!("a thread on each CPU: {error}"))?,
        all: (0..cpus.len()).collect(),
        cpus,
        allocate,
        program,
        share: ticks_of(time / SHARES, ns_per_tick),
        patience: ticks_of(PATIENCE, ns_per_tick),
        clock,
        violations: 0,
        verified: 0,
        corrupt: 0,
    };
    probe.run()
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times below an hour; both are positive, and casts from floats saturate"
)]
fn ticks_of(time: Duration, ns_per_tick: f64) -> u64 {
    (time.as_nanos() as f64 / ns_per_tick) as u64
}

struct Probe<C> {
    cpus: Vec<usize>,
    team: Team,
    /// The numbers of all threads of the team.
    all: Vec<usize>,
    allocate: fn(usize) -> C,
    program: PathBuf,
    /// Ticks of one share of the time.
    share: u64,
    patience: u64,
    clock: Clock,
    violations: u64,
    verified: u64,
    corrupt: u64,
}

impl<C: Cells> Probe<C> {
    fn run(mut self) -> Result<Report, String> {
        let transfers = self.transfers()?;
        let before = Counted::now();
        let wakes = self.wakes()?;
        let calls = if interrupt::can_call() {
            self.calls()?
        } else {
            Vec::new()
        };
        let interrupts = Counted::now().since(before);
        let ssi = Results {
            machine: Machine::read(Path::new("/")),
            transfers,
            wakes,
            interrupts,
            ticket_lock: self.counter(How::TicketLock)?,
            mutex: self.counter(How::Mutex)?,
            add: self.counter(How::Add)?,
            compare_exchange: self.counter(How::CompareExchange)?,
            ordering: self.ordering(!calls.is_empty())?,
            calls,
            times: self.times()?,
            sorted: self.sort()?,
            rate: self.rate()?,
            process_rate: self.process_rate()?,
            cpus: self.cpus,
        };
        Ok(Report {
            ssi,
            violations: self.violations,
            verified_bytes: self.verified * 8,
            corrupt_bytes: self.corrupt * 8,
            elapsed_s: (self.clock.elapsed_s() * 1000.0).round() / 1000.0,
        })
    }

    fn memory(&self, pages: usize) -> Arc<C> {
        Arc::new((self.allocate)(pages))
    }

    /// Runs something on CPU 0 and each other one, in shares of the time.
    fn each_pair<T>(
        &self,
        shares: u64,
        mut run: impl FnMut([usize; 2], u64) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        let pairs = (self.all.len() - 1).min(PAIRS_MAX);
        let ticks = self.share * shares / pairs as u64;
        (1..=pairs).map(|other| run([0, other], ticks)).collect()
    }

    /// The same of something that has ticks of rounds.
    fn pairs(
        &self,
        shares: u64,
        mut run: impl FnMut(&[usize; 2], u64) -> Result<Vec<u64>, String>,
    ) -> Result<Vec<Pair>, String> {
        self.each_pair(shares, |who, ticks| {
            let round_ticks = run(&who, ticks)?;
            Ok(Pair {
                cpus: who.map(|thread| self.cpus[thread]),
                rounds: round_ticks.len(),
                latency_us: latency_of(&round_ticks, self.clock.ns_per_tick()),
            })
        })
    }

    fn transfers(&mut self) -> Result<Vec<Pair>, String> {
        let (mut verified, mut corrupt) = (0, 0);
        let pairs = self.pairs(2, |who, ticks| {
            let memory = self.memory(1);
            let seen = self.team.run(who, move |role| {
                transfer::ping_pong(&*memory, 0, role, &Deadline::after(ticks))
            })?;
            verified += seen.iter().map(|seen| seen.verified).sum::<u64>();
            corrupt += seen.iter().map(|seen| seen.corrupt).sum::<u64>();
            Ok(halves(&seen[0].round_ticks))
        })?;
        self.verified += verified;
        self.corrupt += corrupt;
        Ok(pairs)
    }

    fn wakes(&mut self) -> Result<Vec<Pair>, String> {
        let mut lost = 0;
        let pairs = self.pairs(2, |who, ticks| {
            let wakes = Wakes::default();
            let seen = self
                .team
                .run(who, move |role| wakes.run(role, &Deadline::after(ticks)))?;
            lost += seen.iter().map(|seen| seen.lost).sum::<u64>();
            Ok(halves(&seen[0].round_ticks))
        })?;
        self.violations += lost;
        Ok(pairs)
    }

    fn calls(&self) -> Result<Vec<Pair>, String> {
        self.pairs(1, |who, ticks| {
            let calls = Calls::default();
            let mut ticks = self
                .team
                .run(who, move |role| calls.run(role, &Deadline::after(ticks)))?;
            Ok(ticks.swap_remove(0))
        })
    }

    fn counter(&mut self, how: How) -> Result<Counter, String> {
        let memory = self.memory(Counters::PAGES);
        let counters = Arc::new(Counters::new(0, self.patience));
        let (cells, on, ticks) = (memory.clone(), counters.clone(), self.share);
        let seen = self.team.run(&self.all, move |_| {
            on.run(&*cells, how, &Deadline::after(ticks))
        })?;
        let count = Count::of(memory.load(counters.counter()), &seen);
        self.violations += count.violations;
        let ticks: Vec<u64> = seen.into_iter().flat_map(|seen| seen.turn_ticks).collect();
        Ok(Counter {
            count,
            latency_us: latency_of(&ticks, self.clock.ns_per_tick()),
        })
    }

    /// Six shares, among the tests that can be run.
    fn ordering(&mut self, with_calls: bool) -> Result<Vec<Ordering>, String> {
        let mut tests = Litmus::ALL.to_vec();
        tests.retain(|test| test.cpus() <= self.all.len());
        tests.retain(|test| with_calls || *test != Litmus::StoreBufferingCalled);
        let ticks = self.share * 6 / (2 * tests.len() as u64);
        let mut results = Vec::new();
        for litmus in tests {
            for one_page in [false, true] {
                let memory = self.memory(2);
                let at = if one_page {
                    Variables::together(0)
                } else {
                    Variables::apart(0)
                };
                // The CPUs with the highest numbers too, which may be on other hosts.
                let mut who = self.all.clone();
                who.rotate_right(litmus.cpus() / 2);
                who.truncate(litmus.cpus());
                let histories = self.team.run(&who, move |role| {
                    litmus.run(&*memory, at, role, &Deadline::after(ticks))
                })?;
                let violations = litmus.violations(&histories);
                self.violations += violations;
                results.push(Ordering {
                    test: litmus.name(),
                    one_page,
                    rounds: histories.iter().map(Vec::len).sum(),
                    met: ordering::met(&histories),
                    violations,
                });
            }
        }
        Ok(results)
    }

    #[expect(clippy::cast_precision_loss, reason = "a time below an hour")]
    fn times(&mut self) -> Result<Vec<Times>, String> {
        let clock = self.clock;
        let times = self.each_pair(1, |who, ticks| {
            let memory = self.memory(1);
            let seen = self.team.run(&who, move |role| {
                let now = || [now_ticks(), clock.elapsed_ns()];
                let (most, deadline) = (time::MESSAGES_MAX, Deadline::after(ticks));
                time::exchange(&*memory, 0, role, now, most, &deadline)
            })?;
            let early = |by: usize| seen.iter().map(|seen| seen.early[by]).sum();
            let shortest = seen.iter().map(|seen| seen.shortest);
            let shortest = shortest
                .filter(|ticks| *ticks < u64::MAX)
                .min()
                .unwrap_or(0);
            Ok(Times {
                cpus: who.map(|thread| self.cpus[thread]),
                messages: seen.iter().map(|seen| seen.messages).sum(),
                early_by_counter: early(0),
                early_by_clock: early(1),
                shortest_us: rounded(shortest as f64 * clock.ns_per_tick() / 1e3),
            })
        })?;
        let early = times
            .iter()
            .map(|one| one.early_by_counter + one.early_by_clock);
        self.violations += early.sum::<u64>();
        Ok(times)
    }

    fn sort(&mut self) -> Result<Checked, String> {
        let count = self.all.len();
        let (memory, sort) = (self.memory(Sort::pages(count)), Sort::new(0, count));
        let ticks = self.share * 3;
        let seen = self.team.run(&self.all, move |me| {
            sort.run(&*memory, me, &Deadline::after(ticks))
        })?;
        let checked = Checked {
            parts: seen.iter().map(|seen| seen.checked).sum(),
            wrong: seen.iter().map(|seen| seen.wrong).sum(),
        };
        self.violations += checked.wrong;
        self.verified += checked.parts * (work::PART_PAGES * cells::PAGE_CELLS) as u64;
        Ok(checked)
    }

    fn rate(&mut self) -> Result<Rate, String> {
        let ticks = self.rate_ticks();
        let mut compute = |who: &[usize]| -> Result<f64, String> {
            let work = move |_| Computed::until(&Deadline::after(ticks));
            let computed = self.team.run(who, work)?;
            self.violations += computed.iter().map(|one| one.wrong).sum::<u64>();
            Ok(computed.iter().map(|one| one.rate()).sum())
        };
        let alone = self.all.iter().take(ALONE_MAX).map(|&one| compute(&[one]));
        let alone = alone.collect::<Result<Vec<f64>, String>>()?;
        Ok(Rate::of(alone, compute(&self.all)?))
    }

    fn process_rate(&mut self) -> Result<Rate, String> {
        let ticks = self.rate_ticks();
        let (rate, wrong) = processes::rate(&self.program, &self.cpus, ALONE_MAX, ticks)?;
        self.violations += wrong;
        Ok(rate)
    }

    /// Two shares, for some CPUs alone and all together.
    fn rate_ticks(&self) -> u64 {
        self.share * 2 / (self.all.len().min(ALONE_MAX) as u64 + 1)
    }
}

fn halves(ticks: &[u64]) -> Vec<u64> {
    ticks.iter().map(|ticks| ticks / 2).collect()
}

fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod broken;
#[cfg(test)]
mod tests;
