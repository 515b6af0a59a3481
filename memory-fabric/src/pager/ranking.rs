//! Selects the resident page to evict next: the evictor's queues, without any system call.
//!
//! Pages that arrive are *fresh*. The oldest are put on probation; pages that are touched there are
//! *active* from then on, and so are pages that return soon after their eviction. While fresh
//! pages exceed their share, only they are probed. A pass over a large file therefore evicts its
//! own pages, and the active pages are not even unmapped.
//!
//! The idea of a small queue for unproven pages, and of remembering evicted ones, is that of 2Q
//! (Johnson and Shasha, 1994) and S3-FIFO (Yang et al., 2023).

use super::mailbox::{Arrival, EvictorInbox};
use super::queue::PageQueue;
use crate::page::PageIndex;
use crate::page_map::PageMap;

/// Share of the budget that fresh pages keep when active ones fill the rest, as a divisor.
const FRESH_SHARE: u64 = 8;

/// Share of the budget that changed pages may take while they wait to be written back, as a
/// divisor.
const CHANGED_SHARE: u64 = 16;

/// All resident pages except those being written back, and prefetched ones that were not touched.
#[derive(Debug)]
pub(super) struct Ranking {
    /// Mapped pages that were not seen in use twice, oldest first.
    fresh: PageQueue,
    /// Mapped pages that were, oldest first.
    active: PageQueue,
    /// Unmapped pages, oldest first.
    probation: PageQueue,
    /// Unmapped pages that have to be written back, those that were on probation first in front.
    changed: PageQueue,
    /// Limit of changed pages.
    changed_kept: usize,
    /// Fresh pages beyond these are probed before any active one.
    fresh_kept: usize,
}

impl Ranking {
    /// Creates empty queues for a budget of `limit` pages.
    pub fn new(limit: u64) -> Self {
        Self {
            fresh: PageQueue::default(),
            active: PageQueue::default(),
            probation: PageQueue::default(),
            changed: PageQueue::default(),
            changed_kept: usize::try_from(limit / CHANGED_SHARE).unwrap_or(usize::MAX),
            fresh_kept: usize::try_from(limit / FRESH_SHARE).unwrap_or(usize::MAX),
        }
    }

    /// Moves pages that became resident after a touch into the queues.
    pub fn take_in(&mut self, map: &PageMap, inbox: &EvictorInbox) {
        inbox.drain_into(Arrival::Touched, map, &mut self.fresh);
        inbox.drain_into(Arrival::Returned, map, &mut self.active);
    }

    /// Adds a prefetched page that was touched: that is one use, as for any page that arrives.
    pub fn arrived(&mut self, map: &PageMap, page: PageIndex) {
        self.fresh.push(map, page);
    }

    /// Takes the mapped page to probe next.
    pub fn next_mapped(&mut self, map: &PageMap) -> Option<PageIndex> {
        if self.fresh.len() > self.fresh_kept {
            return self.fresh.pop(map);
        }
        self.active.pop(map).or_else(|| self.fresh.pop(map))
    }

    /// Adds a page that is in use.
    pub fn used(&mut self, map: &PageMap, page: PageIndex) {
        self.active.push(map, page);
    }

    /// Adds a page that was unmapped, to see whether it is used.
    pub fn on_probation(&mut self, map: &PageMap, page: PageIndex) {
        self.probation.push(map, page);
    }

    /// Takes the page that was longest on probation.
    pub fn next_judged(&mut self, map: &PageMap) -> Option<PageIndex> {
        self.probation.pop(map)
    }

    /// Adds a page whose bytes are not those at its home.
    pub fn changed(&mut self, map: &PageMap, page: PageIndex) {
        self.changed.push(map, page);
    }

    /// Takes the changed page to write back next.
    pub fn next_changed(&mut self, map: &PageMap) -> Option<PageIndex> {
        self.changed.pop(map)
    }

    /// Returns whether there are fewer changed pages than their share.
    pub fn has_room_for_changed(&self) -> bool {
        self.changed.len() < self.changed_kept
    }

    /// Returns the number of mapped pages.
    pub fn mapped(&self) -> usize {
        self.fresh.len() + self.active.len()
    }

    /// Returns the number of mapped pages known to be used.
    pub fn active(&self) -> usize {
        self.active.len()
    }

