//! Where the fingerprints of resident pages are: 16 bytes for each page of the budget.

use super::slots::FreeSlots;
use super::{Fingerprint, FingerprintKey};
use crate::page::{PageBytes, PageIndex};
use crate::page_map::{PageEntry, SLOTS_MAX, State};
use fabric_host::Mapping;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where a page has no slot in its own zone, there may be free ones in another. Pages are spread
/// over zones by their number; with millions of slots in each, one more in so many is plenty.
const SPARE_SHARE: u64 = 64;

/// The fingerprints of what homes hold of resident pages. A slot belongs to the page whose state
/// word names it, see [`page_map`](crate::page_map): it is written once, by the thread that
/// fetches the page, and read and freed by the evictor.
#[derive(Debug)]
pub struct FingerprintTable {
    key: FingerprintKey,
    /// A state word names one of [`SLOTS_MAX`] slots, which is a budget of 32 GiB; beyond that
    /// there are several zones, and the page's number says which is meant.
    zones: Box<[Zone]>,
}

#[derive(Debug)]
struct Zone {
    free: FreeSlots,
    /// Two for each slot, backed by the host when first written.
    words: Mapping,
}

impl FingerprintTable {
    /// A table for as many pages as the budget allows, with a random key.
    ///
    /// # Errors
    ///
    /// When the host has no random numbers, or no address space.
    pub fn new(pages: u64) -> io::Result<Self> {
        Self::with_zones(pages, SLOTS_MAX)
    }

    fn with_zones(pages: u64, slots_max: u32) -> io::Result<Self> {
        let spare = if pages > slots_max.into() {
            pages / SPARE_SHARE
        } else {
            0
        };
        let zones = (pages + spare).div_ceil(slots_max.into()).max(1);
        let slots = (pages + spare).div_ceil(zones).max(1);
        let slots = u32::try_from(slots).expect("at most `slots_max`");
        let zones = (0..zones).map(|_| Zone::new(slots));
        Ok(Self {
            key: FingerprintKey::random()?,
            zones: zones.collect::<io::Result<_>>()?,
        })
    }

    /// Remembers the bytes that a page has at home. The caller holds the page, `Fetching`, and
    /// `bytes` came from its home; they are private, so that no guest changes them meanwhile.
    pub fn remember(&self, page: PageIndex, entry: &PageEntry, bytes: &PageBytes) {
        let zone = self.zone_of(page);
        // None is left: the page is written back when it counts as dirty.
        let Some(slot) = zone.free.take(|slot| zone.first_word(slot)) else {
            return;
        };
        let Fingerprint(words) = self.key.of(bytes);
        for (place, word) in zone.words_of(slot).iter().zip(words) {
            // Relaxed here and below: the state word hands the slot on.
            place.store(word, Ordering::Relaxed);
        }
        entry.set_fingerprint(slot);
    }

    /// Evictor: whether `bytes` are those that the page has at home. False when that is unknown.
    #[must_use]
    pub fn is_equal(&self, page: PageIndex, state: State, bytes: &PageBytes) -> bool {
        let Some(slot) = state.fingerprint() else {
            return false;
        };
        let words = self.zone_of(page).words_of(slot);
        let here = self.key.of(bytes);
        let home = Fingerprint([0, 1].map(|half: usize| words[half].load(Ordering::Relaxed)));
        here == home
    }

    /// Evictor: frees the slot of a page whose state word was `before`, and does not name it any
    /// more.
    pub fn release(&self, page: PageIndex, before: State) {
        if let Some(slot) = before.fingerprint() {
            let zone = self.zone_of(page);
            zone.free.put(slot, |slot| zone.first_word(slot));
        }
    }

    fn zone_of(&self, page: PageIndex) -> &Zone {
        // Fibonacci hashing (Knuth, volume 3, section 6.4).
        let mixed = page.number().wrapping_mul(0x9e37_79b9);
        let zones = self.zones.len() as u64;
        let zone = (u64::from(mixed) * zones) >> 32;
        &self.zones[usize::try_from(zone).expect("less than there are")]
    }
}

impl Zone {
    fn new(slots: u32) -> io::Result<Self> {
        Ok(Self {
            free: FreeSlots::new(slots),
            words: Mapping::anonymous(slots as usize * size_of::<Fingerprint>())?,
        })
    }

    fn words_of(&self, slot: u32) -> &[AtomicU64] {
        &self.words.words()[2 * slot as usize..][..2]
    }

