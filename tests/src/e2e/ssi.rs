//! Scenarios of guests that use CPUs of several hosts to their end, verified from inside. They take
//! many minutes where walks of page tables are writes, and run by name.
//!
//! In most of them the CPUs of other hosts go there when the guest has booted (`from=ready`), so that
//! it does so as on one host.

mod devices;
mod follow;
mod hotplug;
mod idle;
mod numa;
mod often;
mod parameters;

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::donor::Donor;
use super::guest::{Finished, Guest, exit, reach_end, reach_init};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::RemoteProcess;

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "ssi_two_hosts",
        about: "a stock kernel with a CPU on each of two hosts; they share memory, locks and interrupts as one machine's do",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| verified(context, &TWO, CLOUD),
    },
    Scenario {
        name: "ssi_boots_on_two_hosts",
        about: "the same, and the CPU on the other host is there since the guest's start",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| verified(context, &TWO_FROM_START, CLOUD),
    },
    Scenario {
        name: "ssi_merged_tables",
        about: "that with page tables of the kernel that both hosts write at once",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| verified(context, &MERGED, CLOUD),
    },
    Scenario {
        name: "ssi_kernel_6_12",
        about: "two hosts as in ssi_two_hosts, with Linux 6.12 as the guest's kernel",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| verified(context, &TWO, "backports-vmlinuz"),
    },
    Scenario {
        name: "ssi_three_hosts",
        about: "the same with a CPU on each of three hosts",
        needs_product: true,
        hosts: Hosts::THREE_6_12,
        run: |context| verified(context, &THREE, CLOUD),
    },
    Scenario {
        name: "ssi_four_cpus",
        about: "the same with two CPUs on each of two hosts",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| verified(context, &FOUR, CLOUD),
    },
    Scenario {
        name: "ssi_numa",
        about: "each host is a NUMA node of the guest, with its CPU in a package of its own",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: numa::exposed,
    },
    Scenario {
        name: "ssi_from_init",
        about: "a CPU that goes to another host when init runs computes there, and the guest boots as on one host",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| computes_apart(context, &FROM_INIT, "the guest's init runs"),
    },
    Scenario {
        name: "ssi_from_ready",
        about: "the same, and it goes there when the guest has booted",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| computes_apart(context, &TWO, "the guest has booted"),
    },
    Scenario {
        name: "ssi_offline",
        about: "a CPU on another host goes off and comes back several times, and works then",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: offline,
    },
    Scenario {
        name: "ssi_hotplug",
        about: "memory is added to a guest on two hosts, used by the CPU of each, taken away and added again",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: hotplug::grows,
    },
    Scenario {
        name: "ssi_devices",
        about: "a CPU on another host uses disk, network, sockets and consoles of the first one, and gets their interrupts",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: devices::used_from_afar,
    },
    Scenario {
        name: "ssi_moves",
        about: "a CPU goes to and fro between two hosts all the time, and the guest that uses it loses nothing",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| often::moves(context, &often::MINUTES),
    },
    Scenario {
        name: "ssi_thousand_moves",
        about: "the same until it has gone a thousand times",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| often::moves(context, &often::THOUSAND),
    },
    Scenario {
        name: "ssi_follow",
        about: "a CPU goes by itself to the host whose pages it waits for, and gets on faster",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: follow::follows,
    },
    Scenario {
        name: "ssi_idle",
        about: "what a CPU that idles on another host costs the one that works",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: idle::costs,
    },
    Scenario {
        name: "ssi_parameters",
        about: "how long a boot on two hosts takes without each default parameter of its kernel",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: parameters::compared,
    },
    Scenario {
        name: "ssi_twenty_boots",
        about: "twenty guests in a row, on the same hosts, each run a program on the CPU that went to another host",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: often::twenty_boots,
    },
];

/// Which CPUs a guest has, and on which hosts.
struct Layout {
    cpus: u32,
    /// Flags of the node on host 2, and what the guest asks of it.
    second: [&'static str; 2],
    /// The same on host 3.
    third: Option<[&'static str; 2]>,
    /// The CPUs that each of these nodes has in the end.
    apart: &'static [&'static [u32]],
    /// Litmus tests that run with so many CPUs.
    tests: usize,
    /// Kernel parameters that say which modules it has.
    modules: &'static str,
    /// Other flags of the guest.
    more: &'static [&'static str],
}

const TWO: Layout = Layout {
    cpus: 2,
    second: ["1", "10.77.0.2:7700,cpus=1,from=ready"],
    third: None,
    apart: &[&[1]],
    tests: 8,
    modules: NO_MODULES,
    more: &[],
};
const FROM_INIT: Layout = Layout {
    second: ["1", "10.77.0.2:7700,cpus=1,from=init"],
    ..TWO
};
const TWO_FROM_START: Layout = Layout {
    second: ["1", "10.77.0.2:7700,cpus=1,from=start"],
    ..TWO
};
const MERGED: Layout = Layout {
    more: &["--merge-tables", "on"],
    ..TWO_FROM_START
};
const THREE: Layout = Layout {
    cpus: 3,
    third: Some(["1", "10.77.0.3:7700,cpus=1,from=ready"]),
    apart: &[&[1], &[2]],
    tests: 10,
    ..TWO
};
const FOUR: Layout = Layout {
    cpus: 4,
    second: ["2", "10.77.0.2:7700,cpus=2,from=ready"],
    third: None,
    apart: &[&[2, 3]],
    tests: 12,
    ..TWO
};

