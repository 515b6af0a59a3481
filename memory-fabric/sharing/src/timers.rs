//! What has to happen at a time: the end of holds, and the deadlines of requests.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric_coherence::{BlockIndex, Directory};
use fabric_pages::page::PageIndex;

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

/// Requests to homes on other nodes that are not answered yet.
#[derive(Debug)]
pub(crate) struct HomeWaits {
    after: Duration,
    waiting: VecDeque<(Instant, PageIndex, bool)>,
}

impl HomeWaits {
    pub(crate) const fn new(after: Duration) -> Self {
        Self {
            after,
            waiting: VecDeque::new(),
        }
    }

    pub(crate) fn begin(&mut self, page: PageIndex, write: bool) {
        let until = Instant::now() + self.after;
        self.waiting.push_back((until, page, write));
    }

    /// The home answered. Returns whether it was asked.
    pub(crate) fn end(&mut self, page: PageIndex, write: bool) -> bool {
        let is_it = |(_, what, kind): &(Instant, PageIndex, bool)| (*what, *kind) == (page, write);
        let place = self.waiting.iter().position(is_it);
        place.and_then(|place| self.waiting.remove(place)).is_some()
    }

    /// Pages that are being read.
    pub(crate) fn reads(&self) -> usize {
        let reads = self.waiting.iter().filter(|(_, _, write)| !write);
        reads.count()
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
