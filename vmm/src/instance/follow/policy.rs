//! Which vCPU moves, as a function of what all have waited for.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::report::{StayReason, VcpuStays};

/// Looks that count together: a vCPU that waits for a short time does not move.
const WINDOW: usize = 5;
/// What a vCPU has waited within them for a move to be worth while, a tenth of the time: its working
/// set follows it, page by page. A count of pages would not do, since a page may take 20 us or 50 ms.
const WAITED_MIN: Duration = Duration::from_millis(500);
/// Of all the time that it waited, so many parts of 100 have to be for one node.
const SHARE_MIN: u128 = 67;
/// How long a vCPU stays after its first move.
const STAYS_MIN: Duration = Duration::from_secs(30);
/// How often that is doubled at most.
const DOUBLINGS_MAX: u32 = 5;

/// A vCPU, as its node reports it.
#[derive(Clone, Debug)]
pub(super) struct Sighting {
    pub cpu: u8,
    pub node: u8,
    /// How long it waited on this node so far, by the node that sent the pages, in nanoseconds. `None`
    /// without a report.
    pub waited_for: Option<Vec<u64>>,
    /// Whether it has nothing to do at the moment.
    pub is_idle: bool,
}

/// A vCPU is to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub cpu: u8,
    pub to: u8,
    /// How long it waited for pages from there within the window.
    pub waited: Duration,
    /// The node that it leaves.
    pub from: u8,
    /// This idle one goes there instead, since the other node has no more room.
    pub instead: Option<u8>,
}

impl Found {
    /// The moves, in an order in which no node but the primary (0) has more vCPUs than it lends CPUs.
    pub fn steps(&self) -> Vec<(u8, u8)> {
        let Self { cpu, to, from, .. } = *self;
        match self.instead {
            None => vec![(cpu, to)],
            Some(other) if to == 0 => vec![(cpu, to), (other, from)],
            Some(other) if from == 0 => vec![(other, from), (cpu, to)],
            Some(other) => vec![(other, 0), (cpu, to), (other, from)],
        }
    }
}

/// What is known of a vCPU.
#[derive(Debug, Default)]
struct Record {
    node: u8,
    /// At the last look.
    last: Option<Vec<u64>>,
    /// The times between two looks each, the newest last.
    window: VecDeque<Vec<u64>>,
    /// Looks within the window at which it had something to do.
    busy_looks: VecDeque<bool>,
    stays_until: Option<Instant>,
    moves: u32,
}

impl Record {
    fn forget(&mut self) {
        self.window.clear();
        self.busy_looks.clear();
    }

    fn look(&mut self, sighting: &Sighting) {
        if self.node != sighting.node {
            // It has moved, perhaps by a command: the other node has sums of its own.
            self.node = sighting.node;
            self.last = None;
            self.forget();
        }
        let Some(waited) = &sighting.waited_for else {
            return;
        };
        if let Some(last) = self.last.replace(waited.clone()) {
            let before = |node: usize| last.get(node).copied().unwrap_or(0);
            let times = waited.iter().enumerate();
            // What a node reports may be anything, and less than before.
            let times = times.map(|(node, time)| time.saturating_sub(before(node)));
            self.window.push_back(times.collect());
            self.busy_looks.push_back(!sighting.is_idle);
            if self.window.len() > WINDOW {
                self.window.pop_front();
                self.busy_looks.pop_front();
            }
        }
    }

    /// Times within the window, by the node that sent the pages, and of all.
    fn sums(&self) -> ([u64; u8::MAX as usize + 1], u64) {
        let mut sums = [0_u64; u8::MAX as usize + 1];
        for times in &self.window {
            for (sum, time) in sums.iter_mut().zip(times) {
                *sum = sum.saturating_add(*time);
            }
        }
        let all = sums
            .iter()
            .fold(0, |all: u64, sum| all.saturating_add(*sum));
        (sums, all)
    }

    /// How long it stays at least.
    fn stays(&self, now: Instant) -> Option<Duration> {
        let left = self.stays_until?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// The other node for which it waited longest within a whole window, and how long; else why it
    /// stays.
    fn longest(&self, now: Instant) -> Result<(u8, Duration), StayReason> {
        if self.stays(now).is_some() {
            return Err(StayReason::Moved);
        }
        if self.window.len() < WINDOW {
            return Err(StayReason::Watched);
        }
        let (sums, all) = self.sums();
        let others = (0..=u8::MAX).zip(sums);
        let others = others.filter(|(node, _)| *node != self.node);
        let longest = others.max_by_key(|(_, waited)| *waited);
        let (node, sum) = longest.ok_or(StayReason::Little)?;
        let waited = Duration::from_nanos(sum);
        if waited < WAITED_MIN {
            Err(StayReason::Little)
        } else if u128::from(sum) * 100 < u128::from(all) * SHARE_MIN {
            Err(StayReason::Spread)
        } else {
            Ok((node, waited))
        }
    }

    /// Whether it had nothing to do within a whole window, and may move.
    fn idles(&self, now: Instant) -> bool {
        let is_idle = self.busy_looks.len() == WINDOW && !self.busy_looks.contains(&true);
        is_idle && Duration::from_nanos(self.sums().1) < WAITED_MIN && self.stays(now).is_none()
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
            let (to, waited) = self.records.get(&sighting.cpu)?.longest(now).ok()?;
            let has_room = self.has_room(to, sightings);
            let instead = (!has_room).then(|| self.idle_one(now, to, sightings));
            Some(Found {
                cpu: sighting.cpu,
                to,
                waited,
                from: sighting.node,
                instead: match instead {
                    None => None,
                    Some(other) => Some(other?),
                },
            })
        });
        // Of equal ones the last: the first vCPUs begin where the devices are.
        let found = found.max_by_key(|found| (found.waited, found.cpu))?;
        self.records.values_mut().for_each(Record::forget);
        for cpu in [Some(found.cpu), found.instead].into_iter().flatten() {
            if let Some(record) = self.records.get_mut(&cpu) {
                record.moved(now);
            }
        }
        Some(found)
    }

    /// A vCPU on this node that has nothing to do.
    fn idle_one(&self, now: Instant, node: u8, sightings: &[Sighting]) -> Option<u8> {
        let mut there = sightings.iter().filter(|one| one.node == node);
        let idles = |one: &&Sighting| self.records.get(&one.cpu).is_some_and(|it| it.idles(now));
        there.find(idles).map(|one| one.cpu)
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
            let reason = record.longest(now).err().unwrap_or(StayReason::Full);
            Some(VcpuStays {
                cpu: sighting.cpu.into(),
                moves: record.moves,
                waited_ms: Duration::from_nanos(record.sums().1).as_secs_f64() * 1e3,
                reason,
                stays_s: left.map(|left| left.as_secs_f64()),
            })
        });
        stays.collect()
    }
}

#[cfg(test)]
mod tests;
