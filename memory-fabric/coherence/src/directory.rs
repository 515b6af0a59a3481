//! The directory of the blocks that the layout assigns to this node.

mod block;
mod changes;
mod entry;
mod home;
mod page;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod view;
mod waiting;

use fabric_homes::BLOCK_PAGES;
use fabric_pages::page::PageIndex;

use crate::action::{DirectoryAction, Sink};
use crate::members::{Member, MemberSet};
use crate::message::{BlockIndex, Message, Number};
use crate::mutation::{Switch, mutated};
use crate::offence::{Offence, Violation};
#[cfg(test)]
pub(crate) use view::View;

use block::{Block, Busy, BusyBlock, SplitBlock, Table, Word};
use entry::Entry;
use page::Context;
use waiting::{Kind, List, Request, Waiting};

/// Sweeps of a split block without a request of a second node, after which it is merged.
pub const MERGE_SWEEPS: u8 = 4;

/// Most requests of one node that one directory keeps open: twice what a cache can have open, with as
/// many puts. Each node has places of its own, so that none can take those of others.
pub const OPEN_MAX: u16 = 256;

/// A page of a lost node, and what is known of its bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Loss {
    /// The only up-to-date copy was on the lost node, or could have been.
    Page(PageIndex),
    /// The page was on its way between nodes when the node was lost.
    InTransit(PageIndex),
    /// The lost node owned the block: any of its pages.
    Block(BlockIndex),
}

/// The directory of a node.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Directory<const PAGES: usize = { BLOCK_PAGES as usize }> {
    members: MemberSet,
    blocks: Vec<Word>,
    busy: Table<BusyBlock>,
    split: Table<Box<SplitBlock<PAGES>>>,
    waiting: Waiting,
    is_stopped: bool,
    pub(crate) switch: Switch,
}

impl<const PAGES: usize> Directory<PAGES> {
    /// The directory for a memory whose blocks it keeps where `is_mine` says so. Nobody owns a
    /// block yet, and all bytes are zero. `open_max` is [`OPEN_MAX`], or less.
    #[must_use]
    pub fn new(members: MemberSet, is_mine: impl Iterator<Item = bool>, open_max: u16) -> Self {
        let word = |is_mine| {
            Word::new(if is_mine {
                Block::Unowned
            } else {
                Block::Elsewhere
            })
        };
        let count = u16::try_from(members.iter().count()).unwrap_or(u16::MAX);
        Self {
            members,
            blocks: is_mine.map(word).collect(),
            busy: Table::new(),
            split: Table::new(),
            waiting: Waiting::new(count, open_max.min(OPEN_MAX)),
            is_stopped: false,
            switch: Switch::default(),
        }
    }

    /// Handles a message of a node. Costs the same for any number of nodes, except that a write
    /// invalidates each sharer.
    ///
    /// # Errors
    /// When a node broke the protocol, which may be another one than the sender. The caller fences
    /// that node on all nodes.
    pub fn handle(
        &mut self,
        from: Member,
        message: &Message,
        sink: &mut impl Sink<DirectoryAction>,
    ) -> Result<(), Offence> {
        if self.is_stopped {
            return Ok(());
        }
        if self.members.contains(from) {
            self.dispatch(from, message, sink)
        } else {
            Err(Violation::NotAMember.of(from))
        }
    }

    fn dispatch(
        &mut self,
        from: Member,
        message: &Message,
        sink: &mut impl Sink<DirectoryAction>,
    ) -> Result<(), Offence> {
        match *message {
            Message::Get { page, want, early } => {
                let kind = Kind::Get { want, early };
                self.get(Request { from, page, kind }, sink)
            }
            Message::Put { page, number, left } => {
                let kind = Kind::Put { number, left };
                self.put(Request { from, page, kind }, number, sink)
            }
            Message::PutShared { page } => {
                let Block::Split(place) = self.block_of(from, page)? else {
                    // The block was merged while the message was on its way.
                    return Ok(());
                };
                let (entry, mut context) = self.entry(place, page, sink);
                context.put_shared(entry, from, page)
            }
            Message::Unblock {
                page,
                number,
                written,
            } => {
                let Block::Split(place) = self.block_of(from, page)? else {
                    return Err(Violation::UnblockNotAsked(page).of(from));
                };
                let (entry, mut context) = self.entry(place, page, sink);
                context.unblock(entry, from, page, number, written)
            }
            Message::Taken { block, number } => self.taken(from, block, number, sink),
            Message::SplitState {
                block,
                number,
                ref pages,
            } => self.split_state(from, block, number, pages, sink),
            _ => Err(Violation::WrongRole.of(from)),
        }
    }

