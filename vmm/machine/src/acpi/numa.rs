//! NUMA topology: SRAT, SLIT and HMAT (ACPI specification 6.5, 5.2.16, 5.2.17 and 5.2.28).
//!
//! Node 0 has all CPUs, and the others memory only, or each has CPUs and memory of one host. SRAT assigns CPUs and memory to nodes, HMAT
//! states latency in nanoseconds and bandwidth in MB/s. SLIT has one byte per distance, with 10
//! within a node; networks are thousands of times slower than memory, so here the distance is
//! logarithmic and grows by 20 with each factor of ten.

use std::time::Duration;

use acpi_tables::Aml;
use acpi_tables::hmat::{
    DataType, LocalityType, MemoryProximityDomain, MinTransferSize, SystemLocality,
};
use acpi_tables::slit::SLIT;
use acpi_tables::srat::MemoryAffinity;

use super::table::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes_of, table};

/// A NUMA node of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its vCPUs.
    pub cpus: Vec<u8>,
    /// Memory ranges: start and length in bytes, both multiples of the page size.
    pub memory: Vec<(u64, u64)>,
    /// The range in which memory may be added while the guest runs: start and length in bytes.
    pub hotplug: Option<(u64, u64)>,
    /// Whether the kernel is to keep no data of its own there: its memory is said to be removable,
    /// and Linux then has only movable pages in it, with the parameter
    /// [`MOVABLE_NODE`](crate::MOVABLE_NODE).
    pub is_movable: bool,
    /// Latency of a CPU's uncached access.
    pub latency: Duration,
    /// Read bandwidth in MB/s; `None` if unknown.
    pub bandwidth_mb_s: Option<u64>,
}

/// The distance from a node to itself.
const DISTANCE_SELF: u8 = 10;
/// Increase of the distance per factor of ten in latency.
const DISTANCE_PER_DECADE: f64 = 20.0;
/// Least distance to another node; Linux rejects 10.
const DISTANCE_MIN: f64 = 11.0;
/// Largest distance: 255 means "unreachable".
const DISTANCE_MAX: f64 = 254.0;

/// SRAT entry: a processor's affinity, by x2APIC id.
const SRAT_X2APIC: u8 = 2;
const SRAT_X2APIC_BYTES: u8 = 24;
const SRAT_ENABLED: u32 = 1;

/// The largest value of an HMAT entry; 0xffff means "unreachable".
const HMAT_ENTRY_MAX: u64 = 0xfffe;
/// The largest latency: Linux stores picoseconds in 32 bits.
const HMAT_LATENCY_MAX: Duration = Duration::from_micros(4200);

/// Builds SRAT, SLIT and HMAT; returns none without nodes. HMAT has what the CPUs of node 0 reach, so
/// there is none if others have CPUs.
pub(crate) fn tables(nodes: &[NumaNode]) -> Vec<Vec<u8>> {
    let Some((_, others)) = nodes.split_first() else {
        return Vec::new();
    };
    let mut tables = vec![srat(nodes), slit(nodes)];
    if others.iter().all(|node| node.cpus.is_empty()) {
        tables.push(hmat(nodes));
    }
    tables
}

fn srat(nodes: &[NumaNode]) -> Vec<u8> {
    // A field whose value is always 1, and eight reserved bytes.
    let mut body = [1_u32.to_le_bytes(), [0; 4], [0; 4]].concat();
    for (domain, node) in (0_u32..).zip(nodes) {
        for &cpu in &node.cpus {
            body.extend([SRAT_X2APIC, SRAT_X2APIC_BYTES, 0, 0]);
            for field in [domain, u32::from(cpu), SRAT_ENABLED, 0, 0] {
                body.extend(field.to_le_bytes());
            }
        }
    }
    for (domain, node) in (0..).zip(nodes) {
        for &(start, bytes) in &node.memory {
            let memory = MemoryAffinity::new(domain, start, bytes).enabled();
            if node.is_movable {
                memory.hotpluggable().to_aml_bytes(&mut body);
            } else {
                memory.to_aml_bytes(&mut body);
            }
        }
        if let Some((start, bytes)) = node.hotplug {
            MemoryAffinity::new(domain, start, bytes)
                .enabled()
                .hotpluggable()
                .to_aml_bytes(&mut body);
        }
    }
    table(*b"SRAT", 3, &body)
}

/// Returns the distance of a node with `latency` from one with `near`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the limits are within u8"
)]
fn distance(near: Duration, latency: Duration) -> u8 {
    let factor = latency.as_secs_f64() / near.as_secs_f64().max(1e-9);
    let distance = f64::from(DISTANCE_SELF) + DISTANCE_PER_DECADE * factor.max(1.0).log10();
    distance.round().clamp(DISTANCE_MIN, DISTANCE_MAX) as u8
}