    fn first_word(&self, slot: u32) -> &AtomicU64 {
        &self.words_of(slot)[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PAGE_SIZE;
    use crate::page_map::Kind;
    use std::collections::HashSet;

    fn page(number: u32) -> PageIndex {
        PageIndex::new(number)
    }

    /// A page that is being fetched.
    fn fetching() -> PageEntry {
        let entry = PageEntry::new();
        assert!(entry.begin_install(entry.state()) && entry.list());
        assert!(!entry.finish_install() && entry.begin_probation());
        assert!(entry.begin_drop(Kind::Probation));
        assert!(!entry.finish_drop(Kind::Remote).is_contended());
        assert!(entry.begin_fetch(entry.state()));
        entry
    }

    /// The page was written, or counts as that, and is on its way out.
    fn leaves(entry: &PageEntry) -> State {
        entry.mark_dirty();
        assert!(entry.list() && !entry.finish_install());
        assert!(entry.begin_probation() && entry.begin_write_back());
        entry.state()
    }

    #[test]
    fn a_page_is_equal_to_what_came_and_to_nothing_else() {
        let table = FingerprintTable::new(2).expect("a small table");
        let entry = fetching();
        let mut bytes = [7; PAGE_SIZE];
        table.remember(page(3), &entry, &bytes);
        let state = leaves(&entry);
        assert!(state.is_dirty() && table.is_equal(page(3), state, &bytes));
        bytes[4095] ^= 128;
        assert!(!table.is_equal(page(3), state, &bytes));
        // A touch in between changes nothing of what is at home.
        assert!(entry.begin_install(state) && !entry.list() && !entry.finish_install());
        assert!(!entry.clear_fingerprint(state), "it was touched");
        assert!(entry.begin_probation() && entry.begin_write_back());
        bytes[4095] ^= 128;
        assert!(table.is_equal(page(3), entry.state(), &bytes));
        // Written back: from here on nothing is known.
        let state = entry.state();
        assert!(entry.clear_fingerprint(state));
        table.release(page(3), state);
        assert!(!table.is_equal(page(3), entry.state(), &bytes));
        assert!(entry.begin_drop(Kind::WritingBack));
        assert_eq!(entry.finish_drop(Kind::Remote).fingerprint(), None);
    }

    #[test]
    fn a_slot_is_free_again_when_its_page_is_dropped_discarded_or_written_back() {
        let table = FingerprintTable::new(1).expect("a small table");
        let other = fetching();
        for end in 0..3 {
            let entry = fetching();
            table.remember(page(1), &entry, &[1; PAGE_SIZE]);
            assert!(entry.state().fingerprint().is_some(), "{end}");
            table.remember(page(2), &other, &[1; PAGE_SIZE]);
            assert_eq!(other.state().fingerprint(), None, "there is one slot");
            let state = leaves(&entry);
            let before = match end {
                0 => {
                    assert!(entry.begin_drop(Kind::WritingBack));
                    entry.finish_drop(Kind::Remote)
                }
                1 => {
                    assert!(entry.begin_discard(state));
                    entry.finish_drop(Kind::Untouched)
                }
                _ => {
                    assert!(entry.clear_fingerprint(state));
                    state
                }
            };
            table.release(page(1), before);
            assert_eq!(entry.state().fingerprint(), None, "{end}");
        }
    }

    #[test]
    fn a_page_fetched_ahead_keeps_its_slot_until_it_is_dropped_untouched() {
        let table = FingerprintTable::new(1).expect("a small table");
        let entry = fetching();
        table.remember(page(9), &entry, &[1; PAGE_SIZE]);
        assert!(entry.list() && entry.finish_ahead(true));
        assert!(entry.state().fingerprint().is_some() && entry.state().is_chained());
        assert!(entry.begin_drop(Kind::Probation));
        assert!(entry.finish_drop(Kind::Remote).fingerprint().is_some());
        assert_eq!(entry.state(), State::new(Kind::Remote));
    }

    #[test]
    fn pages_of_all_zones_find_slots_and_no_two_the_same() {
        // As a budget of more than 32 GiB has them.
        let table = FingerprintTable::with_zones(100_000, 1 << 15).expect("a table");
        assert_eq!(table.zones.len(), 4);
        let mut taken = HashSet::new();
        for number in (0..100_000).map(|number| 5_000_000 + number * 3) {
            let entry = fetching();
            table.remember(page(number), &entry, &[0; PAGE_SIZE]);
            let slot = entry.state().fingerprint().expect("room for every page");
            let zone = table.zone_of(page(number));
            assert!(taken.insert(std::ptr::from_ref(zone.first_word(slot))));
        }
    }
}
