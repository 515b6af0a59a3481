//! Filling copies: of a donor that returned, or in another place than that of a lost donor, or of
//! one that leaves.
//!
//! A copy receives write-backs from the start of its repair on. The other pages that [donors
//! have](stored) are read from the valid copy and written, some at a time and at a bounded rate. What could overtake what:
//!
//! - A page is not read while a write-back of it is outstanding.
//! - A page that is written back after it was read is not copied: the write-back goes to both
//!   copies.
//! - A write-back of a page whose copy is on its way is held until that has been confirmed, and so is
//!   the copy of a page that a repair writes which was given up: two writes of one page are never
//!   outstanding on a connection.
//! - A page that can be checked is not copied if it is wrong, nor computed from a wrong piece: it is read
//!   again, then from the other copy or with all other pieces, also those that are not valid and may have
//!   missed it. If none of that is right, the new copy keeps a [hole](crate::copies) there.

mod arrived;
mod fill;
mod stored;

use crate::copies::{Copies, NextMove, PageSet, Repair};
use crate::gather::{Gather, Trial};
use crate::member::{Member, Purpose, REPAIR_REQUESTS_MAX};
use crate::placement::Place;
use crate::stripe::Layout;
use crate::transport::ReplicatedTransport;
use fabric_host::Allowance;
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use std::time::{Duration, Instant};
use stored::Stored;

/// Limit of the rate of repairs, so that most of a fast link is left to the guest.
pub const REPAIR_BYTES_PER_SECOND: u64 = 128 << 20;

/// Pages that may be copied at once after a pause.
const BURST_PAGES: u64 = 64;

/// Blocks that are completed at once: those without a page to be copied take no time of a donor, but
/// write-backs wait meanwhile.
const BLOCKS_AT_ONCE: usize = 64;

/// Unit of the time until a donor that went out repeatedly is used again: none of it for the first
/// time, then 1, 3, 7, and so on.
const READMISSION_UNIT: Duration = Duration::from_secs(1);

/// Time after which places that copies have left are looked at again, until no request to them is
/// outstanding.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(100);

/// Limit of the doublings of that time.
const READMISSION_DOUBLINGS_MAX: u32 = 6;

/// Progress of a page.
#[derive(Debug)]
enum Phase {
    /// It is being read. `superseded` by a write-back, it is not written.
    Reading {
        superseded: bool,
        gather: Gather,
        /// The pieces that were asked for, a bit each.
        asked: u16,
        /// Whether those that have arrived do not give the page.
        lacks: bool,
        /// How often that was so of all that was asked for: everything is read twice.
        attempts: u8,
    },
    /// It was read: the page, or its piece for the copy.
    Arrived(Box<[u8]>),
    /// It is being written.
    Writing,
}

#[derive(Debug)]
struct Copying {
    page: u32,
    phase: Phase,
}

