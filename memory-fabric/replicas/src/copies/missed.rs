//! Pages that a copy has missed: those written back while its donor was out, or whose write-back it
//! had not confirmed when it went out. When the donor returns with its memory, all other pages of
//! the copy are right, and only these are copied.
//!
//! Only the thread that repairs writes, notes what is missed, and uses donors again, so nothing is
//! missed unseen. What is noted for a copy that has other pages, or more of them, costs a page that
//! is copied needlessly.

use super::{Copies, CopyState};
use crate::placement::Place;
use fabric_homes::BLOCK_PAGES;
use fabric_host::lock;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

const WORDS: usize = (BLOCK_PAGES / u64::BITS) as usize;

/// A bit for each page of a block.
pub(crate) type BlockWords = [u64; WORDS];

/// Pages of a block, a bit each.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct PageSet(BlockWords);

impl PageSet {
    pub const fn of(words: BlockWords) -> Self {
        Self(words)
    }

    fn insert(&mut self, page: u32) {
        self.0[(page / u64::BITS) as usize] |= 1 << (page % u64::BITS);
    }

    pub fn contains(&self, page: u32) -> bool {
        self.0[(page / u64::BITS) as usize] >> (page % u64::BITS) & 1 == 1
    }

    fn with(self, bits: BlockWords) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | bits[word]))
    }

    /// Returns the words, with a bit for each page that is not in the set.
    pub fn others(self) -> impl Iterator<Item = (usize, u64)> {
        self.0.into_iter().map(|word| !word).enumerate()
    }

    /// Returns the pages that both sets have.
    pub fn and(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }

    /// Returns the first page from this one on; the end of the block if there is none.
    pub fn next_from(&self, page: u32) -> u32 {
        (page..BLOCK_PAGES)
            .find(|&page| self.contains(page))
            .unwrap_or(BLOCK_PAGES)
    }
}

/// By places.
type Pages = HashMap<Place, PageSet>;

/// What copies have missed, by their places: nothing in ordinary times.
#[derive(Debug, Default)]
pub(super) struct Missed {
    pages: Mutex<Pages>,
}

impl Missed {
    pub fn lock(&self) -> MutexGuard<'_, Pages> {
        lock(&self.pages)
    }

    /// Forgets what the copy in a place has missed: it has every page, or none that counts.
    pub fn forget(&self, place: Place) {
        self.lock().remove(&place);
    }
}

impl Copies {
    /// Notes that a page of a block is written back without one of its copies, or was not confirmed
    /// there. Only for the thread that repairs.
    pub(crate) fn note_missed(&self, block: u32, at: usize, page: u32) {
        let copy = self.copy(block, at);
        // Of others all that donors have is copied.
        if matches!(
            copy.state,
            CopyState::Valid | CopyState::Behind | CopyState::CatchingUp
        ) {
            let mut pages = self.missed.lock();
            pages.entry(copy.place).or_default().insert(page);
        }
    }

    /// Returns whether a copy whose donor returns needs pages: it has missed some, or has holes, which
    /// others may have.
    pub(super) fn needs_pages(&self, missed: &Pages, place: Place) -> bool {
        missed.contains_key(&place) || self.lacks(place, 0, BLOCK_PAGES)
    }

