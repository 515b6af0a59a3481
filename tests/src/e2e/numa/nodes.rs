//! The NUMA nodes that a guest sees, compared with the host's measurements.

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

/// Prints a line for each of three nodes, and which of them have CPUs and memory.
pub(super) const SHOW: &str = "cd /sys/devices/system/node; \
    for n in 0 1 2; do a=node$n/access0/initiators; \
    echo NODE $n $(grep MemTotal node$n/meminfo | tr -s ' ' | cut -d' ' -f4) \
    $(awk '/^Node/ {n=$2+0} /present/ {p[n]+=$2} END {print p['$n']*4}' /proc/zoneinfo) \
    $(cat $a/read_latency $a/write_latency $a/read_bandwidth $a/write_bandwidth) \
    $(cat node$n/distance) $(ls -d $a/node0); done; \
    echo HAS_CPU $(cat has_cpu) HAS_MEMORY $(cat has_memory); cd /";

/// Memory of node 0 that is not usable as such: page 0, and 636 KiB to 1 MiB.
const HOLES_KIB: u64 = 392;
/// The kernel keeps 64 bytes for each page of 4096, in sections of 128 MiB on the node where each
/// section begins.
const SECTION_KIB: u64 = 128 << 10;
const SECTION_TABLE_KIB: u64 = 2 << 10;
/// Other memory that the kernel keeps for a node: 176 KiB were measured.
const NODE_TABLES_KIB: u64 = 512;
/// Memory of the kernel itself on the node to which it is loaded, and its early allocations: 33 MiB
/// were measured.
const KERNEL_KIB: u64 = 40 << 10;

/// Largest entry of an HMAT matrix, which has 16 bits; 0xffff means unreachable.
const ENTRY_MAX: f64 = 65_534.0;
/// Longest latency that Linux can parse, in nanoseconds.
const LATENCY_NS_MAX: f64 = 4.2e6;

/// What the guest shows of a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Node {
    /// `MemTotal` of the node.
    total_kib: u64,
    /// Memory of the node's present pages.
    present_kib: u64,
    latency_ns: f64,
    bandwidth_mb_s: f64,
    distances: Vec<u8>,
}

/// Measurements of the path to a donor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    page_ns: f64,
    stream_mb_s: f64,
}

impl Way {
    /// Reads `nodes[].path` of the report, of a donor whose pages travel by TCP.
    pub(super) fn of_tcp(node: &Value) -> anyhow::Result<Self> {
        let of = |name: &str| {
            let number = node["path"]["tcp"][name].as_f64();
            number.with_context(|| format!("no {name} of tcp in {node}"))
        };
        Ok(Self {
            page_ns: of("page_us")? * 1e3,
            stream_mb_s: of("stream_bytes_per_second")? / 1e6,
        })
    }
}

/// Parses the output of [`SHOW`].
pub(super) fn read(console: &str) -> anyhow::Result<Vec<Node>> {
    let line = |start: &str| {
        // From the end: the kernel prints the command too.
        let mut lines = console.lines().rev();
        lines.find_map(|line| {
            line.split_once(start)
                .map(|(_, rest)| rest.trim().to_owned())
        })
    };
    let sets = line("HAS_CPU ").context("no sets of nodes")?;
    ensure!(sets == "0 HAS_MEMORY 0-2", "CPUs and memory: {sets}");
    let node = |number: usize| {
        let text = line(&format!("NODE {number} ")).with_context(|| format!("no node {number}"))?;
        parse(&text).with_context(|| format!("node {number}: {text}"))
    };
    (0..3).map(node).collect()
}

