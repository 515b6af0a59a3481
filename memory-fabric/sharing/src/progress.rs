//! Whether the threads that touch guest memory progress.
//!
//! A thread that loses a page before its instruction is done faults on it again, having run for
//! hardly any time since it got the page. User space does not see instructions, so the time that
//! the thread can have run decides.

use std::time::{Duration, Instant};

use fabric_pages::page::PageIndex;

/// Pages of a thread that are remembered: more than one instruction needs.
const REMEMBERED: usize = 64;

/// Threads that are remembered: more than a node's vCPUs.
const THREADS: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Got {
    page: PageIndex,
    /// What the thread had run when it got the page.
    run: Duration,
}

#[derive(Debug)]
struct Thread {
    id: u32,
    /// The page that it waits for.
    waits_for: Option<PageIndex>,
    woken_at: Instant,
    /// How long it can have run since it was first seen.
    run: Duration,
    got: [Option<Got>; REMEMBERED],
    next: usize,
    /// Faults since it last progressed.
    faults: u32,
}

/// What is known of the threads of this node.
#[derive(Debug)]
pub(crate) struct Progress {
    /// Least time in which a thread that got a page surely has used it.
    progresses_in: Duration,
    threads: Vec<Thread>,
}

/// What a fault says about its thread.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Seen {
    /// The thread had the page, and lost it before it progressed.
    pub(crate) early: bool,
    /// Faults of the thread since it last progressed.
    pub(crate) faults: u32,
}

impl Progress {
    pub(crate) const fn new(progresses_in: Duration) -> Self {
        Self {
            progresses_in,
            threads: Vec::new(),
        }
    }

    /// A thread waits for a page.
    pub(crate) fn waits(&mut self, id: u32, page: PageIndex, now: Instant) -> Seen {
        let Some(thread) = self.thread(id, now) else {
            return Seen::default();
        };
        if thread.waits_for.take().is_none() {
            thread.run += now.saturating_duration_since(thread.woken_at);
        }
        thread.waits_for = Some(page);
        let run = thread.run;
        let got = thread.got.iter().flatten().find(|got| got.page == page);
        let got_at = got.map(|got| got.run);
        let early = got_at.is_some_and(|at| run - at < self.progresses_in);
        let thread = self.thread(id, now);
        let faults = thread.map_or(0, |thread| {
            thread.faults = if early { thread.faults + 1 } else { 0 };
            thread.faults
        });
        Seen { early, faults }
    }

    /// The page is mapped, and its waiters were woken.
    pub(crate) fn woken(&mut self, page: PageIndex, now: Instant) {
        for thread in &mut self.threads {
            if thread.waits_for != Some(page) {
                continue;
            }
            thread.waits_for = None;
            thread.woken_at = now;
            let run = thread.run;
            let same = |got: &Option<Got>| got.is_some_and(|got| got.page == page);
            let place = thread.got.iter().position(same).unwrap_or_else(|| {
                thread.next = (thread.next + 1) % REMEMBERED;
                thread.next
            });
            thread.got[place] = Some(Got { page, run });
        }
    }

    fn thread(&mut self, id: u32, now: Instant) -> Option<&mut Thread> {
        let place = self.threads.iter().position(|thread| thread.id == id);
        let place = place.or_else(|| {
            // A thread id of 0 is an unknown one.
            if id == 0 || self.threads.len() == THREADS {
                return None;
            }
            self.threads.push(Thread {
                id,
                waits_for: None,
                woken_at: now,
                run: Duration::ZERO,
                got: [None; REMEMBERED],
                next: 0,
                faults: 0,
            });
            Some(self.threads.len() - 1)
        })?;
        self.threads.get_mut(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_micros(100);

    #[test]
    fn a_page_that_was_lost_at_once_was_lost_early() {
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let mut progress = Progress::new(WINDOW);
        let [first, second] = [7, 8].map(PageIndex::new);
        assert!(!progress.waits(1, first, at(0)).early);
        progress.woken(first, at(500));
        // Its instruction needs a second page, for which it waits long.
        assert!(!progress.waits(1, second, at(510)).early);
        progress.woken(second, at(90_000));
        let seen = progress.waits(1, first, at(90_020));
        assert_eq!((seen.early, seen.faults), (true, 1));
        progress.woken(first, at(91_000));
        assert_eq!(progress.waits(1, second, at(91_010)).faults, 2);
        progress.woken(second, at(92_000));
        let seen = progress.waits(1, first, at(92_500));
        assert_eq!((seen.early, seen.faults), (false, 0), "it ran for long");
    }

    #[test]
    fn threads_are_told_apart_and_unknown_ones_left_out() {
        let start = Instant::now();
        let mut progress = Progress::new(WINDOW);
        let page = PageIndex::new(1);
        progress.waits(1, page, start);
        progress.woken(page, start);
        assert!(!progress.waits(2, page, start).early);
        assert!(progress.waits(1, page, start).early);
        assert!(!progress.waits(0, page, start).early);
    }
}
