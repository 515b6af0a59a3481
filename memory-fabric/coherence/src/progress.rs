//! Whether the accesses of a node progress, and how long the pages that they need are held.
//!
//! User space sees faults and no instructions. A thread that gets a page and faults again at once is
//! still in the access that needed the page. If it then finds that it lost one of the pages that it got
//! for this access, it lost that page *early*.
//!
//! An access can need many pages at once, which its thread gets one after the other. They are a *gang*:
//! their holds end together, when the thread has run for [`RUN_FACTOR`] times as long as it took to
//! collect them. So the hold follows the number of pages and the latency of the links, and the time
//! that a node spends on moving the pages stays a fraction of its turn. A thread that waits for its next
//! page keeps the others for a limited time: the node that has the next one may wait for them.
//!
//! A host that has other work delays threads. So the caller also passes how much processor time a
//! thread has had, as far as it knows: a thread that has hardly run since it got a page has not used
//! it, however long ago that was.
//!
//! Times are in any unit since any origin, as the caller has them; there is no clock here.

#[cfg(test)]
mod tests;

use fabric_pages::page::PageIndex;

use crate::message::HOLD_MAX;
use crate::mutation::{Switch, mutated};

/// Time from the first page of a gang to the end of all holds, at most, in units of the minimum hold
/// and in usual waits for a page, whichever is longer: twice to four times what an access of 30 pages
/// needs.
const GANG_UNITS: u64 = 1024;
const GANG_WAITS: u64 = 128;

/// How long a thread runs with a gang, relative to the time that collecting it took.
pub const RUN_FACTOR: u64 = 2;

/// Units, or usual waits, for which a thread that waits for its next page keeps the pages that it has,
/// at least.
const PATIENCE_UNITS: u64 = 16;
const PATIENCE_WAITS: u64 = 4;

/// The part of the usual wait for a page that is the unit of holds where links or hosts are slow.
const WAIT_PART: u64 = 4;

/// A hold ends only when its thread has run for this part of a unit, or the thread has had
/// the time for that in which it would wait for a page.
const RUN_PART: u64 = 4;

/// Pages of a thread that are remembered: more than one instruction needs.
const REMEMBERED: usize = 64;

/// Threads that are remembered: more than a node's vCPUs.
const THREADS: usize = 256;

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Got {
    page: PageIndex,
    /// The thread's accesses that were done when it got the page.
    done: u64,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Wait {
    page: PageIndex,
    since: u64,
    /// The access that got the thread's last page is not done.
    continues: bool,
}

/// Pages that an access collects and holds.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Gang {
    began: u64,
    /// How long the thread waited for pages after the first.
    collected: u64,
    until: u64,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Thread {
    id: u32,
    wait: Option<Wait>,
    /// The page for which it was woken last, and whether that was for the access before.
    woken_for: Option<PageIndex>,
    continued: bool,
    woken_at: u64,
    /// The processor time that it had had when it was woken, once it holds pages.
    had_run: Option<u64>,
    /// How often it ran for so long that its access was done.
    done: u64,
    got: [Option<Got>; REMEMBERED],
    next: usize,
    /// Pages that the access in progress lost early.
    lost: u32,
    gang: Option<Gang>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Held {
    page: PageIndex,
    /// The place of the thread whose gang has the page.
    by: Option<usize>,
    since: u64,
    /// The end of the hold of a page that no known thread waited for.
    until: u64,
}

/// A page whose hold is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Over {
    /// The page.
    pub page: PageIndex,
    /// How long it was held.
    pub held: u64,
}

/// What a fault says about its thread.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Seen {
    /// The access in progress had the page, and lost it.
    pub early: bool,
    /// Pages that the access in progress lost.
    pub lost: u32,
}

/// What is known of the threads of a node, and the pages that it holds.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Progress {
    /// Least unit of holds.
    unit_min: u64,
    /// Longest time of a gang, and of the patience with a thread.
    longest: u64,
    /// The median of the waits for a page, roughly.
    usual: u64,
    threads: Vec<Thread>,
    held: Vec<Held>,
    pub(crate) switch: Switch,
}

impl Progress {
    /// Nothing is known yet. `unit` is the least of the minimum hold, and not 0. No gang is held longer
    /// than `longest`, and no page longer than three times that: the gang's time, and as long at most
    /// until its thread has run.
    #[must_use]
    pub fn new(unit: u64, longest: u64) -> Self {
        Self {
            unit_min: unit,
            longest,
            usual: unit,
            threads: Vec::new(),
            held: Vec::new(),
            switch: Switch::default(),
        }
    }

