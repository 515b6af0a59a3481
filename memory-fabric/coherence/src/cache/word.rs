//! A node's word for one page of a split block: 8 bytes, so that threads can change it by
//! compare-and-swap.

use crate::message::Number;

/// What this node has of a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub(super) enum State {
    /// Nothing.
    Invalid,
    /// A copy to read. With [`OWNER`] this node answers for the bytes.
    Shared,
    /// The only copy, mapped read-only.
    Exclusive,
    /// The only copy, mapped writable.
    Modified,
    /// The shared copy is being dropped.
    Dropping,
    /// Unmapped, and being written back.
    Cleaning,
    /// Unmapped; the put is on its way, and the bytes are still needed.
    Putting,
    /// The put is on its way, and the bytes were given to another node.
    Gone,
}

/// The bytes differ from those behind the copies, as far as the directory knows.
pub(super) const DIRTY: u8 = 1;
/// This node wrote the page since it was granted.
pub(super) const WRITTEN: u8 = 1 << 1;
/// The copy in states Cleaning and Putting is the only one.
pub(super) const ALONE: u8 = 1 << 2;
/// This node had the page alone before others got shared copies: it sends the bytes to those who ask,
/// and puts the page back.
pub(super) const OWNER: u8 = 1 << 3;
/// A vCPU waits for the end of the state.
pub(super) const WANTED: u8 = 1 << 4;

/// State, flags, and number of the last grant.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Word(u64);

impl Word {
    pub(super) fn new(state: State, flags: u8, number: Number) -> Self {
        Self(number.value() << 16 | u64::from(flags) << 8 | u64::from(state as u8))
    }

    pub(super) fn state(self) -> State {
        match self.0 & 0xff {
            1 => State::Shared,
            2 => State::Exclusive,
            3 => State::Modified,
            4 => State::Dropping,
            5 => State::Cleaning,
            6 => State::Putting,
            7 => State::Gone,
            _ => State::Invalid,
        }
    }

    pub(super) fn flags(self) -> u8 {
        let [_, flags, ..] = self.0.to_le_bytes();
        flags
    }

    pub(super) fn number(self) -> Number {
        Number::new(self.0 >> 16).unwrap_or(Number::MAX)
    }

    pub(super) fn has(self, flag: u8) -> bool {
        self.flags() & flag != 0
    }

    /// Whether this node has the only copy.
    pub(super) fn is_alone(self) -> bool {
        match self.state() {
            State::Exclusive | State::Modified => true,
            State::Cleaning | State::Putting => self.has(ALONE),
            _ => false,
        }
    }

    pub(super) fn with(self, state: State, set: u8, clear: u8) -> Self {
        Self::new(state, self.flags() & !clear | set, self.number())
    }

    /// The page is lost; a waiter stays known.
    pub(super) fn lost(self, state: State) -> Self {
        self.with(state, 0, DIRTY | WRITTEN | ALONE | OWNER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_state_flags_and_number() {
        let states = [
            State::Invalid,
            State::Shared,
            State::Exclusive,
            State::Modified,
            State::Dropping,
            State::Cleaning,
            State::Putting,
            State::Gone,
        ];
        for state in states {
            let word = Word::new(state, DIRTY | WANTED, Number::MAX);
            assert_eq!((word.state(), word.flags()), (state, DIRTY | WANTED));
            assert_eq!(word.number(), Number::MAX);
            let lost = word.lost(State::Invalid);
            assert_eq!((lost.state(), lost.flags()), (State::Invalid, WANTED));
        }
    }
}
