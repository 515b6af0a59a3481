//! Two compute nodes that keep the protocol, among messages of a third that does not.

use std::collections::VecDeque;

use fabric_coherence::message::{Message, PageAt};
use fabric_coherence::{
    BlockIndex, Cache, CacheAction, Directory, DirectoryAction, Lane, LocalPage, Member, MemberSet,
    Offence, Role, Written,
};
use fabric_homes::BLOCK_PAGES;
use fabric_pages::page::PageIndex;

use crate::codec::{Bounds, Kind, PAYLOAD_BYTES_MAX, decode};
use crate::message::PeerMessage;

/// The place of the node that sends anything.
pub(super) const HOSTILE: u8 = 2;

/// Nodes that keep the protocol. Each keeps the directory of the block with its number.
const HONEST: u8 = 2;

/// Pages of a block that are touched, and that an owner reports as its own.
const TOUCHED: u8 = 4;

const PAGES: usize = BLOCK_PAGES as usize;

const BOUNDS: Bounds = Bounds {
    pages: HONEST as u32 * BLOCK_PAGES,
    members: HOSTILE + 1,
};

/// Most messages that may be outstanding between the two nodes at the end, and be delivered.
const DELIVERIES_MAX: usize = 100_000;

type Queue = VecDeque<(Member, Message)>;

struct Node {
    cache: Cache,
    directory: Directory,
    /// What the node receives, by sender and lane.
    arriving: [Queue; HONEST as usize * Lane::ALL.len()],
}

/// The two nodes.
pub(super) struct Nodes {
    nodes: [Node; HONEST as usize],
    /// A message between the two nodes showed that a node broke the protocol: the VM ends.
    offence: Option<Offence>,
}

fn member(place: u8) -> Member {
    Member::at(place).expect("a place")
}

fn page(value: u8) -> PageIndex {
    let block = u32::from(value >> 4 & 1);
    PageIndex::new(block * BLOCK_PAGES + u32::from(value % TOUCHED))
}

impl Node {
    fn new(me: u8) -> Self {
        let all = (0..=HOSTILE).map(member);
        let members = all.fold(MemberSet::EMPTY, MemberSet::with);
        let mine = (0..HONEST).map(|block| block == me);
        let open = fabric_coherence::directory::OPEN_MAX;
        Self {
            cache: Cache::new(member(me), members, (0..HONEST).map(member)),
            directory: Directory::new(members, mine, open),
            arriving: Default::default(),
        }
    }

    /// Handles a message; returns what the node sends.
    fn handle(&mut self, from: Member, message: &Message) -> Result<Queue, Offence> {
        let mut sent = Queue::new();
        if message.role() == Role::Directory {
            let mut actions = Vec::new();
            self.directory.handle(from, message, &mut actions)?;
            self.directed(actions, &mut sent);
        } else {
            let mut actions = Vec::new();
            self.cache.handle(from, message, &mut actions)?;
            self.carry_out(actions, &mut sent)?;
        }
        Ok(sent)
    }

    fn directed(&mut self, actions: Vec<DirectoryAction>, sent: &mut Queue) {
        for action in actions {
            if let DirectoryAction::Send { to, message } = action {
                sent.push_back((to, message));
            }
        }
    }

    /// Does what the cache asks for at once, and with it what that leads to.
    fn carry_out(&mut self, actions: Vec<CacheAction>, sent: &mut Queue) -> Result<(), Offence> {
        let mut ahead = VecDeque::from(actions);
        while let Some(action) = ahead.pop_front() {
            let mut next = Vec::new();
            match action {
                CacheAction::Send { to, message } | CacheAction::SendPage { to, message, .. } => {
                    sent.push_back((to, message));
                }
                CacheAction::Install { page, .. } => self.cache.installed(page, &mut next),
                CacheAction::ReadHome(page) => self.cache.home_read(page, &mut next),
                CacheAction::WriteBack { page, .. } => {
                    self.cache.written(page, Written::Home, &mut next)?;
                }
                CacheAction::Dropped(page) => self.cache.dropped(page, &mut next),
                CacheAction::Hold { page, .. } => self.cache.released(page, &mut next),
                CacheAction::SplitBlock(block) => {
                    let mut pages = [LocalPage::Zero; PAGES];
                    pages[..usize::from(TOUCHED)].fill(LocalPage::Dirty { writable: true });
                    self.cache.split(block, &pages, &mut next);
                }
                CacheAction::OwnBlock { block, .. } => self.cache.owned(block, &mut next),
                CacheAction::Zap(_)
                | CacheAction::WriteProtect(_)
                | CacheAction::Map { .. }
                | CacheAction::Wake(_)
                | CacheAction::AnswerDeadline { .. }
                | CacheAction::PutDeadline { .. }
                | CacheAction::Free(_)
                | CacheAction::Fail(_) => {}
            }
            ahead.extend(next);
        }
        Ok(())
    }
}

impl Nodes {
    pub(super) fn new() -> Self {
        Self {
            nodes: [Node::new(0), Node::new(1)],
            offence: None,
        }
    }