fn slit(nodes: &[NumaNode]) -> Vec<u8> {
    // At most 65 nodes: one more than the limit of donors.
    let count = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    let mut slit = SLIT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, count);
    for (a, from) in nodes.iter().enumerate() {
        for (b, to) in nodes.iter().enumerate().skip(a + 1) {
            // All traffic between donors passes through the node with the CPUs, and hosts are equally
            // far from each other.
            let farther = from.latency.max(to.latency);
            slit.set_distance(a, b, distance(nodes[0].latency, farther));
        }
    }
    bytes_of(&slit)
}

fn hmat(nodes: &[NumaNode]) -> Vec<u8> {
    let mut body = vec![0; 4];
    for domain in 0..u32::try_from(nodes.len()).unwrap_or(u32::MAX) {
        MemoryProximityDomain::new(0, domain).to_aml_bytes(&mut body);
    }
    let latencies: Vec<_> = nodes
        .iter()
        .map(|node| {
            let latency = node.latency.min(HMAT_LATENCY_MAX);
            Some(u64::try_from(latency.as_nanos() * 1000).unwrap_or(u64::MAX))
        })
        .collect();
    let bandwidths: Vec<_> = nodes.iter().map(|node| node.bandwidth_mb_s).collect();
    for (data, values) in [
        (DataType::AccessLatency, latencies),
        (DataType::AccessBandwidth, bandwidths),
    ] {
        if values.iter().any(Option::is_some) {
            locality(data, &values).to_aml_bytes(&mut body);
        }
    }
    table(*b"HMAT", 2, &body)
}