    /// Returns the pages that a copy which is behind needs: those that it has missed, and its holes.
    pub(crate) fn missed_at(&self, place: Place) -> PageSet {
        let missed = self.missed.lock().get(&place).copied();
        missed.unwrap_or_default().with(self.holes_at(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn place(donor: u8, slot: u32) -> Place {
        Place { donor, slot }
    }

    /// Two blocks on two donors, and one without any.
    fn copies() -> Copies {
        let places = [[place(0, 0), place(1, 0)], [place(0, 1), place(1, 1)]];
        Copies::new(&places, &[2, 2, 2], &[2, 2, 0], &[0, 1, 2])
    }

    fn states(copies: &Copies, at: usize) -> [CopyState; 2] {
        [0, 1].map(|block| copies.copy(block, at).state)
    }

    #[test]
    fn only_copies_that_have_missed_a_page_are_behind_and_need_only_it() {
        use CopyState::{Behind, CatchingUp, Valid};
        let copies = copies();
        assert_eq!(copies.exclude(1), Ok(true));
        copies.note_missed(1, 1, 9);
        copies.note_missed(1, 1, 300);
        assert_eq!(copies.degraded(), 2);
        assert!(copies.readmit(1));
        assert_eq!(states(&copies, 1), [Valid, Behind]);
        assert_eq!(copies.readable(1), [Some(place(0, 1)), None]);
        // A write-back before the repair begins misses it as well.
        assert_eq!(copies.writable_at(1, 1), None);
        copies.note_missed(1, 1, 2);
        let repair = copies.begin_repair(0).expect("it is behind");
        assert!(repair.catches_up && repair.to == place(1, 1));
        assert_eq!(states(&copies, 1), [Valid, CatchingUp]);
        let pages = copies.missed_at(repair.to);
        let all = (0..BLOCK_PAGES).filter(|&page| pages.contains(page));
        assert_eq!(all.collect::<Vec<_>>(), [2, 9, 300]);
        // It goes out again: what it has missed by now is added to what it has not got yet.
        assert_eq!(copies.exclude(1), Ok(true));
        copies.note_missed(1, 1, 4);
        assert!(!copies.end_repair(&repair, &[]));
        assert!(copies.readmit(1));
        assert_eq!(states(&copies, 1), [Valid, Behind]);
        let repair = copies.begin_repair(0).expect("it is behind");
        let pages = copies.missed_at(repair.to);
        assert!([2, 4, 9, 300].iter().all(|&page| pages.contains(page)));
        assert_eq!(copies.writable_at(1, 1), Some(repair.to));
        assert!(copies.end_repair(&repair, &[]));
        assert_eq!((states(&copies, 1), copies.degraded()), ([Valid; 2], 0));
        assert_eq!(copies.missed_at(repair.to), PageSet::default());
    }

    #[test]
    fn a_copy_that_was_not_complete_gets_every_page() {
        use CopyState::{Filling, Stale, Valid};
        let copies = copies();
        // The donor of one copy is lost, and its new place goes out while it is filled.
        assert_eq!(copies.expel(1, crate::copies::Spared::Blocks), Ok(true));
        let repair = copies.begin_repair(0).expect("there is room");
        assert!(!repair.catches_up && repair.to.donor == 2);
        assert_eq!(copies.copy(0, 1).state, Filling);
        assert_eq!(copies.exclude(2), Ok(true));
        copies.note_missed(0, 1, 7);
        assert!(copies.readmit(2));
        assert_eq!(copies.copy(0, 1).state, Stale);
        let again = copies.begin_repair(0).expect("it is stale");
        assert!(!again.catches_up && again.to == repair.to);
        assert!(copies.end_repair(&again, &[]));
        // So does one that was found to be wrong.
        let other = copies.begin_repair(0).expect("the other block");
        assert!(copies.end_repair(&other, &[]));
        assert_eq!(states(&copies, 1), [Valid; 2]);
    }

    #[test]
    fn a_copy_that_is_wrong_gets_every_page_also_if_its_donor_is_out_or_it_is_catching_up() {
        for (returns, begins) in [(false, false), (true, false), (true, true)] {
            let copies = copies();
            assert_eq!(copies.exclude(1), Ok(true));
            copies.note_missed(0, 1, 7);
            assert!(!returns || copies.readmit(1));
            let begun = begins.then(|| copies.begin_repair(0).expect("it is behind"));
            assert!(copies.spoil(0, 1), "reads go to the other one");
            let is_ended = begun.map(|repair| copies.end_repair(&repair, &[]));
            assert_ne!(is_ended, Some(true), "it is not valid");
            assert!(returns || copies.readmit(1));
            assert_eq!(copies.readable(0), [Some(place(0, 0)), None]);
            let repair = copies.begin_repair(0).expect("it is stale");
            assert!(!repair.catches_up && repair.to == place(1, 0));
            assert!(copies.end_repair(&repair, &[]));
            assert_eq!(copies.degraded(), 0);
        }
        let copies = copies();
        assert_eq!(copies.exclude(1), Ok(true));
        assert!(!copies.spoil(0, 0), "it is the only one");
    }

    #[test]
    fn a_hole_is_filled_when_the_donor_returns() {
        let copies = copies();
        copies.add_hole(place(1, 0), 40);
        assert_eq!(copies.exclude(1), Ok(true));
        assert!(copies.readmit(1));
        let repair = copies.begin_repair(0).expect("it has a hole");
        assert!(repair.catches_up);
        assert_eq!(copies.missed_at(repair.to).next_from(0), 40);
    }

    #[test]
    fn a_set_has_the_pages_that_were_inserted_in_order() {
        let mut set = PageSet::default();
        assert_eq!(set.next_from(0), BLOCK_PAGES);
        let pages = [0, 63, 64, 300, BLOCK_PAGES - 1];
        pages.iter().for_each(|&page| set.insert(page));
        let found = (0..BLOCK_PAGES).filter(|&page| set.contains(page));
        assert_eq!(found.collect::<Vec<_>>(), pages);
        let mut next = 0;
        for page in pages {
            next = set.next_from(next);
            assert_eq!(next, page);
            next += 1;
        }
        assert_eq!(set.next_from(next), BLOCK_PAGES);
        let mut bits = [0; WORDS];
        bits[2] = 1 << 5;
        assert!(set.with(bits).contains(133) && !set.contains(133));
        bits[1] = 1;
        let both = set.and(PageSet::of(bits));
        assert_eq!(
            [0, 64, 133].map(|page| both.contains(page)),
            [false, true, false]
        );
    }
}
