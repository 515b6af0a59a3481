//! Requests for pages on which no thread has faulted yet: those that a thread needs with the one
//! that it got.

use fabric_coherence::{GATHERING_MEMBERS_MAX, Need, Touch};
use fabric_pages::page::PageIndex;
use fabric_peers::Peers;

use crate::Failure;
use crate::engine::Engine;

impl<P: Peers> Engine<P> {
    /// A page came: requests what its thread needs with it.
    pub(crate) fn ask_ahead(&mut self, page: PageIndex) -> Result<(), Failure> {
        if self.config.members.iter().count() > GATHERING_MEMBERS_MAX {
            return Ok(());
        }
        let mut needs = std::mem::take(&mut self.spare_needs);
        if let Some((thread, early)) = self.progress.gather(page, &mut needs) {
            for need in &needs {
                self.ask(thread, *need, early)?;
            }
        }
        needs.clear();
        self.spare_needs = needs;
        Ok(())
    }

    fn ask(&mut self, thread: u32, need: Need, early: bool) -> Result<(), Failure> {
        let Need { page, write } = need;
        let can_come = self.cache.may_ask(page, write) && !self.tables.has(page);
        // What waits for memory comes first.
        if !can_come || !self.deferred.is_empty() || !self.has_plenty(1) {
            return Ok(());
        }
        let mut actions = self.actions();
        if self.cache.touch(page, write, early, &mut actions) == Touch::Waiting {
            self.stats.ahead.increment();
            self.requests.begin(page, self.now);
            self.progress.asked(thread, page);
        }
        self.carry_out(actions)
    }
}