/// Builds the HMAT matrix from node 0 to each node, in picoseconds or MB/s.
fn locality(data: DataType, values: &[Option<u64>]) -> SystemLocality {
    let largest = values.iter().flatten().copied().max().unwrap_or(0);
    // The finest unit in which the largest value fits.
    let unit = largest.div_ceil(HMAT_ENTRY_MAX).max(1);
    let mut matrix = SystemLocality::new(
        LocalityType::Memory,
        data,
        MinTransferSize::SizeByteAligned,
        unit,
        1,
        values.len(),
    );
    matrix.set_initiator_value(0, 0);
    for (target, value) in values.iter().enumerate() {
        matrix.set_target_value(target, u32::try_from(target).unwrap_or(u32::MAX));
        // 0 would mean "unknown".
        let entry = value.map_or(0, |value| (value / unit).max(1));
        matrix.set_entry_value(0, target, u16::try_from(entry).unwrap_or(u16::MAX - 1));
    }
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(memory: &[(u64, u64)], micros: u64, bandwidth_mb_s: Option<u64>) -> NumaNode {
        NumaNode {
            cpus: Vec::new(),
            memory: memory.to_vec(),
            hotplug: None,
            is_movable: false,
            latency: Duration::from_nanos(micros * 1000),
            bandwidth_mb_s,
        }
    }

    fn nodes() -> Vec<NumaNode> {
        let mut here = node(&[(0, 96 << 20), (928 << 20, 96 << 20)], 0, Some(12_000));
        here.latency = Duration::from_nanos(100);
        here.cpus = vec![0, 1, 2];
        vec![
            here,
            node(&[(96 << 20, 416 << 20)], 10, Some(1000)),
            node(&[(512 << 20, 416 << 20)], 900, Some(70_000)),
        ]
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn a_flat_machine_has_no_such_tables() {
        assert!(tables(&[]).is_empty());
        let all = tables(&nodes());
        let signatures: Vec<_> = all.iter().map(|table| &table[..4]).collect();
        assert_eq!(signatures, [b"SRAT", b"SLIT", b"HMAT"]);
        for table in all {
            assert_eq!(table.iter().fold(0_u8, |sum, b| sum.wrapping_add(*b)), 0);
            assert_eq!(usize::try_from(u32_at(&table, 4)), Ok(table.len()));
        }
    }

    #[test]
    fn every_cpu_and_every_range_has_its_node() {
        let srat = srat(&nodes());
        assert_eq!(u32_at(&srat, 36), 1);
        let (mut cpus, mut memory) = (Vec::new(), Vec::new());
        let mut entries = &srat[48..];
        while let [kind, len, ..] = entries {
            match kind {
                1 => {
                    assert_eq!(u32_at(entries, 28), 1, "enabled");
                    let range = (u64_at(entries, 8), u64_at(entries, 16));
                    memory.push((u32_at(entries, 2), range));
                }
                2 => {
                    assert_eq!(u32_at(entries, 12), 1, "enabled");
                    cpus.push((u32_at(entries, 4), u32_at(entries, 8)));
                }
                other => panic!("entry {other}"),
            }
            entries = &entries[usize::from(*len)..];
        }
        assert_eq!(cpus, [(0, 0), (0, 1), (0, 2)]);
        let expected: Vec<_> = (0..)
            .zip(nodes())
            .flat_map(|(domain, node)| node.memory.into_iter().map(move |m| (domain, m)))
            .collect();
        assert_eq!(memory, expected);
    }

    #[test]
    fn each_of_several_hosts_has_its_cpus_and_nobody_says_what_one_of_them_reaches() {
        let mut hosts = nodes();
        hosts[0].cpus = vec![0, 3];
        hosts[2].cpus = vec![1, 2];
        let all = tables(&hosts);
        let signatures: Vec<_> = all.iter().map(|table| &table[..4]).collect();
        assert_eq!(signatures, [b"SRAT", b"SLIT"]);
        let entry = |number: usize| &all[0][48 + 24 * number..];
        let cpus = (0..4).map(|number| (u32_at(entry(number), 4), u32_at(entry(number), 8)));
        assert_eq!(cpus.collect::<Vec<_>>(), [(0, 0), (0, 3), (2, 1), (2, 2)]);
    }

    #[test]
    fn memory_in_which_the_kernel_keeps_nothing_is_hot_pluggable() {
        let mut nodes = vec![
            node(&[(0, 1 << 30)], 1, None),
            node(&[(1 << 30, 1 << 30)], 100, None),
        ];
        nodes[1].is_movable = true;
        let srat = srat(&nodes);
        // Two entries of 40 bytes at the end, each with its flags at 28.
        let flags = |entry: usize| u32_at(&srat[srat.len() - 40 * entry..], 28);
        assert_eq!((flags(2), flags(1)), (0b01, 0b11));
    }

    #[test]
    fn memory_that_may_be_added_is_hot_pluggable_and_has_its_node() {
        let mut nodes = nodes();
        nodes.push(NumaNode {
            hotplug: Some((4 << 30, 1 << 30)),
            is_movable: false,
            ..node(&[], 20, None)
        });
        let srat = srat(&nodes);
        let last = &srat[srat.len() - 40..];
        assert_eq!((last[0], u32_at(last, 2)), (1, 3));
        assert_eq!((u64_at(last, 8), u64_at(last, 16)), (4 << 30, 1 << 30));
        assert_eq!(u32_at(last, 28), 0b11, "enabled and hot-pluggable");
        assert_eq!(u64_at(&slit(&nodes), 36), 4);
    }

    #[test]
    fn distances_grow_with_latency_and_stay_within_a_byte() {
        let slit = slit(&nodes());
        assert_eq!(u64_at(&slit, 36), 3);
        // 10 us are two decades above 100 ns, 900 us nearly four.
        assert_eq!(slit[44..], [10, 50, 89, 50, 10, 89, 89, 89, 10]);
        let near = Duration::from_nanos(100);
        assert_eq!(distance(near, near), 11);
        assert_eq!(distance(near, Duration::ZERO), 11);
        assert_eq!(distance(Duration::ZERO, Duration::MAX), 254);
    }

    #[test]
    fn latencies_and_bandwidths_can_be_read_back() {
        let hmat = hmat(&nodes());
        assert_eq!(hmat[8], 2, "revision: latencies are in picoseconds");
        let mut entries = &hmat[40..];
        let mut read = Vec::new();
        while entries.len() >= 8 {
            let len = usize::try_from(u32_at(entries, 4)).unwrap();
            if entries[0] == 0 {
                assert_eq!(u32_at(entries, 12), 0, "the initiator is node 0");
            } else {
                let unit = u64_at(entries, 24);
                let values = entries[32 + 4 + 3 * 4..len].chunks_exact(2);
                let values: Vec<u64> = values
                    .map(|v| u64::from(u16::from_le_bytes(v.try_into().unwrap())) * unit)
                    .collect();
                read.push((entries[9], values));
            }
            entries = &entries[len..];
        }
        let [(0, latencies), (3, bandwidths)] = &read[..] else {
            panic!("{read:?}");
        };
        let close = |found: u64, wanted: u64| found.abs_diff(wanted) <= wanted / 5;
        for (found, wanted) in latencies.iter().zip([100_000, 10_000_000, 900_000_000]) {
            assert!(close(*found, wanted), "{latencies:?}");
        }
        for (found, wanted) in bandwidths.iter().zip([12_000, 1000, 70_000]) {
            assert!(close(*found, wanted), "{bandwidths:?}");
        }
    }

    #[test]
    fn what_cannot_be_said_in_32_bits_is_cut_and_what_is_unknown_is_left_out() {
        let far = vec![node(&[], 1, None), node(&[], 9_000_000, None)];
        let hmat = hmat(&far);
        // Two domains and one matrix.
        assert_eq!(hmat.len(), 40 + 2 * 40 + 32 + 3 * 4 + 2 * 2);
        let matrix = &hmat[120..];
        let unit = u64_at(matrix, 24);
        let entry = u16::from_le_bytes(matrix[46..48].try_into().unwrap());
        let picoseconds = u64::from(entry) * unit;
        assert!((4_000_000_000..u64::from(u32::MAX)).contains(&picoseconds));
    }
}
