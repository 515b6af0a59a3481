//! Fault injection over hours: VMs on a testbed, whose guests verify every byte, while their hosts,
//! links and processes fail one after the other.
//!
//! A round boots a VM whose pages travel by one transport and have one copy or two, injects faults
//! that the VM must survive, waits until the guest has verified its memory, and ends the VM by a
//! fault that it cannot survive. The order of faults follows from a seed. A round that a hung
//! emulator ends is counted and says nothing; one that ends early for another reason, such as a
//! donor that does not start, counts as hung, and the run continues on another testbed.

mod donors;
mod fault;
mod kind;
mod progress;
mod record;
mod round;
mod table;

pub use kind::{PageTransport, Replicas};

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;

use super::Context;
use super::random::SplitMix;
use super::repeat::Hang;
use crate::share::Share;
use crate::testbed::{HostImage, HostKernel, Testbed, TestbedConfig};
use fault::{End, Fault};
use kind::{Kind, turn};
use record::Record;
use round::Round;
use table::{Event, Results, UNFINISHED, Verdict};

/// Faults of a round that the VM must survive.
const FAULTS_OF_A_ROUND: usize = 24;
/// Rounds in succession that may lose their testbed, or end early, before a run ends.
const BEDS_LOST_MAX: usize = 3;

/// What is to be injected.
#[derive(Clone, Debug)]
pub struct Torture {
    /// How long rounds begin.
    pub time: Duration,
    /// After how many faults none begins any more.
    pub faults: Option<usize>,
    /// What the order of faults follows from; if not given, what the record says, or the time.
    pub seed: Option<u64>,
    /// A file by which a run continues after its process has ended.
    pub record: Option<PathBuf>,
    /// The transports, in turn.
    pub transports: Vec<PageTransport>,
    /// The numbers of copies, in turn.
    pub replicas: Vec<Replicas>,
    /// What the hosts run.
    pub kernel: HostKernel,
}

impl Torture {
    /// Runs rounds until the time is over or there were enough faults, prints a table and one last
    /// line, and returns whether nothing went wrong.
    ///
    /// # Errors
    /// Fails when no testbed can be started, or the product is not built.
    pub fn run(&self, workspace: &Path) -> anyhow::Result<bool> {
        round::check_work()?;
        let share = Share::prepare(workspace)?;
        anyhow::ensure!(
            share.has_product(),
            "no ssi-hv in target/release: run cargo build --release -p ssi-hv"
        );
        let image = HostImage::prepare(workspace, self.kernel)?;
        let begin = Instant::now();
        let mut results = self.results()?;
        let mut seeds = SplitMix::new(results.seed());
        for _ in 0..results.round() {
            seeds.next();
        }
        let mut lost_in_succession = 0;
        let mut has_run = false;
        let kinds = Kind::all(&self.transports, &self.replicas);
        let mut testbed = None;
        println!("torture: seed {}", results.seed());
        if results.round() > 0 {
            println!(
                "torture: continued after round {} with {} faults",
                results.round(),
                results.faults()
            );
        }
        while !self.has_enough(results.faults()) && (!has_run || begin.elapsed() < self.time) {
            let (at, end) = turn(results.round(), kinds.len());
            let kind = *kinds.get(at).context("no kind of round to test")?;
            // A round's faults follow from its number, not from those before it.
            let mut random = SplitMix::new(seeds.next());
            results.begin_round();
            has_run = true;
            let round = results.round();
            let failures = results.failures();
            let ran = (|| {
                let bed = match testbed.take() {
                    Some(bed) => bed,
                    // An emulated host may also hang, or panic, as it starts.
                    None => self.start_bed(workspace, &share, &image, round)?,
                };
                let context = Context {
                    testbed: &bed,
                    share: &share,
                    artifacts: workspace.join(format!("target/testbed/torture/round{round}")),
                    notes: RefCell::default(),
                };
                std::fs::create_dir_all(&context.artifacts)?;
                one_round(&context, kind, end, &mut random, &mut results)?;
                Ok(bed)
            })();
            let bed = match ran {
                Ok(bed) => bed,
                Err(error) => {
                    let why = match lost_bed(error) {
                        Ok(hang) => {
                            results.add_lost_bed(hang.to_string())?;
                            hang.to_string()
                        }
                        Err(error) => {
                            let why = format!("round {round} was not finished: {error:#}");
                            results.add(Event {
                                kind,
                                name: UNFINISHED.into(),
                                verdict: Verdict::Hung(why.clone()),
                            })?;
                            why
                        }
                    };
                    lost_in_succession += 1;
                    anyhow::ensure!(
                        lost_in_succession < BEDS_LOST_MAX,
                        "{lost_in_succession} rounds in succession were not finished: {why}"
                    );
                    continue;
                }
            };
            lost_in_succession = 0;
            println!(
                "torture: round {round} by {}: {} faults so far, {} s",
                kind.name(),
                results.faults(),
                results.elapsed().as_secs()
            );
            // Hosts on which something failed are not used again.
            if results.failures() == failures {
                testbed = Some(bed);
            }
        }
        print!("{}", results.table());
        println!("{}", results.last_line());
        Ok(results.is_good())
    }

