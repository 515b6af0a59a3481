//! Guests in a row whose donors are killed at random moments and do not return, and that continue
//! with the copies or pieces of other donors.
//!
//! The moments and the donors follow from a seed, which the notes have; the variable
//! `SSI_HV_TEST_SEED` repeats it, and `SSI_HV_TEST_GUESTS` has fewer guests run, or some of the row:
//! `21-40` are those that a run of 40 would have after 20. Each guest has a line in `guests.txt` of
//! the scenario, and a directory with its console. A guest that does not survive ends nothing: the
//! others still run, until a few have failed.

mod by_rdma;
mod choice;
mod tally;

use std::cell::RefCell;
use std::io::Write as _;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::copies::Copies;
use super::donor::Donor;
use super::faults::GRACE_SHORT;
use super::guest::{Finished, GUEST_DEADLINE, Guest, PAUSED, SHORT, exit, faultprobes, tail};
use super::random::SplitMix;
use super::repeat::Hang;
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::cleanup;
use crate::testbed::{RemoteProcess, TestbedError};
use by_rdma::BY_RDMA;
use choice::{Kill, choose, guests_of, seed_of};
use tally::{Survival, Tally, longest_pause_ms};

pub(super) const LONG: &[Scenario] = &[
    Scenario {
        name: "replicas_hundred",
        about: "100 guests with two copies of their memory lose a donor to kill -9 at a random moment, and another one after the repair; no byte is lost",
        needs_product: true,
        hosts: Hosts::THREE_6_12,
        run: |context| guests(context, &COPIES),
    },
    Scenario {
        name: "stripes_hundred",
        about: "100 guests with stripes of 4+2 lose two donors at once to kill -9 at a random moment, and two more after the repair; no byte is lost",
        needs_product: true,
        hosts: Hosts::THREE_6_12,
        run: |context| guests(context, &STRIPES),
    },
    Scenario {
        name: "replicas_rdma",
        about: "a guest with two copies of its memory, which it reads by RDMA, loses a donor to kill -9 while it verifies them, and another one after the repair; no byte is lost",
        needs_product: true,
        hosts: Hosts::THREE_6_12,
        run: by_rdma::by_rdma,
    },
];

/// Guests in a row.
const GUESTS: usize = 100;
/// Guests that may fail before a scenario ends: the first ones show what is wrong.
const FAILED_MAX: usize = 3;
/// The name of the guests.
const NAME: &str = "survivor";
/// Bytes that a guest writes and verifies, again and again: as much as may be local, so that with
/// the kernel's memory each pass needs the donors.
const PROBE_BYTES: u64 = 48 << 20;
/// Pages that must come from the donors that are left after the second kill.
const FETCHED_MIN: u64 = 200;
/// Pages are fetched when they are touched, and then ahead. A byte that is not right ends the loop, and
/// the guest with it.
const WORK: &str =
    "while faultprobe --bytes 48M && faultprobe --bytes 48M --pattern sequential; do :; done";
/// The line of a pass.
const PASS: &str = "FAULTPROBE {";
/// What each donor can lend: more than any guest has.
const LENT: &str = "320M";
/// Time between two looks at a guest.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a repair may stop: for the grace time, or the slowest readmission of a donor that went
/// out for a while (63 s), and a margin for busy hosts.
const REPAIR_STEP: Duration = Duration::from_secs(120);
/// Deadline of a repair. Emulated hosts copy 1 to 5 MiB a second.
const REPAIR_DEADLINE: Duration = Duration::from_secs(900);
/// The variable with a seed to repeat.
const SEED: &str = "SSI_HV_TEST_SEED";
/// The variable with the guests that run.
const COUNT: &str = "SSI_HV_TEST_GUESTS";