    /// One step as the input says, or `None` at its end.
    pub(super) fn step(&mut self, input: &mut impl Iterator<Item = u8>) -> Option<()> {
        let what = input.next()?;
        let at = what >> 3 & 1;
        let value = input.next()?;
        if self.offence.is_some() {
            return None;
        }
        match what & 7 {
            0 => self.local(at, |cache, actions| {
                let (write, early) = (value >> 5 & 1 == 1, value >> 6 & 1 == 1);
                cache.touch(page(value), write, early, actions);
            }),
            1 => self.local(at, |cache, actions| {
                cache.evict(page(value), actions);
            }),
            2 => {
                let node = &mut self.nodes[usize::from(at)];
                let (mut actions, mut sent) = (Vec::new(), Queue::new());
                node.directory
                    .sweep(BlockIndex(u32::from(at)), &mut actions);
                node.directed(actions, &mut sent);
                self.send(at, sent);
            }
            3 | 4 => self.deliver(at, usize::from(value)),
            _ => self.hostile(at, value, input)?,
        }
        Some(())
    }

    /// Delivers what is on its way. Returns which node broke the protocol and how, if one did.
    pub(super) fn deliver_all(mut self) -> Option<Offence> {
        for _ in 0..DELIVERIES_MAX {
            let waits = |node: &Node| node.arriving.iter().any(|queue| !queue.is_empty());
            let at = (0..HONEST).find(|at| waits(&self.nodes[usize::from(*at)]));
            let Some(at) = at.filter(|_| self.offence.is_none()) else {
                return self.offence;
            };
            self.deliver(at, 0);
        }
        panic!("two nodes send each other messages without an end");
    }

    fn local(&mut self, at: u8, act: impl FnOnce(&mut Cache, &mut Vec<CacheAction>)) {
        let node = &mut self.nodes[usize::from(at)];
        let (mut actions, mut sent) = (Vec::new(), Queue::new());
        act(&mut node.cache, &mut actions);
        match node.carry_out(actions, &mut sent) {
            Ok(()) => self.send(at, sent),
            Err(offence) => self.offence = Some(offence),
        }
    }

    fn send(&mut self, from: u8, sent: Queue) {
        for (to, message) in sent {
            if let Some(node) = self.nodes.get_mut(to.index()) {
                let place = usize::from(from) * Lane::ALL.len() + message.lane() as usize;
                node.arriving[place].push_back((member(from), message));
            }
        }
    }

    /// Delivers the next message to a node, of the first lane from `choice` on that has one.
    fn deliver(&mut self, at: u8, choice: usize) {
        let node = &mut self.nodes[usize::from(at)];
        let lanes = node.arriving.len();
        let mut places = (0..lanes).map(|place| (place + choice) % lanes);
        let Some(place) = places.find(|place| !node.arriving[*place].is_empty()) else {
            return;
        };
        let Some((from, message)) = node.arriving[place].pop_front() else {
            return;
        };
        match node.handle(from, &message) {
            Ok(sent) => self.send(at, sent),
            Err(offence) => self.offence = Some(offence),
        }
    }

    /// Passes a message of the third node to one of the others, unless the decoder refuses it.
    fn hostile(&mut self, at: u8, kind: u8, input: &mut impl Iterator<Item = u8>) -> Option<()> {
        let kind = Kind::ALL[usize::from(kind) % Kind::ALL.len()];
        let mut payload = [0; PAYLOAD_BYTES_MAX];
        let length = (0..=PAYLOAD_BYTES_MAX).rev();
        let length = length.filter(|length| kind.check_length(*length).is_ok());
        let mut lengths = length.collect::<Vec<_>>().into_iter();
        let (long, short) = (lengths.next()?, lengths.next());
        let shape = input.next()?;
        let length = short.filter(|_| shape & 1 == 1).unwrap_or(long);
        // Page or block, number, and the rest: mostly values that exist.
        let named = input.next()?;
        let first = match kind {
            Kind::Taken | Kind::Split | Kind::SplitState | Kind::BlockGrant => u32::from(named & 1),
            _ => page(named).number(),
        };
        payload[..4].copy_from_slice(&first.to_le_bytes());
        payload[4] = input.next()?;
        if kind == Kind::SplitState {
            let state = [PageAt::Zero, PageAt::Home, PageAt::Owner][usize::from(named >> 1) % 3];
            payload[12..].fill(state as u8 * 0b0101_0101);
        } else if length > 12 {
            for byte in payload[12..length].iter_mut().take(5) {
                *byte = input.next()?;
            }
        }
        if shape & 0xf0 == 0xf0 {
            payload[usize::from(named) % PAYLOAD_BYTES_MAX] ^= shape;
        }
        let message = decode(kind, &payload[..length], BOUNDS);
        let Ok(PeerMessage::Coherence(message)) = message else {
            return Some(());
        };
        match self.nodes[usize::from(at)].handle(member(HOSTILE), &message) {
            Ok(sent) => self.send(at, sent),
            // The caller would fence the third node. Nothing else changed, so all can continue.
            Err(offence) => assert_eq!(offence.peer.place(), HOSTILE, "{offence}"),
        }
        Some(())
    }
}
