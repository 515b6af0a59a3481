//! Repeats a scenario whose testbed hung, and records every repetition.
//!
//! Emulation is not perfect: a host hangs, the emulator drops a link, or delivers an interrupt
//! twice. Only what the testbed itself shows, by its heartbeat or its links, and a call trace that
//! no processor leaves, are reasons to repeat. A guest that stalls or panics is none: it looks the
//! same as a deadlock or a wrong byte of the product. A scenario that passes only when it is
//! repeated is flaky. The summary lists flaky scenarios and limits them.

use std::fmt;

use anyhow::Error;

use super::guest::{KERNEL_SEPARATOR, kernel_lines};
use super::{Result, Verdict};
use crate::summary::Outcome;
use crate::testbed::TestbedError;

/// How often one scenario gets a new testbed.
pub(super) const RESTARTS_MAX: usize = 2;

/// What a kernel says when two interrupts nest on the small stack on which they enter.
const TRAMPOLINE: &str = "ENTRY_TRAMPOLINE stack guard page was hit";

/// Why an attempt is repeated on a new testbed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Hang {
    /// The agent of a host missed its heartbeat, or the host did not start: the emulator hung.
    Host(String),
    /// The emulator no longer carries packets between two hosts.
    Link(usize, usize),
    /// The emulator delivered an interrupt twice to a guest, whose kernel said this.
    Interrupt(String),
}

impl Hang {
    /// Returns the hang that an error reports.
    pub(super) fn of(error: &Error) -> Option<Self> {
        let mut causes = error.chain().filter_map(|e| e.downcast_ref());
        if let Some(hung) = causes.find(|cause: &&TestbedError| cause.is_hung_host()) {
            return Some(Self::Host(first_line(hung)));
        }
        let text = format!("{error:#}");
        interrupted_entry(&text).map(|said| Self::Interrupt(said.to_owned()))
    }
}

/// Returns the line of a failed kernel that shows an interrupt at the first byte of the code that
/// receives interrupts, where they are off: that one was delivered twice (docs/testbed.md).
fn interrupted_entry(error: &str) -> Option<&str> {
    let is_entry = |line: &str| {
        let at_entry = line.starts_with("RIP: ") && line.contains(":asm_");
        at_entry && line.contains("+0x0/") || line.contains(TRAMPOLINE)
    };
    let lines = kernel_lines(error)?;
    lines.split(KERNEL_SEPARATOR).find(|line| is_entry(line))
}

impl fmt::Display for Hang {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(what) => write!(f, "the emulator hung: {what}"),
            Self::Link(a, b) => {
                write!(f, "the emulator hung: the link {a}-{b} carries nothing")
            }
            Self::Interrupt(said) => {
                write!(f, "the emulator delivered an interrupt twice: {said}")
            }
        }
    }
}

/// Result of one attempt at a scenario.
pub(super) struct Attempt {
    pub result: Result,
    pub notes: Vec<String>,
    /// The hang that made the attempt fail.
    pub hang: Option<Hang>,
    /// What the hosts of a failed attempt did not do meanwhile.
    pub hosts: Option<String>,
}

/// Result of a scenario after all attempts.
#[derive(Debug)]
pub(super) struct Ended {
    pub outcome: Outcome,
    pub notes: Vec<String>,
    /// Why it was repeated, if only a repetition passed.
    pub flaky: Option<String>,
}

/// Repeats a scenario until an attempt did not hang, or the limit is reached. Calls `restarted`
/// before each repetition.
pub(super) fn until_it_counts(
    mut attempt: impl FnMut() -> Attempt,
    mut restarted: impl FnMut(&str),
) -> Ended {
    let mut hangs = Vec::new();
    loop {
        let Attempt {
            result,
            notes,
            hang,
            hosts,
        } = attempt();
        if let (Err(error), Some(hang)) = (&result, hang)
            && hangs.len() < RESTARTS_MAX
        {
            let reason = match hang {
                Hang::Link(..) => format!("{hang} ({})", first_line(&format!("{error:#}"))),
                _ => hang.to_string(),
            };
            restarted(&reason);
            hangs.push(reason);
            continue;
        }
        let is_flaky = matches!(result, Ok(Verdict::Pass)) && !hangs.is_empty();
        return Ended {
            outcome: match result {
                Ok(Verdict::Pass) => Outcome::Passed,
                Ok(Verdict::Skip(reason)) => Outcome::Skipped(reason),
                Err(error) => Outcome::Failed(match hosts {
                    Some(hosts) => format!("{error:#}\n{hosts}"),
                    None => format!("{error:#}"),
                }),
            },
            notes,
            flaky: is_flaky.then(|| {
                format!(
                    "passed at attempt {}: {}",
                    hangs.len() + 1,
                    hangs.join("; ")
                )
            }),
        };
    }
}

