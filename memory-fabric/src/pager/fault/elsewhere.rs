//! Faults on pages of donors that do not answer any more: other homes have the pages, or they are
//! lost.

use super::{FaultThread, Pending};
use crate::page::PageIndex;
use crate::pager::PagerError;
use crate::pager::found::failed;

impl FaultThread {
    /// Serves the faults whose requests to a donor are not answered any more, because its transport
    /// was removed: their pages have other homes by now.
    pub(super) fn serve_elsewhere(&mut self, donor: usize) {
        for ticket in 0..self.fetches.len() {
            let Some(fetch) = self.fetches[ticket].take_if(|fetch| fetch.donor == donor) else {
                continue;
            };
            self.free_tickets
                .push(u32::try_from(ticket).expect("a few donors"));
            // All its waiters are woken when the page is mapped.
            let _ = self.shared.map.entry(fetch.page).abandon_fetch();
            self.uncharge();
            self.deferred.push_back(Pending {
                page: fetch.page,
                write: fetch.write,
                write_protected: false,
                thread: 0,
                read_at: fetch.read_at,
            });
        }
    }

    /// Poisons a lost page that this thread holds, and wakes its waiters.
    pub(super) fn poison(&self, page: PageIndex) -> Result<(), PagerError> {
        let shared = &self.shared;
        let target = shared.memory.guest_page(page);
        let poisoned = shared.uffd.poison(target);
        // A second fault on the page, of a thread that a signal interrupted or of KVM's kernel thread,
        // may have been read before the first was answered.
        if poisoned.map_err(failed("POISON", page))? {
            shared.losses.poisoned.increment();
        }
        if shared.map.entry(page).finish_poison() {
            shared.uffd.wake(target).map_err(failed("WAKE", page))?;
        }
        Ok(())
    }
}
