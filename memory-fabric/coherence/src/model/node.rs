//! A node: its vCPU, its memory, its threads and what they still have to do.

use std::collections::VecDeque;

use fabric_pages::page::PageIndex;

use super::policy::Policy;
use super::world::Access;
use crate::action::{CacheAction, LocalPage};
use crate::cache::{Cache, Written};
use crate::directory::Directory;
use crate::members::{Member, MemberSet};
use crate::message::Number;

/// How a page is mapped in the guest view.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Mapped {
    No,
    ReadOnly,
    Writable,
}

/// A page of a node's memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Frame {
    pub(super) mapped: Mapped,
    /// The bytes, unless they are freed.
    pub(super) value: Option<u16>,
    /// The bytes that the home sent.
    pub(super) home: Option<u16>,
    /// The bytes that another node sent.
    pub(super) peer: Option<(Member, u16)>,
    /// The page's state in the owner's protocol.
    pub(super) local: LocalPage,
    /// It leaves in the owner's protocol: its write-back is on its way, and no touch has cancelled it.
    pub(super) leaves: bool,
}

/// A write-back on its way.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Write {
    pub(super) page: PageIndex,
    pub(super) number: Number,
    pub(super) value: u16,
}

/// An access, the page that it waits for, and those of its pages that it had.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Work {
    pub(super) access: Access,
    pub(super) page: PageIndex,
    pub(super) had: u32,
    /// It lost one of them.
    pub(super) lost: bool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Vcpu {
    Idle,
    Trying(Work),
    Blocked(Work),
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Node<const P: usize> {
    pub(super) cache: Cache<P>,
    pub(super) directory: Directory<P>,
    pub(super) frames: Vec<Frame>,
    /// Whether the owner's protocol serves a block.
    pub(super) owned: Vec<bool>,
    pub(super) evictor: VecDeque<CacheAction>,
    pub(super) responder: VecDeque<CacheAction>,
    pub(super) reads: VecDeque<PageIndex>,
    pub(super) writes: VecDeque<Write>,
    /// What homes have answered to writes.
    pub(super) answers: VecDeque<(PageIndex, Written)>,
    /// Pages of which a mutation forgot that they are on their way.
    pub(super) forgotten: Vec<PageIndex>,
    pub(super) holds: Vec<PageIndex>,
    pub(super) vcpu: Vcpu,
    pub(super) accesses: u8,
    /// Pages that the access in progress lost.
    pub(super) losses: u32,
    pub(super) token: Option<Number>,
    /// It has asked for the token.
    pub(super) wants_token: bool,
    /// What decides how long pages are held; without it, steps do.
    pub(super) policy: Option<Policy>,
    pub(super) is_alive: bool,
    pub(super) is_fenced: bool,
}

/// Requests that a node may have open at a directory of the model.
const OPEN: u16 = 16;

impl<const P: usize> Node<P> {
    pub(super) fn new(
        me: Member,
        members: MemberSet,
        nodes: usize,
        blocks: usize,
        is_split: bool,
    ) -> Self {
        let keeper = |block: usize| super::world::member(block % nodes);
        let mine = (0..blocks).map(|block| keeper(block) == me);
        let mut directory = Directory::new(members, mine, OPEN);
        if is_split {
            directory.split_all();
        }
        let frame = Frame {
            mapped: Mapped::No,
            value: None,
            home: None,
            peer: None,
            local: LocalPage::Zero,
            leaves: false,
        };
        let room = if nodes > 3 { 16 } else { 3 };
        Self {
            cache: Cache::with_room(me, members, (0..blocks).map(keeper), room),
            directory,
            frames: vec![frame; blocks * P],
            owned: vec![false; blocks],
            evictor: VecDeque::new(),
            responder: VecDeque::new(),
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            answers: VecDeque::new(),
            forgotten: Vec::new(),
            holds: Vec::new(),
            vcpu: Vcpu::Idle,
            accesses: 0,
            losses: 0,
            token: None,
            wants_token: false,
            policy: None,
            is_alive: true,
            is_fenced: false,
        }
    }

    /// Whether its vCPU runs.
    pub(super) fn runs(&self) -> bool {
        self.is_alive && !self.is_fenced
    }

    /// Whether a write-back of the page is not answered, as far as the runtime knows.
    pub(super) fn is_writing(&self, page: PageIndex) -> bool {
        let answers = self.answers.iter().map(|(page, _)| *page);
        let mut writes = self.writes.iter().map(|write| write.page).chain(answers);
        writes.any(|written| written == page) && !self.forgotten.contains(&page)
    }

    /// Whether the access in progress needs the page.
    pub(super) fn is_in_access(&self, page: PageIndex) -> bool {
        match self.vcpu {
            Vcpu::Idle => false,
            Vcpu::Trying(work) | Vcpu::Blocked(work) => {
                let first = work.access.first;
                (first..first + u32::from(work.access.count)).contains(&page.number())
            }
        }
    }

    /// The page changed in a way that may let the access go on.
    pub(super) fn wake(&mut self, page: PageIndex) -> bool {
        match self.vcpu {
            Vcpu::Blocked(work) if work.page == page => {
                self.vcpu = Vcpu::Trying(work);
                true
            }
            _ => false,
        }
    }
}
