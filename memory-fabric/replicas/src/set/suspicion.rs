//! Donors that send wrong pieces of pages: they are counted, and are not used any more once there are
//! too many.

use super::{ReplicaEvent, ReplicaSet};
use crate::copies::Spared;
use crate::transport::{page_in, split};
use fabric_host::lock;
use fabric_pages::page::PageBytes;
use std::time::{Duration, Instant};

/// Pages with wrong pieces after which a donor goes out of use: a single one may be a bit that flipped
/// in its memory, which the next write-back of the page corrects, however often it is read until then.
pub(crate) const WRONG_MAX: usize = 3;

/// Interval between reports of a donor, and between attempts to do without it where others are
/// needed as well: each looks at all blocks.
const INTERVAL: Duration = Duration::from_secs(60);
const ATTEMPT_INTERVAL: Duration = Duration::from_secs(1);

/// Says whether a page is what was written back at an offset last, and may overwrite it; `None` if
/// that is not known.
pub type Check = Box<dyn Fn(u64, &mut PageBytes) -> Option<bool> + Send + Sync>;

/// What a donor has sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Suspicion {
    wrong: u64,
    /// The offsets of the first pages that these are of.
    pages: [Option<u64>; WRONG_MAX],
    reported_at: Option<Instant>,
    attempted_at: Option<Instant>,
}

impl Suspicion {
    /// Takes in a wrong piece of the page at an offset. Returns whether that is too much.
    fn add(&mut self, offset: u64) -> bool {
        self.wrong += 1;
        let is_known = self.pages.contains(&Some(offset));
        let free = self.pages.iter_mut().find(|page| page.is_none());
        if let Some(page) = free.filter(|_| !is_known) {
            *page = Some(offset);
        }
        self.is_too_much()
    }

    fn is_too_much(&self) -> bool {
        self.pages.iter().all(Option::is_some)
    }
}

/// Returns whether it is time to do something that was done last at `last`, and notes it.
fn is_due(last: &mut Option<Instant>, now: Instant, interval: Duration) -> bool {
    let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= interval);
    if is_due {
        *last = Some(now);
    }
    is_due
}

impl ReplicaSet {
    /// Sets how pages are checked, where they can be. Later calls have no effect.
    pub fn set_check(&self, check: Check) {
        self.copies.keep_holes();
        let _ = self.check.set(check);
    }

    pub(crate) fn has_check(&self) -> bool {
        self.check.get().is_some()
    }

    /// Returns whether a page is what was written back at an offset last, and may overwrite it;
    /// `None` if that is not known.
    pub(crate) fn is_genuine(&self, offset: u64, page: &mut PageBytes) -> Option<bool> {
        self.check.get()?(offset, page)
    }

    /// A donor sent a piece of the page at an offset that is not what was written last. From the third
    /// page on it goes out of use for good, unless a block needs it.
    pub(crate) fn note_wrong(&self, donor: u8, offset: u64) {
        let (block, _) = split(offset);
        if self.lacks(donor, offset) || self.copies.is_unsure_at(donor, block) {
            return;
        }
        self.wrong_pieces.increment();
        if self.copies.is_out(donor) {
            return;
        }
        let now = Instant::now();
        let (wrong, is_reported, is_attempted) = {
            let mut all = lock(&self.suspicions);
            let suspicion = &mut all[usize::from(donor)];
            let is_too_much = suspicion.add(offset);
            (
                suspicion.wrong,
                is_due(&mut suspicion.reported_at, now, INTERVAL),
                is_too_much && is_due(&mut suspicion.attempted_at, now, ATTEMPT_INTERVAL),
            )
        };
        if is_reported {
            (self.observer)(ReplicaEvent::WrongPieces {
                donor: donor.into(),
                pieces: wrong,
            });
        }
        if is_attempted {
            let reason = format!(
                "it sent {wrong} pieces of pages with other bytes than were written back last: the \
                 donor, its memory or the network to it changed them"
            );
            // Of a donor that a block needs, it is tried again later.
            self.expel(donor.into(), Spared::Pages, &reason);
        }
    }

    /// Returns whether a donor has sent too many wrong pieces, in use or not. It is to be asked before
    /// another one takes its number.
    pub fn is_distrusted(&self, donor: usize) -> bool {
        lock(&self.suspicions)[donor].is_too_much()
    }

    /// Forgets what a donor has sent: another one takes its number.
    pub(super) fn forget_suspicion(&self, donor: usize) {
        lock(&self.suspicions)[donor] = Suspicion::default();
    }

    /// Returns whether the copy of a donor does not have the page at an offset, which it was never
    /// given.
    pub fn lacks(&self, donor: u8, offset: u64) -> bool {
        let (block, in_block) = split(offset);
        self.copies.lacks_at(donor, block, page_in(in_block))
    }

    /// Returns whether a valid copy at another donor has the page at an offset.
    pub fn has_other(&self, donor: u8, offset: u64) -> bool {
        let (block, in_block) = split(offset);
        let mut places = self.copies.readable(block).into_iter().flatten();
        places.any(|place| place.donor != donor && !self.copies.lacks(place, page_in(in_block), 1))
    }

    /// Returns whether a page that a donor sent is lost if it is wrong: no other copy has it, or may
    /// have it, for one was made without it.
    pub fn is_last_of(&self, donor: u8, offset: u64) -> bool {
        let (block, in_block) = split(offset);
        self.copies.has_no_other(donor, block, page_in(in_block))
    }

    /// A page at this offset is not what was written last in the copy of a donor that cannot go out,
    /// since other blocks need it. Returns true when another copy of it is read from now on, and
    /// this one is made again.
    pub fn read_elsewhere(&self, donor: u8, offset: u64) -> bool {
        let (block, _) = split(offset);
        let is_spoiled = self.copies.spoil(block, donor);
        if is_spoiled {
            self.wrong_pieces.increment();
            self.wake();
        }
        is_spoiled
    }
}
