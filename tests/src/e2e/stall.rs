//! A guest that does not reach its init, or its end: what it waits for.
//!
//! Such a guest is never run again: an interrupt that the emulator lost and a deadlock of the
//! product look the same from outside. What each layer does is collected while it lasts: the
//! guest's console, the exits of its vCPUs, the state of the VM and its pager, the threads of the
//! product on all hosts, and the heartbeats of the hosts.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::guest::{BOOT_DEADLINE, Guest, SHORT, reach_init};
use super::health::describe_heartbeat;
use super::status::status;
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::{Host, RemoteProcess};

/// Lines of the console and of a trace that the error quotes.
const LINES_QUOTED: usize = 6;
/// Time without a page that travels after which a guest on several hosts stands still: two of its
/// CPUs cannot compute for so long without a timer's or the scheduler's data.
pub(super) const STILL_MAX: Duration = Duration::from_secs(60);
/// Deadline for the init of the guest that is meant to stall, from when its kernel has booted.
const STALL_DEADLINE: Duration = Duration::from_secs(2);
/// The last message of its kernel.
const BOOTED: &str = "Run /bin/cat as init process";

/// Threads of the product, three times with a second in between: what waits for ever does not move.
const THREADS: &str = "for round in 1 2 3; do [ $round = 1 ] || sleep 1; echo \"== round $round\"; \
    for p in $(pidof ssi-hv); do for t in /proc/$p/task/*; do \
    echo \"= $(cat $t/comm) $(cut -d' ' -f3,14,15 $t/stat) $(cat $t/wchan)\"; \
    cat $t/syscall $t/stack; done; done; done";
/// What KVM does within two seconds: exits have the reason and the guest's instruction pointer.
const TRACE: &str = "t=/sys/kernel/tracing; [ -e $t/trace ] || mount -t tracefs tracefs $t; \
    echo 0 >$t/tracing_on; echo >$t/trace; echo 1 >$t/events/kvm/enable; echo 1 >$t/tracing_on; sleep 2; \
    echo 0 >$t/tracing_on; echo 0 >$t/events/kvm/enable; grep -v '^#' $t/trace | tail -n 400";
/// The kernel's own messages, such as a watchdog's.
const MESSAGES: &str = "dmesg | tail -n 40";

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "stall_is_examined",
    about: "of a guest that never reaches its init, the error says what its vCPU, pager and hosts do",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: stall_is_examined,
}];

/// A guest that neither came to this point nor ended. The text has what it waits for.
#[derive(Debug, thiserror::Error)]
#[error("the guest stalled: no {missing} within {}s\n{seen}", within.as_secs())]
pub(super) struct GuestStalled {
    missing: &'static str,
    within: Duration,
    seen: String,
}

#[cfg(test)]
impl GuestStalled {
    /// An error as a scenario returns it.
    pub(super) fn example() -> Self {
        Self {
            missing: "init",
            within: Duration::from_secs(150),
            seen: "vcpu0 S".into(),
        }
    }
}

