//! The starvation token: who keeps it, and when this node asks for it and returns it.

use std::time::Instant;

use fabric_coherence::{Member, Message, Violation};
use fabric_peers::Peers;

use crate::Failure;
use crate::engine::Engine;

impl<P: Peers> Engine<P> {
    /// The member that keeps the starvation token: the first.
    fn keeper_member(&self) -> Member {
        self.config.members.first().unwrap_or(self.config.me)
    }

    pub(crate) fn send_token(&mut self, message: Message) {
        let keeper = self.keeper_member();
        self.send(keeper, message);
    }

    pub(crate) fn token(&mut self, from: Member, message: &Message) -> Result<(), Failure> {
        if let Message::TokenGrant { number } = *message {
            if from != self.keeper_member() || !self.wants_token {
                return Err(Violation::Token.of(from).into());
            }
            self.wants_token = false;
            self.stats.tokens.increment();
            // Longer than an instruction needs for its pages, and bounded.
            let until = Instant::now() + self.config.hold_unit * 256;
            self.token = Some((number, until));
            let mut actions = self.actions();
            self.cache.protect(true, &mut actions);
            return self.carry_out(actions);
        }
        if let Some(granted) = self.keeper.handle(from, message)? {
            let number = granted.number;
            let keeper = &self.keeper;
            self.tokens.begin(number, Instant::now(), |number| {
                keeper.overdue(number).is_ok()
            });
            self.send(granted.to, Message::TokenGrant { number });
        }
        Ok(())
    }

    pub(crate) fn return_token(&mut self) -> Result<(), Failure> {
        let Some((number, _)) = self.token.take() else {
            return Ok(());
        };
        let mut actions = self.actions();
        self.cache.protect(false, &mut actions);
        self.carry_out(actions)?;
        self.send_token(Message::TokenBack { number });
        Ok(())
    }
}