    /// The results so far: none, or those of the record.
    fn results(&self) -> anyhow::Result<Results> {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let chosen = self.seed;
        let of_time = || since_1970.map_or(0, |time| time.as_secs());
        let Some(path) = &self.record else {
            return Ok(Results::new(chosen.unwrap_or_else(of_time)));
        };
        let (record, lines) = Record::open(path)?;
        let recorded = lines.first().map(|line| line.seed);
        if let (Some(chosen), Some(recorded)) = (chosen, recorded) {
            anyhow::ensure!(
                chosen == recorded,
                "--seed {chosen}, and the record {} has seed {recorded}; leave out --seed, or name another \
                 file",
                path.display()
            );
        }
        let seed = recorded.or(chosen).unwrap_or_else(of_time);
        Ok(Results::recorded(seed, record, lines))
    }

    /// Whether so many faults are as many as there should be.
    fn has_enough(&self, faults: usize) -> bool {
        self.faults.is_some_and(|enough| faults >= enough)
    }

    fn start_bed(
        &self,
        workspace: &Path,
        share: &Share,
        image: &HostImage,
        round: usize,
    ) -> anyhow::Result<Testbed> {
        let logs = workspace.join(format!("target/testbed/torture/bed{round}"));
        let config = TestbedConfig::two_hosts(&share.dir, logs);
        Testbed::start(&config, image).context("testbed")
    }
}

/// Returns why a testbed is lost, or the error if it is another one.
fn lost_bed(error: anyhow::Error) -> anyhow::Result<Hang> {
    Hang::of(&error).ok_or(error)
}

fn one_round(
    context: &Context<'_>,
    kind: Kind,
    end: End,
    random: &mut SplitMix,
    results: &mut Results,
) -> anyhow::Result<()> {
    let (mut round, started) = Round::start(context, kind)?;
    if !results.add(started)? {
        return Ok(());
    }
    let mut faults = Fault::of(kind);
    for count in 0..FAULTS_OF_A_ROUND {
        let left = faults.len() - count % faults.len();
        // Each fault comes once before one comes again.
        let chosen = usize::try_from(random.next() % left as u64)?;
        faults.swap(chosen, left - 1);
        let event = round.try_fault(faults[left - 1], random.next())?;
        if !results.add(event)? {
            return Ok(());
        }
    }
    if results.add(round.verify()?)? {
        results.add(round.end(end)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testbed::TestbedError;

    #[test]
    fn a_host_that_panics_as_it_starts_costs_a_testbed_and_not_the_run() {
        let boot = TestbedError::Boot {
            host: 1,
            reason: "the emulator exited".into(),
            log: "console.log".into(),
            tail: "Kernel panic - not syncing: IO-APIC + timer doesn't work!".into(),
        };
        let started: anyhow::Result<()> = Err(boot).context("testbed");
        let hang = lost_bed(started.unwrap_err()).unwrap();
        assert!(hang.to_string().contains("the emulator exited"), "{hang}");
        assert!(lost_bed(anyhow::anyhow!("no such command")).is_err());
    }
}
