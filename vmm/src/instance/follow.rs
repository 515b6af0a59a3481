//! vCPUs follow the pages that they wait for (`--vcpu-policy follow`).
//!
//! Each node adds up, for each of its vCPUs, how long it waited for the pages of each other node. Once
//! in a second the primary looks at the reports of all. A vCPU moves when it waited for a good part of
//! the last seconds, most of it for one node, and that node has room, or a vCPU that idles and goes to
//! the other's place.
//!
//! Two vCPUs that take pages from each other would both move, and be apart again. So one moves at a
//! time, and then all are watched for as long again. One that has moved stays for a while, and twice
//! as long after each further move.

mod policy;

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use super::seen::NodesSeen;
use crate::compute::Observed;
use crate::config::RunConfig;
use crate::intervals::Intervals;
use crate::machine::MachineHandle;
use crate::report::{PolicyKind, PolicyUsed};
use crate::status::VcpuState;
use policy::{Policy, Sighting};

/// Interval between looks: each node reports as often.
const INTERVAL: Duration = Duration::from_secs(1);

/// How many vCPUs each node runs at most: as many as it lends CPUs. This host shares its CPUs with its
/// devices anyway.
fn room(config: &RunConfig) -> Vec<usize> {
    let lent = config.nodes.iter().map(|node| usize::from(node.cpus));
    let elsewhere: usize = lent.clone().sum();
    let begins_here = usize::from(config.cpus).saturating_sub(elsewhere);
    let here = available_parallelism().map_or(1, usize::from);
    [begins_here.max(here)].into_iter().chain(lent).collect()
}

/// Moves vCPUs, in a thread of its own, until the result is dropped.
///
/// # Errors
///
/// If the thread cannot be started.
pub fn start(
    config: &RunConfig,
    seen: &Arc<NodesSeen>,
    machine: &MachineHandle,
) -> io::Result<Intervals> {
    let (seen, machine) = (Arc::clone(seen), machine.clone());
    let mut policy = Policy::new(room(config));
    let mut used = PolicyUsed {
        kind: PolicyKind::Follow,
        ..PolicyUsed::default()
    };
    seen.set_policy(used.clone());
    Intervals::start("vcpu-policy", INTERVAL, move || {
        look(&mut policy, &mut used, &seen, &machine);
        seen.set_policy(used.clone());
        ControlFlow::Continue(())
    })
}

/// Looks at the reports of all nodes, and moves a vCPU if that helps.
fn look(policy: &mut Policy, used: &mut PolicyUsed, seen: &NodesSeen, machine: &MachineHandle) {
    let observed = seen.observed(&machine.vcpu_threads());
    let owners = machine.vcpu_nodes().unwrap_or_default();
    let sightings = (0..).zip(owners).map(|(cpu, node)| {
        let report = observed.get(usize::from(node)).and_then(Option::as_ref);
        let of_it = report.and_then(|report| {
            let mut all = report.waited_for.iter();
            all.find(|(of, _)| *of == u32::from(cpu))
        });
        Sighting {
            cpu,
            node,
            waited_for: of_it.map(|(_, waited)| waited.clone()),
            is_idle: report.is_some_and(|report| idles(report, cpu)),
        }
    });
    let sightings: Vec<_> = sightings.collect();
    let now = Instant::now();
    let found = policy.look(now, &sightings);
    used.vcpus = policy.reasons(now, &sightings);
    let Some(found) = found else {
        return;
    };
    for (cpu, to) in found.steps() {
        let (cpu, node) = (u32::from(cpu), u32::from(to));
        let done = machine.move_vcpu(cpu, node);
        if let Err(error) = done {
            used.moves_failed += 1;
            tracing::debug!(
                "vCPU {cpu} does not go to node {node} (--vcpu-policy follow): {error}"
            );
            return;
        }
        used.moves += 1;
        if cpu == u32::from(found.cpu) {
            tracing::info!(
                cpu,
                node,
                waited_ms = found.waited.as_millis(),
                "a vCPU has followed the pages that it waited for (--vcpu-policy follow)"
            );
        } else {
            tracing::info!(
                cpu,
                node,
                "a vCPU that idles has made room (--vcpu-policy follow)"
            );
        }
    }
}

/// Whether a vCPU has nothing to do, as its node reports.
fn idles(report: &Observed, cpu: u8) -> bool {
    let mut all = report.vcpus.iter();
    let found = all.find(|(of, _, _)| *of == u32::from(cpu));
    found.is_some_and(|(_, state, _)| matches!(state, VcpuState::Halted | VcpuState::Offline))
}