    /// The deadline of a page's transaction is over.
    ///
    /// # Errors
    /// When the transaction is still in progress: its requester has neither unblocked nor reported
    /// who keeps it waiting, for which it has half the time ([`crate::cache::Cache::overdue`]).
    pub fn page_overdue(&self, page: PageIndex, number: Number) -> Result<(), Offence> {
        let Some(Block::Split(place)) = self.word(block_index::<PAGES>(page)) else {
            return Ok(());
        };
        let split = self.split.get(place);
        let entry = split.map(|split| &split.entries[page_in_block::<PAGES>(page)]);
        match entry.and_then(|entry| entry.requester().filter(|_| entry.number() == number)) {
            Some(peer) if !self.is_stopped => Err(Violation::Silent(page).of(peer)),
            _ => Ok(()),
        }
    }

    /// The deadline of a block's transaction is over.
    ///
    /// # Errors
    /// When the block's owner has not answered.
    pub fn block_overdue(&self, block: BlockIndex, number: Number) -> Result<(), Offence> {
        let Some(Block::Busy(place)) = self.word(block) else {
            return Ok(());
        };
        match self.busy.get(place) {
            Some(busy) if busy.number == number && !self.is_stopped => {
                Err(Violation::SilentBlock(block).of(busy.owner))
            }
            _ => Ok(()),
        }
    }

    /// Stops: a node is lost, and with it its vCPUs. Every later call does nothing. Returns what was
    /// lost with the node.
    pub fn fence(&mut self, lost: Member) -> Vec<Loss> {
        self.is_stopped = true;
        let mut losses = Vec::new();
        for (word, number) in self.blocks.iter().zip(0..) {
            let block = BlockIndex(number);
            match word.block() {
                Block::Owned { owner, .. } if owner == lost => losses.push(Loss::Block(block)),
                Block::Busy(place)
                    if self.busy.get(place).is_some_and(|busy| busy.owner == lost) =>
                {
                    losses.push(Loss::Block(block));
                }
                Block::Split(place) => {
                    let split = self.split.get(place);
                    let entries = split.iter().flat_map(|split| split.entries.iter());
                    for (entry, page) in entries.zip(first_page::<PAGES>(block)..) {
                        let page = PageIndex::new(page);
                        if entry.owner() == Some(lost) {
                            losses.push(Loss::Page(page));
                        } else if entry.requester().is_some() {
                            losses.push(Loss::InTransit(page));
                        }
                    }
                }
                _ => {}
            }
        }
        losses
    }

    fn get(
        &mut self,
        request: Request,
        sink: &mut impl Sink<DirectoryAction>,
    ) -> Result<(), Offence> {
        let Request { from, page, .. } = request;
        let block = block_index::<PAGES>(page);
        let state = self.block_of(from, page)?;
        if let Block::Unowned = state {
            let number = Number::ZERO.next().unwrap_or(Number::MAX);
            self.grant_block(block, from, number, Box::default(), sink);
            return Ok(());
        }
        if let Block::Busy(place) = state
            && let Some(busy) = self.busy.get(place)
            && (busy.busy, busy.owner) == (Busy::Granting, from)
            && !mutated!(self, ServeVoid)
        {
            // The grant of the block answers it.
            return Ok(());
        }
        if let Block::Owned { owner, .. } = state
            && owner == from
        {
            return Err(Violation::AlreadyHeld(page).of(from));
        }
        if !self.waiting.open(from) {
            return Err(Violation::Flooding(self.waiting.limit()).of(from));
        }
        match state {
            Block::Owned { owner, number } => {
                let mut list = List::EMPTY;
                self.waiting.push(&mut list, request);
                self.start_split(block, owner, number, list, sink)
            }
            Block::Busy(place) => {
                if let Some(busy) = self.busy.get_mut(place) {
                    self.waiting.push(&mut busy.list, request);
                }
                Ok(())
            }
            Block::Split(place) => self.page_request(place, request, sink),
            Block::Elsewhere | Block::Unowned => Ok(()),
        }
    }

