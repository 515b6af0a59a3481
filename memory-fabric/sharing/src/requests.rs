//! Requests that other nodes take part in.

use std::time::{Duration, Instant};

use fabric_pages::page::PageIndex;

use crate::timers::Deadlines;

/// A request in progress.
#[derive(Clone, Copy)]
struct Open {
    page: PageIndex,
    /// When the fault was read. With the page it names the request.
    since: Instant,
}

/// The requests in progress, and the deadlines of their directories.
pub(crate) struct Requests {
    open: Vec<Open>,
    /// Some are of requests that are over: a page can be in use by another one since.
    unanswered: Deadlines<(PageIndex, Instant)>,
}

impl Requests {
    /// No request. A directory may take `time` to answer one.
    pub(crate) const fn new(time: Duration) -> Self {
        Self {
            open: Vec::new(),
            unanswered: Deadlines::new(time),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// A fault that was read at this time makes a request, or waits for the one in progress.
    pub(crate) fn begin(&mut self, page: PageIndex, since: Instant) {
        if self.open.iter().any(|open| open.page == page) {
            return;
        }
        self.open.push(Open { page, since });
        let open = &self.open;
        self.unanswered
            .begin((page, since), since, |what| !is_open(open, what));
    }

    /// Waiters of the page were woken. Returns since when they waited for another node.
    pub(crate) fn end(&mut self, page: PageIndex) -> Option<Instant> {
        let place = self.open.iter().position(|open| open.page == page)?;
        Some(self.open.swap_remove(place).since)
    }

    /// The next page that has waited for its directory for too long, if it is not answered yet.
    pub(crate) fn overdue(&mut self, now: Instant) -> Option<PageIndex> {
        while let Some(what) = self.unanswered.overdue(now) {
            if is_open(&self.open, what) {
                return Some(what.0);
            }
        }
        None
    }

    /// When to call [`Self::overdue`].
    pub(crate) fn next(&self) -> Option<Instant> {
        self.unanswered.next()
    }
}

fn is_open(open: &[Open], (page, since): (PageIndex, Instant)) -> bool {
    open.iter()
        .any(|one| (one.page, one.since) == (page, since))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_of_a_request_is_not_that_of_the_next_one_of_its_page() {
        let [hot, other] = [1, 2].map(PageIndex::new);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut requests = Requests::new(Duration::from_secs(10));
        requests.begin(hot, at(0));
        requests.begin(hot, at(1));
        requests.begin(other, at(2));
        assert_eq!((requests.len(), requests.next()), (2, Some(at(10))));
        assert_eq!(requests.end(hot), Some(at(0)));
        assert_eq!(requests.end(hot), None);
        requests.begin(hot, at(9));
        assert_eq!(requests.overdue(at(11)), None, "the first one was answered");
        assert_eq!(requests.overdue(at(12)), Some(other));
        assert_eq!(requests.overdue(at(18)), None);
        assert_eq!(requests.overdue(at(19)), Some(hot));
    }

    #[test]
    fn what_is_answered_is_not_kept() {
        let page = PageIndex::new(1);
        let start = Instant::now();
        let mut requests = Requests::new(Duration::from_secs(10));
        for number in 0..1000 {
            requests.begin(page, start + Duration::from_micros(number));
            assert!(requests.end(page).is_some());
        }
        assert_eq!(requests.unanswered.len(), 1);
    }
}