const CLOUD: &str = "cloud-vmlinuz";
/// Of a guest from its start to init, and from there to its end.
const DEADLINE: Duration = Duration::from_secs(1200);
/// A kernel that is not moved has its page tables where they can be looked up.
const PARAMETERS: &str = "nokaslr";
/// Modules that the guest's init would load: each patches the kernel's text, for which all CPUs
/// interrupt each other several times, and no command here needs them.
const NO_MODULES: &str = "module_blacklist=pvpanic_mmio,virtio_mmio,virtio_balloon";

impl Layout {
    /// Starts the nodes.
    fn nodes(&self, context: &Context<'_>) -> anyhow::Result<Vec<Donor>> {
        let [cpus, _] = self.second;
        let mut nodes = vec![Donor::lending(context, "512M", &["--cpus", cpus])?];
        if let Some([cpus, _]) = self.third {
            nodes.push(Donor::third_lending(context, "512M", &["--cpus", cpus])?);
        }
        Ok(nodes)
    }

    /// A guest that has CPUs on these nodes, and runs a command.
    fn guest(&self, kernel: &'static str, exec: &str) -> Guest {
        let mut guest = Guest {
            kernel,
            memory: "256M",
            ..Guest::local(self.cpus, exec)
        };
        guest
            .cmdline
            .insert_str(0, &format!("{PARAMETERS} {} ", self.modules));
        for [_, node] in [Some(self.second), self.third].into_iter().flatten() {
            guest.more.extend(["--node", node]);
        }
        guest.more.extend(self.more);
        guest
    }

    /// Fails unless the guest ended by itself with its CPUs on these nodes.
    fn check(&self, guest: &Finished) -> anyhow::Result<()> {
        guest.expect_exit(exit::SHUTDOWN)?;
        for (number, cpus) in (1..).zip(self.apart) {
            let found = &guest.report["nodes"][number]["cpus"];
            ensure!(
                *found == serde_json::json!(cpus),
                "CPUs on node {number}: {found}"
            );
        }
        Ok(())
    }
}

/// Ends the nodes, which have all of their memory back.
fn end(context: &Context<'_>, nodes: Vec<Donor>) -> anyhow::Result<()> {
    for node in nodes {
        let report = node.end(context)?;
        ensure!(report["lent_bytes"] == 0, "the node's report: {report}");
    }
    Ok(())
}

/// What the guest and its nodes say, for errors.
fn said(process: &RemoteProcess, nodes: &[Donor]) -> String {
    let nodes: Vec<_> = nodes.iter().map(Donor::stderr).collect();
    format!("errors: {}; the nodes say: {nodes:?}", process.stderr())
}

/// Runs a command in a guest, and returns how it ended and the time from its start to init.
fn run(
    context: &Context<'_>,
    layout: &Layout,
    kernel: &'static str,
    exec: &str,
) -> anyhow::Result<(Finished, Duration)> {
    let nodes = layout.nodes(context)?;
    let started = Instant::now();
    let process = layout.guest(kernel, exec).start(context)?;
    reach_init(context, &process, DEADLINE)?;
    let to_init = started.elapsed();
    let output = reach_end(context, &process, DEADLINE);
    let output = output.with_context(|| said(&process, &nodes))?;
    let guest = Finished::read(context, output)?;
    layout.check(&guest)?;
    end(context, nodes)?;
    Ok((guest, to_init))
}

fn verified(context: &Context<'_>, layout: &Layout, kernel: &'static str) -> Result {
    // Each pair of CPUs gets a part of this time.
    let exec = format!("{QUIET}; faultprobe --ssi --seconds {}", 30 * layout.cpus);
    let (guest, to_init) = run(context, layout, kernel, &exec)?;
    let probe = guest.faultprobe_over(1 << 16)?;
    ensure!(probe["violations"] == 0, "violations: {probe}");
    let ssi = &probe["ssi"];
    ensure!(
        ssi["cpus"].as_array().map(Vec::len) == usize::try_from(layout.cpus).ok(),
        "CPUs: {ssi}"
    );
    for pairs in ["transfers", "wakes", "calls"] {
        let pairs = ssi[pairs].as_array().context("pairs of CPUs")?;
        let had_rounds = |pair: &Value| pair["rounds"].as_u64() > Some(0);
        ensure!(
            !pairs.is_empty() && pairs.iter().all(had_rounds),
            "pairs without rounds: {ssi}"
        );
    }
    let tests = ssi["ordering"].as_array().context("litmus tests")?;
    ensure!(tests.len() == layout.tests, "litmus tests: {ssi}");
    let p50 = |pairs: &str| ssi[pairs][0]["latency_us"]["p50"].as_f64().unwrap_or(0.0);
    context.note(format!(
        "{} CPUs: init after {:.0} s; transfer {:.0} us, wake-up {:.0} us, call {:.0} us; rate of processes {}, of threads {} (emulated)",
        layout.cpus,
        to_init.as_secs_f64(),
        p50("transfers"),
        p50("wakes"),
        p50("calls"),
        ssi["process_rate"]["ratio"],
        ssi["rate"]["ratio"],
    ));
    Ok(Verdict::Pass)
}

