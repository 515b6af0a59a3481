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

use super::{BATCH, Evictor, PagerError, Ranking, Shared};
use crate::homes::{Eviction, Home, HomeTable};
use crate::page::{PageIndex, is_zero};
use crate::page_map::{Kind, PageMap};
use crate::pager::found::failed;
use crate::stats::Counter;
use crate::transport::Ticket;
use std::sync::Arc;

impl Evictor {
    /// Decides on the pages that were longest on probation, while memory is needed.
    pub(super) fn judge(&mut self) -> Result<bool, PagerError> {
        let shared = Arc::clone(&self.shared);
        let under_way = self.writing.len() - self.free_tickets.len();
        let shortfall = shared.budget.shortfall().saturating_sub(under_way as u64);
        let count = usize::try_from(shortfall).unwrap_or(BATCH).min(BATCH);
        // A page's time on probation is that of passing through the whole queue.
        let probed = self.ranking.probed();
        if (probed as u64) < self.probation_wanted() && self.ranking.mapped() > 0 {
            return Ok(false);
        }
        let mut worked = false;
        for _ in 0..count.min(probed) {
            let Some(page) = self.ranking.next_judged(&shared.map) else {
                break;
            };
            worked |= self.judge_page(&shared, page)?;
        }
        // Changed pages are the last reserve when nothing else is left.
        let is_last = self.ranking.mapped() + self.ranking.probed() == 0;
        for _ in 0..if is_last { count } else { 0 } {
            let Some(page) = self.ranking.next_changed(&shared.map) else {
                break;
            };
            worked |= self.leave_or(&shared, page, Ranking::changed)?;
        }
        self.free_dropped()?;
        for transport in &mut self.transports {
            transport.flush();
        }
        Ok(worked)
    }

    /// Decides on a page that was on probation. Returns false when it has to stay there because
    /// its home, or that of a page that has to leave before it, is busy.
    fn judge_page(&mut self, shared: &Shared, page: PageIndex) -> Result<bool, PagerError> {
        let seen = shared.map.entry(page).state();
        if seen.kind() != Kind::Probation {
            self.rescued(page);
            return Ok(true);
        }
        let stats = &shared.stats;
        let (to, counter) = match shared.homes.eviction_of(page) {
            Eviction::Keep => {
                self.set_aside(page);
                return Ok(true);
            }
            // The guest may not use it: see `fabric::Hotplug`.
            Eviction::Discard => (Kind::Untouched, &stats.evictions_zero),
            Eviction::WriteBack(_) if !seen.is_dirty() => (Kind::Remote, &stats.evictions_clean),
            // The page's bytes are local until this thread drops them. A fault may map the page
            // writable meanwhile; then it is no longer on probation, and is kept.
            Eviction::WriteBack(_) => {
                let read = shared.memory.read_unmapped(page, &mut self.bytes);
                read.map_err(failed("READ", page))?;
                if is_zero(&self.bytes) {
                    (Kind::Untouched, &stats.evictions_zero)
                } else if seen.fingerprint().is_none() {
                    // Home has no copy yet, so it has not changed again.
                    return self.leave_or(shared, page, Ranking::on_probation);
                } else {
                    let fingerprint = shared.fingerprints.of(&self.bytes);
                    if !shared.fingerprints.is_at_home(page, seen, fingerprint) {
                        return self.defer(shared, page);
                    }
                    (Kind::Remote, &stats.evictions_unchanged)
                }
            }
        };
        self.evict_unsent(page, to, counter)?;
        Ok(true)
    }

    /// Adds a page to those that have changed. When there is no room, the first of them leaves; if
    /// its home is busy, the page stays on probation. So no more pages are unmapped than can leave.
    fn defer(&mut self, shared: &Shared, page: PageIndex) -> Result<bool, PagerError> {
        if !self.ranking.has_room_for_changed() {
            let Some(first) = self.ranking.next_changed(&shared.map) else {
                return self.leave_or(shared, page, Ranking::on_probation);
            };
            if !self.leave_or(shared, first, Ranking::changed)? {
                self.ranking.on_probation(&shared.map, page);
                return Ok(false);
            }
        }
        self.ranking.changed(&shared.map, page);
        Ok(true)
    }