fn first_line(text: &(impl ToString + ?Sized)) -> String {
    let text = text.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::e2e::stall::GuestStalled;

    fn hung_host() -> TestbedError {
        TestbedError::HostHung {
            host: 1,
            silent: Duration::from_secs(30),
            log: "host1.log".into(),
        }
    }

    fn attempt(result: Result) -> Attempt {
        let hang = result.as_ref().err().and_then(Hang::of);
        Attempt {
            result,
            notes: vec!["a note".into()],
            hang,
            hosts: Some("host 1: silent".into()),
        }
    }

    /// Runs a scenario whose attempts have these results, and returns the restarts.
    fn end_of(results: Vec<Result>) -> (Ended, Vec<String>) {
        let mut results = results.into_iter();
        let mut restarts = Vec::new();
        let ended = until_it_counts(
            || attempt(results.next().expect("no further attempt")),
            |reason| restarts.push(reason.to_owned()),
        );
        assert!(results.next().is_none(), "too few attempts");
        (ended, restarts)
    }

    #[test]
    fn a_hung_host_is_recognised_below_other_context() {
        let error = Error::new(hung_host()).context("while booting");
        let hang = Hang::of(&error).expect("it hung");
        assert!(matches!(hang, Hang::Host(_)));
        assert!(hang.to_string().contains("no heartbeat for 30s"), "{hang}");
        assert_eq!(Hang::of(&anyhow::anyhow!("wrong number")), None);
    }

    #[test]
    fn only_a_call_trace_that_no_processor_leaves_excuses_a_panic() {
        let hang = |text: &str| Hang::of(&anyhow::anyhow!("exit code 0 expected; {text}"));
        for twice in [
            "kernel: BUG: ENTRY_TRAMPOLINE stack guard page was hit at 1 / CPU: 0\n  console ends",
            "kernel: Oops: 0000 / RIP: 0010:asm_sysvec_apic_timer_interrupt+0x0/0x20 / Code: 0\n  x",
        ] {
            assert!(matches!(hang(twice), Some(Hang::Interrupt(_))), "{twice}");
        }
        for other in [
            "kernel: Oops: 0000 / RIP: 0010:asm_sysvec_apic_timer_interrupt+0x16/0x20\n  x",
            "kernel: Oops: 0000 / RIP: 0010:memcpy+0x0/0x20\n  x",
            "kernel: Kernel panic - not syncing: Attempted to kill init!\n  x",
            "console ends\n | RIP: 0010:asm_sysvec_apic_timer_interrupt+0x0/0x20",
        ] {
            assert_eq!(hang(other), None, "{other}");
        }
    }

    #[test]
    fn a_guest_that_stalls_while_its_host_answers_fails_at_once() {
        let stalled = || Err(GuestStalled::example().into());
        let (ended, restarts) = end_of(vec![stalled()]);
        assert!(matches!(ended.outcome, Outcome::Failed(why) if why.contains("stalled")));
        assert!(restarts.is_empty() && ended.flaky.is_none());
    }

    #[test]
    fn what_passes_only_when_repeated_is_flaky_and_says_why() {
        let hung = || Err(hung_host().into());
        let (ended, restarts) = end_of(vec![hung(), hung(), Ok(Verdict::Pass)]);
        assert_eq!((ended.outcome, restarts.len()), (Outcome::Passed, 2));
        let reason = ended.flaky.expect("it was repeated");
        assert!(reason.starts_with("passed at attempt 3: "), "{reason}");
        assert!(restarts.iter().all(|one| reason.contains(one)), "{reason}");
        assert_eq!(ended.notes, ["a note"]);
    }

    #[test]
    fn what_passes_at_once_fails_or_is_skipped_is_not_flaky() {
        let (ended, restarts) = end_of(vec![Ok(Verdict::Pass)]);
        assert_eq!((ended.outcome, ended.flaky), (Outcome::Passed, None));
        assert!(restarts.is_empty());

        let skipped = Ok(Verdict::Skip("no kvm".into()));
        let (ended, _) = end_of(vec![Err(hung_host().into()), skipped]);
        assert_eq!(ended.outcome, Outcome::Skipped("no kvm".into()));
        assert_eq!(ended.flaky, None);

        let (ended, restarts) = end_of(vec![Err(anyhow::anyhow!("wrong byte"))]);
        assert_eq!(
            ended.outcome,
            Outcome::Failed("wrong byte\nhost 1: silent".into())
        );
        assert!(restarts.is_empty() && ended.flaky.is_none());
    }

    #[test]
    fn what_hangs_every_time_fails() {
        let hung = || Err(hung_host().into());
        let (ended, restarts) = end_of((0..=RESTARTS_MAX).map(|_| hung()).collect());
        assert!(matches!(ended.outcome, Outcome::Failed(why) if why.contains("heartbeat")));
        assert_eq!((restarts.len(), ended.flaky), (RESTARTS_MAX, None));
    }
}
