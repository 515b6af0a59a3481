//! The starvation token: who keeps it, and when this node asks for it and returns it.

use std::time::{Duration, Instant};

use fabric_coherence::{Member, Message, Number, Violation};
use fabric_peers::Peers;

use crate::Failure;
use crate::engine::{Engine, thread_time};

/// The token, while this node has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    number: Number,
    /// For which thread.
    thread: u32,
    until: Instant,
}

impl<P: Peers> Engine<P> {
    /// The access of a thread lost so many pages that it may starve.
    pub(crate) fn starves(&mut self, thread: u32) -> Result<(), Failure> {
        if self.starving.is_none() && self.token.is_none() {
            self.starving = Some(thread);
            self.send_token(Message::TokenWant)?;
        }
        Ok(())
    }

    /// When [`Self::is_token_over`] may be.
    pub(crate) fn token_ends(&self) -> Option<Instant> {
        let token = self.token?;
        let settles_at = self.progress.settles_at(token.thread);
        let settles_at = settles_at.map_or(token.until, |at| self.instant(at));
        Some(settles_at.min(token.until))
    }

    /// Whether the token is returned: its thread has progressed, and has run as long as it may with what
    /// it collected, or has not had the pages that it needs in the longest time for that.
    pub(crate) fn is_token_over(&mut self, now: Instant) -> bool {
        let ticks = self.ticks(now);
        self.token.is_some_and(|token| {
            let progress = &mut self.progress;
            now >= token.until || progress.is_settled(token.thread, ticks, thread_time)
        })
    }

    /// The member that keeps the starvation token: the first.
    fn keeper_member(&self) -> Member {
        self.config.members.first().unwrap_or(self.config.me)
    }

    pub(crate) fn send_token(&mut self, message: Message) -> Result<(), Failure> {
        let keeper = self.keeper_member();
        self.send(keeper, message)
    }

    pub(crate) fn token(&mut self, from: Member, message: &Message) -> Result<(), Failure> {
        if let Message::TokenGrant { number } = *message {
            let thread = self.starving.take();
            let thread = thread.filter(|_| from == self.keeper_member());
            let thread = thread.ok_or_else(|| Violation::Token.of(from))?;
            self.stats.tokens.increment();
            // As long as any gang is held.
            let until = Instant::now() + Duration::from_nanos(self.progress.gang_time());
            self.token = Some(Token {
                number,
                thread,
                until,
            });
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
            self.send(granted.to, Message::TokenGrant { number })?;
        }
        Ok(())
    }

    pub(crate) fn return_token(&mut self) -> Result<(), Failure> {
        let Some(Token { number, .. }) = self.token.take() else {
            return Ok(());
        };
        let mut actions = self.actions();
        self.cache.protect(false, &mut actions);
        self.carry_out(actions)?;
        self.send_token(Message::TokenBack { number })
    }
}
