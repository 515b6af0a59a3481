//! A guest that sees which CPUs and which memory are on which host.

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::{CLOUD, Layout, QUIET, TWO, run};
use crate::e2e::{Context, Result, Verdict};

const EXPOSED: Layout = Layout {
    more: &["--numa", "expose"],
    ..TWO
};

/// Half of 256 MiB, without what the kernel's image takes.
const NODE_BYTES: std::ops::RangeInclusive<u64> = 80 << 20..=128 << 20;

/// Fails unless the guest's kernel has a NUMA node and a package for each of two hosts.
fn has_two_hosts(machine: &Value) -> anyhow::Result<()> {
    ensure!(machine["sockets"] == 2, "sockets: {machine}");
    let nodes = machine["nodes"].as_array().context("NUMA nodes")?;
    ensure!(nodes.len() == 2, "NUMA nodes: {machine}");
    for (node, (number, distances)) in nodes.iter().zip([("0", [10, 56]), ("1", [56, 10])]) {
        ensure!(
            node["cpus"] == number && node["distances"] == json!(distances),
            "NUMA node {number}: {node}"
        );
        let bytes = node["memory_bytes"].as_u64();
        ensure!(
            bytes.is_some_and(|bytes| NODE_BYTES.contains(&bytes)),
            "NUMA node {number}: {node}"
        );
    }
    Ok(())
}

pub(super) fn exposed(context: &Context<'_>) -> Result {
    let exec = format!("{QUIET}; faultprobe --ssi --seconds 60");
    let (guest, to_init) = run(context, &EXPOSED, CLOUD, &exec)?;
    let probe = guest.faultprobe_over(1 << 16)?;
    ensure!(probe["violations"] == 0, "violations: {probe}");
    let ssi = &probe["ssi"];
    has_two_hosts(&ssi["machine"])?;
    let p50 = |pairs: &str| ssi[pairs][0]["latency_us"]["p50"].as_f64().unwrap_or(0.0);
    context.note(format!(
        "NUMA nodes {}; init after {:.0} s; transfer {:.0} us, wake-up {:.0} us; rate of processes {}, of threads {} (emulated)",
        ssi["machine"]["nodes"],
        to_init.as_secs_f64(),
        p50("transfers"),
        p50("wakes"),
        ssi["process_rate"]["ratio"],
        ssi["rate"]["ratio"],
    ));
    Ok(Verdict::Pass)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_is_a_node_with_its_cpu_and_half_of_the_memory() {
        let machine = |cpus: [&str; 2], bytes: u64, sockets: u32| {
            json!({"sockets": sockets, "nodes": [
                {"node": 0, "cpus": cpus[0], "memory_bytes": 97_447_936, "distances": [10, 56]},
                {"node": 1, "cpus": cpus[1], "memory_bytes": bytes, "distances": [56, 10]},
            ]})
        };
        let fine = machine(["0", "1"], 131_653_632, 2);
        assert!(has_two_hosts(&fine).is_ok());
        for wrong in [
            machine(["0-1", ""], 131_653_632, 2),
            machine(["0", "1"], 1 << 20, 2),
            machine(["0", "1"], 131_653_632, 1),
            json!({"sockets": 2, "nodes": []}),
        ] {
            assert!(has_two_hosts(&wrong).is_err(), "{wrong}");
        }
    }
}
