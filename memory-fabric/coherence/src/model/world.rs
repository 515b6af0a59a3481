//! Nodes, lanes and homes around the protocol: what a runtime does with its actions, one at a time.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use fabric_pages::page::PageIndex;

use super::explore::Budget;
use super::node::{Node, Vcpu};
use crate::action::DirectoryAction;
use crate::lanes::{Arrival, Header, Inbox};
use crate::members::{Member, MemberSet};
use crate::message::{Lane, Message, Number, Role};
use crate::mutation::Mutation;
use crate::offence::Offence;
use crate::token::{Keeper, STARVING_LOSSES};

/// A message on its way, and the value of the page that travels beside it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Item {
    pub(super) sequence: u64,
    pub(super) message: Message,
    pub(super) value: u16,
}

/// The messages of one lane from one node to another. Sequence numbers count only relative to what
/// the receiver expects: histories that differ in nothing else are one state.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    next: u64,
    pub(super) expected: u64,
    pub(super) items: VecDeque<Item>,
    /// Delivered, and not confirmed by the receiver: a restored connection repeats them.
    pub(super) delivered: VecDeque<Item>,
}

impl Queue {
    fn relative(&self) -> impl Iterator<Item = (u64, &Message, u16)> {
        let expected = self.expected;
        let items = self.items.iter();
        items.map(move |item| {
            (
                expected.wrapping_sub(item.sequence),
                &item.message,
                item.value,
            )
        })
    }
}

impl Hash for Queue {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(self.items.len());
        self.relative().for_each(|item| item.hash(state));
    }
}

impl PartialEq for Queue {
    fn eq(&self, other: &Self) -> bool {
        self.relative().eq(other.relative())
    }
}

impl Eq for Queue {}

/// A page as its home stores it.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Stored {
    pub(super) number: Number,
    pub(super) value: u16,
}

/// All nodes, and what is between them.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct World<const P: usize> {
    pub(super) nodes: Vec<Node<P>>,
    pub(super) queues: Vec<Queue>,
    pub(super) homes: Vec<Stored>,
    /// The last value written to each page, in the order of the writes.
    pub(super) truth: Vec<u16>,
    /// How many writes each page had.
    pub(super) writes: Vec<u16>,
    /// Keeps the starvation token, on the first node.
    pub(super) keeper: Keeper,
    /// Pages that an access lost after which its node asks for it.
    pub(super) starves_after: u32,
    pub(super) budget: Budget,
    /// The time of a simulation.
    pub(super) now: u64,
    pub(super) crashed: Option<Member>,
    /// A node that breaks the protocol, and whether another one has found out.
    pub(super) hostile: Option<Member>,
    pub(super) is_exposed: bool,
    pub(super) mutation: Option<Mutation>,
    /// The first property that did not hold.
    pub(super) failure: Option<String>,
    /// Steps that became possible, for a simulation; an exploration looks for itself.
    pub(super) news: Option<Vec<News>>,
}

/// A step that became possible, and how many units of the minimum hold it is delayed.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct News {
    pub(super) step: Step,
    pub(super) units: u32,
}

/// Something that happens.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Step {
    /// The vCPU is done with its access.
    Rest(Member),
    Deliver(Member, Member, Lane),
    /// Delivered, and repeated later.
    DeliverAgain(Member, Member, Lane),
    /// The connection between two nodes is restored: what was not confirmed is repeated.
    Reconnect(Member, Member),
    /// The evictor thread carries out its next action.
    Evictor(Member),
    /// The thread that receives responses carries out its next action.
    Responder(Member),
    HomeRead(Member),
    HomeWrite(Member),
    /// The answer for a page arrives.
    HomeWritten(Member, PageIndex),
    /// The home stores a write whose answer is lost, so that it will be repeated.
    HomeWriteUnanswered(Member),
    HoldOver(Member, PageIndex),
    /// The time has come for which the policy of a node asked.
    Policy(Member),
    HoldOverEarly(Member, PageIndex),
    Access(Member, Access),
    Retry(Member),
    Evict(Member, PageIndex),
    /// A page is touched that no vCPU waits for.
    Prefetch(Member, PageIndex),
    Sweep(u32),
    Crash(Member),
    Fence(Member),
}

