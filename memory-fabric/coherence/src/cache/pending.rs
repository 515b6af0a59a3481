//! Requests of this node that are not done, and pages held before their unblock.

use fabric_pages::page::PageIndex;

use crate::members::{Member, MemberSet};
use crate::message::{Grant, Message, Number, Right, Source, Want};
use crate::offence::{Offence, Violation};

/// The data message that came for a request.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Data {
    pub(super) from: Member,
    pub(super) dirty: bool,
    pub(super) written: bool,
}

/// A request of this node. Acknowledgements and data may come before the grant that asks for them,
/// and are compared with it when it comes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Pending {
    pub(super) page: PageIndex,
    pub(super) want: Want,
    pub(super) grant: Option<Grant>,
    /// The transaction, as who answered before the grant calls it.
    first: Option<(Number, Member)>,
    /// Those who answered before the grant and call it otherwise.
    odd: MemberSet,
    acks: MemberSet,
    pub(super) data: Option<Data>,
    /// Who sent the page before the grant, too.
    rival: Option<Member>,
    home_read: bool,
    /// The page is being installed.
    pub(super) is_installing: bool,
    /// The page is installed, and the unblock is delayed.
    pub(super) is_held: bool,
}

impl Pending {
    pub(super) fn new(page: PageIndex, want: Want) -> Self {
        Self {
            page,
            want,
            grant: None,
            first: None,
            odd: MemberSet::EMPTY,
            acks: MemberSet::EMPTY,
            data: None,
            rival: None,
            home_read: false,
            is_installing: false,
            is_held: false,
        }
    }

    /// Notes a grant. The caller has compared it with the state of the page.
    pub(super) fn granted(&mut self, directory: Member, grant: Grant) -> Result<(), Offence> {
        let fits = match self.want {
            Want::Read => grant.source != Source::Own,
            Want::Write => grant.right == Right::Exclusive && grant.source != Source::Own,
            Want::Upgrade => grant.right == Right::Exclusive,
        };
        if !fits || self.grant.is_some() {
            return Err(Violation::GrantNotAsked(self.page).of(directory));
        }
        // What came before the grant was not compared with anything.
        let mut wrong = self.odd;
        if let Some((number, first)) = self.first
            && number != grant.number
        {
            wrong = MemberSet::of(first);
        }
        if let Some(peer) = wrong.first() {
            return Err(Violation::NumberNotGranted(self.page, grant.number).of(peer));
        }
        if let Some(peer) = self.acks.minus(grant.acks).first() {
            return Err(Violation::AckNotAsked(self.page).of(peer));
        }
        let senders = [self.data.map(|data| data.from), self.rival];
        let is_wrong = |sender: &Member| grant.source != Source::Member(*sender);
        if let Some(peer) = senders.into_iter().flatten().find(is_wrong) {
            return Err(Violation::DataNotAsked(self.page).of(peer));
        }
        self.grant = Some(grant);
        Ok(())
    }

    pub(super) fn acknowledged(&mut self, from: Member, number: Number) -> Result<(), Offence> {
        let is_asked = self.grant.is_none_or(|grant| grant.acks.contains(from));
        if !is_asked || self.acks.contains(from) || !self.is_number(from, number) {
            return Err(Violation::AckNotAsked(self.page).of(from));
        }
        self.acks = self.acks.with(from);
        Ok(())
    }

    /// Notes the page's bytes. Of two members that send them before the grant, one breaks the protocol,
    /// and the grant shows which.
    pub(super) fn received(&mut self, number: Number, data: Data) -> Result<(), Offence> {
        let from = data.from;
        let source = Source::Member(from);
        let is_asked = self.grant.is_none_or(|grant| grant.source == source);
        let has_sent = self.data.is_some_and(|data| data.from == from) || self.rival == Some(from);
        if !is_asked || has_sent || !self.is_number(from, number) {
            return Err(Violation::DataNotAsked(self.page).of(from));
        }
        if self.data.is_some() {
            self.rival = Some(from);
        } else {
            self.data = Some(data);
        }
        Ok(())
    }

    /// Whether a number is that of the grant, or is compared with it later.
    fn is_number(&mut self, from: Member, number: Number) -> bool {
        if let Some(grant) = self.grant {
            return grant.number == number;
        }
        let (first, _) = *self.first.get_or_insert((number, from));
        if first != number {
            self.odd = self.odd.with(from);
        }
        true
    }

    pub(super) fn home_was_read(&mut self) {
        self.home_read = true;
    }

    /// The grant, once the page can be installed.
    pub(super) fn complete(&self, ignore_acks: bool) -> Option<Grant> {
        let grant = self.grant.filter(|_| !self.is_installing)?;
        let has_bytes = match grant.source {
            Source::Zero | Source::Own => true,
            Source::Home => self.home_read,
            Source::Member(_) => self.data.is_some(),
        };
        let acknowledged = ignore_acks || grant.acks.is_within(self.acks);
        Some(grant).filter(|_| has_bytes && acknowledged)
    }

    pub(super) fn granted_number(&self) -> Option<Number> {
        self.grant.map(|grant| grant.number)
    }

    /// The peers that the request waits for, as far as the grant names them.
    pub(super) fn missing(&self) -> MemberSet {
        let Some(grant) = self.grant else {
            return MemberSet::EMPTY;
        };
        let missing = grant.acks.minus(self.acks);
        match grant.source {
            Source::Member(owner) if self.data.is_none() => missing.with(owner),
            _ => missing,
        }
    }

    pub(super) fn unblock(&self) -> Option<Message> {
        let grant = self.grant?;
        Some(Message::Unblock {
            page: grant.page,
            number: grant.number,
            written: self.data.is_some_and(|data| data.written),
        })
    }
}