/// A donor: its host, its port, and the value of `--donor`.
type Place = (usize, u16, &'static str);

/// How donors keep the memory of the guests.
#[derive(Debug)]
struct Way {
    flags: [&'static str; 2],
    transport: &'static str,
    donors: &'static [Place],
    /// How many are killed at once.
    at_once: usize,
    /// Guests in a row, unless [`COUNT`] says otherwise.
    guests: usize,
}

/// Two are left after the first kill, which hold both copies of everything.
const COPIES: Way = Way {
    flags: ["--replicas", "2"],
    transport: "tcp",
    guests: GUESTS,
    donors: &[
        (2, 7700, "10.77.0.2:7700"),
        (2, 7701, "10.77.0.2:7701"),
        (3, 7700, "10.77.0.3:7700"),
    ],
    at_once: 1,
};

/// Six are left after the first kill, which hold a piece of everything each: they are asked for
/// enough, since a VM by itself asks for room for the pieces of one donor only.
const STRIPES: Way = Way {
    flags: ["--redundancy", "4+2"],
    transport: "tcp",
    guests: GUESTS,
    donors: &[
        (2, 7700, "10.77.0.2:7700,memory=64M"),
        (2, 7701, "10.77.0.2:7701,memory=64M"),
        (2, 7702, "10.77.0.2:7702,memory=64M"),
        (2, 7703, "10.77.0.2:7703,memory=64M"),
        (3, 7700, "10.77.0.3:7700,memory=64M"),
        (3, 7701, "10.77.0.3:7701,memory=64M"),
        (3, 7702, "10.77.0.3:7702,memory=64M"),
        (3, 7703, "10.77.0.3:7703,memory=64M"),
    ],
    at_once: 2,
};

impl Way {
    fn guest(&self) -> Guest {
        let mut guest = Guest {
            // Less than usual: what donors have is copied again for each kill.
            memory: "160M",
            // With other donors than a guest has otherwise.
            local_memory: None,
            ..Guest::small(1, WORK)
        };
        guest.more.extend(["--local-memory", "48M", "--name", NAME]);
        guest.more.extend(["--transport", self.transport]);
        guest.more.extend(GRACE_SHORT);
        guest.more.extend(self.flags);
        for &(.., donor) in self.donors {
            guest.more.extend(["--donor", donor]);
        }
        guest
    }
}

fn guests(context: &Context<'_>, way: &Way) -> Result {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let named = std::env::var(SEED).ok();
    let seed = seed_of(named.as_deref(), now.unwrap_or_default())
        .map_err(|error| anyhow::anyhow!("{SEED}: {error}"))?;
    let named = std::env::var(COUNT).ok();
    let chosen = guests_of(named.as_deref(), way.guests)
        .map_err(|error| anyhow::anyhow!("{COUNT}: {error}"))?;
    let mut lines = std::fs::File::create(context.artifacts.join("guests.txt"))?;
    writeln!(lines, "seed {seed}")?;
    let mut random = SplitMix::new(seed);
    let mut donors: Vec<Option<Donor>> = way.donors.iter().map(|_| None).collect();
    let mut tally = Tally::default();
    for guest in 1..=*chosen.end() {
        let kills = choose(&mut random, way.donors.len(), way.at_once);
        if !chosen.contains(&guest) {
            continue;
        }
        let of_guest = Context {
            testbed: context.testbed,
            share: context.share,
            artifacts: context.artifacts.join(format!("guest{guest}")),
            notes: RefCell::default(),
        };
        std::fs::create_dir_all(&of_guest.artifacts)?;
        let ended = one_guest(&of_guest, way, &kills, &mut donors);
        cleanup::end_if_interrupted();
        let line = tally::line(guest, &kills, ended.as_ref());
        writeln!(lines, "{line}")?;
        match ended {
            Ok(survival) => tally.survived.push(survival),
            Err(error) => {
                // What the testbed did is repeated on another one, and says nothing.
                if Hang::of(&error).is_some() {
                    return Err(error.context(line));
                }
                if let Some((a, b)) = context.testbed.stuck_link()? {
                    return Err(error.context(format!("the link {a}-{b} carries nothing")));
                }
                tally.failed.push(line);
                let left = donors.iter_mut().filter_map(Option::take).collect();
                Donor::kill_all(left)?;
            }
        }
        if tally.failed.len() >= FAILED_MAX {
            break;
        }
    }
    context.note(format!("{} (seed {seed}, emulated)", tally.summary()));
    for donor in donors.into_iter().flatten() {
        donor.end(context)?;
    }
    let wrong = tally.wrong();
    ensure!(wrong.is_empty(), "seed {seed}: {}", wrong.join("\n"));
    Ok(Verdict::Pass)
}

/// Runs a guest on all donors, of which those that an earlier one has lost are started again.
fn one_guest(
    context: &Context<'_>,
    way: &Way,
    kills: &[Kill; 2],
    donors: &mut [Option<Donor>],
) -> anyhow::Result<Survival> {
    for (donor, &(host, port, flag)) in donors.iter_mut().zip(way.donors) {
        if donor.is_none() {
            let place = (host, address_of(flag), port);
            *donor = Some(Donor::listening_at(context, place, LENT, &[])?);
        }
    }
    let process = way.guest().boot(context)?;
    let survived = survive(context, way, kills, donors, &process);
    if survived.is_err() {
        // Best effort: the first error counts. The next guest must not meet this one.
        let _ = std::fs::write(context.artifacts.join("errors.txt"), process.stderr());
        let _ = process.kill(libc::SIGKILL);
        let _ = process.wait(SHORT);
    }
    survived
}

/// Returns the address in a value of `--donor`.
fn address_of(flag: &str) -> &str {
    flag.split(',').next().unwrap_or(flag)
}

/// Kills donors of a guest twice, and checks that it verifies its memory after each time.
fn survive(
    context: &Context<'_>,
    way: &Way,
    [first, second]: &[Kill; 2],
    donors: &mut [Option<Donor>],
    process: &RemoteProcess,
) -> anyhow::Result<Survival> {
    runs_for(process, first.after)?;
    // A donor that a busy host has put out of use for a moment may be the only other one.
    let whole = await_whole(context, process, &[])?;
    let slowest_before = slowest_fault_us(&whole)?;
    let passes_before = passes(process);
    let lost = kill(donors, first)?;
    let killed = Instant::now();
    await_whole(context, process, &lost).context("after the first kill")?;
    let repair = killed.elapsed();
    a_whole_pass(process, passes_before).context("after the first kill")?;

    runs_for(process, second.after)?;
    let again = await_whole(context, process, &lost).context("before the second kill")?;
    let fetched_before = remote_faults(&again)?;
    let passes_between = passes(process);
    kill(donors, second)?;
    a_whole_pass(process, passes_between).context("after the second kill")?;
    let fetched = remote_faults(&status(context.testbed.host(1), &[NAME])?)? - fetched_before;
    ensure!(
        fetched >= FETCHED_MIN,
        "only {fetched} pages came from donors after the second kill"
    );

    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
    // The last line may have been cut by the end.
    let console = &guest.output.stdout;
    let whole_lines = console.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let probes = faultprobes(whole_lines)?;
    let is_right = |probe: &Value| {
        probe["corrupt_bytes"] == 0 && probe["verified_bytes"].as_u64() >= Some(PROBE_BYTES)
    };
    ensure!(probes.iter().all(is_right), "{probes:?}");
    if way.transport == BY_RDMA.transport {
        let fetched = by_rdma::fetched(&guest.report)?;
        ensure!(
            fetched >= FETCHED_MIN,
            "only {fetched} pages came by RDMA: {}",
            guest.report["nodes"]
        );
    }
    memory_is_back(context)?;
    let since: Vec<Value> = probes.into_iter().skip(passes_before).collect();
    let slowest = guest.number("/faults/remote/latency_us/max")?;
    Ok(Survival {
        repair,
        pause_ms: longest_pause_ms(&since, slowest_before, slowest),
        was_paused: guest.output.stderr.contains(PAUSED),
    })
}

/// Kills donors at once, and returns their addresses.
fn kill(donors: &mut [Option<Donor>], kill: &Kill) -> anyhow::Result<Vec<String>> {
    let mut chosen = Vec::new();
    for &place in &kill.lost {
        chosen.push(donors[place].take().context("no donor there")?);
    }
    let lost = chosen.iter().map(|donor| donor.address().to_owned());
    let lost = lost.collect();
    Donor::kill_all(chosen)?;
    Ok(lost)
}

/// Lets the guest run for a time, within which it must not end.
fn runs_for(process: &RemoteProcess, time: Duration) -> anyhow::Result<()> {
    match process.wait(time) {
        Err(TestbedError::Deadline { .. }) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(output) => bail!("the guest ended with {}; {}", output.status, tail(&output)),
    }
}

/// Waits until these donors are known to be lost, and nothing lacks a copy. Returns the status.
fn await_whole(
    context: &Context<'_>,
    process: &RemoteProcess,
    lost: &[String],
) -> anyhow::Result<Value> {
    let begin = Instant::now();
    let mut last = (Copies::default(), begin);
    loop {
        let now = status(context.testbed.host(1), &[NAME])?;
        let copies = Copies::of(&now)?;
        if copies.is_whole_without(lost.iter().map(String::as_str)) {
            return Ok(now);
        }
        if copies != last.0 {
            last = (copies, Instant::now());
        }
        let (all, since) = (begin.elapsed().as_secs(), last.1.elapsed());
        ensure!(
            since < REPAIR_STEP && begin.elapsed() < REPAIR_DEADLINE,
            "memory is not whole without {lost:?} after {all} s, and nothing has changed for {} s: {now}",
            since.as_secs()
        );
        // A host has one CPU, which the guest shares with whoever looks at it.
        runs_for(process, LOOK_EVERY)?;
    }
}

/// Returns how many passes the guest has printed.
fn passes(process: &RemoteProcess) -> usize {
    process.stdout().matches(PASS).count()
}

/// Waits until the pass that runs has ended after so many others, and a whole one after it.
fn a_whole_pass(process: &RemoteProcess, before: usize) -> anyhow::Result<()> {
    process.wait_for_nth_line(PASS, before + 1, GUEST_DEADLINE)?;
    Ok(())
}

/// Returns the slowest remote fault of a VM so far, in microseconds.
fn slowest_fault_us(status: &Value) -> anyhow::Result<f64> {
    let slowest = status.pointer("/vms/0/faults/remote/latency_us/max");
    let slowest = slowest.and_then(Value::as_f64);
    slowest.with_context(|| format!("no slowest fault in {status}"))
}

/// Returns how many pages a VM has waited for so far.
fn remote_faults(status: &Value) -> anyhow::Result<u64> {
    number(status, "/vms/0/faults/remote/count")
}

/// Waits until all donors that live have their memory back.
fn memory_is_back(context: &Context<'_>) -> anyhow::Result<()> {
    for host in [2, 3] {
        let deadline = Instant::now() + SHORT;
        loop {
            let now = status(context.testbed.host(host), &[])?;
            if lends_nothing(&now)? {
                break;
            }
            ensure!(
                Instant::now() < deadline,
                "donors on host {host} do not have their memory back: {now}"
            );
        }
    }
    Ok(())
}

/// Whether no node of a host lends anything.
fn lends_nothing(status: &Value) -> anyhow::Result<bool> {
    let nodes = status["nodes"].as_array().context("no list of nodes")?;
    let mut lent = 0;
    for node in nodes {
        lent += number(node, "/leases")? + number(node, "/lent_bytes")?;
    }
    Ok(lent == 0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn donors_are_where_the_flags_say_and_enough_for_both_kills() {
        for way in [&COPIES, &BY_RDMA, &STRIPES] {
            for (host, port, flag) in way.donors {
                let network = match (way.transport, host) {
                    ("rdma", 3) => 78,
                    _ => 77,
                };
                let address = format!("10.{network}.0.{host}:{port}");
                assert_eq!(address_of(flag), address);
            }
            let guest = way.guest();
            assert!(guest.more.windows(2).any(|pair| pair == way.flags));
            assert_eq!(guest.local_memory, None);
            let transport = ["--transport", way.transport];
            assert!(guest.more.windows(2).any(|pair| pair == transport));
        }
        let probes = WORK.matches("faultprobe").count();
        assert_eq!(
            WORK.matches(&format!(" {}M ", PROBE_BYTES >> 20)).count(),
            probes
        );
        assert_eq!(COPIES.donors.len() - 2 * COPIES.at_once, 1);
        assert_eq!(STRIPES.donors.len() - 2 * STRIPES.at_once, 4);
    }

    #[test]
    fn a_host_lends_nothing_only_without_leases_and_bytes() {
        let of = |nodes: Value| lends_nothing(&json!({"nodes": nodes})).unwrap();
        assert!(of(json!([])));
        assert!(of(json!([{"leases": 0, "lent_bytes": 0}])));
        assert!(!of(
            json!([{"leases": 0, "lent_bytes": 0}, {"leases": 1, "lent_bytes": 0}])
        ));
        assert!(!of(json!([{"leases": 0, "lent_bytes": 4096}])));
        assert!(lends_nothing(&json!({})).is_err());
    }
}