/// What a vCPU does: all its pages at once.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Access {
    pub(super) first: u32,
    pub(super) count: u8,
    pub(super) kind: Kind,
    /// It touches the last page first.
    pub(super) backwards: bool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Kind {
    Read,
    Write,
    Zero,
}

pub(super) fn member(place: usize) -> Member {
    let place = u8::try_from(place).ok();
    place.and_then(Member::at).expect("a member")
}

impl<const P: usize> World<P> {
    /// Nodes with a memory of some pages, all zero. `is_split`: every block is split from the start.
    pub(super) fn new(nodes: usize, pages: usize, budget: Budget, is_split: bool) -> Self {
        let members = (0..nodes).map(member);
        let all = members.clone().fold(MemberSet::EMPTY, MemberSet::with);
        let blocks = pages.div_ceil(P);
        Self {
            nodes: members
                .map(|me| Node::new(me, all, nodes, blocks, is_split))
                .collect(),
            queues: vec![Queue::default(); nodes * nodes * Lane::ALL.len()],
            homes: vec![Stored::default(); pages],
            truth: vec![0; pages],
            writes: vec![0; pages],
            keeper: Keeper::default(),
            starves_after: STARVING_LOSSES,
            budget,
            now: 0,
            crashed: None,
            hostile: None,
            is_exposed: false,
            mutation: None,
            failure: None,
            news: None,
        }
    }

    pub(super) fn mutate(mut self, mutation: Option<Mutation>) -> Self {
        self.mutation = mutation;
        for node in &mut self.nodes {
            node.cache.switch = mutation;
            node.directory.switch = mutation;
            if let Some(policy) = &mut node.policy {
                policy.progress.switch = mutation;
            }
        }
        self
    }

    pub(super) fn fail(&mut self, failure: impl Into<String>) {
        // A hostile node may well break the memory; that is not what is looked for.
        if self.hostile.is_none() {
            self.failure.get_or_insert(failure.into());
        }
    }

    /// A directory that lies about its transactions can make others look silent.
    fn has_hostile_directory(&self) -> bool {
        let keepers = self.homes.len().div_ceil(P);
        self.hostile
            .is_some_and(|hostile| hostile.index() < keepers)
    }

    /// A node found an offence.
    pub(super) fn blame(&mut self, at: Member, offence: Offence) {
        if self.hostile.is_none() || self.hostile == Some(at) {
            self.fail(offence.to_string());
        } else if self.hostile == Some(offence.peer) || self.has_hostile_directory() {
            self.is_exposed = true;
        } else {
            self.failure = Some(format!("{at} blames an honest node: {offence}"));
        }
    }

    pub(super) fn members(&self) -> impl Iterator<Item = Member> + use<P> {
        (0..self.nodes.len()).map(member)
    }

    pub(super) fn note(&mut self, step: Step) {
        self.note_later(step, 0);
    }

    pub(super) fn note_later(&mut self, step: Step, units: u32) {
        if let Some(news) = &mut self.news {
            news.push(News { step, units });
        }
    }

    pub(super) fn queue_at(&self, from: Member, to: Member, lane: Lane) -> usize {
        (from.index() * self.nodes.len() + to.index()) * Lane::ALL.len() + lane as usize
    }

    pub(super) fn send(&mut self, from: Member, to: Member, message: Message, value: u16) {
        let lane = message.lane();
        let at = self.queue_at(from, to, lane);
        let queue = &mut self.queues[at];
        queue.items.push_back(Item {
            sequence: queue.next,
            message,
            value,
        });
        queue.next += 1;
        self.note(Step::Deliver(from, to, lane));
    }

