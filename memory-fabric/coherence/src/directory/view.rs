//! What the directory knows, for the tests.

use fabric_pages::page::PageIndex;

use super::block::Block;
use super::entry::Copies;
use super::{Directory, block_index, first_page, page_in_block};
use crate::members::{Member, MemberSet};
use crate::message::{Behind, BlockIndex, Number};
use crate::offence::Offence;

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

    /// The first offence if the deadlines of all transactions were over.
    pub(crate) fn overdue(&self) -> Result<(), Offence> {
        for number in 0..self.blocks.len() {
            let block = BlockIndex(u32::try_from(number).expect("a block"));
            match self.word(block) {
                Some(Block::Busy(place)) => {
                    let busy = self.busy.get(place).expect("a busy block");
                    self.block_overdue(block, busy.number)?;
                }
                Some(Block::Split(place)) => {
                    let split = self.split.get(place).expect("a split block");
                    for (entry, page) in split.entries.iter().zip(first_page::<PAGES>(block)..) {
                        self.page_overdue(PageIndex::new(page), entry.number())?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What holds in every state, whatever came from peers.
    pub(crate) fn check(&self) {
        for word in &self.blocks {
            let Block::Split(place) = word.block() else {
                continue;
            };
            for entry in &self.split.get(place).expect("a split block").entries {
                assert!(entry.holders().is_within(self.members), "{entry:?}");
                let is_shared = entry.copies == Copies::Shared;
                let is_alone = entry.copies == Copies::Exclusive;
                let has_sharers_or_is_busy =
                    !is_shared || !entry.sharers.is_empty() || !entry.is_idle();
                assert!(has_sharers_or_is_busy, "{entry:?}");
                assert!(is_shared || entry.sharers.is_empty(), "{entry:?}");
                assert!(!is_alone || entry.owner().is_some(), "{entry:?}");
                assert!(
                    entry.copies != Copies::None || entry.owner().is_none(),
                    "{entry:?}"
                );
            }
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