fn parse(text: &str) -> anyhow::Result<Node> {
    let fields: Vec<&str> = text.split(' ').collect();
    let [
        total,
        present,
        read,
        write,
        read_rate,
        write_rate,
        ref distances @ ..,
        initiator,
    ] = fields[..]
    else {
        bail!("too few fields");
    };
    ensure!(
        read == write && read_rate == write_rate,
        "reads and writes differ"
    );
    ensure!(
        initiator.ends_with("initiators/node0"),
        "node 0 is no initiator"
    );
    ensure!(distances.len() == 3, "{} distances", distances.len());
    let distances = distances.iter().map(|distance| distance.parse());
    Ok(Node {
        total_kib: total.parse()?,
        present_kib: present.parse()?,
        latency_ns: read.parse()?,
        bandwidth_mb_s: read_rate.parse()?,
        distances: distances.collect::<Result<_, _>>()?,
    })
}

/// Checks that each node has the memory that the layout gives it.
pub(super) fn check_sizes(nodes: &[Node], wanted_kib: &[u64]) -> anyhow::Result<()> {
    ensure!(nodes.len() == wanted_kib.len(), "{nodes:?}");
    for (number, (node, &wanted)) in nodes.iter().zip(wanted_kib).enumerate() {
        let (holes, kernel) = if number == 0 {
            (HOLES_KIB, KERNEL_KIB)
        } else {
            (0, 0)
        };
        ensure!(
            node.present_kib + holes == wanted,
            "node {number} has {} KiB of {wanted}, {holes} less are due",
            node.present_kib
        );
        let sections = wanted.div_ceil(SECTION_KIB);
        let kept = sections * SECTION_TABLE_KIB + NODE_TABLES_KIB + kernel;
        ensure!(
            (wanted - kept..node.present_kib).contains(&node.total_kib),
            "node {number} gives {} KiB of {wanted}, where its kernel may keep {kept}",
            node.total_kib
        );
    }
    Ok(())
}

/// Checks latencies, rates and distances against the host's measurements, as far as the tables can
/// represent them. No report has the measurement of the host's own memory, so node 0 is only
/// compared by rank.
pub(super) fn check_speeds(nodes: &[Node], ways: &[Way]) -> anyhow::Result<()> {
    let [here, donors @ ..] = nodes else {
        bail!("no nodes");
    };
    ensure!(donors.len() == ways.len(), "{nodes:?}, {ways:?}");
    ensure!(
        here.latency_ns > 0.0 && here.bandwidth_mb_s > 0.0,
        "{here:?}"
    );
    let largest = |of: fn(&Node) -> f64| nodes.iter().map(of).fold(0.0, f64::max);
    // Entries are truncated to whole steps, and Linux then rounds nanoseconds up.
    let step = |largest: f64| (largest / ENTRY_MAX).floor() + 2.0;
    let step_ns = largest(|node| node.latency_ns) / ENTRY_MAX + 2.0;
    let step_mb_s = step(largest(|node| node.bandwidth_mb_s));
    for (number, (node, way)) in (1..).zip(donors.iter().zip(ways)) {
        let latency = way.page_ns.min(LATENCY_NS_MAX);
        ensure!(
            (node.latency_ns - latency).abs() <= step_ns,
            "node {number} is {} ns away, {latency} were measured",
            node.latency_ns
        );
        ensure!(
            (node.bandwidth_mb_s - way.stream_mb_s).abs() <= step_mb_s,
            "node {number} carries {} MB/s, {} were measured",
            node.bandwidth_mb_s,
            way.stream_mb_s
        );
        ensure!(
            here.latency_ns < node.latency_ns && here.bandwidth_mb_s > node.bandwidth_mb_s,
            "node 0 is no nearer than node {number}: {here:?}, {node:?}"
        );
    }
    // Unlike latencies, distances have no such limit.
    let far = |node: usize| node.checked_sub(1).map_or(0.0, |donor| ways[donor].page_ns);
    for (a, from) in nodes.iter().enumerate() {
        for b in 0..nodes.len() {
            let far = far(a).max(far(b));
            let (least, most) = if a == b {
                (10, 10)
            } else {
                (
                    distance(here.latency_ns + step_ns, far),
                    distance(here.latency_ns - step_ns, far),
                )
            };
            ensure!(
                (least..=most).contains(&from.distances[b]),
                "from node {a} to node {b} it is {}, not {least} to {most}: {nodes:?}",
                from.distances[b]
            );
        }
    }
    Ok(())
}

