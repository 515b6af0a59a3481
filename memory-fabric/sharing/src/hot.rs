//! The pages that this node got most often because another node had them.
//!
//! One thread counts, without allocation or lock, in a table of fixed size; any thread reads. The
//! table is set-associative, and each set is a space-saving counter (A. Metwally, D. Agrawal, A. El
//! Abbadi, Efficient computation of frequent and top-k elements in data streams, 2005): a page without
//! a place takes that of the least frequent page of its set, and remembers the count of that one as
//! [`HotPage::earlier_max`]: so often at most it was counted before. So a page that is frequent enough
//! is never missing.

use std::sync::atomic::{AtomicU64, Ordering};

use fabric_pages::page::PageIndex;

/// Pages that one set remembers.
const WAYS: usize = 8;

/// Sets, a power of two.
const SETS: usize = 64;

/// How often this node got one page since the page has a place in the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HotPage {
    /// The page.
    pub page: PageIndex,
    /// How often for a read.
    pub reads: u32,
    /// How often for a write, with its bytes or as an upgrade.
    pub writes: u32,
    /// How often at most before.
    pub earlier_max: u32,
}

impl HotPage {
    /// How often the node got the page, at least.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.reads.saturating_add(self.writes)
    }

    const fn count_max(&self) -> u32 {
        self.count().saturating_add(self.earlier_max)
    }
}

/// One place: two words, which the counting thread stores one after the other. A reader that sees the
/// same page before and after has counts of that page.
#[derive(Debug, Default)]
struct Place {
    /// The page and one, or 0 while the place is free; above it the writes.
    page_and_writes: AtomicU64,
    /// The reads; above them the counts before, at most.
    reads_and_earlier: AtomicU64,
}

const fn pack(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

#[allow(clippy::cast_possible_truncation, reason = "the halves of a word")]
const fn unpack(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

impl Place {
    fn get(&self) -> Option<HotPage> {
        // Pairs with `set`: acquire keeps the loads in this order, release the stores in theirs.
        let before = self.page_and_writes.load(Ordering::Acquire);
        let (reads, earlier_max) = unpack(self.reads_and_earlier.load(Ordering::Acquire));
        let (page, writes) = unpack(self.page_and_writes.load(Ordering::Relaxed));
        let page = page.checked_sub(1).filter(|_| unpack(before).0 == page)?;
        Some(HotPage {
            page: PageIndex::new(page),
            reads,
            writes,
            earlier_max,
        })
    }

    fn set(&self, page: &HotPage) {
        let counts = pack(page.reads, page.earlier_max);
        let (of, _) = unpack(self.page_and_writes.load(Ordering::Relaxed));
        let of_page = page.page.number() + 1;
        if of != of_page {
            // Nobody takes the counts of one page for those of the other.
            self.page_and_writes.store(0, Ordering::Release);
        }
        self.reads_and_earlier.store(counts, Ordering::Release);
        let word = pack(of_page, page.writes);
        self.page_and_writes.store(word, Ordering::Release);
    }
}

/// The most frequent pages of a node.
#[derive(Debug)]
pub struct HotPages(Box<[[Place; WAYS]; SETS]>);

impl Default for HotPages {
    fn default() -> Self {
        Self(Box::new(std::array::from_fn(|_| {
            std::array::from_fn(|_| Place::default())
        })))
    }
}

/// Neighbours go to different sets, and so do pages with the same place in their blocks.
const fn set_of(page: PageIndex) -> usize {
    let mixed = page.number().wrapping_mul(0x9e37_79b1);
    (mixed >> (u32::BITS - SETS.ilog2())) as usize
}

impl HotPages {
    /// Counts a page that this node got. Called by one thread.
    pub(crate) fn count(&self, page: PageIndex, write: bool) {
        let set = &self.0[set_of(page)];
        let mut least = (&set[0], u32::MAX, None);
        for place in set {
            let found = place.get();
            let count = found.map_or(0, |found| found.count_max());
            if found.is_some_and(|found| found.page == page) {
                least = (place, count, found);
                break;
            }
            if count < least.1 {
                least = (place, count, None);
            }
        }
        let (place, count, found) = least;
        let mut next = found.unwrap_or(HotPage {
            page,
            reads: 0,
            writes: 0,
            earlier_max: count,
        });
        let counter = if write {
            &mut next.writes
        } else {
            &mut next.reads
        };
        *counter = counter.saturating_add(1);
        place.set(&next);
    }

    /// At most `most` pages, the most frequent first.
    #[must_use]
    pub fn hottest(&self, most: usize) -> Vec<HotPage> {
        let places = self.0.iter().flatten();
        let mut pages: Vec<HotPage> = places.filter_map(Place::get).collect();
        pages.sort_by_key(|page| (std::cmp::Reverse(page.count()), page.page.number()));
        pages.truncate(most);
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_pages_are_found_among_many_others() {
        let pages = HotPages::default();
        let hot = [7, 512, 70_000].map(PageIndex::new);
        for round in 0..10_000 {
            for (page, every) in hot.into_iter().zip([1, 2, 4]) {
                if round % every == 0 {
                    pages.count(page, round % 3 == 0);
                }
            }
            pages.count(PageIndex::new(100_000 + round), true);
        }
        let hottest = pages.hottest(3);
        let found: Vec<PageIndex> = hottest.iter().map(|page| page.page).collect();
        assert_eq!(found, hot);
        for (page, wanted) in hottest.iter().zip([10_000, 5_000, 2_500]) {
            let (count, over) = (page.count(), page.earlier_max);
            assert!(count >= wanted && count - over <= wanted, "{page:?}");
        }
        assert_eq!(
            hottest[0].writes, 3_334,
            "reads and writes are counted separately"
        );
    }

    #[test]
    fn the_table_is_full_without_growing() {
        let pages = HotPages::default();
        for page in 0..100_000 {
            pages.count(PageIndex::new(page), false);
        }
        let all = pages.hottest(usize::MAX);
        assert_eq!(all.len(), WAYS * SETS);
        // Each set counted its part of the touches, no more.
        let sum: u64 = all.iter().map(|page| u64::from(page.count_max())).sum();
        assert_eq!(sum, 100_000);
    }
}
