//! What becomes of pages that were not touched on probation: the evictor's part.
//!
//! A clean page is dropped, and so is one that counts as dirty but has the fingerprint of its home's
//! copy; a page of zeroes becomes untouched again. Any other is written back first.
//!
//! Of these, a page of which its home has an older copy leaves after clean pages as old as it: it
//! waits unmapped in a queue of its own. A page that the guest changes again and again, such as the
//! kernel's notes on each page of a file that is read repeatedly, is thus touched before it is
//! written back, although much that is only read passes through local memory in between. New pages
//! would only push such pages out of that queue. The idea of evicting clean pages first is that of
//! CFLRU (Park et al., 2006).

use super::{BATCH, Evictor, PagerError, Shared};
use crate::homes::{Eviction, Home};
use crate::page::{PageIndex, is_zero};
use crate::page_map::Kind;
use crate::stats::Counter;
use crate::transport::{IN_FLIGHT_MAX, Ticket};
use std::sync::Arc;

impl Evictor {
    /// Decides on the pages that were longest on probation, while memory is needed.
    pub(super) fn judge(&mut self) -> Result<bool, PagerError> {
        let shared = Arc::clone(&self.shared);
        let under_way = self.writing.len() - self.free_tickets.len();
        let shortfall = shared.budget.shortfall().saturating_sub(under_way as u64);
        let mut count = usize::try_from(shortfall).unwrap_or(BATCH).min(BATCH);
        let mut worked = false;
        // A page's time on probation is that of passing through the whole queue.
        let probed = self.ranking.probed();
        if probed as u64 >= self.probation_wanted() || self.ranking.mapped() == 0 {
            for _ in 0..count.min(probed) {
                let Some(page) = self.ranking.next_judged(&shared.map) else {
                    break;
                };
                self.judge_page(&shared, page)?;
                worked = true;
            }
        }
        // Their number is limited, and they are the last reserve when nothing else is left.
        if self.ranking.mapped() + self.ranking.probed() > 0 {
            count = count.min(self.ranking.changed_excess());
        }
        for _ in 0..count {
            let Some(page) = self.ranking.next_changed(&shared.map) else {
                break;
            };
            worked |= self.write_back(&shared, page)?;
        }
        self.free_dropped()?;
        for transport in &mut self.transports {
            transport.flush();
        }
        Ok(worked)
    }

    /// Decides on a page that was on probation.
    fn judge_page(&mut self, shared: &Shared, page: PageIndex) -> Result<(), PagerError> {
        let seen = shared.map.entry(page).state();
        if seen.kind() != Kind::Probation {
            self.rescued(page);
            return Ok(());
        }
        let stats = &shared.stats;
        match shared.homes.eviction_of(page) {
            Eviction::Keep => {
                self.set_aside(page);
                Ok(())
            }
            // The guest may not use it: see `fabric::Hotplug`.
            Eviction::Discard => self.evict_unsent(page, Kind::Untouched, &stats.evictions_zero),
            Eviction::WriteBack(_) if !seen.is_dirty() => {
                self.evict_unsent(page, Kind::Remote, &stats.evictions_clean)
            }
            // The page's bytes are local until this thread drops them. A fault may map the page
            // writable meanwhile; then it is no longer on probation, and is kept.
            Eviction::WriteBack(_) => {
                shared.memory.read(page, &mut self.bytes);
                if is_zero(&self.bytes) {
                    return self.evict_unsent(page, Kind::Untouched, &stats.evictions_zero);
                }
                // Home has no copy yet, so it has not changed again.
                if seen.fingerprint().is_none() {
                    self.write_back(shared, page)?;
                    return Ok(());
                }
                let fingerprint = shared.fingerprints.of(&self.bytes);
                if shared.fingerprints.is_at_home(page, seen, fingerprint) {
                    return self.evict_unsent(page, Kind::Remote, &stats.evictions_unchanged);
                }
                self.ranking.changed(&shared.map, page);
                Ok(())
            }
        }
    }

    /// Writes a changed page back, unless it was touched. Returns false when its home is busy,
    /// which must not block pages with other homes.
    fn write_back(&mut self, shared: &Shared, page: PageIndex) -> Result<bool, PagerError> {
        let entry = shared.map.entry(page);
        if entry.state().kind() != Kind::Probation {
            self.rescued(page);
            return Ok(true);
        }
        let Eviction::WriteBack(home) = shared.homes.eviction_of(page) else {
            // Its block was unplugged, or got its home here, in the meantime.
            self.judge_page(shared, page)?;
            return Ok(true);
        };
        let link = shared.homes.link_to_home(home);
        if self.transports[link].in_flight() >= IN_FLIGHT_MAX {
            self.ranking.changed(&shared.map, page);
            return Ok(false);
        }
        self.send_home(shared, page, home, link);
        Ok(true)
    }

    /// Posts the write-back of a page to a home that is not busy, unless the page is touched.
    fn send_home(&mut self, shared: &Shared, page: PageIndex, home: Home, link: usize) {
        let entry = shared.map.entry(page);
        if !entry.begin_write_back() {
            self.rescued(page);
            return;
        }
        let seen = entry.state();
        if seen.kind() != Kind::WritingBack {
            self.rescued(page);
            return;
        }
        // A fault may map the page writable concurrently; then the copy is stale, but the state has
        // changed as well, and the result is not used.
        let bytes = &mut *self.bytes;
        shared.memory.read(page, bytes);
        let fingerprint = shared.fingerprints.of(bytes);
        // A page that is touched while it is on its way keeps this: it is what home holds then.
        if !shared.fingerprints.replace(page, entry, seen, fingerprint) {
            self.rescued(page);
            return;
        }
        let ticket = self
            .free_tickets
            .pop()
            .expect("one for each place on a transport");
        self.transports[link]
            .post_write(Ticket(ticket), home.offset_of(page), bytes)
            .expect("a free place was seen");
        self.writing[ticket as usize] = Some((page, link));
    }

    /// Drops a page on probation without writing it back, unless it is touched in the meantime.
    fn evict_unsent(
        &mut self,
        page: PageIndex,
        to: Kind,
        counter: &Counter,
    ) -> Result<(), PagerError> {
        if self.shared.map.entry(page).begin_drop(Kind::Probation) {
            self.drop_page(page, to)?;
            counter.increment();
        } else {
            self.rescued(page);
        }
        Ok(())
    }
}
