//! Queues of pages, linked through the page map: they need no memory of their own.
//!
//! A page with local bytes is in exactly one place: the arrivals (of three kinds: touched, returned
//! soon after its eviction, and prefetched), one of the evictor's queues, or the evictor's table of
//! write-backs. A fault or a discard that cancels an eviction leaves the page where it is; a flag
//! in the page's state word shows that it is in one of these places.

use crate::page::PageIndex;
use crate::page_map::PageMap;
use std::sync::atomic::{AtomicU32, Ordering};

/// Pages that became resident, on their way to the evictor: a stack to which many threads push and
/// which one thread takes as a whole, so that no page is taken while it is pushed.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// The newest page's number plus one, or 0.
    head: AtomicU32,
}

impl Arrivals {
    /// Adds a page that the caller has listed: it is in no queue, and no other thread adds it.
    pub(super) fn push(&self, map: &PageMap, page: PageIndex) {
        let entry = map.entry(page);
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            entry.set_link(head.checked_sub(1).map(PageIndex::new));
            // Release: the link is visible to the thread that takes the stack.
            match self.head.compare_exchange_weak(
                head,
                page.number() + 1,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Moves all arrivals to the end of `queue`, oldest first.
    pub(super) fn drain_into(&self, map: &PageMap, queue: &mut PageQueue) {
        // Acquire: pairs with the Release of each push.
        let mut next = self
            .head
            .swap(0, Ordering::Acquire)
            .checked_sub(1)
            .map(PageIndex::new);
        let newest = next;
        let mut oldest = None;
        let mut count = 0;
        // Reverses the stack.
        let mut behind = None;
        while let Some(page) = next {
            next = map.entry(page).link();
            map.entry(page).set_link(behind);
            behind = Some(page);
            oldest = Some(page);
            count += 1;
        }
        if let (Some(first), Some(last)) = (oldest, newest) {
            queue.append(map, first, last, count);
        }
    }
}

/// A FIFO queue with one owner.
#[derive(Debug, Default)]
pub(super) struct PageQueue {
    ends: Option<(PageIndex, PageIndex)>,
    length: usize,
}

impl PageQueue {
    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// Returns the page that [`Self::pop`] returns next.
    pub(super) fn first(&self) -> Option<PageIndex> {
        self.ends.map(|(first, _)| first)
    }

    pub(super) fn push(&mut self, map: &PageMap, page: PageIndex) {
        map.entry(page).set_link(None);
        self.append(map, page, page, 1);
    }

    /// Appends a chain whose last page links to nothing.
    fn append(&mut self, map: &PageMap, first: PageIndex, last: PageIndex, count: usize) {
        self.ends = match self.ends {
            None => Some((first, last)),
            Some((head, tail)) => {
                map.entry(tail).set_link(Some(first));
                Some((head, last))
            }
        };
        self.length += count;
    }

    pub(super) fn pop(&mut self, map: &PageMap) -> Option<PageIndex> {
        let (head, tail) = self.ends?;
        self.ends = map.entry(head).link().map(|next| (next, tail));
        self.length -= 1;
        Some(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_leave_in_the_order_in_which_they_came() {
        let map = PageMap::new(100).expect("small");
        let arrivals = Arrivals::default();
        let mut queue = PageQueue::default();
        queue.push(&map, PageIndex::new(90));
        for number in [5, 3, 0, 8] {
            arrivals.push(&map, PageIndex::new(number));
        }
        arrivals.drain_into(&map, &mut queue);
        arrivals.drain_into(&map, &mut queue);
        queue.push(&map, PageIndex::new(91));
        assert_eq!(queue.len(), 6);
        let left: Vec<_> = std::iter::from_fn(|| queue.pop(&map))
            .map(PageIndex::number)
            .collect();
        assert_eq!(left, [90, 5, 3, 0, 8, 91]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn no_arrival_is_lost_between_pushers_and_a_drainer() {
        let map = PageMap::new(4000).expect("small");
        let arrivals = Arrivals::default();
        let mut queue = PageQueue::default();
        std::thread::scope(|scope| {
            for half in 0..2 {
                let (map, arrivals) = (&map, &arrivals);
                scope.spawn(move || {
                    for number in 0..2000 {
                        arrivals.push(map, PageIndex::new(half * 2000 + number));
                    }
                });
            }
            while queue.len() < 4000 {
                arrivals.drain_into(&map, &mut queue);
                std::thread::yield_now();
            }
        });
        let mut left: Vec<_> = std::iter::from_fn(|| queue.pop(&map)).collect();
        left.sort_unstable();
        left.dedup();
        assert_eq!(left.len(), 4000);
    }
}