/// 20 for each factor of ten, above the 10 within a node.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the limits are within u8"
)]
fn distance(near_ns: f64, far_ns: f64) -> u8 {
    let factor = (far_ns / near_ns.max(1.0)).max(1.0);
    (10.0 + 20.0 * factor.log10()).round().clamp(11.0, 254.0) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSOLE: &str = "\
        NODE 0 111508 147064 130 130 9000 9000 10 87 89 access0/initiators/node0\r\n\
        NODE 1 444240 450560 900000 900000 12 12 87 10 89 access0/initiators/node0\r\n\
        NODE 2 442192 450560 1200000 1200000 11 11 89 89 10 access0/initiators/node0\r\n\
        HAS_CPU 0 HAS_MEMORY 0-2\r\n";
    const WAYS: [Way; 2] = [
        Way {
            page_ns: 900_005.5,
            stream_mb_s: 12.9,
        },
        Way {
            page_ns: 1_200_010.0,
            stream_mb_s: 11.3,
        },
    ];
    const SIZES_KIB: [u64; 3] = [144 << 10, 440 << 10, 440 << 10];

    #[test]
    fn nodes_as_they_were_measured_are_right() {
        let nodes = read(CONSOLE).unwrap();
        check_sizes(&nodes, &SIZES_KIB).unwrap();
        check_speeds(&nodes, &WAYS).unwrap();
    }

    #[test]
    fn a_way_that_is_slower_than_linux_can_read_is_as_far_as_it_is() {
        let slow = Way {
            page_ns: 12e6,
            ..WAYS[1]
        };
        let console = CONSOLE.replace(" 1200000 1200000 ", " 4199972 4199972 ");
        let near = read(&console).unwrap();
        assert!(check_speeds(&near, &[WAYS[0], slow]).is_err());
        let nodes = read(&console.replace("89", "109")).unwrap();
        check_speeds(&nodes, &[WAYS[0], slow]).unwrap();
    }

    #[test]
    fn what_nobody_measured_is_noticed() {
        for (right, wrong) in [
            // Latency and rate of a donor, and those of local memory.
            (" 900000 900000 ", " 901000 901000 "),
            (" 1200000 1200000 ", " 900000 900000 "),
            (" 130 130 ", " 1300000 1300000 "),
            (" 12 12 ", " 15 15 "),
            (" 11 11 ", " 0 0 "),
            (" 9000 9000 ", " 10 10 "),
            // Distances.
            (" 10 87 89 ", " 10 89 89 "),
            (" 87 10 89 ", " 20 10 20 "),
            (" 89 89 10 ", " 89 89 11 "),
        ] {
            assert!(CONSOLE.contains(right));
            let nodes = read(&CONSOLE.replace(right, wrong)).unwrap();
            assert!(check_speeds(&nodes, &WAYS).is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_that_is_missing_or_on_another_node_is_noticed() {
        for (right, wrong) in [
            (" 147064 ", " 147456 "),
            (" 147064 ", " 145020 "),
            (" 450560 900000", " 448512 900000"),
            (" 111508 ", " 100000 "),
            (" 442192 ", " 440000 "),
            (" 442192 ", " 450560 "),
        ] {
            assert!(CONSOLE.contains(right));
            let nodes = read(&CONSOLE.replace(right, wrong)).unwrap();
            assert!(check_sizes(&nodes, &SIZES_KIB).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_no_table_of_nodes_is_refused() {
        for (right, wrong) in [
            ("NODE 2", "NODE 3"),
            (" 130 130 ", " 130 131 "),
            (" 12 12 ", " 12 13 "),
            ("node0\r\nNODE 2", "node1\r\nNODE 2"),
            ("0-2", "0"),
            (" 10 87 89 ", " 10 87 "),
        ] {
            assert!(CONSOLE.contains(right));
            assert!(read(&CONSOLE.replace(right, wrong)).is_err(), "{wrong}");
        }
    }
}
