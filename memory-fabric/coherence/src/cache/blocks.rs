//! Blocks that this node owns, gives up and gets.

use fabric_pages::page::PageIndex;

use super::Cache;
use super::word::{DIRTY, State, WANTED, WRITTEN, Word};
use crate::action::{CacheAction, LocalPage, Sink};
use crate::directory::{block_index, first_page};
use crate::members::Member;
use crate::message::{Behind, BlockIndex, Message, Number, PageAt};
use crate::offence::{Offence, Violation};

/// What this node may do with a block.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) enum Rights<const PAGES: usize> {
    /// Nothing: it has not asked, or has no answer yet.
    Foreign,
    /// The owner's protocol is being started.
    Taking { number: Number },
    /// All: the owner's protocol serves it.
    Owned { number: Number },
    /// The owner's protocol is being stopped.
    Splitting { number: Number },
    /// What the words of the pages say.
    Split(Box<[Word; PAGES]>),
}

/// A block, and who keeps its directory.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct NodeBlock<const PAGES: usize> {
    pub(super) directory: Member,
    pub(super) rights: Rights<PAGES>,
}

impl<const PAGES: usize> NodeBlock<PAGES> {
    pub(super) fn new(directory: Member) -> Self {
        let rights = Rights::Foreign;
        Self { directory, rights }
    }
}

impl<const PAGES: usize> Cache<PAGES> {
    /// The number that write-backs of a block that this node owns carry.
    #[must_use]
    pub fn owned_number(&self, block: BlockIndex) -> Option<Number> {
        match self.blocks.get(block.index())?.rights {
            Rights::Owned { number } => Some(number),
            _ => None,
        }
    }

    /// Whether this node has no page of a block, unless it owns it.
    #[must_use]
    pub fn has_nothing_of(&self, block: BlockIndex) -> bool {
        let block = self.blocks.get(block.index());
        block.is_none_or(|block| !matches!(block.rights, Rights::Split(_)))
    }

    /// Whether this node has the bytes of a page of a block that is split.
    #[must_use]
    pub fn has_copy(&self, page: PageIndex) -> bool {
        matches!(
            self.word(page).state(),
            State::Shared | State::Exclusive | State::Modified | State::Cleaning | State::Putting
        )
    }

    pub(super) fn start_split(
        &mut self,
        from: Member,
        block: BlockIndex,
        number: Number,
        sink: &mut impl Sink<CacheAction>,
    ) -> Result<(), Offence> {
        match self.block(from, block)?.rights {
            Rights::Owned { number: owned } if owned < number => {}
            _ => return Err(Violation::BlockNotHeld(block).of(from)),
        }
        self.blocks[block.index()].rights = Rights::Splitting { number };
        sink.push(CacheAction::SplitBlock(block));
        Ok(())
    }

    /// The owner's protocol has stopped in the block, with its pages in these states. No page is in
    /// transit. Does nothing unless [`CacheAction::SplitBlock`] asked for it.
    pub fn split(
        &mut self,
        block: BlockIndex,
        pages: &[LocalPage; PAGES],
        sink: &mut impl Sink<CacheAction>,
    ) {
        let Some(entry) = self.blocks.get_mut(block.index()) else {
            return;
        };
        let Rights::Splitting { number } = entry.rights else {
            return;
        };
        let word = |page: &LocalPage| match *page {
            LocalPage::Zero | LocalPage::Home => Word::new(State::Invalid, 0, number),
            LocalPage::Clean(Behind::Home) => Word::new(State::Exclusive, 0, number),
            // The directory will take the home to be behind it.
            LocalPage::Clean(Behind::Zero) => Word::new(State::Exclusive, DIRTY, number),
            LocalPage::Dirty { writable: true } => {
                Word::new(State::Modified, DIRTY | WRITTEN, number)
            }
            LocalPage::Dirty { writable: false } => Word::new(State::Exclusive, DIRTY, number),
        };
        let at = |page: &LocalPage| match page {
            LocalPage::Zero => PageAt::Zero,
            LocalPage::Home => PageAt::Home,
            LocalPage::Clean(_) | LocalPage::Dirty { .. } => PageAt::Owner,
        };
        entry.rights = Rights::Split(Box::new(pages.each_ref().map(word)));
        let message = Message::SplitState {
            block,
            number,
            pages: pages.iter().map(at).collect(),
        };
        let to = entry.directory;
        sink.push(CacheAction::Send { to, message });
    }

