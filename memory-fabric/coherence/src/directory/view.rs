//! What the directory knows, for the tests.

use fabric_pages::page::PageIndex;

use super::block::Block;
use super::{Directory, block_index, page_in_block};
use crate::members::{Member, MemberSet};
use crate::message::{Behind, BlockIndex, Number};

/// What the directory knows of a page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum View {
    Unowned,
    Owned(Member),
    Busy,
    Page {
        holders: MemberSet,
        owner: Option<Member>,
        behind: Behind,
    },
}

impl<const PAGES: usize> Directory<PAGES> {
    pub(crate) fn view(&self, page: PageIndex) -> View {
        match self.word(block_index::<PAGES>(page)) {
            Some(Block::Owned { owner, .. }) => View::Owned(owner),
            Some(Block::Split(place)) => {
                let split = self.split.get(place).expect("a split block");
                let entry = &split.entries[page_in_block::<PAGES>(page)];
                if !entry.is_idle() {
                    return View::Busy;
                }
                View::Page {
                    holders: entry.holders(),
                    owner: entry.owner(),
                    behind: entry.behind(),
                }
            }
            Some(Block::Busy(_)) => View::Busy,
            _ => View::Unowned,
        }
    }

    /// Whether no transaction is in progress.
    pub(crate) fn is_quiet(&self) -> bool {
        self.waiting.is_quiet() && self.busy.is_empty()
    }

    /// Splits all blocks of this directory, with zeroes behind all pages.
    pub(crate) fn split_all(&mut self) {
        let me = self.members.first().expect("a member");
        for number in 0..self.blocks.len() {
            let block = BlockIndex(u32::try_from(number).expect("a block"));
            if self.word(block) == Some(Block::Unowned) {
                self.insert_split(block, me, Number::ZERO, |_| Behind::Zero);
            }
        }
    }
}
