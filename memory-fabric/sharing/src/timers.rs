//! What has to happen at a time: the end of holds, and the deadlines of requests.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric_coherence::{BlockIndex, Directory};
use fabric_pages::page::PageIndex;

use crate::evict::RESERVE;

/// Deadlines of one length: what begins later ends later.
#[derive(Debug)]
pub(crate) struct Deadlines<T> {
    after: Duration,
    waiting: VecDeque<(Instant, T)>,
}

impl<T: Copy> Deadlines<T> {
    pub(crate) const fn new(after: Duration) -> Self {
        Self {
            after,
            waiting: VecDeque::new(),
        }
    }

    /// Begins a wait. Those at the front that are over already are dropped, so that the queue is
    /// not longer than what has begun since the oldest open wait.
    pub(crate) fn begin(&mut self, what: T, now: Instant, is_over: impl Fn(T) -> bool) {
        while self.waiting.front().is_some_and(|(_, what)| is_over(*what)) {
            self.waiting.pop_front();
        }
        self.waiting.push_back((now + self.after, what));
    }

    /// The next wait whose deadline has passed.
    pub(crate) fn overdue(&mut self, now: Instant) -> Option<T> {
        self.next().filter(|at| *at <= now)?;
        self.waiting.pop_front().map(|(_, what)| what)
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.waiting.front().map(|(at, _)| *at)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }
}

/// Write-backs to homes on other nodes at once. Those that a touch cancels are on their way as well, and a
/// program that touches pages as fast as they leave would have any number of them.
pub(crate) const WRITES_MAX: usize = 2 * RESERVE;

/// Requests to homes on other nodes that are not answered yet.
#[derive(Debug)]
pub(crate) struct HomeWaits {
    after: Duration,
    waiting: VecDeque<(Instant, PageIndex, bool)>,
    /// Number of those that write.
    writes: usize,
}

impl HomeWaits {
    pub(crate) const fn new(after: Duration) -> Self {
        Self {
            after,
            waiting: VecDeque::new(),
            writes: 0,
        }
    }

    /// Whether a write of a page is not answered. Its answer would be taken for that of the next one,
    /// while the home has older bytes.
    pub(crate) fn is_writing(&self, page: PageIndex) -> bool {
        let is_it = |(_, what, write): &(Instant, PageIndex, bool)| *write && *what == page;
        self.waiting.iter().any(is_it)
    }

    /// Whether a page may be written to its home now.
    pub(crate) fn may_write(&self, page: PageIndex) -> bool {
        self.writes < WRITES_MAX && !self.is_writing(page)
    }

    pub(crate) fn begin(&mut self, page: PageIndex, write: bool) {
        self.writes += usize::from(write);
        let until = Instant::now() + self.after;
        self.waiting.push_back((until, page, write));
    }

    /// The home answered. Returns whether it was asked.
    pub(crate) fn end(&mut self, page: PageIndex, write: bool) -> bool {
        let is_it = |(_, what, kind): &(Instant, PageIndex, bool)| (*what, *kind) == (page, write);
        let place = self.waiting.iter().position(is_it);
        let was_asked = place.and_then(|place| self.waiting.remove(place)).is_some();
        self.writes -= usize::from(was_asked && write);
        was_asked
    }

    /// Pages that are being read.
    pub(crate) fn reads(&self) -> usize {
        self.waiting.len() - self.writes
    }

    /// A page whose home has not answered in time.
    pub(crate) fn overdue(&self, now: Instant) -> Option<PageIndex> {
        let (until, page, _) = self.waiting.front()?;
        (*until <= now).then_some(*page)
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.waiting.front().map(|(until, ..)| *until)
    }
}

/// Split blocks that are looked at before faults and messages are served again: 8 KiB of entries each.
pub(crate) const SWEEPS_AT_ONCE: usize = 32;

/// Time in which the directory looks once at each of its blocks.
const SWEEP_TIME: Duration = Duration::from_millis(250);

/// Looks at the blocks of a directory, one after the other, while some are split.
#[derive(Debug, Default)]
pub(crate) struct Sweeper {
    block: u32,
    next: Option<Instant>,
}

impl Sweeper {
    pub(crate) fn next(&self, directory: &Directory) -> Option<Instant> {
        self.next.filter(|_| directory.has_split_blocks())
    }

    /// The next block to look at, all of them once in [`SWEEP_TIME`].
    pub(crate) fn turn(&mut self, now: Instant, directory: &Directory) -> Option<BlockIndex> {
        if !directory.has_split_blocks() || self.next.is_some_and(|next| now < next) {
            return None;
        }
        // An interrupted round continues at the next pass.
        self.next.get_or_insert(now);
        let blocks = directory.blocks();
        while self.block < blocks {
            let block = BlockIndex(self.block);
            self.block += 1;
            if directory.is_split(block) {
                return Some(block);
            }
        }
        self.block = 0;
        self.next = Some(now + SWEEP_TIME);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_written_to_its_home_once_at_a_time_and_few_are_at_once() {
        let mut waits = HomeWaits::new(Duration::from_secs(1));
        let [page, other] = [7, 8].map(PageIndex::new);
        waits.begin(page, false);
        assert!(waits.may_write(page), "it is only read");
        waits.begin(page, true);
        assert!(!waits.may_write(page) && waits.may_write(other));
        assert_eq!(waits.reads(), 1);
        assert!(waits.end(page, true) && waits.may_write(page));
        assert!(!waits.end(page, true), "it is not asked any more");
        let first = u32::try_from(WRITES_MAX).expect("small");
        for number in first..2 * first {
            assert!(waits.may_write(other));
            waits.begin(PageIndex::new(number), true);
        }
        assert!(!waits.may_write(other));
        assert_eq!(waits.reads(), 1);
        assert!(waits.end(PageIndex::new(first), true) && waits.may_write(other));
    }

    #[test]
    fn waits_that_are_over_are_forgotten() {
        let start = Instant::now();
        let mut deadlines = Deadlines::new(Duration::from_secs(1));
        for number in 0..5 {
            deadlines.begin(number, start, |older| older != 2);
        }
        assert_eq!(deadlines.overdue(start), None);
        let late = start + Duration::from_secs(1);
        assert_eq!(deadlines.overdue(late), Some(2));
        assert_eq!(deadlines.overdue(late), Some(3));
        assert_eq!(deadlines.overdue(late), Some(4));
        assert_eq!((deadlines.overdue(late), deadlines.next()), (None, None));
    }
}