    /// Returns the number of pages on probation.
    pub fn probed(&self) -> usize {
        self.probation.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::mailbox::EvictorMailbox;
    use super::*;
    use crate::page_map::Kind;
    use std::collections::{HashMap, HashSet};

    /// A cache with a [`Ranking`], whose user touches pages one by one.
    struct Cache {
        map: PageMap,
        ranking: Ranking,
        mailbox: EvictorMailbox,
        inbox: EvictorInbox,
        /// Time of each page's eviction.
        away: HashMap<u32, u32>,
        limit: usize,
        resident: HashSet<u32>,
        touched: HashSet<u32>,
        fetches: u64,
        /// Pages from this one on change with every touch.
        changing: u32,
        written_back: u64,
    }

    impl Cache {
        fn new(limit: usize) -> Self {
            let (mailbox, inbox) = EvictorMailbox::new().expect("an eventfd");
            Self {
                map: PageMap::new(1 << 20).expect("small"),
                ranking: Ranking::new(limit as u64),
                mailbox,
                inbox,
                away: HashMap::new(),
                limit,
                resident: HashSet::new(),
                touched: HashSet::new(),
                fetches: 0,
                changing: u32::MAX,
                written_back: 0,
            }
        }

        fn touch(&mut self, page: u32) {
            self.touched.insert(page);
            if !self.resident.insert(page) {
                return;
            }
            self.fetches += 1;
            let entry = self.map.entry(PageIndex::new(page));
            assert!(entry.begin_install(entry.state()) && entry.list());
            let _ = entry.finish_install();
            let stamp = self.away.remove(&page);
            let arrival = stamp.map_or(Arrival::Touched, |stamp| self.mailbox.arrival_of(stamp));
            self.mailbox.push(&self.map, PageIndex::new(page), arrival);
            while self.resident.len() > self.limit {
                self.evict_one();
            }
        }

        fn evict_one(&mut self) {
            let (map, ranking) = (&self.map, &mut self.ranking);
            ranking.take_in(map, &self.inbox);
            self.inbox.clock().set_recent(ranking.active());
            while ranking.probed() < self.limit / 8 {
                let Some(page) = ranking.next_mapped(map) else {
                    break;
                };
                // Unmapped: only touches from now on count.
                assert!(map.entry(page).begin_probation());
                self.touched.remove(&page.number());
                ranking.on_probation(map, page);
            }
            let page = ranking.next_judged(map).expect("the cache is full");
            if !self.touched.contains(&page.number()) && page.number() >= self.changing {
                let first = match ranking.has_room_for_changed() {
                    true => None,
                    false => ranking.next_changed(map),
                };
                ranking.changed(map, page);
                if let Some(first) = first {
                    self.leave(first);
                }
                return;
            }
            self.leave(page);
        }

        /// Evicts a page, unless it was touched since it was unmapped.
        fn leave(&mut self, page: PageIndex) {
            let entry = self.map.entry(page);
            if self.touched.contains(&page.number()) {
                assert!(entry.begin_install(entry.state()));
                let _ = entry.finish_install();
                self.ranking.used(&self.map, page);
                return;
            }
            assert!(entry.begin_drop(Kind::Probation));
            let _ = entry.finish_drop(Kind::Untouched);
            self.resident.remove(&page.number());
            self.away.insert(page.number(), self.inbox.clock().tick());
            self.written_back += u64::from(page.number() >= self.changing);
        }

        fn fetches_of(&mut self, pages: impl Iterator<Item = u32>) -> u64 {
            let before = self.fetches;
            pages.for_each(|page| self.touch(page));
            self.fetches - before
        }
    }

    #[test]
    fn one_pass_over_a_large_file_does_not_push_out_the_hot_set() {
        let hot = 0..600;
        let mut cache = Cache::new(1000);
        // The hot set is recognized in a stream of pages that are used once.
        let mut cold = 10_000..;
        for _ in 0..20 {
            hot.clone().for_each(|page| cache.touch(page));
            cold.by_ref().take(200).for_each(|page| cache.touch(page));
        }
        // Ten times the cache is touched while the hot set is idle.
        cold.by_ref()
            .take(10_000)
            .for_each(|page| cache.touch(page));
        let fetched = cache.fetches_of(hot);
        assert!(
            fetched <= 6,
            "{fetched} of 600 hot pages were lost to a scan"
        );
    }

    #[test]
    fn what_changes_in_each_pass_over_a_large_file_is_not_written_back() {
        const NOTES: u32 = 100_000;
        let mut cache = Cache::new(1000);
        cache.changing = NOTES;
        let mut pass = || {
            let before = cache.written_back;
            for page in 0..1600 {
                cache.touch(page);
                cache.touch(NOTES + page / 64);
            }
            cache.written_back - before
        };
        let written: Vec<u64> = (0..6).map(|_| pass()).collect();
        assert_eq!(written, [0; 6]);
    }

    #[test]
    fn a_new_hot_set_replaces_an_old_one() {
        let mut cache = Cache::new(1000);
        let mut cold = 100_000..;
        let mut live_on = |cache: &mut Cache, hot: std::ops::Range<u32>| {
            for _ in 0..60 {
                hot.clone().for_each(|page| cache.touch(page));
                cold.by_ref().take(100).for_each(|page| cache.touch(page));
            }
            cache.fetches_of(hot)
        };
        live_on(&mut cache, 0..700);
        let fetched = live_on(&mut cache, 5000..5700);
        assert!(fetched <= 35, "{fetched} of 700 pages of the new hot set");
    }

    #[test]
    fn nothing_is_lost_between_the_queues() {
        let mut cache = Cache::new(64);
        let mut random = 1_u32;
        for _ in 0..20_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            cache.touch((random >> 20) % 200);
        }
        let (map, ranking) = (&cache.map, &mut cache.ranking);
        ranking.take_in(map, &cache.inbox);
        let mut left = HashSet::new();
        while let Some(page) = ranking
            .next_mapped(map)
            .or_else(|| ranking.next_judged(map))
            .or_else(|| ranking.next_changed(map))
        {
            assert!(left.insert(page.number()), "{page} twice");
        }
        assert_eq!(left, cache.resident);
    }
}
