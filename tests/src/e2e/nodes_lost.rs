//! Scenarios in which one of two hosts with vCPUs of a VM is lost.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::donor::{DONOR, Donor};
use super::guest::{Finished, Guest, SHORT, exit};
use super::nodes::{INIT_DEADLINE, MOVES, SPINS};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::{Output, RemoteProcess};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "nodes_lost",
    about: "a VM on two hosts ends, and leaves nothing, when they are cut off or one of them freezes",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: lost,
}];

/// How long a VM may take to end: 10 s of silence and what a busy host needs.
const END_MAX: Duration = Duration::from_secs(30);
/// What a node says when a VM has left it.
const RETURNED: &str = "vCPUs returned";

/// How the hosts lose each other.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// No packet goes between them.
    Cut,
    /// No process on the second one runs.
    FrozenNode,
    /// The VM's process on the first one does not run.
    FrozenPrimary,
}

fn lost(context: &Context<'_>) -> Result {
    // One node has all of these VMs, one after the other.
    let node = Donor::lending(context, "512M", &["--cpus", "1"])?;
    for (before, loss) in [Loss::Cut, Loss::FrozenNode, Loss::FrozenPrimary]
        .into_iter()
        .enumerate()
    {
        let ended = loses(context, &node, loss, before).with_context(|| format!("{loss:?}"))?;
        context.note(format!(
            "{loss:?}: the VM has ended after {:.1} s (emulated)",
            ended.as_secs_f64()
        ));
    }
    let report = node.end(context)?;
    ensure!(report["lent_bytes"] == 0, "the node's report: {report}");
    Ok(Verdict::Pass)
}

/// Boots a VM, whose CPU 1 goes to the node, which has had `before` others; loses one host, and waits
/// until nothing of it is left. Returns how long its process took to end.
fn loses(
    context: &Context<'_>,
    node: &Donor,
    loss: Loss,
    before: usize,
) -> anyhow::Result<Duration> {
    let mut guest = Guest {
        memory: "256M",
        cmdline: SPINS.to_owned(),
        ..Guest::local(2, "")
    };
    guest.more.extend(["--node", "10.77.0.2:7700,cpus=1"]);
    let vm = guest.start(context)?;
    vm.wait_for_line(MOVES, INIT_DEADLINE)
        .with_context(|| format!("errors: {}", vm.stderr()))?;
    let begin = Instant::now();
    let (output, took) = match loss {
        Loss::Cut => {
            context.testbed.cut_link(1, 2)?;
            let output = vm.wait(END_MAX);
            let took = begin.elapsed();
            // The node knows it by itself, too.
            let left = is_left(context, node, before);
            context.testbed.restore_link(1, 2)?;
            left?;
            (output?, took)
        }
        Loss::FrozenNode => {
            signal_all(context, 2, "STOP")?;
            let output = vm.wait(END_MAX);
            let took = begin.elapsed();
            signal_all(context, 2, "CONT")?;
            (output?, took)
        }
        Loss::FrozenPrimary => {
            signal_all(context, 1, "STOP")?;
            let left = is_left(context, node, before);
            let took = begin.elapsed();
            signal_all(context, 1, "CONT")?;
            left?;
            (vm.wait(END_MAX)?, took)
        }
    };
    ended(context, &vm, output)?;
    is_left(context, node, before)?;
    Ok(took)
}

/// Sends a signal to all processes of `ssi-hv` on a host.
fn signal_all(context: &Context<'_>, host: usize, signal: &str) -> anyhow::Result<()> {
    let host = context.testbed.host(host);
    host.check(&["killall", &format!("-{signal}"), "ssi-hv"], SHORT)?;
    Ok(())
}

/// Checks that the VM has ended because of its node, which it names, and that nothing of it is left on
/// its host.
fn ended(context: &Context<'_>, vm: &RemoteProcess, output: Output) -> anyhow::Result<()> {
    let errors = output.stderr.clone();
    let finished = Finished::read(context, output)?;
    finished.expect_exit(exit::NODE_LOST)?;
    ensure!(errors.contains(DONOR), "the error names no node: {errors}");
    ensure!(
        errors.contains("lost with it: the registers of vCPU(s) 1, "),
        "the error does not say what was lost: {errors}"
    );
    let node = &finished.report["nodes"][1];
    // It was the home of a part of the memory, of which the guest has used little.
    let bytes = node["lost"]["at_home"]["bytes"].as_u64();
    ensure!(
        bytes.is_some_and(|bytes| bytes > 0),
        "what was lost: {node}"
    );
    let host = context.testbed.host(1);
    let left = host.run(&["pidof", "ssi-hv"], SHORT)?.stdout;
    ensure!(left.trim().is_empty(), "{left} beside {}", vm.pid());
    Ok(())
}

/// Waits until the node has its vCPUs back, and no process of the VM.
fn is_left(context: &Context<'_>, node: &Donor, before: usize) -> anyhow::Result<()> {
    let host = context.testbed.host(2);
    let deadline = Instant::now() + END_MAX;
    loop {
        let processes = host.check(&["pidof", "ssi-hv"], SHORT)?;
        let said = node.stderr();
        let is_alone = processes.trim() == node.pid().to_string();
        if is_alone && said.matches(RETURNED).count() == before + 1 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "processes {} on the node {}, which says: {said}",
            processes.trim(),
            node.pid()
        );
    }
}
