//! Which threads wait for which pages, for anyone who asks what a vCPU does.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use fabric_pages::page::PageIndex;

/// Threads that are recorded at once, more than a VM has vCPUs and devices; others wait unrecorded.
pub(crate) const THREADS_MAX: usize = 512;

/// The threads that wait. The engine's thread writes; any thread reads.
#[derive(Debug)]
pub struct Waits {
    /// A thread's id, above it the page; 0 while the place is free.
    places: [AtomicU64; THREADS_MAX],
    /// Since when, in ticks of the engine.
    since: [AtomicU64; THREADS_MAX],
    /// No place from this one on was ever used.
    used: AtomicUsize,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            places: std::array::from_fn(|_| AtomicU64::new(0)),
            since: std::array::from_fn(|_| AtomicU64::new(0)),
            used: AtomicUsize::new(0),
        }
    }
}

const fn pack(thread: u32, page: PageIndex) -> u64 {
    thread as u64 | (page.number() as u64) << 32
}

#[allow(clippy::cast_possible_truncation, reason = "the halves of a word")]
const fn unpack(word: u64) -> (u32, PageIndex) {
    (word as u32, PageIndex::new((word >> 32) as u32))
}

impl Waits {
    fn places(&self) -> &[AtomicU64] {
        // Relaxed here and below: each word is complete in itself.
        &self.places[..self.used.load(Ordering::Relaxed)]
    }

    /// A thread waits for a page from now on. A thread with number 0 is an unknown one.
    pub(crate) fn begin(&self, thread: u32, page: PageIndex, now: u64) {
        if thread == 0 {
            return;
        }
        let word = pack(thread, page);
        let mut free = None;
        for (index, place) in self.places().iter().enumerate() {
            let (of, _) = unpack(place.load(Ordering::Relaxed));
            if of == thread {
                free = Some(index);
                break;
            }
            if of == 0 {
                free.get_or_insert(index);
            }
        }
        let index = free.unwrap_or(self.used.load(Ordering::Relaxed));
        if let (Some(place), Some(since)) = (self.places.get(index), self.since.get(index)) {
            since.store(now, Ordering::Relaxed);
            place.store(word, Ordering::Relaxed);
            self.used.fetch_max(index + 1, Ordering::Relaxed);
        }
    }

    /// Whoever waits for the page is woken. Returns whether a recorded thread does.
    pub(crate) fn end(&self, page: PageIndex) -> bool {
        let mut any = false;
        for place in self.places() {
            let word = place.load(Ordering::Relaxed);
            if word != 0 && unpack(word).1 == page {
                place.store(0, Ordering::Relaxed);
                any = true;
            }
        }
        any
    }

    /// The threads that wait for a page, and since when. For the engine's thread.
    pub(crate) fn threads(&self, page: PageIndex) -> impl Iterator<Item = (u32, u64)> {
        let places = self.places().iter().zip(&self.since);
        let words = places.map(|(place, since)| (place.load(Ordering::Relaxed), since));
        let waits = words.filter(move |(word, _)| *word != 0 && unpack(*word).1 == page);
        waits.map(|(word, since)| (unpack(word).0, since.load(Ordering::Relaxed)))
    }

    /// The page for which a thread waits.
    #[must_use]
    pub fn of(&self, thread: u32) -> Option<PageIndex> {
        let words = self.places().iter();
        let mut words = words.map(|place| unpack(place.load(Ordering::Relaxed)));
        let found = words.find(|(of, _)| *of == thread && thread != 0);
        found.map(|(_, page)| page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_waits_until_its_page_is_there() {
        let waits = Waits::default();
        let [one, two] = [0, 9].map(PageIndex::new);
        waits.begin(5, one, 10);
        waits.begin(6, two, 11);
        waits.begin(7, two, 12);
        assert_eq!(
            [5, 6, 8].map(|of| waits.of(of)),
            [Some(one), Some(two), None]
        );
        waits.begin(5, two, 13);
        assert_eq!(waits.of(5), Some(two), "the newest counts");
        assert!(waits.threads(two).eq([(5, 13), (6, 11), (7, 12)]));
        assert!(waits.end(two));
        assert!(!waits.end(two));
        assert_eq!([5, 6, 7].map(|of| waits.of(of)), [None; 3]);
        waits.begin(0, one, 14);
        assert_eq!((waits.of(0), waits.used.load(Ordering::Relaxed)), (None, 3));
    }

    #[test]
    fn more_threads_than_places_wait_unrecorded() {
        let waits = Waits::default();
        for thread in 1..=600 {
            waits.begin(thread, PageIndex::new(thread), 0);
        }
        assert_eq!(waits.of(512), Some(PageIndex::new(512)));
        assert_eq!(waits.of(513), None);
        assert!(waits.end(PageIndex::new(3)));
        waits.begin(513, PageIndex::new(513), 0);
        assert_eq!(waits.of(513), Some(PageIndex::new(513)));
    }
}