    /// Writes a page back, unless it was touched. When its home is busy or its block is moving, which
    /// must not block pages with other homes, the page is put at the end of a queue, and this returns
    /// false.
    fn leave_or(
        &mut self,
        shared: &Shared,
        page: PageIndex,
        put: fn(&mut Ranking, &PageMap, PageIndex),
    ) -> Result<bool, PagerError> {
        if shared.map.entry(page).state().kind() != Kind::Probation {
            self.rescued(page);
            return Ok(true);
        }
        match shared.homes.eviction_of(page) {
            // Its block got its home here in the meantime.
            Eviction::Keep => self.set_aside(page),
            // Its block was unplugged in the meantime.
            Eviction::Discard => {
                let counter = &shared.stats.evictions_zero;
                self.evict_unsent(page, Kind::Untouched, counter)?;
            }
            Eviction::WriteBack(home) => {
                let link = shared.homes.link_to_home(home);
                let is_held = self.relocation.holds(HomeTable::block_of(page));
                let most = self.relocation.in_flight_for_write_backs();
                let transport = &self.transports[link];
                // The block is marked as lost after the transport was removed, or moves elsewhere.
                if is_held || transport.is_vacant() || transport.in_flight() >= most {
                    put(&mut self.ranking, &shared.map, page);
                    return Ok(false);
                }
                self.send_home(shared, page, home, link)?;
            }
        }
        Ok(true)
    }

    /// Posts the write-back of a page to a home that is not busy, unless the page is touched.
    fn send_home(
        &mut self,
        shared: &Shared,
        page: PageIndex,
        home: Home,
        link: usize,
    ) -> Result<(), PagerError> {
        let entry = shared.map.entry(page);
        if !entry.begin_write_back() {
            self.rescued(page);
            return Ok(());
        }
        let seen = entry.state();
        if seen.kind() != Kind::WritingBack {
            self.rescued(page);
            return Ok(());
        }
        // A fault may map the page writable concurrently; then the copy is stale, but the state has
        // changed as well, and the result is not used.
        let bytes = &mut *self.bytes;
        let read = shared.memory.read_unmapped(page, bytes);
        read.map_err(failed("READ", page))?;
        let fingerprint = shared.fingerprints.of(bytes);
        // A page that is touched while it is on its way keeps this: it is what home holds then.
        if !shared.fingerprints.replace(page, entry, seen, fingerprint) {
            self.rescued(page);
            return Ok(());
        }
        let ticket = self
            .free_tickets
            .pop()
            .expect("one for each place on a transport");
        self.transports[link]
            .post_write(Ticket(ticket), home.offset_of(page), bytes)
            .expect("a free place was seen");
        self.writing[ticket as usize] = Some((page, link));
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::homes::{BLOCK_PAGES, NodeId};
    use crate::page::{PAGE_SIZE, PageRange};
    use crate::pager::testing;
    use crate::transport::vacant::Vacant;
    use std::sync::Arc;

    #[test]
    fn a_page_whose_home_has_no_transport_any_more_stays() {
        let ram = PageRange::new(PageIndex::new(0), BLOCK_PAGES);
        let homes = HomeTable::new(NodeId(0), &[ram], None);
        let (shared, inboxes) = testing::shared(homes, 64, 1);
        let home = Home {
            node: shared.nodes.node_at(0),
            slot: 0,
        };
        shared.homes.assign(0, home);
        let transports = vec![Box::new(Vacant) as Box<_>];
        let mut evictor = Evictor::new(Arc::clone(&shared), transports, inboxes.evictor);
        let page = PageIndex::new(5);
        shared
            .memory
            .write(page, &[7; PAGE_SIZE])
            .expect("there is memory");
        let entry = shared.map.entry(page);
        assert!(entry.begin_install(entry.state()) && entry.list());
        assert!(!entry.finish_install());
        assert!(entry.begin_probation());
        let left = evictor.leave_or(&shared, page, Ranking::on_probation);
        assert!(!left.expect("nothing is posted"));
        assert_eq!(shared.map.entry(page).state().kind(), Kind::Probation);
    }
}
