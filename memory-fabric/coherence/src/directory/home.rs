//! Which write-backs the home of a page, which keeps its directory, stores.

use fabric_pages::page::PageIndex;

use super::block::Block;
use super::{Directory, page_in_block};
use crate::members::Member;
use crate::message::Number;
use crate::offence::{Offence, Violation};

impl<const PAGES: usize> Directory<PAGES> {
    /// Whether the home of the page stores bytes that a node writes back: only those of the owner.
    /// Others lost the page while its bytes were on their way. Nobody reads those: the owner has the
    /// page, and writes it back, or gives it back as unchanged, before the home answers for it again.
    ///
    /// # Errors
    /// When the node uses a number that was never granted.
    pub fn stores(&self, from: Member, page: PageIndex, number: Number) -> Result<bool, Offence> {
        if !self.members.contains(from) {
            return Err(Violation::NotAMember.of(from));
        }
        let (owner, granted) = match self.block_of(from, page)? {
            Block::Elsewhere | Block::Unowned => (None, Number::ZERO),
            Block::Owned { owner, number } => (Some(owner), number),
            Block::Busy(place) => {
                let busy = self.busy.get(place);
                busy.map_or((None, Number::ZERO), |busy| (Some(busy.owner), busy.number))
            }
            Block::Split(place) => {
                let split = self.split.get(place);
                let entry = split.map(|split| &split.entries[page_in_block::<PAGES>(page)]);
                entry.map_or((None, Number::ZERO), |entry| {
                    (entry.owner(), entry.number())
                })
            }
        };
        if number > granted {
            return Err(Violation::NumberNotGranted(page, number).of(from));
        }
        Ok(owner == Some(from))
    }
}
