//! The contended pages that the accesses of a thread needed lately.
//!
//! A thread that has lost a gang needs it again as a whole. Without this it would ask for one page
//! after the other, each when it faults on it, and wait as often for the other node.
//!
//! Nobody sees whether a page that was requested ahead is used. So a page has credit for a few such
//! requests, and gets new credit by a fault only: one that is not needed any longer is soon
//! forgotten.

use fabric_pages::page::PageIndex;

/// Pages of one thread, at most: twice what one instruction needs.
const NEEDS: usize = 64;

/// Requests of a page ahead of its fault, after which its thread has to fault on it again.
pub(super) const CREDIT: u8 = 8;

/// A page that a thread needs.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Need {
    /// The page.
    pub page: PageIndex,
    /// Whether its last fault was a write.
    pub write: bool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Place {
    need: Need,
    credit: u8,
    /// It was requested ahead, and has not come.
    is_asked: bool,
}

/// The pages that a thread needs.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Needs([Option<Place>; NEEDS]);

impl Needs {
    pub(super) const fn new() -> Self {
        Self([None; NEEDS])
    }

    fn place(&mut self, page: PageIndex) -> Option<&mut Place> {
        let mut places = self.0.iter_mut().flatten();
        places.find(|place| place.need.page == page)
    }

    pub(super) fn has(&self, page: PageIndex) -> bool {
        let mut places = self.0.iter().flatten();
        places.any(|place| place.need.page == page)
    }

    /// The thread faults on the page, which has new credit if it is one of these.
    pub(super) fn faulted(&mut self, page: PageIndex, write: bool) {
        if let Some(place) = self.place(page) {
            place.need.write = write;
            place.credit = CREDIT;
            place.is_asked = false;
        }
    }

    /// The thread got a contended page by a fault. It takes the place of the page with the least
    /// credit.
    pub(super) fn add(&mut self, page: PageIndex, write: bool) {
        if self.has(page) {
            return;
        }
        let least = |place: &&mut Option<Place>| place.map_or(0, |place| place.credit + 1);
        if let Some(place) = self.0.iter_mut().min_by_key(least) {
            *place = Some(Place {
                need: Need { page, write },
                credit: CREDIT,
                is_asked: false,
            });
        }
    }

    /// What may be requested ahead.
    pub(super) fn with_credit(&self) -> impl Iterator<Item = Need> + '_ {
        let places = self.0.iter().flatten();
        let places = places.filter(|place| place.credit > 0);
        places.map(|place| place.need)
    }

    /// The page was requested ahead.
    pub(super) fn asked(&mut self, page: PageIndex) {
        if let Some(place) = self.place(page) {
            place.credit = place.credit.saturating_sub(1);
            place.is_asked = true;
        }
    }

    /// Whether the page was requested ahead, and has not come.
    pub(super) fn is_asked(&self, page: PageIndex) -> bool {
        let mut places = self.0.iter().flatten();
        places.any(|place| place.is_asked && place.need.page == page)
    }

    /// The page comes. Returns whether it was requested ahead.
    pub(super) fn take_asked(&mut self, page: PageIndex) -> bool {
        let place = self.place(page);
        place.is_some_and(|place| std::mem::take(&mut place.is_asked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u32) -> PageIndex {
        PageIndex::new(number)
    }

    fn pages(needs: &Needs) -> Vec<u32> {
        needs.with_credit().map(|need| need.page.number()).collect()
    }

    #[test]
    fn a_page_is_requested_ahead_until_its_credit_is_used() {
        let mut needs = Needs::new();
        needs.add(page(1), true);
        needs.add(page(2), false);
        for _ in 0..CREDIT {
            assert_eq!(pages(&needs), [1, 2]);
            needs.asked(page(1));
        }
        assert_eq!(pages(&needs), [2]);
        needs.faulted(page(1), false);
        assert_eq!(pages(&needs), [1, 2], "a fault gives new credit");
        needs.faulted(page(3), true);
        assert_eq!(pages(&needs), [1, 2], "a page without contention");
        assert!(needs.with_credit().all(|need| !need.write));
    }

    #[test]
    fn a_page_that_comes_was_asked_for_once() {
        let mut needs = Needs::new();
        needs.add(page(1), true);
        assert!(!needs.take_asked(page(1)));
        needs.asked(page(1));
        assert!(needs.take_asked(page(1)));
        assert!(!needs.take_asked(page(1)));
        needs.asked(page(1));
        needs.faulted(page(1), true);
        assert!(!needs.take_asked(page(1)), "its thread waits for it");
    }

    #[test]
    fn the_page_with_the_least_credit_is_forgotten() {
        let mut needs = Needs::new();
        (0..64).for_each(|number| needs.add(page(number), true));
        needs.asked(page(7));
        needs.add(page(7), true);
        needs.add(page(100), true);
        assert!(!needs.has(page(7)));
        assert!(needs.has(page(100)) && needs.has(page(0)));
        assert_eq!(pages(&needs).len(), NEEDS);
    }
}
