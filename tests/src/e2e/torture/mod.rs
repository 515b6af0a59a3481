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
mod round;
mod table;

pub use kind::{PageTransport, Replicas};

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::Context;
use super::random::SplitMix;
use super::repeat::Hang;
use crate::share::Share;
use crate::testbed::{HostImage, HostKernel, Testbed, TestbedConfig};
use fault::{End, Fault};
use kind::{Kind, turn};
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
    /// What the order of faults follows from.
    pub seed: u64,
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
        let mut random = SplitMix::new(self.seed);
        let mut results = Results::new(begin);
        let mut lost_in_succession = 0;
        let mut rounds = 0;
        let kinds = Kind::all(&self.transports, &self.replicas);
        let mut testbed = None;
        println!("torture: seed {}", self.seed);
        while rounds == 0 || begin.elapsed() < self.time && !self.has_enough(results.faults()) {
            let (at, end) = turn(rounds, kinds.len());
            let kind = *kinds.get(at).context("no kind of round to test")?;
            rounds += 1;
            let failures = results.failures();
            let ran = (|| {
                let bed = match testbed.take() {
                    Some(bed) => bed,
                    // An emulated host may also hang, or panic, as it starts.
                    None => self.start_bed(workspace, &share, &image, rounds)?,
                };
                let context = Context {
                    testbed: &bed,
                    share: &share,
                    artifacts: workspace.join(format!("target/testbed/torture/round{rounds}")),
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
                            println!("torture: round {rounds}: testbed lost: {hang}");
                            results.beds_lost.push(hang.to_string());
                            hang.to_string()
                        }
                        Err(error) => {
                            let why = format!("round {rounds} was not finished: {error:#}");
                            results.add(Event {
                                kind,
                                name: UNFINISHED,
                                verdict: Verdict::Hung(why.clone()),
                            });
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
                "torture: round {rounds} by {}: {} faults so far, {} s",
                kind.name(),
                results.faults(),
                begin.elapsed().as_secs()
            );
            // Hosts on which something failed are not used again.
            if results.failures() == failures {
                testbed = Some(bed);
            }
        }
        print!("{}", results.table());
        println!("{}", results.last_line(begin.elapsed(), self.seed));
        Ok(results.is_good())
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
    if !results.add(started) {
        return Ok(());
    }
    let mut faults = Fault::of(kind);
    for count in 0..FAULTS_OF_A_ROUND {
        let left = faults.len() - count % faults.len();
        // Each fault comes once before one comes again.
        let chosen = usize::try_from(random.next() % left as u64)?;
        faults.swap(chosen, left - 1);
        let event = round.try_fault(faults[left - 1], random.next())?;
        if !results.add(event) {
            return Ok(());
        }
    }
    if results.add(round.verify()?) {
        results.add(round.end(end)?);
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