/// Collects what a guest on host 1 waits for, writes all of it to `stalled.txt`, and returns an
/// error with the essence. Nothing else of the guest's host is changed.
///
/// # Errors
/// Fails when a host hung: then the guest could not run.
pub(super) fn examine(
    context: &Context<'_>,
    process: &RemoteProcess,
    missing: &'static str,
    within: Duration,
) -> anyhow::Result<GuestStalled> {
    let here = context.testbed.host(1);
    let said = |host: &Host, script: &str| match host.run(&["sh", "-c", script], SHORT) {
        Ok(output) => output.stdout + &output.stderr,
        Err(error) => error.to_string(),
    };
    let (console, messages) = (process.stdout(), process.stderr());
    let vms = status(here, &["--heat"]);
    let trace = said(here, TRACE);
    let mut essence = format!("  console: {}", last_lines(&console));
    let _ = write!(essence, "\n  messages: {}", last_lines(&messages));
    let _ = match &vms {
        Ok(vms) => write!(essence, "{}", describe_vms(vms)),
        Err(error) => write!(essence, "\n  the VM does not answer: {error:#}"),
    };
    let exits: Vec<&str> = trace.lines().filter(|line| is_exit(line)).collect();
    let _ = write!(
        essence,
        "\n  {} exits in the last 2 s: {}",
        exits.len(),
        last_lines(&exits.join("\n"))
    );
    let mut whole = String::new();
    for host in context.testbed.hosts() {
        let (threads, number) = (said(host, THREADS), host.number());
        essence.push_str(&describe_vcpus(number, &threads));
        let _ = write!(
            whole,
            "\n--- threads on host {number}\n{threads}\n--- kernel of host {number}\n{}",
            said(host, MESSAGES)
        );
        if number > 1 {
            let _ = write!(
                whole,
                "\n--- trace of KVM on host {number}\n{}",
                said(host, TRACE)
            );
        }
    }
    // After all of that a host that hung has been silent for longer.
    for host in context.testbed.hosts() {
        host.check_health()?;
        let _ = write!(
            essence,
            "\n  {}",
            describe_heartbeat(host.number(), host.silence())
        );
    }
    let path = context.artifacts.join("stalled.txt");
    let status = vms.map_or_else(|error| format!("{error:#}"), |vms| format!("{vms:#}"));
    let text = format!(
        "{essence}\n--- status\n{status}\n--- trace of KVM\n{trace}{whole}\n--- console\n{console}\n{messages}"
    );
    // Best effort: the error has the essence.
    let _ = std::fs::write(&path, text);
    let _ = write!(essence, "\n  all of it: {}", path.display());
    Ok(GuestStalled {
        missing,
        within,
        seen: essence,
    })
}

/// Pages that the nodes of the only VM on a host have received, from one look to the next.
#[derive(Default)]
pub(super) struct Received(Option<Vec<u64>>);

impl Received {
    /// Returns whether no node has received a page since the last look.
    ///
    /// # Errors
    /// Fails when the VM does not answer.
    pub(super) fn nothing_since(&mut self, host: &Host) -> anyhow::Result<bool> {
        let status = status(host, &[])?;
        let nodes = status["vms"][0]["nodes"].as_array();
        let pages = |node: &Value| node["transfers"]["pages_received"].as_u64();
        let now: Vec<u64> = nodes.into_iter().flatten().filter_map(pages).collect();
        ensure!(
            !now.is_empty(),
            "no node says which pages it received: {status}"
        );
        let same = self.0.as_ref() == Some(&now);
        self.0 = Some(now);
        Ok(same)
    }
}

/// The threads of a process on a host: name, state, system call and stack of each.
pub(super) fn threads_of(host: &Host, pid: i32) -> String {
    let script = format!(
        "for t in /proc/{pid}/task/*; do echo \"$(cat $t/comm) $(cut -d' ' -f3 $t/stat)\"; \
         cat $t/syscall $t/stack; done"
    );
    let seen = host.run(&["sh", "-c", &script], SHORT);
    seen.map_or_else(|error| error.to_string(), |output| output.stdout)
}

/// The last lines of a text, separated by a sign.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    if lines.is_empty() {
        return "nothing".into();
    }
    let last = &lines[lines.len().saturating_sub(LINES_QUOTED)..];
    format!("\n    | {}", last.join("\n    | "))
}

/// State, faults, pages in transit and donors of each VM.
fn describe_vms(status: &Value) -> String {
    let mut text = String::new();
    let vms = status["vms"].as_array().map_or(&[][..], Vec::as_slice);
    if vms.is_empty() {
        text.push_str("\n  no VM answers");
    }
    for vm in vms {
        let faults = |kind: &str| &vm["faults"][kind]["count"];
        let blocks = vm["heat"]["extents"].as_array().into_iter().flatten();
        let blocks = blocks
            .filter_map(|extent| extent["blocks"].as_array())
            .flatten();
        let in_transit =
            |key: &str| -> u64 { blocks.clone().filter_map(|block| block[key].as_u64()).sum() };
        let _ = write!(
            text,
            "\n  VM {} {}: faults {} remote, {} zero, {} minor; pages arriving {}, leaving {}; \
             {} faults waited for memory; {} errors",
            vm["name"],
            vm["state"],
            faults("remote"),
            faults("zero"),
            faults("minor"),
            in_transit("arriving"),
            in_transit("leaving"),
            vm["stalled_for_memory"],
            vm["errors_total"],
        );
        for node in vm["nodes"].as_array().into_iter().flatten() {
            if node["role"] == "donor" {
                let _ = write!(text, "; donor {}: {}", node["address"], node["link"]);
            }
        }
    }
    text
}