    fn put(
        &mut self,
        request: Request,
        number: Number,
        sink: &mut impl Sink<DirectoryAction>,
    ) -> Result<(), Offence> {
        let Request { from, page, .. } = request;
        let state = self.block_of(from, page)?;
        let (owner, busy) = match state {
            Block::Split(_) => (None, None),
            Block::Owned { owner, .. } => (Some(owner), None),
            Block::Busy(place) => {
                let busy = self.busy.get(place);
                (busy.map(|one| one.owner), busy.map(|one| one.busy))
            }
            Block::Elsewhere | Block::Unowned => {
                return Err(Violation::NumberNotGranted(page, number).of(from));
            }
        };
        match (owner == Some(from), busy) {
            // The new owner of the block has the page again.
            (true, Some(Busy::Granting)) => return Ok(()),
            (true, None) => return Err(Violation::NumberNotGranted(page, number).of(from)),
            _ => {}
        }
        if owner.is_some_and(|owner| owner != from) {
            // The block was merged into another node's after the page was taken from this one.
            let message = Message::PutDone { page, number };
            sink.push(DirectoryAction::Send { to: from, message });
            return Ok(());
        }
        if !self.waiting.open(from) {
            return Err(Violation::Flooding(self.waiting.limit()).of(from));
        }
        match state {
            Block::Busy(place) => {
                if let Some(busy) = self.busy.get_mut(place) {
                    self.waiting.push(&mut busy.list, request);
                }
                Ok(())
            }
            Block::Split(place) => self.page_request(place, request, sink),
            _ => Ok(()),
        }
    }

    fn page_request(
        &mut self,
        place: u32,
        request: Request,
        sink: &mut impl Sink<DirectoryAction>,
    ) -> Result<(), Offence> {
        if let Some(split) = self.split.get_mut(place)
            && split.last != request.from
        {
            split.last = request.from;
            split.quiet_sweeps = 0;
        }
        let (entry, mut context) = self.entry(place, request.page, sink);
        context.request(entry, request)
    }

    /// Whether requests wait for a page of a split block.
    #[must_use]
    pub fn has_waiting(&self, page: PageIndex) -> bool {
        let Some(Block::Split(place)) = self.word(block_index::<PAGES>(page)) else {
            return false;
        };
        let split = self.split.get(place);
        split.is_some_and(|split| split.entries[page_in_block::<PAGES>(page)].has_waiting())
    }

    /// Takes the requests that wait for a page out of the directory: the caller answers them, from a
    /// page that its own node alone has.
    pub fn take_gets(&mut self, page: PageIndex) -> Vec<Member> {
        let Some(Block::Split(place)) = self.word(block_index::<PAGES>(page)) else {
            return Vec::new();
        };
        let mut ignored = Vec::new();
        let (entry, mut context) = self.entry(place, page, &mut ignored);
        context.take_gets(entry)
    }

    /// Number of blocks of the memory.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap_or(u32::MAX)
    }

    /// Whether the pages of some block have entries.
    #[must_use]
    pub fn has_split_blocks(&self) -> bool {
        !self.split.is_empty()
    }

    /// Number of blocks whose pages have entries. Looks at each.
    #[must_use]
    pub fn split_blocks(&self) -> usize {
        self.split.used()
    }

    /// Whether the pages of a block have entries.
    #[must_use]
    pub fn is_split(&self, block: BlockIndex) -> bool {
        matches!(self.word(block), Some(Block::Split(_)))
    }

    fn word(&self, block: BlockIndex) -> Option<Block> {
        self.blocks.get(block.index()).map(|word| word.block())
    }

    /// The state of a page's block, if it is one of this directory.
    fn block_of(&self, from: Member, page: PageIndex) -> Result<Block, Offence> {
        match self.word(block_index::<PAGES>(page)) {
            None => Err(Violation::NoSuchPage(page).of(from)),
            Some(Block::Elsewhere) => Err(Violation::ElsewhereDirectory(page).of(from)),
            Some(block) => Ok(block),
        }
    }

    /// The entry of a page of a split block, and what its transactions need besides.
    fn entry<'a, S>(
        &'a mut self,
        place: u32,
        page: PageIndex,
        sink: &'a mut S,
    ) -> (&'a mut Entry, Context<'a, S>) {
        let split = self.split.get_mut(place).expect("the word names a place");
        let entry = &mut split.entries[page_in_block::<PAGES>(page)];
        let context = Context {
            waiting: &mut self.waiting,
            sink,
            switch: self.switch,
        };
        (entry, context)
    }
}

/// The block of a page.
pub(crate) fn block_index<const PAGES: usize>(page: PageIndex) -> BlockIndex {
    BlockIndex(page.number() / u32::try_from(PAGES).unwrap_or(u32::MAX))
}

/// The place of a page in its block.
pub(crate) fn page_in_block<const PAGES: usize>(page: PageIndex) -> usize {
    page.index() % PAGES
}

/// The number of the first page of a block.
pub(crate) fn first_page<const PAGES: usize>(block: BlockIndex) -> u32 {
    let pages = u32::try_from(PAGES).unwrap_or(u32::MAX);
    block.0.saturating_mul(pages)
}
