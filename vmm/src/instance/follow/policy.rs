//! Which vCPU moves, as a function of what all have waited for.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::report::{StayReason, VcpuStays};

/// Looks that count together: a vCPU that waits for a short time does not move.
const WINDOW: usize = 5;
/// Pages within them for which a move is worth while: it costs two pages, and the working set of the
/// vCPU follows it, page by page.
const PAGES_MIN: u64 = 100;
/// Of all pages that it waited for, so many of 100 have to come from one node.
const SHARE_MIN: u64 = 67;
/// How long a vCPU stays after its first move.
const STAYS_MIN: Duration = Duration::from_secs(30);
/// How often that is doubled at most.
const DOUBLINGS_MAX: u32 = 5;

/// A vCPU, as its node reports it.
#[derive(Clone, Debug)]
pub(super) struct Sighting {
    pub cpu: u8,
    pub node: u8,
    /// Pages that it waited for on this node so far, by the node that sent them; they wrap around.
    /// `None` without a report.
    pub came_from: Option<Vec<u32>>,
}

/// A vCPU is to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub cpu: u8,
    pub to: u8,
    /// Pages that it waited for from there within the window.
    pub pages: u64,
}

/// What is known of a vCPU.
#[derive(Debug, Default)]
struct Record {
    node: u8,
    /// At the last look.
    last: Option<Vec<u32>>,
    /// What came between two looks each, the newest last.
    window: VecDeque<Vec<u64>>,
    stays_until: Option<Instant>,
    moves: u32,
}

impl Record {
    fn forget(&mut self) {
        self.window.clear();
    }

    fn look(&mut self, sighting: &Sighting) {
        if self.node != sighting.node {
            // It has moved, perhaps by a command: the other node has counts of its own.
            self.node = sighting.node;
            self.last = None;
            self.forget();
        }
        let Some(pages) = &sighting.came_from else {
            return;
        };
        if let Some(last) = self.last.replace(pages.clone()) {
            let before = |node: usize| last.get(node).copied().unwrap_or(0);
            let came = pages.iter().enumerate();
            let came = came.map(|(node, pages)| u64::from(pages.wrapping_sub(before(node))));
            self.window.push_back(came.collect());
            if self.window.len() > WINDOW {
                self.window.pop_front();
            }
        }
    }

    /// Pages within the window, by the node that sent them, and all.
    fn sums(&self) -> ([u64; u8::MAX as usize + 1], u64) {
        let mut sums = [0_u64; u8::MAX as usize + 1];
        for came in &self.window {
            for (sum, pages) in sums.iter_mut().zip(came) {
                *sum = sum.saturating_add(*pages);
            }
        }
        let all = sums.iter().fold(0_u64, |all, sum| all.saturating_add(*sum));
        (sums, all)
    }

    /// How long it stays at least.
    fn stays(&self, now: Instant) -> Option<Duration> {
        let left = self.stays_until?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// The other node from which most pages came within a whole window, and how many; else why it
    /// stays.
    fn most(&self, now: Instant) -> Result<(u8, u64), StayReason> {
        if self.stays(now).is_some() {
            return Err(StayReason::Moved);
        }
        if self.window.len() < WINDOW {
            return Err(StayReason::Watched);
        }
        let (sums, all) = self.sums();
        let others = (0..=u8::MAX).zip(sums);
        let others = others.filter(|(node, _)| *node != self.node);
        let most = others.max_by_key(|(_, pages)| *pages);
        let (node, pages) = most.ok_or(StayReason::Few)?;
        if pages < PAGES_MIN {
            Err(StayReason::Few)
        } else if u128::from(pages) * 100 < u128::from(all) * u128::from(SHARE_MIN) {
            Err(StayReason::Spread)
        } else {
            Ok((node, pages))
        }
    }

    fn moved(&mut self, now: Instant) {
        let stays = STAYS_MIN * (1 << self.moves.min(DOUBLINGS_MAX));
        self.stays_until = now.checked_add(stays);
        self.moves = self.moves.saturating_add(1);
    }
}

/// Decides which vCPU moves.
#[derive(Debug)]
pub(super) struct Policy {
    /// How many vCPUs each node runs at most.
    room: Vec<usize>,
    records: BTreeMap<u8, Record>,
}

impl Policy {
    pub fn new(room: Vec<usize>) -> Self {
        Self {
            room,
            records: BTreeMap::new(),
        }
    }

    /// Takes what is known of all vCPUs, about once in a second. Returns the one that is to move, which
    /// counts as moved.
    pub fn look(&mut self, now: Instant, sightings: &[Sighting]) -> Option<Found> {
        for sighting in sightings {
            let record = self.records.entry(sighting.cpu).or_default();
            record.look(sighting);
        }
        let found = sightings.iter().filter_map(|sighting| {
            let (to, pages) = self.records.get(&sighting.cpu)?.most(now).ok()?;
            let cpu = sighting.cpu;
            let has_room = self.has_room(to, sightings);
            has_room.then_some(Found { cpu, to, pages })
        });
        // Of equal ones the last: the first vCPUs begin where the devices are.
        let found = found.max_by_key(|found| (found.pages, found.cpu))?;
        self.records.values_mut().for_each(Record::forget);
        if let Some(record) = self.records.get_mut(&found.cpu) {
            record.moved(now);
        }
        Some(found)
    }

    fn has_room(&self, node: u8, sightings: &[Sighting]) -> bool {
        let there = sightings.iter().filter(|one| one.node == node).count();
        let room = self.room.get(usize::from(node)).copied();
        room.is_some_and(|room| there < room)
    }

    /// Why each vCPU stays where it is, after a look at the same time.
    pub fn reasons(&self, now: Instant, sightings: &[Sighting]) -> Vec<VcpuStays> {
        let stays = sightings.iter().filter_map(|sighting| {
            let record = self.records.get(&sighting.cpu)?;
            let left = record.stays(now);
            // With room it would have moved.
            let reason = record.most(now).err().unwrap_or(StayReason::Full);
            Some(VcpuStays {
                cpu: sighting.cpu.into(),
                moves: record.moves,
                pages: record.sums().1,
                reason,
                stays_s: left.map(|left| left.as_secs_f64()),
            })
        });
        stays.collect()
    }
}

#[cfg(test)]
mod tests;