    /// A thread waits for a page. A thread with number 0 is an unknown one. `run` returns the processor
    /// time of a thread.
    pub fn waits(
        &mut self,
        id: u32,
        page: PageIndex,
        now: u64,
        run: impl FnOnce(u32) -> Option<u64>,
    ) -> Seen {
        let unit = self.unit();
        let Some(thread) = self.thread(id, now) else {
            return Seen::default();
        };
        let continues = match thread.wait {
            Some(wait) => wait.continues,
            None if now.saturating_sub(thread.woken_at) < unit => true,
            // It was woken long ago, and may not have run since.
            None => ran(thread, run).is_some_and(|ran| ran < unit),
        };
        if !continues && thread.wait.is_none() {
            thread.done += 1;
            thread.lost = 0;
        }
        let since = now;
        thread.wait = Some(Wait {
            page,
            since,
            continues,
        });
        let done = thread.done;
        let got = thread
            .got
            .iter_mut()
            .find(|got| got.is_some_and(|got| got.page == page));
        let early = got
            .and_then(Option::take)
            .is_some_and(|got| got.done == done);
        thread.lost = thread.lost.saturating_add(early.into());
        Seen {
            early,
            lost: thread.lost,
        }
    }

    /// Time in which a thread that got a page surely has used it. One that runs for less between two
    /// pages than a part of the wait for each is still collecting.
    fn unit(&self) -> u64 {
        self.unit_min
            .max((self.usual / WAIT_PART).min(self.longest / 1024))
    }

    /// Longest time from the first page of a gang to the end of all holds.
    #[must_use]
    pub fn gang_time(&self) -> u64 {
        if mutated!(self, UnboundedGang) {
            return u64::MAX / 4;
        }
        let time = (self.unit_min * GANG_UNITS).max(self.usual * GANG_WAITS);
        time.min(self.longest)
    }

    /// The page is mapped, and its waiters were woken.
    pub fn woken(&mut self, page: PageIndex, now: u64) {
        for thread in &mut self.threads {
            let Some(wait) = thread.wait.take_if(|wait| wait.page == page) else {
                continue;
            };
            let waited = now.saturating_sub(wait.since);
            // As many waits are longer than the median as are shorter.
            let step = self.usual / 8 + 1;
            self.usual = if waited > self.usual {
                self.usual + step
            } else {
                self.usual.saturating_sub(step)
            };
            if let Some(gang) = thread.gang.as_mut().filter(|_| wait.continues) {
                gang.collected += waited;
            }
            thread.woken_for = Some(page);
            thread.continued = wait.continues;
            thread.woken_at = now;
            thread.had_run = None;
            let done = thread.done;
            thread.next = (thread.next + 1) % REMEMBERED;
            thread.got[thread.next] = Some(Got { page, done });
        }
    }

    /// Begins the hold of a page that was just installed, at the level of its grant, which is not 0.
    /// [`Self::over`] ends it. `run` returns the processor time of a thread.
    pub fn hold(
        &mut self,
        page: PageIndex,
        level: u8,
        now: u64,
        run: impl FnOnce(u32) -> Option<u64>,
    ) {
        let (unit, longest) = (self.unit(), self.gang_time());
        let least = now + (unit << (level.clamp(1, HOLD_MAX) - 1));
        let is_alone = mutated!(self, NoGang);
        let mut since = now;
        self.held.retain(|held| {
            if held.page == page {
                since = held.since;
            }
            held.page != page
        });
        let has_it = |thread: &Thread| thread.wait.is_none() && thread.woken_for == Some(page);
        let by = self.threads.iter().position(has_it);
        if let Some(thread) = by.and_then(|place| self.threads.get_mut(place)) {
            let is_open =
                |gang: &Gang| (thread.continued || now < gang.until) && now < gang.began + longest;
            let old = thread.gang;
            let mut gang = old.filter(is_open).unwrap_or(Gang {
                began: now,
                collected: 0,
                until: now,
            });
            // What the thread collected before the new gang ends with the old one.
            if let Some(Gang { until, .. }) = old.filter(|old| old.began != gang.began) {
                let mine = self.held.iter_mut().filter(|held| held.by == by);
                mine.for_each(|held| (held.by, held.until) = (None, until));
            }
            let turn = if thread.continued {
                RUN_FACTOR * gang.collected
            } else {
                0
            };
            let until = least.max(now + turn).max(gang.until);
            thread.had_run = run(thread.id);
            gang.until = until.min(gang.began + longest);
            thread.gang = Some(gang);
        }
        self.held.push(Held {
            page,
            by: by.filter(|_| !is_alone),
            since,
            until: least,
        });
    }

