//! The starvation token: one node at a time keeps the pages that it gets, until its vCPU has
//! progressed or the time is over. First come, first served.

use crate::members::{Member, MemberSet};
use crate::message::{Message, Number};
use crate::offence::{Offence, Violation};

/// Pages that one access lost before it progressed after which its node asks for the token. What makes
/// holds longer has had a few tries by then.
pub const STARVING_LOSSES: u32 = 16;

/// The keeper of the token, on one compute node of a VM.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Keeper {
    holder: Option<Member>,
    number: Number,
    waiting: MemberSet,
    /// Places of the waiting members, oldest first; as many as there are members.
    queue: [Option<Member>; crate::members::MEMBERS_MAX],
}

/// What the keeper asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Granted {
    /// To whom a [`Message::TokenGrant`] is sent.
    pub to: Member,
    /// Its number. [`Keeper::overdue`] is called with it after twice the time of the token.
    pub number: Number,
}

impl Keeper {
    /// Handles a message of a node.
    ///
    /// # Errors
    /// When a node returns what it does not hold, or asks twice.
    pub fn handle(&mut self, from: Member, message: &Message) -> Result<Option<Granted>, Offence> {
        match message {
            Message::TokenWant if !self.has(from) => {
                let free = self.queue.iter_mut().find(|place| place.is_none());
                if let Some(place) = free {
                    *place = Some(from);
                    self.waiting = self.waiting.with(from);
                }
            }
            Message::TokenBack { number }
                if self.holder == Some(from) && self.number == *number =>
            {
                self.holder = None;
            }
            Message::TokenWant | Message::TokenBack { .. } => {
                return Err(Violation::Token.of(from));
            }
            _ => return Err(Violation::WrongRole.of(from)),
        }
        Ok(self.grant())
    }

    /// The deadline of a token is over.
    ///
    /// # Errors
    /// When its holder has not returned it.
    pub fn overdue(&self, number: Number) -> Result<(), Offence> {
        match self.holder {
            Some(holder) if self.number == number => Err(Violation::Token.of(holder)),
            _ => Ok(()),
        }
    }

    /// Whether nobody has the token or waits for it.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.holder.is_none() && self.waiting.is_empty()
    }

    /// How often the token was given.
    #[cfg(test)]
    pub(crate) fn granted(&self) -> u64 {
        self.number.value()
    }

    fn has(&self, member: Member) -> bool {
        self.holder == Some(member) || self.waiting.contains(member)
    }

    fn grant(&mut self) -> Option<Granted> {
        if self.holder.is_some() {
            return None;
        }
        let to = self.queue[0].take()?;
        self.queue.rotate_left(1);
        self.waiting = self.waiting.without(to);
        self.holder = Some(to);
        self.number = self.number.next().unwrap_or(Number::ZERO);
        let number = self.number;
        Some(Granted { to, number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(place: u8) -> Member {
        Member::at(place).expect("a member")
    }

    #[test]
    fn the_token_goes_to_the_oldest_that_waits() {
        let mut keeper = Keeper::default();
        let mut want = |place| keeper.handle(member(place), &Message::TokenWant);
        let first = want(5).expect("a request").expect("the token");
        assert_eq!(first.to, member(5));
        assert_eq!(want(9), Ok(None));
        assert_eq!(want(2), Ok(None));
        let offence = Violation::Token.of(member(9));
        assert_eq!(want(9), Err(offence), "asks twice");
        let back = |number| Message::TokenBack { number };
        let stolen = keeper.handle(member(2), &back(first.number));
        assert_eq!(stolen, Err(Violation::Token.of(member(2))));
        let second = keeper.handle(member(5), &back(first.number));
        let second = second.expect("a return").expect("the token");
        assert_eq!(second.to, member(9));
        assert_eq!(keeper.overdue(first.number), Ok(()));
        assert_eq!(keeper.overdue(second.number), Err(offence));
        let third = keeper.handle(member(9), &back(second.number));
        assert_eq!(third.expect("a return").expect("the token").to, member(2));
    }
}