/// The vCPU threads in each round: state, ticks in user and kernel mode, and where they wait.
fn describe_vcpus(host: usize, threads: &str) -> String {
    let vcpus = threads.lines().filter_map(|line| {
        let thread = line.strip_prefix("= ")?;
        thread.starts_with("vcpu").then_some(thread)
    });
    vcpus.fold(String::new(), |mut text, vcpu| {
        let _ = write!(text, "\n  host {host}: thread {vcpu}");
        text
    })
}

fn is_exit(line: &str) -> bool {
    line.contains(" kvm_exit: ")
}

/// Instead of the guest's init, a program runs that waits for input that never comes.
fn stall_is_examined(context: &Context<'_>) -> Result {
    let mut guest = Guest::local(1, "");
    guest.cmdline = "rdinit=/bin/cat".into();
    guest.more.extend(["--name", "stalls"]);
    let process = guest.start(context)?;
    process.wait_for_line(BOOTED, BOOT_DEADLINE)?;
    let reached = reach_init(context, &process, STALL_DEADLINE);
    let error = reached.err().context("a guest without init reached it")?;
    let stalled = error.downcast_ref::<GuestStalled>();
    let text = stalled
        .with_context(|| format!("another error: {error:#}"))?
        .to_string();
    context.note(format!(
        "{} lines about a guest that waits for input",
        text.lines().count()
    ));
    for due in [
        "no init within 2s",
        BOOTED,
        "VM \"stalls\" \"running\": faults 0 remote",
        "reason hlt",
        "host 1: thread vcpu0 S ",
        "kvm_vcpu_block",
        "host 1: last heartbeat ",
        "host 2: last heartbeat ",
    ] {
        ensure!(text.contains(due), "no {due:?} in: {text}");
    }
    Ok(Verdict::Pass)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_vm_is_described_by_its_faults_pages_in_transit_and_donors() {
        let blocks = json!([{"arriving": 1, "leaving": 0}, {"arriving": 2, "leaving": 3}]);
        let status = json!({"vms": [{
            "name": "a", "state": "paused", "stalled_for_memory": 4, "errors_total": 1,
            "faults": {"remote": {"count": 7}, "zero": {"count": 8}, "minor": {"count": 9}},
            "heat": {"extents": [{"blocks": blocks}]},
            "nodes": [
                {"role": "compute", "address": null, "link": null},
                {"role": "donor", "address": "10.77.0.2:7700", "link": {"reachable": false}},
            ],
        }]});
        assert_eq!(
            describe_vms(&status),
            "\n  VM \"a\" \"paused\": faults 7 remote, 8 zero, 9 minor; pages arriving 3, leaving 3; \
             4 faults waited for memory; 1 errors; donor \"10.77.0.2:7700\": {\"reachable\":false}"
        );
        assert_eq!(describe_vms(&json!({"vms": []})), "\n  no VM answers");
    }

    #[test]
    fn vcpus_are_described_in_each_round_and_other_threads_are_not() {
        let threads = "== round 1\n= vcpu0 R 1 2 0\n== round 2\n= ssi-hv S 0 0 ep_poll\n0x1\n\
            = vcpu0 S 1 9 kvm_vcpu_block\n[<0>] kvm_vcpu_block\n";
        assert_eq!(
            describe_vcpus(2, threads),
            "\n  host 2: thread vcpu0 R 1 2 0\n  host 2: thread vcpu0 S 1 9 kvm_vcpu_block"
        );
    }

    #[test]
    fn only_the_last_lines_are_quoted() {
        let text: Vec<String> = (0..20).map(|line| line.to_string()).collect();
        let quoted = last_lines(&text.join("\n\n"));
        assert_eq!(quoted.matches("    | ").count(), LINES_QUOTED);
        assert!(quoted.ends_with("| 19"), "{quoted}");
        assert_eq!(last_lines(" \n"), "nothing");
    }
}