    /// A page whose hold is over. `run` returns the processor time of a thread.
    pub fn over(&mut self, now: u64, mut run: impl FnMut(u32) -> Option<u64>) -> Option<Over> {
        loop {
            let is_over = |held: &Held| self.end(held) <= now;
            if mutated!(self, NeverEndHold) {
                return None;
            }
            let place = self.held.iter().position(is_over)?;
            let by = self.held[place].by;
            let (unit, patience) = (self.unit(), self.patience());
            let thread = by.and_then(|by| self.threads.get_mut(by));
            let waits_to_run =
                thread.is_some_and(|thread| thread.waits_to_run(unit, patience, now, &mut run));
            if !waits_to_run {
                let Held { page, since, .. } = self.held.swap_remove(place);
                let held = now.saturating_sub(since);
                return Some(Over { page, held });
            }
        }
    }

    /// When the next hold is over, unless a thread waits or is woken before.
    #[must_use]
    pub fn next(&self) -> Option<u64> {
        self.held.iter().map(|held| self.end(held)).min()
    }

    /// Whether a thread has progressed and run with what it has. `run` returns the processor time of a
    /// thread.
    pub fn is_settled(&mut self, id: u32, now: u64, run: impl FnOnce(u32) -> Option<u64>) -> bool {
        let is_over = self.settles_at(id).is_some_and(|at| at <= now);
        let (unit, patience) = (self.unit(), self.patience());
        let thread = self.threads.iter_mut().find(|thread| thread.id == id);
        is_over && !thread.is_some_and(|thread| thread.waits_to_run(unit, patience, now, run))
    }

    /// When [`Self::is_settled`] may be, unless the thread waits again before; `None` while it waits.
    #[must_use]
    pub fn settles_at(&self, id: u32) -> Option<u64> {
        let Some(thread) = self.threads.iter().find(|thread| thread.id == id) else {
            return Some(0);
        };
        let runs = thread.wait.is_none();
        let until = thread.gang.map_or(0, |gang| gang.until);
        runs.then_some(until.max(thread.woken_at + self.unit()))
    }

    /// Whether a thread's starvation token, which it may keep until `until`, is to be returned. `run`
    /// returns the processor time of a thread.
    pub fn is_token_over(
        &mut self,
        id: u32,
        until: u64,
        now: u64,
        run: impl FnOnce(u32) -> Option<u64>,
    ) -> bool {
        if mutated!(self, KeepToken) {
            return false;
        }
        now >= until || self.is_settled(id, now, run)
    }

    /// How long a page may be held, whatever its thread does and however long pages take to come.
    #[cfg(test)]
    pub(crate) fn hold_max(&self) -> u64 {
        3 * self.longest
    }

    fn patience(&self) -> u64 {
        if mutated!(self, NoPatience) {
            return 0;
        }
        let patience = (self.unit_min * PATIENCE_UNITS).max(self.usual * PATIENCE_WAITS);
        // The usual wait contains the holds of other nodes, whose waits contain those of this one.
        // Without a bound each would prolong the other, up to the deadlines of requests.
        if mutated!(self, UnboundedPatience) {
            return patience;
        }
        patience.min(self.longest)
    }

    fn end(&self, held: &Held) -> u64 {
        let thread = held.by.and_then(|place| self.threads.get(place));
        let Some((thread, gang)) = thread.and_then(|thread| Some((thread, thread.gang?))) else {
            return held.until;
        };
        match thread.wait {
            Some(wait) if wait.continues => {
                let patience = self.patience() + RUN_FACTOR * gang.collected;
                (wait.since + patience).min(gang.began + self.gang_time())
            }
            _ => gang.until,
        }
    }

    fn thread(&mut self, id: u32, now: u64) -> Option<&mut Thread> {
        let place = self.threads.iter().position(|thread| thread.id == id);
        let place = place.or_else(|| {
            if id == 0 || self.threads.len() == THREADS {
                return None;
            }
            self.threads.push(Thread {
                id,
                wait: None,
                woken_for: None,
                continued: false,
                woken_at: now,
                had_run: None,
                done: 0,
                got: [None; REMEMBERED],
                next: 0,
                lost: 0,
                gang: None,
            });
            Some(self.threads.len() - 1)
        })?;
        self.threads.get_mut(place)
    }
}

impl Thread {
    /// Whether the thread has not run yet with what it got. Its gang then gets one more unit.
    fn waits_to_run(
        &mut self,
        unit: u64,
        patience: u64,
        now: u64,
        run: impl FnOnce(u32) -> Option<u64>,
    ) -> bool {
        let is_late = now >= self.woken_at + patience;
        let Some(mut gang) = self.gang.filter(|_| self.wait.is_none() && !is_late) else {
            return false;
        };
        let has_run = ran(self, run).is_none_or(|ran| ran >= unit / RUN_PART);
        if has_run {
            return false;
        }
        gang.until = now + unit;
        self.gang = Some(gang);
        true
    }
}

/// The processor time of the thread since it was woken, if that is known.
fn ran(thread: &Thread, run: impl FnOnce(u32) -> Option<u64>) -> Option<u64> {
    let before = thread.had_run?;
    Some(run(thread.id)?.saturating_sub(before))
}
