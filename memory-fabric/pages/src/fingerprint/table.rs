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
/// word names it, see [`page_map`](crate::page_map): it is written by the thread that fetches the
/// page, and from then on written, read and freed by the evictor.
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
        zone.store(slot, self.key.of(bytes));
        entry.set_fingerprint(slot);
    }

    /// Computes the fingerprint of bytes.
    #[must_use]
    pub fn of(&self, bytes: &PageBytes) -> Fingerprint {
        self.key.of(bytes)
    }

    /// Evictor: whether the bytes with this fingerprint are those that the page has at home. False
    /// when that is unknown.
    #[must_use]
    pub fn is_at_home(&self, page: PageIndex, state: State, here: Fingerprint) -> bool {
        let Some(slot) = state.fingerprint() else {
            return false;
        };
        let words = self.zone_of(page).words_of(slot);
        let home = Fingerprint([0, 1].map(|half: usize| words[half].load(Ordering::Relaxed)));
        here == home
    }

    /// Evictor, next before it posts the write-back of bytes with this fingerprint: remembers it as
    /// that of the bytes at home. `seen` is the state of the page when its bytes were read. Returns
    /// false when the page was touched since: nothing has changed, and nothing must be posted.
    ///
    /// Until the write-back is confirmed the home may hold either bytes. All the while the page is
    /// in the evictor's table of write-backs, so that no other eviction of it asks.
    #[must_use]
    pub fn replace(
        &self,
        page: PageIndex,
        entry: &PageEntry,
        seen: State,
        sent: Fingerprint,
    ) -> bool {
        let zone = self.zone_of(page);
        let had = seen.fingerprint();
        let Some(slot) = had.or_else(|| zone.free.take(|slot| zone.first_word(slot))) else {
            // None is left: a page that is touched now goes home again.
            return entry.state() == seen;
        };
        let is_current = match had {
            Some(_) => entry.state() == seen,
            None => entry.attach_fingerprint(seen, slot),
        };
        if is_current {
            // Only this thread reads them while the page has the slot.
            zone.store(slot, sent);
        } else if had.is_none() {
            zone.free.put(slot, |slot| zone.first_word(slot));
        }
        is_current
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

    fn store(&self, slot: u32, fingerprint: Fingerprint) {
        for (place, word) in self.words_of(slot).iter().zip(fingerprint.0) {
            // Relaxed here and where they are read: the state word hands the slot on.
            place.store(word, Ordering::Relaxed);
        }
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

    fn is_equal(table: &FingerprintTable, number: u32, entry: &PageEntry, byte: u8) -> bool {
        let here = table.of(&[byte; PAGE_SIZE]);
        table.is_at_home(page(number), entry.state(), here)
    }

    /// A fault takes the page back.
    fn touch(entry: &PageEntry) {
        assert!(entry.begin_install(entry.state()) && !entry.list());
        assert!(!entry.finish_install());
    }

    #[test]
    fn a_page_is_equal_to_what_came_and_to_nothing_else() {
        let table = FingerprintTable::new(2).expect("a small table");
        let entry = fetching();
        let mut bytes = [7; PAGE_SIZE];
        table.remember(page(3), &entry, &bytes);
        let state = leaves(&entry);
        assert!(state.is_dirty() && is_equal(&table, 3, &entry, 7));
        bytes[4095] ^= 128;
        assert!(!table.is_at_home(page(3), state, table.of(&bytes)));
        // A touch in between changes nothing of what is at home.
        touch(&entry);
        let sent = table.of(&bytes);
        assert!(
            !table.replace(page(3), &entry, state, sent),
            "it was touched"
        );
        assert!(entry.begin_probation() && entry.begin_write_back());
        assert!(is_equal(&table, 3, &entry, 7));
    }

    #[test]
    fn a_page_that_is_touched_while_it_is_written_back_is_equal_to_what_was_sent() {
        let table = FingerprintTable::new(2).expect("a small table");
        let never_fetched = PageEntry::new();
        assert!(never_fetched.begin_install(never_fetched.state()));
        for entry in [fetching(), never_fetched] {
            if entry.state().kind() == Kind::Fetching {
                table.remember(page(3), &entry, &[7; PAGE_SIZE]);
            }
            let state = leaves(&entry);
            let sent = table.of(&[8; PAGE_SIZE]);
            assert!(table.replace(page(3), &entry, state, sent));
            touch(&entry);
            assert!(entry.begin_probation() && entry.begin_write_back());
            assert!(is_equal(&table, 3, &entry, 8) && !is_equal(&table, 3, &entry, 7));
        }
    }

    #[test]
    fn a_page_without_a_slot_goes_home_unless_it_was_touched() {
        let table = FingerprintTable::new(1).expect("a small table");
        table.remember(page(2), &fetching(), &[1; PAGE_SIZE]);
        let entry = fetching();
        table.remember(page(3), &entry, &[7; PAGE_SIZE]);
        let state = leaves(&entry);
        let sent = table.of(&[7; PAGE_SIZE]);
        assert!(!is_equal(&table, 3, &entry, 7), "there is one slot");
        assert!(table.replace(page(3), &entry, state, sent));
        touch(&entry);
        assert!(!table.replace(page(3), &entry, state, sent));
    }

    #[test]
    fn a_slot_is_free_again_when_its_page_is_dropped_discarded_or_touched_too_early() {
        let table = FingerprintTable::new(1).expect("a small table");
        let other = fetching();
        for end in 0..3 {
            let entry = fetching();
            if end < 2 {
                table.remember(page(1), &entry, &[1; PAGE_SIZE]);
                assert!(entry.state().fingerprint().is_some(), "{end}");
                table.remember(page(2), &other, &[1; PAGE_SIZE]);
                assert_eq!(other.state().fingerprint(), None, "there is one slot");
            }
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
                    touch(&entry);
                    let sent = table.of(&[1; PAGE_SIZE]);
                    assert!(!table.replace(page(1), &entry, state, sent));
                    entry.state()
                }
            };
            table.release(page(1), before);
            assert_eq!(entry.state().fingerprint(), None, "{end}");
        }
        table.remember(page(2), &other, &[1; PAGE_SIZE]);
        assert!(other.state().fingerprint().is_some(), "the slot is lost");
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