    /// Whether the head of a lane can be handled now. The evictor thread handles revocations one
    /// after the other, and the thread that receives responses its messages; blocks change hands
    /// while neither is in the middle of something.
    pub(super) fn can_deliver(&self, from: Member, to: Member, lane: Lane) -> bool {
        let queue = &self.queues[self.queue_at(from, to, lane)];
        let Some(item) = queue.items.front() else {
            return false;
        };
        let node = &self.nodes[to.index()];
        if !node.is_alive {
            return false;
        }
        let (evicts, responds) = (node.evictor.is_empty(), node.responder.is_empty());
        match item.message {
            Message::Invalidate { .. } | Message::Fetch { .. } => evicts,
            Message::Split { .. } | Message::BlockGrant { .. } => evicts && responds,
            _ if item.message.role() == Role::Cache => responds,
            _ => true,
        }
    }

    pub(super) fn deliver(&mut self, from: Member, to: Member, lane: Lane, is_repeated: bool) {
        let at = self.queue_at(from, to, lane);
        let keep = usize::from(self.news.is_some()) * 4;
        let is_fenced = self.nodes[to.index()].is_fenced;
        let queue = &mut self.queues[at];
        let Some(item) = queue.items.front().cloned() else {
            return;
        };
        if !is_repeated {
            queue.items.pop_front();
            if keep > 0 && item.sequence == queue.expected {
                queue.delivered.push_back(item.clone());
            }
            if queue.delivered.len() > keep {
                queue.delivered.pop_front();
            }
        }
        if is_fenced {
            return;
        }
        // The filter of the real inbox, whose state is the number that the lane continues with.
        let mut inbox = <Inbox>::new(0);
        inbox.resume(lane, queue.expected);
        let header = Header {
            epoch: 0,
            sequence: item.sequence,
        };
        let arrival = inbox.accept(lane, header);
        queue.expected = inbox.expected(lane);
        match arrival {
            Ok(Arrival::Fresh) => self.receive(from, to, item),
            Ok(Arrival::Duplicate) if self.mutation == Some(Mutation::NoDuplicateFilter) => {
                self.receive(from, to, item);
            }
            Ok(Arrival::Duplicate | Arrival::Stale) => {}
            Err(violation) => self.fail(violation.to_string()),
        }
    }

    pub(super) fn reconnect(&mut self, from: Member, to: Member) {
        for lane in Lane::ALL {
            let at = self.queue_at(from, to, lane);
            let queue = &mut self.queues[at];
            let mut repeated = 0;
            while let Some(item) = queue.delivered.pop_back() {
                queue.items.push_front(item);
                repeated += 1;
            }
            for _ in 0..repeated {
                self.note(Step::Deliver(from, to, lane));
            }
        }
    }

    fn receive(&mut self, from: Member, to: Member, item: Item) {
        match item.message.role() {
            Role::Directory => {}
            Role::Cache => return self.node_receives(from, to, &item),
            Role::Token => return self.token(from, to, &item.message),
        }
        let mut actions = Vec::new();
        let directory = &mut self.nodes[to.index()].directory;
        if let Err(offence) = directory.handle(from, &item.message, &mut actions) {
            self.blame(to, offence);
        }
        self.direct(to, actions);
    }

    fn direct(&mut self, at: Member, actions: Vec<DirectoryAction>) {
        for action in actions {
            if let DirectoryAction::Send { to, message } = action {
                self.send(at, to, message, 0);
            }
        }
    }

    pub(super) fn sweep(&mut self, block: u32) {
        let at = member(block as usize % self.nodes.len());
        let mut actions = Vec::new();
        let directory = &mut self.nodes[at.index()].directory;
        directory.sweep(crate::message::BlockIndex(block), &mut actions);
        self.direct(at, actions);
    }

