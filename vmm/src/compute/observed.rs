//! What a compute node reports of its part of a VM.

use std::sync::Arc;
use std::time::Duration;

use memory_fabric::compute::{self, Paths, SharedGuest, SharingStats};
use memory_fabric::fabric::DONORS_MAX;
use memory_fabric::page::PAGE_SHIFT;
use memory_fabric::stats::{Counter, Summary};
use memory_fabric::view::FabricView;
use serde::{Deserialize, Serialize};

use crate::instance::{distribution, percentiles};
use crate::machine::{Activity, NodeFacts, REPORT_BYTES_MAX, Reporter, TimeFacts, VcpuThread};
use crate::report::{Distribution, NodeClock, Peer, PeerTransport, Transfers};
use crate::status::VcpuState;

/// Limit of pages in a report.
const PAGES_MAX: usize = 100;

/// How often a node got a page of which others have copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotPageHere {
    /// Its guest-physical address.
    pub address: u64,
    /// For a read, at least.
    pub reads: u32,
    /// For a write, at least.
    pub writes: u32,
    /// How often before, at most.
    pub earlier_max: u32,
}

/// What is known here of the memory that nodes share.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    /// What this node counts.
    pub stats: Arc<SharingStats>,
    /// How the memory travels to each other node.
    pub paths: Arc<Paths>,
}

impl From<&SharedGuest> for Watched {
    fn from(shared: &SharedGuest) -> Self {
        Self {
            stats: Arc::clone(shared.stats()),
            paths: Arc::clone(shared.paths()),
        }
    }
}

impl Watched {
    fn pages_from(&self, place: usize) -> u64 {
        self.stats.from_each.get(place).map_or(0, Counter::get)
    }

    fn peers(&self) -> Vec<Peer> {
        let peers = self.paths.now().map(|path| Peer {
            node: path.peer.place().into(),
            transport: match path.transport {
                compute::PeerTransport::Tcp => PeerTransport::Tcp,
                compute::PeerTransport::SecureTcp => PeerTransport::Tls,
                compute::PeerTransport::Rdma => PeerTransport::Rdma,
            },
            connections: path.connections,
            pages_received: self.pages_from(path.peer.index()),
        });
        peers.collect()
    }
}

/// A node, as it reports itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observed {
    /// Its counters.
    pub transfers: Transfers,
    /// How long pages were held.
    pub holds: Distribution,
    /// How long requests took.
    pub requests: Distribution,
    /// How long its RDMA WRITEs to other nodes took.
    #[serde(default)]
    pub ring_writes: Distribution,
    /// The pages that it got most often.
    pub hottest: Vec<HotPageHere>,
    /// Its vCPUs, each with the page that it waits for.
    pub vcpus: Vec<(u32, VcpuState, Option<u64>)>,
    /// The shortest round trip to the primary in the last second, in microseconds.
    pub round_trip_us: Option<f64>,
    /// How its time follows the primary's; `None` of the primary.
    #[serde(default)]
    pub clock: Option<NodeClock>,
    /// How memory travels to the other nodes.
    #[serde(default)]
    pub peers: Vec<Peer>,
    /// What it keeps at donors by itself.
    #[serde(default)]
    pub at_donors: AtDonors,
    /// For each of its vCPUs: how long it waited here for pages, by the node that sent them, in
    /// nanoseconds.
    #[serde(default)]
    pub waited_for: Vec<(u32, Vec<u64>)>,
}

/// What a node keeps at donors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AtDonors {
    /// Each donor that it uses.
    pub donors: Vec<DonorHere>,
    /// Pages that it sealed, opened and rejected.
    pub sealing: [u64; 3],
}

/// What a node keeps at a donor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DonorHere {
    /// The donor's number among the VM's nodes.
    pub id: u32,
    /// Bytes of guest memory with their place there.
    pub memory_bytes: u64,
    /// Pages read from it.
    pub pages_fetched: u64,
    /// Pages written to it.
    pub pages_written_back: u64,
}

impl AtDonors {
    /// Adds what another node reports, which may be anything.
    pub fn add(&mut self, other: &Self) {
        for more in &other.donors {
            let place = self.donors.iter().position(|donor| donor.id == more.id);
            match place {
                Some(place) => self.donors[place].add(*more),
                None if self.donors.len() < DONORS_MAX => self.donors.push(*more),
                None => {}
            }
        }
        for (count, more) in self.sealing.iter_mut().zip(other.sealing) {
            *count = count.saturating_add(more);
        }
    }
}

impl DonorHere {
    fn add(&mut self, more: Self) {
        for (count, more) in [
            (&mut self.memory_bytes, more.memory_bytes),
            (&mut self.pages_fetched, more.pages_fetched),
            (&mut self.pages_written_back, more.pages_written_back),
        ] {
            *count = count.saturating_add(more);
        }
    }
}

