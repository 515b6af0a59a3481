//! Whether the accesses of a node progress, and how long the pages that they need are held.
//!
//! User space sees faults and no instructions. A thread that gets a page and faults again at once is
//! still in the access that needed the page. If it then finds that it lost one of the pages that it got
//! for this access, it lost that page *early*.
//!
//! An access can need many pages at once, which its thread gets one after the other. They are a *gang*:
//! their holds end together, when the thread has run for [`RUN_FACTOR`] times as long as it takes to
//! collect them from nodes that do not hold them. So the hold follows the number of pages and the
//! latency of the links, and the time that a node spends on moving the pages stays a fraction of its
//! turn. A thread that waits for its next page keeps the others for a limited time: the node that has
//! the next one may wait for them. A vCPU that halts has used what it got ([`Progress::halts`]).
//!
//! A thread that lost a gang and gets one of its pages back gets the others at once
//! ([`Progress::gather`]): its node requests them ahead, and holds what comes as part of the gang.
//!
//! A host that has other work delays threads. So the caller also passes how much processor time a
//! thread has had, as far as it knows: a thread that has hardly run since it got a page has not used
//! it, however long ago that was.
//!
//! Times are in any unit since any origin, as the caller has them; there is no clock here.

mod needs;
#[cfg(test)]
mod tests;
mod thread;

use std::cmp::Ordering;

use fabric_pages::page::PageIndex;

use crate::message::HOLD_MAX;
use crate::mutation::{Switch, mutated};
pub use needs::Need;
use thread::{Gang, Thread, Wait, ran};

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

/// One of so many waits is quick: no other node holds the page.
const QUICK_PART: u64 = 4;

/// The part of the usual wait for a page that is the unit of holds where links or hosts are slow.
const WAIT_PART: u64 = 4;

/// The part of a quick wait for which a thread may run between two pages of one access, and of the
/// longest time of a gang at most. What makes the waits long, a slow host, also makes each entry into
/// the guest long.
const STEP_PART: u64 = 2;
const STEP_BOUND: u64 = 64;

/// Nodes of a VM that request ahead, at most. Requests wait at the directory of each page, also
/// when their node has lost the page that it got first. Where several nodes wait, most of what
/// comes is of no use then: 3 nodes had half as many turns with it as without.
pub const GATHERING_MEMBERS_MAX: usize = 2;