impl Copying {
    /// Returns what is to be written.
    fn arrived(&self) -> Option<&[u8]> {
        match &self.phase {
            Phase::Arrived(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// The block that is being filled.
#[derive(Debug)]
struct Current {
    repair: Repair,
    /// What is read: the valid copy, or enough pieces of a stripe, with their numbers; all of them
    /// once one was wrong.
    sources: Vec<(usize, Place)>,
    /// Donors that were asked for copies, or pieces, that are not valid, a bit each.
    unsure: u64,
    /// Whether the copy will take the place of another, which is in use until then.
    is_move: bool,
    /// The pages that are copied.
    pages: PageSet,
    /// The next one of them.
    next: u32,
    copying: Vec<Copying>,
}

/// A write-back behind the copy of its page.
#[derive(Debug)]
struct Held {
    operation: u32,
    place: Place,
    in_block: u64,
    bytes: Box<[u8]>,
}

/// When a donor that went out may be used again.
#[derive(Clone, Copy, Debug, Default)]
struct Readmission {
    times_out: u32,
    not_before: Option<Instant>,
}

/// Repairs in progress.
#[derive(Debug)]
pub(crate) struct Repairs {
    current: Option<Current>,
    held: Vec<Held>,
    /// The block with which the search for the next repair continues; `None` when there is none.
    cursor: Option<u32>,
    /// The changes of the donors that were seen.
    changes: u32,
    /// Whether a block was repaired since the last report.
    has_repaired: bool,
    /// What donors have. Empty for a thread that does not repair.
    stored: Stored,
    readmissions: Vec<Readmission>,
    pub readmission_unit: Duration,
    /// That of stripes; `None` for two copies.
    layout: Option<Layout>,
    trial: Option<Trial>,
    /// What the check of a page overwrites.
    checked: Box<PageBytes>,
    /// Pages that may be copied.
    allowance: Allowance,
    /// When to look again at places that copies have left.
    reclaim_at: Option<Instant>,
    due: Option<Instant>,
}

fn page_of(in_block: u64) -> u32 {
    u32::try_from(in_block / PAGE_SIZE as u64).expect("inside a block")
}

fn in_block(page: u32) -> u64 {
    u64::from(page) * PAGE_SIZE as u64
}

impl Repairs {
    pub fn new(layout: Option<Layout>) -> Self {
        Self {
            current: None,
            held: Vec::new(),
            cursor: None,
            changes: 0,
            has_repaired: false,
            stored: Stored::default(),
            readmissions: Vec::new(),
            readmission_unit: READMISSION_UNIT,
            layout,
            trial: layout.map(Trial::new),
            checked: Box::new([0; PAGE_SIZE]),
            allowance: Allowance::new(REPAIR_BYTES_PER_SECOND / PAGE_SIZE as u64, BURST_PAGES),
            reclaim_at: None,
            due: None,
        }
    }

    /// Returns when there is something to do at the latest.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Returns which copy of a block moves, and the place to which it does: a third one that is
    /// written.
    pub fn third_place(&self, block: u32) -> Option<(usize, Place)> {
        let current = self.current.as_ref()?;
        let Repair { at, to, .. } = current.repair;
        (current.is_move && current.repair.block == block).then_some((at, to))
    }

    /// Has repairs made from now on, of so many blocks of which donors have no page.
    pub fn of_blocks(self, blocks: u32) -> Self {
        Self {
            stored: Stored::new(blocks),
            ..self
        }
    }

    /// Notes that pages of a block are dropped.
    pub fn note_dropped(&mut self, block: u32, first: u32, pages: u32) {
        self.stored.remove(block, first, pages);
    }

    /// Notes that a page is written back to all copies.
    pub fn note_written(&mut self, block: u32, in_block: u64) {
        self.stored.insert(block, page_of(in_block));
        let Some(current) = &mut self.current else {
            return;
        };
        if current.repair.block != block {
            return;
        }
        let page = page_of(in_block);
        current.copying.retain_mut(|copying| {
            if copying.page != page {
                return true;
            }
            if let Phase::Reading { superseded, .. } = &mut copying.phase {
                *superseded = true;
            }
            !matches!(
                copying.phase,
                Phase::Arrived(_) | Phase::Reading { lacks: true, .. }
            )
        });
    }

    /// Keeps a write-back until the copy of its page is confirmed.
    pub fn hold(&mut self, operation: u32, place: Place, in_block: u64, bytes: &[u8]) {
        self.held.push(Held {
            operation,
            place,
            in_block,
            bytes: bytes.into(),
        });
    }

    /// Pages of the new copy are complete.
    pub fn written(&mut self, copies: &Copies, first: u32, pages: u32) {
        if let Some(current) = &mut self.current {
            copies.fill_holes(current.repair.to, first, pages);
            let written = first..first + pages;
            current
                .copying
                .retain(|copying| !written.contains(&copying.page));
        }
    }

    /// Ends what involves a donor that went out. Returns a move that is given up.
    pub fn leave(&mut self, donor: u8, members: &mut [Member]) -> Option<Repair> {
        self.held.retain(|held| held.place.donor != donor);
        let given_up = self.give_up(members, |current| {
            let mut sources = current.sources.iter();
            current.repair.to.donor == donor
                || current.unsure >> donor & 1 == 1
                || sources.any(|(_, place)| place.donor == donor)
        });
        let at = usize::from(donor);
        if self.readmissions.len() <= at {
            self.readmissions.resize(at + 1, Readmission::default());
        }
        let readmission = &mut self.readmissions[at];
        let doublings = readmission.times_out.min(READMISSION_DOUBLINGS_MAX);
        readmission.times_out += 1;
        let delay = self.readmission_unit * ((1 << doublings) - 1);
        readmission.not_before = Some(Instant::now() + delay);
        given_up
    }

    /// Ends the repair of the current block, if it is to end. Returns a move that is given up.
    fn give_up(
        &mut self,
        members: &mut [Member],
        ends: impl Fn(&Current) -> bool,
    ) -> Option<Repair> {
        let ended = self.current.take_if(|current| ends(current))?;
        for member in members {
            member.abandon(|purpose| {
                matches!(purpose, Purpose::CopyRead(_) | Purpose::CopyWrite { .. })
            });
        }
        ended.is_move.then_some(ended.repair)
    }

    /// Forgets how often a donor went out that has left: another one has its place.
    pub fn forget(&mut self, donor: usize) {
        if let Some(readmission) = self.readmissions.get_mut(donor) {
            *readmission = Readmission::default();
        }
    }

    /// Takes so many pages from the allowance, if it has them.
    fn may_copy(&mut self, now: Instant, pages: u32) -> bool {
        let is_allowed = self.allowance.take_all(now, pages.into());
        if !is_allowed {
            let pause = now + Allowance::PAUSE;
            self.due = Some(self.due.map_or(pause, |due| due.min(pause)));
        }
        is_allowed
    }
}

impl ReplicatedTransport {
    /// Uses donors again that were readmitted.
    pub(crate) fn readmit_seen(&mut self) {
        let copies = self.set.copies();
        for (donor, member) in (0..=u8::MAX).zip(&mut self.members) {
            member.out &= copies.is_out(donor);
        }
    }

    /// Readmits donors that are back, and fills copies, as far as possible without waiting.
    pub(crate) fn repair(&mut self) {
        self.repairs.due = None;
        self.readmit();
        let changes = self.set.copies().changes();
        if changes != self.repairs.changes {
            self.repairs.changes = changes;
            self.repairs.cursor = Some(0);
            let copies = self.set.copies();
            // A copy that was found to be wrong misses write-backs.
            let given_up = self.repairs.give_up(&mut self.members, |current| {
                !copies.are_valid(current.repair.block, &current.sources)
            });
            if let Some(given_up) = given_up {
                self.set.give_up_move(&given_up);
            }
        }
        self.reclaim();
        self.release_held();
        let mut ended = 0;
        while self.repairs.cursor.is_some() || self.repairs.current.is_some() {
            if ended == BLOCKS_AT_ONCE {
                self.repairs.due = Some(Instant::now());
                return;
            }
            if !self.has_current() {
                return;
            }
            self.read_more();
            self.write_arrived();
            self.read_next();
            if !self.end_block() {
                return;
            }
            ended += 1;
        }
    }

    /// Makes places usable again that copies have left, once no thread has a request there, and
    /// then looks for copies that have found no room. Nothing is woken by what other threads note.
    fn reclaim(&mut self) {
        let (repairs, copies) = (&mut self.repairs, self.set.copies());
        if !copies.keeps_places() {
            // The search for a repair, or another drain, may have found them usable.
            if repairs.reclaim_at.take().is_some() {
                repairs.cursor = Some(0);
            }
            return;
        }
        let now = Instant::now();
        if repairs.reclaim_at.is_none_or(|at| at <= now) {
            if copies.reclaim_kept() {
                repairs.reclaim_at = None;
                repairs.cursor = Some(0);
                return;
            }
            repairs.reclaim_at = Some(now + RECLAIM_INTERVAL);
        }
        repairs.due = repairs.due.into_iter().chain(repairs.reclaim_at).min();
    }

    fn readmit(&mut self) {
        for donor in 0..self.members.len() {
            let Member { out, has_left, .. } = self.members[donor];
            if !out || has_left || self.set.is_down(donor) {
                continue;
            }
            if !self.members[donor].is_idle() {
                // Late answers come first.
                continue;
            }
            let times = self.repairs.readmissions.get(donor);
            let not_before = times.and_then(|readmission| readmission.not_before);
            if let Some(at) = not_before.filter(|&at| at > Instant::now()) {
                self.repairs.due = Some(self.repairs.due.map_or(at, |due| due.min(at)));
                continue;
            }
            let id = u8::try_from(donor).expect("at most 64 donors");
            if self.set.copies().readmit(id) {
                // It may have missed nothing.
                self.repairs.has_repaired |= self.set.copies().blocks_at(id) > 0;
                self.members[donor].out = false;
                self.set.note_readmitted();
            }
        }
    }

    /// Finds the next block to be filled, unless there is one; false when there is none.
    fn has_current(&mut self) -> bool {
        let repairs = &mut self.repairs;
        if repairs.current.is_some() {
            return true;
        }
        let Some(cursor) = repairs.cursor else {
            return false;
        };
        let copies = self.set.copies();
        let (repair, is_move) = match copies.begin_repair(cursor) {
            Some(repair) => (repair, false),
            None => {
                // What only an unreachable donor had may be elsewhere by now.
                self.set.settle_links();
                if std::mem::take(&mut repairs.has_repaired) {
                    self.set.report_zones();
                    if copies.degraded() == 0 {
                        self.set.note_complete();
                    }
                }
                // Copies that are missing come first. There are none until something changes.
                repairs.cursor = Some(copies.blocks());
                match copies.begin_move() {
                    NextMove::Begun(repair) => (repair, true),
                    NextMove::Ended { stayed } => {
                        self.set.note_left(stayed);
                        repairs.cursor = None;
                        return false;
                    }
                    NextMove::None => {
                        repairs.cursor = None;
                        return false;
                    }
                }
            }
        };
        if !is_move {
            repairs.cursor = Some(repair.block);
        }
        let sources = match repairs.layout {
            None => {
                let is_it = |&at: &usize| copies.copy(repair.block, at).place == repair.from;
                let at = (0..copies.width()).find(is_it);
                vec![(at.unwrap_or(1 - repair.at), repair.from)]
            }
            Some(layout) => {
                let readable = |at| Some((at, copies.readable_at(repair.block, at)?));
                let all = (0..copies.width()).filter_map(readable);
                let found: Vec<_> = all.take(layout.data()).collect();
                if found.len() < layout.data() {
                    // A donor has just gone out. The copy is found again.
                    if is_move {
                        self.set.give_up_move(&repair);
                    }
                    return false;
                }
                found
            }
        };
        let stored = repairs.stored.of(repair.block);
        copies.fill_holes_except(repair.to, stored);
        let pages = match repair.catches_up {
            true => stored.and(copies.missed_at(repair.to)),
            false => stored,
        };
        repairs.current = Some(Current {
            repair,
            sources,
            unsure: 0,
            is_move,
            pages,
            next: pages.next_from(0),
            copying: Vec::with_capacity(REPAIR_REQUESTS_MAX),
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repairs_copy_no_more_than_their_rate() {
        let start = Instant::now();
        let mut repairs = Repairs::new(None);
        let copied = (0..=100_000).filter(|count| {
            let now = start + Duration::from_micros(*count * 10);
            repairs.may_copy(now, 1)
        });
        let copied = copied.count() as u64;
        // In a second; what is less than a page is not saved up.
        let rate = REPAIR_BYTES_PER_SECOND / PAGE_SIZE as u64;
        assert!(copied <= rate && copied > rate / 2, "{copied} of {rate}");
        // No page is copied until this.
        assert!(repairs.due().is_some_and(|due| due > start));
    }
}
