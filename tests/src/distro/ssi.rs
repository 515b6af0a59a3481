//! Debian with a CPU on each of two hosts: it boots on the first, and works on both.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::{Network, SCRIPT_INPUT};
use crate::moves;
use crate::testbed::{Host, Tap};

/// Flags of a guest whose second CPU goes to host 2 when it is told to.
pub const FLAGS: [&str; 7] = [
    "--name",
    NAME,
    "--insecure",
    "--numa",
    "expose",
    "--node",
    "10.77.0.2:7700,cpus=1,from=ready",
];
/// Keeps what nobody binds to CPU 1 away from it: a whole distribution has many threads that wake up
/// for a moment, and each that does so on the other host takes pages with it.
pub const PARAMETERS: &str = "isolcpus=nohz,domain,managed_irq,1 rcu_nocbs=1 irqaffinity=0";
/// What the node on host 2 lends.
pub const LENDS: &[&str] = &["--memory", "1G", "--cpus", "1"];
const NAME: &str = "debian";

/// Deadline of the login prompt: its memory is that of two hosts from the start.
const LOGIN_DEADLINE: Duration = Duration::from_secs(900);
/// Deadline of each piece of work where walks of page tables are writes.
const WORK_DEADLINE: Duration = Duration::from_secs(1500);
/// Deadline of a move of the CPU.
const MOVE_DEADLINE: Duration = Duration::from_secs(120);

/// What works on both CPUs.
const SCRIPT: &str = include_str!("ssi_guest.sh");

/// A piece of the work: its name, and what the script says of it, as often.
type Piece = (&'static str, &'static str, usize);
/// Sums of squares up to n are n(n+1)(2n+1)/6.
const WORK: &[Piece] = &[
    ("sqlite", "ok\n300|9045050\n", 1),
    ("redis", "sum 338350\n", 1),
    ("stress-ng", "", 0),
    ("end", "successful run completed", 2),
];

/// Messages of the guest's kernel that say that it waits, as it does for its memory.
const WAITS: &[&str] = &[
    "blocked for more than",
    "soft lockup",
    "detected stalls",
    "rcu_sched self-detected",
    "call trace",
    "tx timeout",
];

/// How long the steps of the guest took.
#[derive(Clone, Debug)]
pub struct Worked {
    /// From its start to its login prompt.
    pub to_login: Duration,
    /// From the login for the work until all of it ran, and its CPU was on the other host.
    pub apart_after: Duration,
    /// Each piece of [`WORK`].
    pub work: Vec<(&'static str, Duration)>,
    /// The report of `ssi-hv`.
    pub report: Value,
}

impl Worked {
    /// The times in seconds, for reports.
    #[must_use]
    pub fn json(&self) -> Value {
        let work = self.work.iter();
        let work = work.map(|(name, time)| json!({ "name": name, "seconds": time.as_secs_f64() }));
        json!({
            "to_login_s": self.to_login.as_secs_f64(),
            "apart_after_s": self.apart_after.as_secs_f64(),
            "work": work.collect::<Vec<_>>(),
        })
    }

    /// A line for each step.
    #[must_use]
    pub fn table(&self) -> String {
        let steps = [("login", self.to_login), ("apart", self.apart_after)];
        let steps = steps.iter().chain(&self.work);
        let line =
            |(name, time): &(&str, Duration)| format!("{name:<12}{:>10.1} s\n", time.as_secs_f64());
        steps.map(line).collect()
    }
}

/// Boots the guest, starts the work, moves its second CPU to the node that runs on host 2 with
/// [`LENDS`], waits for the work, takes the CPU back, checks the guest's log, and powers it off.
/// Local files go to `dir`.
///
/// # Errors
/// Fails when a step fails in the guest, or its kernel logs a problem.
pub fn work_on_two_hosts(host: &Host, dir: &Path, console: Tap) -> anyhow::Result<Worked> {
    let network = Network::up(host, dir)?;
    let guest = network.boot((PARAMETERS, &FLAGS), console, LOGIN_DEADLINE)?;
    println!("{:<12}{:>10.1} s", "login", guest.to_login.as_secs_f64());
    guest.wait_for_ssh()?;
    // One connection for all: each new one starts programs.
    let begin = Instant::now();
    let mut times = Vec::new();
    let said = guest.follow(SCRIPT, ("begin ", WORK.len()), WORK_DEADLINE, || {
        if times.is_empty() {
            move_cpu(host, "1")?;
            host.check(
                &["sh", "-c", &format!("echo apart >{SCRIPT_INPUT}")],
                MOVE_DEADLINE,
            )?;
        }
        times.push(begin.elapsed());
        Ok(())
    })?;
    for (name, says, count) in WORK {
        let (_, part) = said
            .split_once(&format!("begin {name}\n"))
            .with_context(|| format!("no {name}: {said}"))?;
        let part = part.split("begin ").next().unwrap_or_default();
        ensure!(
            says.is_empty() || part.matches(says).count() == *count,
            "{name} did not say {says:?} {count} times: {part}"
        );
    }
    let names = WORK.iter().map(|(name, ..)| *name);
    let steps = names.zip(times.windows(2).map(|two| two[1] - two[0]));
    let work: Vec<_> = steps.collect();
    move_cpu(host, "0")?;
    guest.check_log_except(WAITS)?;
    let to_login = guest.to_login;
    let report = guest.end(dir)?;
    let pages = report["nodes"][1]["transfers"]["pages_received"].as_u64();
    ensure!(
        pages.is_some_and(|pages| pages > 1000),
        "pages that host 2 received: {pages:?}"
    );
    Ok(Worked {
        to_login,
        apart_after: times.first().copied().unwrap_or_default(),
        work,
        report,
    })
}

/// Moves the guest's second CPU to a node, and waits until it is there. Debian cannot ask for that
/// itself: its cloud kernel has no `/dev/port`.
fn move_cpu(host: &Host, node: &str) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !moves::order(host, NAME, node)? {
        ensure!(
            begin.elapsed() < MOVE_DEADLINE,
            "CPU 1 has not moved to node {node} within {MOVE_DEADLINE:?}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_to_have_the_sums_of_its_squares() {
        let sum = |n: u64| (1..=n).map(|i| i * i).sum::<u64>();
        assert!(WORK[0].1.contains(&format!("300|{}", sum(300))));
        assert!(WORK[1].1.contains(&format!("sum {}", sum(100))));
    }
}