/// The kernel prints nothing from here on, not even that a CPU or thread of it waited long: that
/// would stand in the middle of the probe's line.
const QUIET: &str = "echo 0 > /proc/sys/kernel/printk";

/// The last line is counted by what the shell itself can do: a program would take seconds to start.
const OFFLINE: &str = "cd /sys/devices/system/cpu/cpu1; for i in 1 2 3 4 5 6 7 8; do \
    echo 0 > online; read x < online; [ $x = 0 ] || exit 1; \
    echo 1 > online; read x < online; [ $x = 1 ] || exit 1; echo turn $i; done; \
    faultprobe --ssi --seconds 20";

fn offline(context: &Context<'_>) -> Result {
    let (guest, _) = run(context, &TWO, CLOUD, OFFLINE)?;
    ensure!(
        guest.output.stdout.contains("turn 8"),
        "console: {}",
        guest.output.stdout
    );
    let probe = guest.faultprobe_over(1)?;
    ensure!(probe["violations"] == 0, "violations: {probe}");
    ensure!(probe["ssi"]["cpus"].as_array().map(Vec::len) == Some(2));
    Ok(Verdict::Pass)
}

/// Deadline from the start of a guest to a report of its boot before which its CPUs are on one host.
const ONE_HOST_MAX: Duration = Duration::from_secs(120);
/// The program of the CPU that moves, by what the shell itself can do, and a second one. 500,500 is
/// the sum of the first, and the CPU on which it has run is the 39th field of its `stat`.
const SUM: &str = "taskset -c 1 sh -c 'echo pinned; i=0; s=0; while [ $i -lt 1000 ]; \
    do i=$((i+1)); s=$((s+i)); done; echo sum $s; read x < /proc/self/stat; echo stat $x'; \
    taskset -c 1 sh -c 'echo repeated'";

/// A program runs on a CPU that goes to another host with an event of the guest's boot.
fn computes_apart(context: &Context<'_>, layout: &Layout, event: &str) -> Result {
    let nodes = layout.nodes(context)?;
    let started = Instant::now();
    let process = layout.guest(CLOUD, SUM).start(context)?;
    let moves = format!("{event}: a vCPU moves cpu=1 node=1");
    let lines = [
        (moves.as_str(), ONE_HOST_MAX),
        ("pinned", DEADLINE),
        ("sum ", DEADLINE),
        ("repeated", DEADLINE),
    ];
    let mut times = Vec::new();
    for (line, deadline) in lines {
        process
            .wait_for_line(line, deadline)
            .with_context(|| said(&process, &nodes))?;
        times.push(started.elapsed().as_secs_f64());
    }
    let guest = Finished::read(context, reach_end(context, &process, DEADLINE)?)?;
    has_summed(&guest)?;
    context.note(format!(
        "{event} after {:.0} s; from there the pinned program took {:.0} s to begin, its sum {:.0} s, the \
         next program {:.0} s; the end after {:.0} s; {} faults and {} pages on the node (emulated)",
        times[0],
        times[1] - times[0],
        times[2] - times[1],
        times[3] - times[2],
        started.elapsed().as_secs_f64(),
        guest.number("/nodes/1/transfers/faults")?,
        guest.number("/nodes/1/transfers/pages_received")?,
    ));
    end(context, nodes)?;
    Ok(Verdict::Pass)
}

/// Fails unless a guest ran [`SUM`] on the CPU that went to the other host.
fn has_summed(guest: &Finished) -> anyhow::Result<()> {
    TWO.check(guest)?;
    let console = &guest.output.stdout;
    ensure!(
        console.contains("sum 500500\r\n") && console.contains("repeated\r\n"),
        "console: {console}"
    );
    ensure!(cpu_of(console) == Some(1), "console: {console}");
    Ok(())
}

/// The CPU on which the process whose `stat` is on the console has run.
fn cpu_of(console: &str) -> Option<u32> {
    let (_, stat) = console.split_once("\nstat ")?;
    let (_, fields) = stat.lines().next()?.rsplit_once(") ")?;
    // The first of these is the third.
    fields.split_whitespace().nth(39 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_of_a_process_is_found_on_the_console() {
        let fields = (4..=52).map(|field| field.to_string());
        let fields = fields.collect::<Vec<_>>().join(" ");
        let console = format!("sum 1\r\nstat 77 (sh (x)) R {fields}\r\n");
        assert_eq!(cpu_of(&console), Some(39));
        assert_eq!(cpu_of("sum 1\r\n"), None);
    }
}
