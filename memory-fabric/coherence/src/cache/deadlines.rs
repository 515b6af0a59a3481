//! Peers that do not answer in time.

use fabric_pages::page::PageIndex;

use super::Cache;
use super::pending::Pending;
use crate::message::Number;
use crate::offence::{Offence, Violation};

impl<const PAGES: usize> Cache<PAGES> {
    /// The deadline of [`crate::action::CacheAction::AnswerDeadline`] has passed.
    ///
    /// # Errors
    /// When a peer that this grant names has still not answered: the first of those that are missing.
    pub fn overdue(&self, page: PageIndex, number: Number) -> Result<(), Offence> {
        let pending = self.pending_of(page);
        let pending = pending.filter(|pending| pending.granted_number() == Some(number));
        let missing = pending
            .filter(|pending| !pending.is_installing && !self.is_stopped)
            .and_then(|pending| pending.missing().first());
        missing.map_or(Ok(()), |peer| Err(Violation::Silent(page).of(peer)))
    }

    /// A request or put of the page has waited as long as the directory may take with a transaction of
    /// every other member before it: [`crate::members::MEMBERS_MAX`] of its deadlines.
    ///
    /// # Errors
    /// When the directory has not answered.
    pub fn unanswered(&self, page: PageIndex) -> Result<(), Offence> {
        let waits = match self.pending_of(page) {
            Some(pending) => pending.granted_number().is_none(),
            None => self.is_putting(page),
        };
        if waits && !self.is_stopped {
            return Err(Violation::Silent(page).of(self.directory(page)));
        }
        Ok(())
    }

    /// The deadline of [`crate::action::CacheAction::PutDeadline`] has passed.
    ///
    /// # Errors
    /// When the directory has still not confirmed this put.
    pub fn put_unanswered(&self, page: PageIndex, number: Number) -> Result<(), Offence> {
        if self.is_putting(page) && self.word(page).number() == number && !self.is_stopped {
            return Err(Violation::Silent(page).of(self.directory(page)));
        }
        Ok(())
    }

    fn pending_of(&self, page: PageIndex) -> Option<Pending> {
        self.find(page).and_then(|place| self.pending[place])
    }

    /// The grant of the request in progress.
    #[cfg(test)]
    pub(crate) fn granted_number(&self, page: PageIndex) -> Option<Number> {
        self.pending_of(page)?.granted_number()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::CacheAction;
    use crate::cache::{Evict, Written};
    use crate::members::{Member, MemberSet};
    use crate::message::{Grant, Message, Right, Source};

    const PAGE: PageIndex = PageIndex::new(1);

    fn member(place: u8) -> Member {
        Member::at(place).expect("a place")
    }

    /// Member 0, whose directory is on member 1, writes the page. Returns the actions after the grant,
    /// which names member 2 as the owner.
    fn granted(cache: &mut Cache, number: Number) -> Vec<CacheAction> {
        cache.touch(PAGE, true, false, &mut Vec::new());
        let mut actions = Vec::new();
        let grant = Message::Grant(Grant {
            page: PAGE,
            number,
            right: Right::Exclusive,
            source: Source::Member(member(2)),
            acks: MemberSet::EMPTY,
            hold: 0,
        });
        cache
            .handle(member(1), &grant, &mut actions)
            .expect("asked");
        actions
    }

    #[test]
    fn a_peer_is_not_blamed_for_an_earlier_request_of_the_page() {
        let members = (0..3).map(member).fold(MemberSet::EMPTY, MemberSet::with);
        let mut cache = Cache::new(member(0), members, [member(1)].into_iter());
        let [first, theirs, second] = [7, 8, 9].map(|value| Number::new(value).expect("not 0"));
        let actions = granted(&mut cache, first);
        let deadline = |number| CacheAction::AnswerDeadline { page: PAGE, number };
        assert_eq!(actions, [deadline(first)]);
        let silent = Err(Violation::Silent(PAGE).of(member(2)));
        assert_eq!(cache.overdue(PAGE, first), silent);
        let data = Message::Data {
            page: PAGE,
            number: first,
            dirty: true,
            written: true,
        };
        let mut actions = Vec::new();
        cache.handle(member(2), &data, &mut actions).expect("asked");
        cache.installed(PAGE, &mut actions);
        assert_eq!(cache.overdue(PAGE, first), Ok(()));
        // The next owner took the page, and this node asks for it again.
        let fetch = Message::Fetch {
            page: PAGE,
            number: theirs,
            requester: member(2),
            right: Right::Exclusive,
        };
        cache
            .handle(member(1), &fetch, &mut actions)
            .expect("the owner");
        assert_eq!(granted(&mut cache, second), [deadline(second)]);
        assert_eq!(cache.overdue(PAGE, first), Ok(()), "it was answered");
        assert_eq!(cache.overdue(PAGE, second), silent);
    }

    #[test]
    fn a_directory_is_blamed_for_a_put_that_it_does_not_confirm_and_for_no_other() {
        let members = (0..2).map(member).fold(MemberSet::EMPTY, MemberSet::with);
        let mut cache = Cache::new(member(0), members, [member(1)].into_iter());
        let [first, second] = [7, 8].map(|value| Number::new(value).expect("not 0"));
        let give_back = |cache: &mut Cache, number| {
            cache.touch(PAGE, true, false, &mut Vec::new());
            let mut actions = Vec::new();
            let grant = Message::Grant(Grant {
                page: PAGE,
                number,
                right: Right::Exclusive,
                source: Source::Zero,
                acks: MemberSet::EMPTY,
                hold: 0,
            });
            cache
                .handle(member(1), &grant, &mut actions)
                .expect("asked");
            cache.installed(PAGE, &mut actions);
            assert_eq!(cache.evict(PAGE, &mut actions), Evict::Started);
            cache
                .written(PAGE, Written::Zero, &mut actions)
                .expect("it is written");
            let deadline = CacheAction::PutDeadline { page: PAGE, number };
            assert!(actions.contains(&deadline), "{actions:?}");
        };
        let silent = Err(Violation::Silent(PAGE).of(member(1)));
        give_back(&mut cache, first);
        assert_eq!(cache.put_unanswered(PAGE, first), silent);
        let done = Message::PutDone {
            page: PAGE,
            number: first,
        };
        cache
            .handle(member(1), &done, &mut Vec::new())
            .expect("asked");
        assert_eq!(cache.put_unanswered(PAGE, first), Ok(()));
        give_back(&mut cache, second);
        assert_eq!(
            cache.put_unanswered(PAGE, first),
            Ok(()),
            "it was confirmed"
        );
        assert_eq!(cache.put_unanswered(PAGE, second), silent);
    }
}