impl From<&FabricView> for AtDonors {
    fn from(view: &FabricView) -> Self {
        let donors = view.nodes().into_iter().skip(1);
        let donors = donors.map(|donor| DonorHere {
            id: donor.id.0.into(),
            memory_bytes: donor.memory_bytes,
            pages_fetched: donor.pages_fetched,
            pages_written_back: donor.pages_written_back,
        });
        let sealing = &view.stats().sealing;
        let sealing = [&sealing.sealed, &sealing.opened, &sealing.rejected];
        Self {
            donors: donors.collect(),
            sealing: sealing.map(|count| count.get()),
        }
    }
}

impl Observed {
    /// Reads what is known of this node.
    #[must_use]
    pub fn now(watched: &Watched, vcpus: &[VcpuThread]) -> Self {
        let stats = &*watched.stats;
        let (hold, request) = (stats.hold.summary(), stats.request.summary());
        Self {
            transfers: transfers(stats, &hold, &request),
            holds: distribution(&stats.hold),
            requests: distribution(&stats.request),
            ring_writes: distribution(&watched.paths.ring_writes),
            hottest: hottest(stats),
            vcpus: vcpus.iter().map(|vcpu| vcpu_now(stats, *vcpu)).collect(),
            round_trip_us: None,
            clock: None,
            peers: watched.peers(),
            at_donors: AtDonors::default(),
            waited_for: vcpus.iter().map(|vcpu| waited_for(stats, *vcpu)).collect(),
        }
    }
}

fn hottest(stats: &SharingStats) -> Vec<HotPageHere> {
    let pages = stats.hot.hottest(PAGES_MAX).into_iter();
    pages
        .map(|page| HotPageHere {
            address: u64::from(page.page.number()) << PAGE_SHIFT,
            reads: page.reads,
            writes: page.writes,
            earlier_max: page.earlier_max,
        })
        .collect()
}

fn vcpu_now(stats: &SharingStats, vcpu: VcpuThread) -> (u32, VcpuState, Option<u64>) {
    let page = stats.waits.of(vcpu.thread);
    let state = match (page, vcpu.activity) {
        (Some(_), _) => VcpuState::Page,
        (None, Activity::Runs) => VcpuState::Running,
        (None, Activity::Halted) => VcpuState::Halted,
        (None, Activity::Offline) => VcpuState::Offline,
    };
    let page = page.map(|page| u64::from(page.number()) << PAGE_SHIFT);
    (vcpu.cpu, state, page)
}

fn waited_for(stats: &SharingStats, vcpu: VcpuThread) -> (u32, Vec<u64>) {
    let mut waited = stats.sources.of(vcpu.thread).to_vec();
    let nodes = waited.iter().rposition(|time| *time > 0);
    waited.truncate(nodes.map_or(0, |last| last + 1));
    (vcpu.cpu, waited)
}

fn transfers(stats: &SharingStats, hold: &Summary, request: &Summary) -> Transfers {
    Transfers {
        faults: stats.faults.get(),
        reads: stats.reads.get(),
        writes: stats.writes.get(),
        upgrades: stats.upgrades.get(),
        pages_received: stats.from_member.get(),
        pages_from_home: stats.from_home.get(),
        pages_zero: stats.zeroes.get(),
        pages_sent: stats.sent.get(),
        invalidations: stats.invalidated.get(),
        holds: stats.holds.get(),
        hold_us: percentiles(hold),
        early_losses: stats.early.get(),
        requested_ahead: stats.ahead.get(),
        tokens: stats.tokens.get(),
        requests: request.count,
        request_us: percentiles(request),
        blocks_taken: stats.blocks_taken.get(),
        blocks_split: stats.blocks_split.get(),
        split_blocks: stats.split_blocks.get(),
        evictions: stats.evictions.get(),
        write_backs: stats.write_backs.get(),
        stalled_for_memory: stats.stalled_for_memory.get(),
        merged_tables: stats.merged_tables.get(),
        table_changes: stats.table_changes.get(),
        held_for_tables: stats.held_for_tables.get(),
    }
}

/// Makes the reports of a node that is not the primary.
#[derive(Debug)]
pub struct SharingReporter {
    /// What the node knows.
    pub watched: Watched,
    /// Its donors, if it has any.
    pub donors: Option<FabricView>,
}

