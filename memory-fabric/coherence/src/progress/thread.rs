//! What is known of one thread.

use fabric_pages::page::PageIndex;

use super::Seen;
use super::needs::Needs;

/// A hold ends only when its thread has run for this part of a step, or the thread has had
/// the time for that in which it would wait for a page.
const RUN_PART: u64 = 4;

/// Pages of a thread that are remembered: more than one instruction needs.
const REMEMBERED: usize = 64;

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Got {
    page: PageIndex,
    /// The thread's accesses that were done when it got the page.
    done: u64,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Wait {
    pub(super) page: PageIndex,
    pub(super) since: u64,
    /// The access that got the thread's last page is not done.
    pub(super) continues: bool,
    pub(super) write: bool,
}

/// Pages that an access collects and holds.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Gang {
    pub(super) began: u64,
    /// How long the pages after the first were in coming.
    pub(super) collected: u64,
    /// How many these are.
    pub(super) pages: u64,
    pub(super) until: u64,
}

impl Gang {
    /// How long it takes to collect the pages when no other node holds one: `quick` is what a page
    /// takes then. Of two nodes whose turns contained each other's holds, each would prolong those of
    /// the other.
    pub(super) fn cost(&self, quick: u64) -> u64 {
        self.collected.min(self.pages.saturating_mul(quick))
    }
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Thread {
    pub(super) id: u32,
    pub(super) wait: Option<Wait>,
    /// The page for which it was woken last, and whether that was for the access before.
    pub(super) woken_for: Option<PageIndex>,
    pub(super) woken_to_write: bool,
    pub(super) continued: bool,
    pub(super) woken_at: u64,
    /// The processor time that it had had when it was woken, once it holds pages.
    pub(super) had_run: Option<u64>,
    /// How often it ran for so long that its access was done.
    pub(super) done: u64,
    /// It needs nothing until an interrupt.
    pub(super) is_halted: bool,
    got: [Option<Got>; REMEMBERED],
    next: usize,
    /// Pages that the access in progress lost early.
    pub(super) lost: u32,
    pub(super) gang: Option<Gang>,
    pub(super) needs: Needs,
}

impl Thread {
    pub(super) const fn new(id: u32, now: u64) -> Self {
        Self {
            id,
            wait: None,
            woken_for: None,
            woken_to_write: false,
            continued: false,
            woken_at: now,
            had_run: None,
            done: 0,
            is_halted: false,
            got: [None; REMEMBERED],
            next: 0,
            lost: 0,
            gang: None,
            needs: Needs::new(),
        }
    }

    /// A page came for the access in progress.
    pub(super) fn got(&mut self, page: PageIndex) {
        let done = self.done;
        let is_old = |got: &Option<Got>| got.is_some_and(|got| got.page == page);
        let old = self.got.iter().position(is_old);
        let place = old.unwrap_or_else(|| {
            self.next = (self.next + 1) % REMEMBERED;
            self.next
        });
        self.got[place] = Some(Got { page, done });
    }

    /// The thread needs a page that is not here.
    pub(super) fn lost(&mut self, page: PageIndex) -> Seen {
        let mut got = self.got.iter_mut();
        let got = got.find(|got| got.is_some_and(|got| got.page == page));
        let got = got.and_then(Option::take);
        let early = got.is_some_and(|got| got.done == self.done);
        self.lost = self.lost.saturating_add(early.into());
        Seen {
            early,
            lost: self.lost,
        }
    }

    /// Whether a page that comes belongs to the access that got the page before. `is_ahead`: the
    /// thread has not waited for it.
    pub(super) fn continues(&self, is_ahead: bool) -> bool {
        match self.wait {
            Some(wait) => wait.continues || self.gang.is_some_and(|gang| gang.began >= wait.since),
            None => self.continued && !is_ahead,
        }
    }

    /// Whether the thread has not run yet with what it got. Its gang then gets one more step.
    pub(super) fn waits_to_run(
        &mut self,
        step: u64,
        patience: u64,
        now: u64,
        run: impl FnOnce(u32) -> Option<u64>,
    ) -> bool {
        let is_late = now >= self.woken_at + patience;
        let may_run = self.wait.is_none() && !self.is_halted && !is_late;
        let Some(mut gang) = self.gang.filter(|_| may_run) else {
            return false;
        };
        let has_run = ran(self, run).is_none_or(|ran| ran >= step / RUN_PART);
        if has_run {
            return false;
        }
        gang.until = now + step;
        self.gang = Some(gang);
        true
    }
}

/// The processor time of the thread since it was woken, if that is known.
pub(super) fn ran(thread: &Thread, run: impl FnOnce(u32) -> Option<u64>) -> Option<u64> {
    let before = thread.had_run?;
    Some(run(thread.id)?.saturating_sub(before))
}