/// Threads that are remembered: more than a VM has vCPUs and devices.
const THREADS: usize = 512;

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
    /// The lower quartile of them, roughly, since the first one.
    quick: Option<u64>,
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
            quick: None,
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
        let step = self.step();
        let Some(thread) = self.thread(id, now) else {
            return Seen::default();
        };
        let had_halted = std::mem::take(&mut thread.is_halted);
        let continues = match thread.wait {
            Some(wait) => wait.continues,
            None if had_halted => false,
            None if now.saturating_sub(thread.woken_at) < step => true,
            // It was woken long ago, and may not have run since.
            None => ran(thread, run).is_some_and(|ran| ran < step),
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
            write: false,
        });
        thread.lost(page)
    }

    /// The vCPU of a thread is halted: it has used all pages that it got, and needs none of them
    /// until an interrupt comes.
    pub fn halts(&mut self, id: u32, now: u64) {
        let is_it = |thread: &&mut Thread| thread.id == id && thread.wait.is_none();
        let Some(thread) = self.threads.iter_mut().find(is_it) else {
            // It has run again meanwhile, or has no page.
            return;
        };
        if mutated!(self, HoldWhileHalted) {
            return;
        }
        thread.is_halted = true;
        if let Some(gang) = &mut thread.gang {
            gang.until = gang.until.min(now);
        }
    }

    /// Whether the fault for which a thread waits is a write.
    pub fn wants(&mut self, id: u32, write: bool) {
        let thread = self.threads.iter_mut().find(|thread| thread.id == id);
        if let Some(wait) = thread.and_then(|thread| thread.wait.as_mut()) {
            wait.write = write;
        }
    }

    /// A thread was woken for a page. If it lately needed that page with others, `ahead` gets
    /// these, to be requested at once: who had them gives up all when it gives up one. Returns the
    /// thread and whether its access lost a page. [`Self::asked`] notes what was requested.
    ///
    /// Not before the first page is there: nodes that need the same pages would each get some, and
    /// wait for the others.
    pub fn gather(&mut self, page: PageIndex, ahead: &mut Vec<Need>) -> Option<(u32, bool)> {
        let has_it = |thread: &&mut Thread| {
            thread.wait.is_none() && thread.woken_for == Some(page) && thread.needs.has(page)
        };
        let thread = self.threads.iter_mut().find(has_it)?;
        thread.needs.faulted(page, thread.woken_to_write);
        let others = thread.needs.with_credit();
        ahead.extend(others.filter(|need| need.page != page));
        Some((thread.id, thread.lost > 0))
    }

    /// A page was requested that a thread needs, and on which it has not faulted.
    pub fn asked(&mut self, id: u32, page: PageIndex) {
        if let Some(thread) = self.threads.iter_mut().find(|thread| thread.id == id) {
            thread.needs.asked(page);
        }
    }

    /// The unit of holds: time in which a thread that got a page and runs has used it.
    fn unit(&self) -> u64 {
        self.unit_min
            .max((self.usual / WAIT_PART).min(self.longest / 1024))
    }

    /// A thread that ran for less between two pages is still collecting. On a host that other work
    /// delays, a thread is charged for time in which it did not get into the guest: with the unit alone,
    /// no page was ever lost early there, so none was held, and no access was done.
    fn step(&self) -> u64 {
        if mutated!(self, StepOfUnit) {
            return self.unit();
        }
        let quick = self.quick.unwrap_or(0);
        let step = (quick / STEP_PART).min(self.longest / STEP_BOUND);
        self.unit().max(step)
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
                if thread.needs.is_asked(page) {
                    thread.got(page);
                }
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
            // And three times as many longer than the lower quartile as are shorter.
            let quick = self.quick.unwrap_or(waited);
            let step = quick / 32 + 1;
            self.quick = Some(match waited.cmp(&quick) {
                Ordering::Greater => quick + step,
                Ordering::Equal => quick,
                Ordering::Less => quick.saturating_sub((QUICK_PART - 1) * step),
            });
            // Or what was requested ahead came first.
            let is_begun = thread.gang.is_some_and(|gang| gang.began >= wait.since);
            let continues = wait.continues || is_begun;
            if let Some(gang) = thread.gang.as_mut().filter(|_| continues) {
                gang.collected += waited.min(now - gang.began);
                gang.pages += 1;
            }
            thread.woken_for = Some(page);
            thread.woken_to_write = wait.write;
            thread.continued = continues;
            thread.woken_at = now;
            thread.had_run = None;
            thread.got(page);
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
        let quick = self.quick();
        let mut since = now;
        self.held.retain(|held| {
            if held.page == page {
                since = held.since;
            }
            held.page != page
        });
        let has_it = |thread: &Thread| thread.wait.is_none() && thread.woken_for == Some(page);
        let waited = self.threads.iter().position(has_it);
        let mut threads = self.threads.iter_mut();
        let ahead = threads.position(|thread| thread.needs.take_asked(page));
        let is_ahead = waited.is_none() && !mutated!(self, ForgetAhead);
        let by = waited.or(ahead.filter(|_| is_ahead));
        if let Some(thread) = by.and_then(|place| self.threads.get_mut(place)) {
            if !is_ahead {
                thread.needs.add(page, thread.woken_to_write);
            }
            let old = thread.gang;
            let continues = thread.continues(is_ahead);
            let is_open =
                |gang: &Gang| (continues || now < gang.until) && now < gang.began + longest;
            let mut gang = old.filter(is_open).unwrap_or(Gang {
                began: now,
                collected: 0,
                pages: 0,
                until: now,
            });
            // What the thread collected before the new gang ends with the old one.
            if let Some(Gang { until, .. }) = old.filter(|old| old.began != gang.began) {
                let mine = self.held.iter_mut().filter(|held| held.by == by);
                mine.for_each(|held| (held.by, held.until) = (None, until));
            }
            if is_ahead {
                // The thread may run already, so that it waits for none of these.
                gang.collected = gang.collected.max(now - gang.began);
                gang.pages += 1;
            } else {
                thread.had_run = run(thread.id);
            }
            let turn = if continues || is_ahead {
                RUN_FACTOR * gang.cost(quick)
            } else {
                0
            };
            let until = least.max(now + turn).max(gang.until);
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
            let (step, patience) = (self.step(), self.patience());
            let thread = by.and_then(|by| self.threads.get_mut(by));
            let waits_to_run =
                thread.is_some_and(|thread| thread.waits_to_run(step, patience, now, &mut run));
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
        let (step, patience) = (self.step(), self.patience());
        let thread = self.threads.iter_mut().find(|thread| thread.id == id);
        is_over && !thread.is_some_and(|thread| thread.waits_to_run(step, patience, now, run))
    }

    /// When [`Self::is_settled`] may be, unless the thread waits again before; `None` while it waits.
    #[must_use]
    pub fn settles_at(&self, id: u32) -> Option<u64> {
        let Some(thread) = self.threads.iter().find(|thread| thread.id == id) else {
            return Some(0);
        };
        let runs = thread.wait.is_none();
        let until = thread.gang.map_or(0, |gang| gang.until);
        runs.then_some(until.max(thread.woken_at + self.step()))
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

    /// What a page takes that no other node holds.
    fn quick(&self) -> u64 {
        if mutated!(self, CountHolds) {
            return u64::MAX;
        }
        self.quick.unwrap_or(0).max(self.unit_min)
    }

    fn end(&self, held: &Held) -> u64 {
        let thread = held.by.and_then(|place| self.threads.get(place));
        let Some((thread, gang)) = thread.and_then(|thread| Some((thread, thread.gang?))) else {
            return held.until;
        };
        match thread.wait {
            Some(wait) if thread.continues(true) => {
                let patience = self.patience() + RUN_FACTOR * gang.cost(self.quick());
                let since = wait.since.max(gang.began);
                (since + patience).min(gang.began + self.gang_time())
            }
            // Also what was requested ahead and came after that.
            _ if thread.is_halted => held.since,
            _ => gang.until,
        }
    }

    fn thread(&mut self, id: u32, now: u64) -> Option<&mut Thread> {
        let place = self.threads.iter().position(|thread| thread.id == id);
        let place = place.or_else(|| {
            if id == 0 || self.threads.len() == THREADS {
                return None;
            }
            self.threads.push(Thread::new(id, now));
            Some(self.threads.len() - 1)
        })?;
        self.threads.get_mut(place)
    }
}
