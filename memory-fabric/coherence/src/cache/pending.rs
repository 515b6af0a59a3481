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
    /// The transaction, from the first message of it.
    number: Option<Number>,
    acks: MemberSet,
    pub(super) data: Option<Data>,
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
            number: None,
            acks: MemberSet::EMPTY,
            data: None,
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
        if let Some(data) = self.data
            && (self.number != Some(grant.number) || grant.source != Source::Member(data.from))
        {
            return Err(Violation::DataNotAsked(self.page).of(data.from));
        }
        let mut unasked = self.acks.minus(grant.acks);
        if self.number.is_some_and(|number| number != grant.number) {
            unasked = self.acks;
        }
        if let Some(peer) = unasked.first() {
            return Err(Violation::AckNotAsked(self.page).of(peer));
        }
        self.number = Some(grant.number);
        self.grant = Some(grant);
        Ok(())
    }

    pub(super) fn acknowledged(&mut self, from: Member, number: Number) -> Result<(), Offence> {
        let is_asked = self.grant.is_none_or(|grant| grant.acks.contains(from));
        if !is_asked || self.acks.contains(from) || !self.is_number(number) {
            return Err(Violation::AckNotAsked(self.page).of(from));
        }
        self.number = Some(number);
        self.acks = self.acks.with(from);
        Ok(())
    }

    pub(super) fn received(&mut self, number: Number, data: Data) -> Result<(), Offence> {
        let source = Source::Member(data.from);
        let is_asked = self.grant.is_none_or(|grant| grant.source == source);
        if !is_asked || self.data.is_some() || !self.is_number(number) {
            return Err(Violation::DataNotAsked(self.page).of(data.from));
        }
        self.number = Some(number);
        self.data = Some(data);
        Ok(())
    }

    fn is_number(&self, number: Number) -> bool {
        self.number.is_none_or(|known| known == number)
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

    /// The peers that the request waits for; the directory if that has not answered.
    pub(super) fn missing(&self, directory: Member) -> MemberSet {
        let Some(grant) = self.grant else {
            return MemberSet::of(directory);
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
            dirty: self.data.is_some_and(|data| data.dirty),
            written: self.data.is_some_and(|data| data.written),
        })
    }
}
