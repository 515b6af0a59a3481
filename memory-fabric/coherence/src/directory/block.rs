//! The directory's word for one block, and what belongs to blocks that are split or busy.

use super::entry::Entry;
use super::waiting::List;
use crate::members::Member;
use crate::message::Number;

/// The state of a block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Block {
    /// Another node has the directory.
    Elsewhere,
    /// Nobody has used it.
    Unowned,
    /// One node uses it alone, since the grant of this number.
    Owned { owner: Member, number: Number },
    /// It is being granted or split; a place in the table of busy blocks.
    Busy(u32),
    /// Its pages have entries; a place in the table of split blocks.
    Split(u32),
}

/// [`Block`] in 8 bytes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Word(u64);

const _: () = assert!(size_of::<Word>() == 8, "the budget of an owned block");

impl Word {
    const SHIFT: u32 = 16;

    pub(super) fn new(block: Block) -> Self {
        let word = |tag: u64, place: u8, value: u64| {
            Self(value << Self::SHIFT | u64::from(place) << 8 | tag)
        };
        match block {
            Block::Elsewhere => word(0, 0, 0),
            Block::Unowned => word(1, 0, 0),
            Block::Owned { owner, number } => word(2, owner.place(), number.value()),
            Block::Busy(place) => word(3, 0, place.into()),
            Block::Split(place) => word(4, 0, place.into()),
        }
    }

    pub(super) fn block(self) -> Block {
        let [tag, owner, ..] = self.0.to_le_bytes();
        let value = self.0 >> Self::SHIFT;
        let place = u32::try_from(value).unwrap_or(u32::MAX);
        match (tag, Member::at(owner), Number::new(value)) {
            (1, ..) => Block::Unowned,
            (2, Some(owner), Some(number)) => Block::Owned { owner, number },
            (3, ..) => Block::Busy(place),
            (4, ..) => Block::Split(place),
            _ => Block::Elsewhere,
        }
    }
}

/// What a busy block waits for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Busy {
    /// The new owner's `Taken`.
    Granting,
    /// The owner's `SplitState`.
    Splitting,
}

/// A block that is being granted or split.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct BusyBlock {
    pub(super) busy: Busy,
    pub(super) owner: Member,
    pub(super) number: Number,
    pub(super) list: List,
}

/// A block whose pages have entries.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct SplitBlock<const PAGES: usize> {
    pub(super) entries: [Entry; PAGES],
    /// Who asked last, and the sweeps since another member did.
    pub(super) last: Member,
    pub(super) quiet_sweeps: u8,
}

/// A table with free places.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Table<T>(Vec<Option<T>>);

impl<T> Table<T> {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        let free = self.0.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.0.push(None);
            self.0.len() - 1
        });
        self.0[place] = Some(value);
        u32::try_from(place).expect("fewer places than blocks, whose numbers have 32 bits")
    }

    pub(super) fn remove(&mut self, place: u32) -> Option<T> {
        let value = self.0.get_mut(place as usize)?.take();
        while self.0.last().is_some_and(Option::is_none) {
            self.0.pop();
        }
        value
    }

    pub(super) fn get(&self, place: u32) -> Option<&T> {
        self.0.get(place as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, place: u32) -> Option<&mut T> {
        self.0.get_mut(place as usize)?.as_mut()
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of places in use.
    pub(super) fn used(&self) -> usize {
        self.0.iter().flatten().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_the_state_of_its_block() {
        let owner = Member::at(15).expect("a member");
        let states = [
            Block::Elsewhere,
            Block::Unowned,
            Block::Owned {
                owner,
                number: Number::MAX,
            },
            Block::Busy(u32::MAX),
            Block::Split(7),
        ];
        for state in states {
            assert_eq!(Word::new(state).block(), state);
        }
    }

    #[test]
    fn a_table_uses_its_free_places_again() {
        let mut table = Table::new();
        assert_eq!([table.insert('a'), table.insert('b')], [0, 1]);
        assert_eq!(table.remove(0), Some('a'));
        assert_eq!(table.insert('c'), 0);
        assert_eq!((table.get(0), table.get(2)), (Some(&'c'), None));
        assert_eq!(table.remove(5), None);
        table.insert('d');
        assert_eq!((table.remove(1), table.used()), (Some('b'), 2));
    }
}
