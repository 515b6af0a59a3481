//! Blocks that change between unowned, owned and split.

use fabric_pages::page::PageIndex;

use super::block::{Block, Busy, BusyBlock, SplitBlock, Word};
use super::entry::{Copies, Entry};
use super::waiting::List;
use super::{Directory, MERGE_SWEEPS, first_page};
use crate::action::{DirectoryAction, Sink};
use crate::members::{Member, MemberSet};
use crate::message::{Behind, BlockIndex, Message, Number, PageAt};
use crate::mutation::mutated;
use crate::offence::{Offence, Violation};

impl<const PAGES: usize> Directory<PAGES> {
    /// Looks whether a split block has been used by one node alone for [`MERGE_SWEEPS`] calls, and
    /// gives the block to that node. Called from time to time, for each split block.
    pub fn sweep(&mut self, block: BlockIndex, sink: &mut impl Sink<DirectoryAction>) {
        let Some(Block::Split(place)) = self.word(block).filter(|_| !self.is_stopped) else {
            return;
        };
        let Some(split) = self.split.get_mut(place) else {
            return;
        };
        let alone = MemberSet::of(split.last);
        let is_alone = |entry: &Entry| entry.is_idle() && entry.holders().is_within(alone);
        if !split.entries.iter().all(is_alone) {
            split.quiet_sweeps = 0;
            return;
        }
        split.quiet_sweeps = split.quiet_sweeps.saturating_add(1);
        let greatest = split.entries.iter().map(Entry::number).max();
        let number = greatest.and_then(Number::next);
        if split.quiet_sweeps < MERGE_SWEEPS {
            return;
        }
        // Without a number left the block stays split.
        let (Some(number), Some(split)) = (number, self.split.remove(place)) else {
            return;
        };
        let behind = split.entries.iter().map(Entry::behind).collect();
        self.grant_block(block, split.last, number, behind, sink);
    }

    pub(super) fn grant_block(
        &mut self,
        block: BlockIndex,
        owner: Member,
        number: Number,
        behind: Box<[Behind]>,
        sink: &mut impl Sink<DirectoryAction>,
    ) {
        let place = self.busy.insert(BusyBlock {
            busy: Busy::Granting,
            owner,
            number,
            list: List::EMPTY,
        });
        self.blocks[block.index()] = Word::new(Block::Busy(place));
        let message = Message::BlockGrant {
            block,
            number,
            behind,
        };
        sink.push(DirectoryAction::Send { to: owner, message });
        sink.push(DirectoryAction::BlockDeadline { block, number });
    }

    pub(super) fn taken(
        &mut self,
        from: Member,
        block: BlockIndex,
        number: Number,
        sink: &mut impl Sink<DirectoryAction>,
    ) -> Result<(), Offence> {
        let busy = self.answered(from, block, number, Busy::Granting)?;
        if busy.list == List::EMPTY {
            let owner = from;
            self.blocks[block.index()] = Word::new(Block::Owned { owner, number });
            return Ok(());
        }
        self.start_split(block, from, number, busy.list, sink)
    }

    pub(super) fn start_split(
        &mut self,
        block: BlockIndex,
        owner: Member,
        number: Number,
        list: List,
        sink: &mut impl Sink<DirectoryAction>,
    ) -> Result<(), Offence> {
        let Some(number) = number.next() else {
            let page = PageIndex::new(first_page::<PAGES>(block));
            return Err(Violation::NumbersExhausted(page).of(owner));
        };
        let place = self.busy.insert(BusyBlock {
            busy: Busy::Splitting,
            owner,
            number,
            list,
        });
        self.blocks[block.index()] = Word::new(Block::Busy(place));
        let message = Message::Split { block, number };
        sink.push(DirectoryAction::Send { to: owner, message });
        sink.push(DirectoryAction::BlockDeadline { block, number });
        Ok(())
    }

    pub(super) fn split_state(
        &mut self,
        from: Member,
        block: BlockIndex,
        number: Number,
        pages: &[PageAt],
        sink: &mut impl Sink<DirectoryAction>,
    ) -> Result<(), Offence> {
        if pages.len() != PAGES {
            return Err(Violation::BlockLength(block, pages.len()).of(from));
        }
        let mut busy = self.answered(from, block, number, Busy::Splitting)?;
        let is_forgotten = mutated!(self, SplitForgetsOwner);
        let place = self.insert_split(block, from, number, |at| match pages[at] {
            PageAt::Zero => Behind::Zero,
            PageAt::Home | PageAt::Owner => Behind::Home,
        });
        let split = self.split.get_mut(place).expect("it was just inserted");
        for (entry, at) in split.entries.iter_mut().zip(pages) {
            if *at == PageAt::Owner && !is_forgotten {
                entry.copies = Copies::Exclusive;
                entry.set_owner(Some(from));
            }
        }
        while let Some(request) = self.waiting.pop(&mut busy.list) {
            self.page_request(place, request, sink)?;
        }
        Ok(())
    }

    pub(super) fn insert_split(
        &mut self,
        block: BlockIndex,
        last: Member,
        number: Number,
        behind: impl Fn(usize) -> Behind,
    ) -> u32 {
        let place = self.split.insert(Box::new(SplitBlock {
            entries: std::array::from_fn(|at| Entry::new(number, behind(at))),
            last,
            quiet_sweeps: 0,
        }));
        self.blocks[block.index()] = Word::new(Block::Split(place));
        place
    }

    /// The busy block whose owner has answered.
    fn answered(
        &mut self,
        from: Member,
        block: BlockIndex,
        number: Number,
        what: Busy,
    ) -> Result<BusyBlock, Offence> {
        let state = self.word(block);
        let state = state.ok_or(Violation::NoSuchBlock(block).of(from))?;
        if let Block::Busy(place) = state
            && let Some(busy) = self.busy.get(place)
            && (busy.busy, busy.owner, busy.number) == (what, from, number)
            && let Some(busy) = self.busy.remove(place)
        {
            return Ok(busy);
        }
        Err(Violation::BlockNotAsked(block).of(from))
    }
}