    /// The block is this node's: all its requests for pages of it are void.
    pub(super) fn own_block(
        &mut self,
        from: Member,
        block: BlockIndex,
        number: Number,
        behind: &[Behind],
        sink: &mut impl Sink<CacheAction>,
    ) -> Result<(), Offence> {
        let is_in = |page: PageIndex| block_index::<PAGES>(page) == block;
        let pending = self.pending.iter().flatten();
        let mut pending = pending.filter(|pending| is_in(pending.page)).peekable();
        let has_asked = pending.peek().is_some();
        let is_granted = pending.any(|pending| pending.grant.is_some());
        let fits = match &self.block(from, block)?.rights {
            Rights::Foreign => has_asked && (behind.is_empty() || behind.len() == PAGES),
            Rights::Split(words) => {
                let is_newer = |word: &Word| word.number() < number;
                behind.len() == PAGES && words.iter().all(is_newer)
            }
            Rights::Taking { .. } | Rights::Owned { .. } | Rights::Splitting { .. } => false,
        };
        if !fits || is_granted {
            return Err(Violation::BlockNotHeld(block).of(from));
        }
        let pages = self.local_pages(block, behind);
        let woken = self.wanted(block);
        self.blocks[block.index()].rights = Rights::Taking { number };
        sink.push(CacheAction::OwnBlock { block, pages });
        for slot in &mut self.pending {
            if let Some(pending) = slot.take_if(|pending| is_in(pending.page)) {
                sink.push(CacheAction::Wake(pending.page));
            }
        }
        self.trim();
        for page in woken {
            sink.push(CacheAction::Wake(page));
        }
        Ok(())
    }

    /// [`CacheAction::OwnBlock`] is done: the owner's protocol serves the block.
    pub fn owned(&mut self, block: BlockIndex, sink: &mut impl Sink<CacheAction>) {
        let Some(entry) = self.blocks.get_mut(block.index()) else {
            return;
        };
        let Rights::Taking { number } = entry.rights else {
            return;
        };
        entry.rights = Rights::Owned { number };
        let to = entry.directory;
        let message = Message::Taken { block, number };
        sink.push(CacheAction::Send { to, message });
    }

    /// The pages of a block as the owner's protocol finds them.
    fn local_pages(&self, block: BlockIndex, behind: &[Behind]) -> Box<[LocalPage]> {
        let absent = |behind: Behind| match behind {
            Behind::Zero => LocalPage::Zero,
            Behind::Home => LocalPage::Home,
        };
        let Rights::Split(words) = &self.blocks[block.index()].rights else {
            return behind.iter().map(|one| absent(*one)).collect();
        };
        let local = |(word, behind): (&Word, &Behind)| match word.state() {
            State::Invalid | State::Gone | State::Dropping => absent(*behind),
            // What a put left may not have reached the directory.
            _ if word.has(DIRTY) => LocalPage::Dirty {
                writable: word.state() == State::Modified,
            },
            _ => LocalPage::Clean(*behind),
        };
        words.iter().zip(behind).map(local).collect()
    }

    /// Pages of a block whose waiters wait for the end of a put.
    fn wanted(&self, block: BlockIndex) -> Vec<PageIndex> {
        let Rights::Split(words) = &self.blocks[block.index()].rights else {
            return Vec::new();
        };
        let pages = words.iter().zip(first_page::<PAGES>(block)..);
        let wanted = pages.filter(|(word, _)| word.has(WANTED));
        wanted.map(|(_, page)| PageIndex::new(page)).collect()
    }

    pub(super) fn fail_wanted(&self, sink: &mut impl Sink<CacheAction>) {
        for (_, number) in self.blocks.iter().zip(0..) {
            for page in self.wanted(BlockIndex(number)) {
                sink.push(CacheAction::Fail(page));
            }
        }
    }

    fn block(&self, from: Member, block: BlockIndex) -> Result<&NodeBlock<PAGES>, Offence> {
        let entry = self.blocks.get(block.index());
        let entry = entry.ok_or(Violation::NoSuchBlock(block).of(from))?;
        if entry.directory == from {
            Ok(entry)
        } else {
            Err(Violation::BlockNotHeld(block).of(from))
        }
    }
}