impl Reporter for SharingReporter {
    fn report(&self, facts: &NodeFacts) -> Vec<u8> {
        let mut observed = Observed::now(&self.watched, &facts.vcpus);
        let round_trip = facts.clock.map(|clock| clock.round_trip);
        observed.round_trip_us = round_trip.map(micros);
        observed.clock = clock(&facts.time);
        observed.at_donors = self.donors.as_ref().map(Into::into).unwrap_or_default();
        let mut bytes = serde_json::to_vec(&observed).unwrap_or_default();
        if bytes.len() > REPORT_BYTES_MAX {
            // Its longest parts, which grow with the number of different values.
            observed.holds.clear();
            observed.requests.clear();
            observed.ring_writes.clear();
            bytes = serde_json::to_vec(&observed).unwrap_or_default();
        }
        bytes
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Converts what is known of a node's time, once it was compared with the primary's.
fn clock(time: &TimeFacts) -> Option<NodeClock> {
    #[allow(
        clippy::cast_precision_loss,
        reason = "a microsecond is lost after 285 years"
    )]
    let micros_of = |nanos: i64| nanos as f64 / 1e3;
    Some(NodeClock {
        offset_us: micros_of(time.offset_ns?),
        error_us_max: micros(time.error_max?),
        rate_ppm: time.rate_ppm.map(|(rate, _)| rate),
        rate_ppm_error_max: time.rate_ppm.map(|(_, error)| error),
        scaled: time.scales,
        steps: time.corrections,
        steps_us: micros_of(time.corrected_ns),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_of_a_node_changes_what_it_reports() {
        let watched = Watched::default();
        let stats = &watched.stats;
        let empty = Observed::now(&watched, &[]);
        let before = serde_json::to_value(empty.transfers).expect("JSON");
        for counter in [
            &stats.faults,
            &stats.reads,
            &stats.writes,
            &stats.upgrades,
            &stats.from_member,
            &stats.from_home,
            &stats.zeroes,
            &stats.sent,
            &stats.invalidated,
            &stats.holds,
            &stats.early,
            &stats.ahead,
            &stats.tokens,
            &stats.blocks_taken,
            &stats.blocks_split,
            &stats.evictions,
            &stats.write_backs,
            &stats.stalled_for_memory,
            &stats.table_changes,
            &stats.held_for_tables,
        ] {
            counter.increment();
        }
        stats.split_blocks.set(1);
        stats.merged_tables.set(1);
        stats.hold.record(Duration::from_micros(5));
        stats.request.record(Duration::from_micros(5));
        watched.paths.ring_writes.record(Duration::from_micros(7));
        let observed = Observed::now(&watched, &[]);
        let after = serde_json::to_value(observed.transfers).expect("JSON");
        let fields = before.as_object().expect("an object");
        assert_eq!(fields.len(), 25);
        for (name, value) in fields {
            assert_ne!(after[name], *value, "{name}");
        }
        assert_eq!((observed.holds.len(), observed.requests.len()), (1, 1));
        assert_eq!(observed.ring_writes.len(), 1);
    }

    #[test]
    fn a_report_is_read_as_it_was_made_and_fits() {
        let watched = Watched::default();
        let stats = &watched.stats;
        stats.reads.add(7);
        // Every bucket that a hold can have.
        for power in 0..40 {
            for part in 0..32 {
                let nanos = (1_u64 << power) + (part << power) / 32;
                stats.hold.record(Duration::from_nanos(nanos));
                stats.request.record(Duration::from_nanos(nanos));
            }
        }
        let vcpu = |cpu| VcpuThread {
            cpu,
            thread: 1000 + cpu,
            activity: Activity::Halted,
        };
        let facts = NodeFacts {
            vcpus: (0..3).map(vcpu).collect(),
            ..NodeFacts::default()
        };
        let reporter = SharingReporter {
            watched: watched.clone(),
            donors: None,
        };
        let bytes = reporter.report(&facts);
        assert!(bytes.len() <= REPORT_BYTES_MAX, "{} bytes", bytes.len());
        let found: Observed = serde_json::from_slice(&bytes).expect("is read");
        assert_eq!((found.transfers.reads, found.vcpus.len()), (7, 3));
        assert_eq!(found.vcpus[2], (2, VcpuState::Halted, None));
        let facts = NodeFacts {
            vcpus: (0..254).map(vcpu).collect(),
            ..NodeFacts::default()
        };
        let bytes = reporter.report(&facts);
        assert!(bytes.len() <= REPORT_BYTES_MAX, "{} bytes", bytes.len());
    }
    #[test]
    fn a_node_reports_its_clock_once_it_was_compared() {
        let reporter = SharingReporter {
            watched: Watched::default(),
            donors: None,
        };
        let clock_of = |time| {
            let facts = NodeFacts {
                time,
                ..NodeFacts::default()
            };
            let bytes = reporter.report(&facts);
            let found: Observed = serde_json::from_slice(&bytes).expect("is read");
            found.clock
        };
        assert_eq!(clock_of(TimeFacts::default()), None);
        let compared = TimeFacts {
            offset_ns: Some(-7_000_500),
            error_max: Some(Duration::from_nanos(31_250)),
            rate_ppm: Some((-3.5, 0.25)),
            scales: true,
            corrections: 40,
            corrected_ns: -1_250_000,
        };
        let expected = NodeClock {
            offset_us: -7000.5,
            error_us_max: 31.25,
            rate_ppm: Some(-3.5),
            rate_ppm_error_max: Some(0.25),
            scaled: true,
            steps: 40,
            steps_us: -1250.0,
        };
        assert_eq!(clock_of(compared), Some(expected));
    }
}