    /// Steps that the protocol, its runtime or the network will do.
    pub(super) fn system_steps(&self, steps: &mut Vec<Step>) {
        let members = || self.members();
        for from in members() {
            for to in members() {
                for lane in Lane::ALL {
                    if self.can_deliver(from, to, lane) {
                        steps.push(Step::Deliver(from, to, lane));
                    }
                }
            }
        }
        for (me, node) in members().zip(&self.nodes).filter(|(_, node)| node.is_alive) {
            if !node.evictor.is_empty() {
                steps.push(Step::Evictor(me));
            }
            if !node.responder.is_empty() {
                steps.push(Step::Responder(me));
            }
            if !node.reads.is_empty() {
                steps.push(Step::HomeRead(me));
            }
            if !node.writes.is_empty() {
                steps.push(Step::HomeWrite(me));
            }
            let answers = node.answers.iter();
            steps.extend(answers.map(|(page, _)| Step::HomeWritten(me, *page)));
            for page in &node.holds {
                if !node.is_in_access(*page) && self.mutation != Some(Mutation::NeverEndHold) {
                    steps.push(Step::HoldOver(me, *page));
                }
            }
            if let Vcpu::Trying(_) = node.vcpu {
                steps.push(Step::Retry(me));
            }
            let is_lost = self.crashed.is_some() && self.mutation != Some(Mutation::NoFence);
            if is_lost && !node.is_fenced {
                steps.push(Step::Fence(me));
            }
        }
        if steps.is_empty() && self.budget.pairs {
            self.patience_steps(steps);
        }
    }

    /// Whether the node has no directory, and the one before it neither, which has done nothing.
    fn is_before_its_turn(&self, me: Member) -> bool {
        let keepers = self.homes.len().div_ceil(P);
        let before = me.index().checked_sub(1).filter(|at| *at >= keepers);
        before.is_some_and(|at| self.nodes[at].is_alive && self.nodes[at].accesses == 0)
    }

    /// Steps that come from outside, as far as the budget goes.
    pub(super) fn outside_steps(&self, steps: &mut Vec<Step>) {
        let budget = &self.budget;
        let pages = || (0..).take(self.homes.len()).map(PageIndex::new);
        let members = || self.members();
        for (me, node) in members().zip(&self.nodes).filter(|(_, node)| node.runs()) {
            if budget.in_order && self.is_before_its_turn(me) {
                continue;
            }
            let can_begin = node.vcpu == Vcpu::Idle && node.accesses < budget.accesses;
            if can_begin && budget.pairs {
                for backwards in [false, true] {
                    for kind in [Kind::Read, Kind::Write] {
                        let access = Access {
                            first: 0,
                            count: 2,
                            kind,
                            backwards,
                        };
                        steps.push(Step::Access(me, access));
                    }
                }
            } else if can_begin {
                for page in pages() {
                    let kinds = [Kind::Read, Kind::Write, Kind::Zero];
                    for kind in kinds.into_iter().take(2 + usize::from(budget.zeroes)) {
                        let access = Access {
                            first: page.number(),
                            count: 1,
                            kind,
                            backwards: false,
                        };
                        steps.push(Step::Access(me, access));
                    }
                }
            }
            if budget.evictions > 0 && node.evictor.is_empty() {
                let here = pages().filter(|page| node.frames[page.index()].value.is_some());
                let here = here.filter(|page| self.may_evict(me, *page));
                steps.extend(here.map(|page| Step::Evict(me, page)));
            }
            if budget.prefetches > 0 {
                steps.extend(pages().map(|page| Step::Prefetch(me, page)));
            }
            if budget.replayed_writes > 0 && !node.writes.is_empty() {
                steps.push(Step::HomeWriteUnanswered(me));
            }
            if budget.early_releases > 0 {
                let held = node.holds.iter();
                steps.extend(held.map(|page| Step::HoldOverEarly(me, *page)));
            }
            // Without the node of the directory everything just ends.
            if budget.crashes > 0 && me.index() > 0 {
                steps.push(Step::Crash(me));
            }
        }
        if budget.duplicates > 0 {
            for from in members() {
                for to in members() {
                    let lanes = Lane::ALL.into_iter();
                    let full = lanes.filter(|lane| self.can_deliver(from, to, *lane));
                    steps.extend(full.map(|lane| Step::DeliverAgain(from, to, lane)));
                }
            }
        }
        if budget.sweeps > 0 {
            let blocks = self.homes.len().div_ceil(P);
            steps.extend((0..).take(blocks).map(Step::Sweep));
        }
    }
}
