//! Worlds of 4 to 16 nodes with random delays, evictions, reconnections and hot spots.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fabric_pages::page::PageIndex;

use super::explore::Budget;
use super::world::{Access, Kind, Step, World, member};
use crate::mutation::Mutation;

/// Pages of a block here.
pub(super) const P: usize = 4;

/// A generator of numbers that only depend on the seed (splitmix64).
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `limit`.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        usize::try_from(mixed % limit as u64).expect("less than a usize")
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// What a simulation does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) nodes: usize,
    pub(super) blocks: usize,
    pub(super) accesses: u8,
    /// Pages that an access needs at once, at most; with a negative chance of fewer.
    pub(super) pages_at_once: usize,
    pub(super) only_writes: bool,
    /// Longest usual delay of a message, in the unit of the minimum hold.
    pub(super) delay: usize,
    pub(super) disturbs: bool,
    pub(super) crashes: bool,
    /// Pages are held as the policy of a runtime decides.
    pub(super) has_policy: bool,
    /// Nodes go through the pages one after the other, without a rest.
    pub(super) streams: bool,
    /// Memory is scarce: pages leave and blocks merge often, nodes rest, and homes answer late.
    pub(super) is_scarce: bool,
}

impl Plan {
    fn random(random: &mut Random) -> Self {
        let nodes = 4 + random.below(13);
        Self {
            nodes,
            blocks: 1 + random.below(3),
            accesses: u8::try_from(40 / nodes).unwrap_or(1),
            pages_at_once: 1 + random.below(2),
            only_writes: random.one_in(4),
            delay: 1 + random.below(30),
            disturbs: !random.one_in(8),
            crashes: random.one_in(16),
            has_policy: random.one_in(2),
            streams: false,
            is_scarce: random.one_in(4),
        }
    }
}

pub(super) struct Simulation {
    pub(super) world: World<P>,
    plan: Plan,
    pub(super) random: Random,
    now: u64,
    count: u64,
    ahead: BinaryHeap<Reverse<(u64, u64, Step)>>,
    /// When the policy of each node is called next.
    policies: Vec<Option<u64>>,
}

/// Events after which a run that should end counts as endless.
const EVENTS_MAX: u64 = 200_000;

impl Simulation {
    pub(super) fn new(plan: Plan, random: Random, mutation: Option<Mutation>) -> Self {
        let budget = Budget {
            accesses: plan.accesses,
            evictions: u8::MAX,
            replayed_writes: u8::MAX,
            sweeps: u8::MAX,
            ..Budget::default()
        };
        let mut world = World::new(plan.nodes, plan.blocks * P, budget, false);
        if plan.has_policy {
            world.hold_by_policy();
        }
        let mut world = world.mutate(mutation);
        world.news = Some(Vec::new());
        Self {
            world,
            plan,
            random,
            now: 0,
            count: 0,
            ahead: BinaryHeap::new(),
            policies: vec![None; plan.nodes],
        }
    }

    fn schedule(&mut self, step: Step, delay: u64) {
        self.count += 1;
        self.ahead
            .push(Reverse((self.now + delay, self.count, step)));
    }

    fn delay(&mut self) -> u64 {
        let slow = if self.random.one_in(40) { 20 } else { 1 };
        (1 + self.random.below(self.plan.delay) * slow) as u64
    }

    /// Calls the policies of all nodes when they ask for it.
    fn schedule_policies(&mut self) {
        for node in 0..self.plan.nodes {
            let next = self.world.policy_next(member(node));
            // Not twice at one time.
            let next = next.map(|at| at.max(self.now + 1));
            if let Some(at) = next
                && self.policies[node].is_none_or(|before| at < before || before <= self.now)
            {
                self.policies[node] = Some(at);
                let delay = at - self.now;
                self.schedule(Step::Policy(member(node)), delay);
            }
        }
    }

    fn access(&mut self, node: usize) {
        let pages = self.plan.blocks * P;
        if self.plan.streams {
            let done = usize::from(self.world.nodes[node].accesses);
            let access = Access {
                first: u32::try_from(done % pages).expect("a page"),
                count: 1,
                kind: Kind::Write,
                backwards: false,
            };
            return self.schedule(Step::Access(member(node), access), 0);
        }
        let count = 1 + self.random.below(self.plan.pages_at_once);
        let count = if self.plan.pages_at_once > 2 {
            self.plan.pages_at_once
        } else {
            count
        };
        // Half of all accesses are to the same few pages.
        let first = if self.random.one_in(2) {
            self.random.below(2)
        } else {
            self.random.below(pages)
        };
        let kind = match self.random.below(8) {
            0 => Kind::Zero,
            1..=3 => Kind::Write,
            _ if self.plan.only_writes => Kind::Write,
            _ => Kind::Read,
        };
        let access = Access {
            first: u32::try_from(first.min(pages - count)).expect("a page"),
            count: u8::try_from(count).expect("a few pages"),
            kind,
            backwards: false,
        };
        let rest = if self.plan.is_scarce && self.random.one_in(4) {
            40
        } else {
            1
        };
        let delay = rest * self.delay();
        self.schedule(Step::Access(member(node), access), delay);
    }

    /// The next step in time. When nothing moves any more because of a hostile node, the deadlines of
    /// the others end.
    fn next_step(&mut self) -> Option<Step> {
        let Some(Reverse((time, _, step))) = self.ahead.pop() else {
            self.world.end_deadlines();
            if self.world.is_exposed && self.world.crashed.is_none() {
                self.expose();
                return self.next_step();
            }
            return None;
        };
        self.now = time;
        if self.world.is_exposed && self.world.crashed.is_none() {
            self.expose();
        }
        Some(step)
    }

    /// The others fence the hostile node.
    fn expose(&mut self) {
        self.world.crashed = self.world.hostile;
        for node in 0..self.plan.nodes {
            let is_hostile = self.world.hostile == Some(member(node));
            self.world.nodes[node].is_alive &= !is_hostile;
            let delay = self.delay();
            self.schedule(Step::Fence(member(node)), delay);
        }
    }

    /// A message of the hostile node is lost, or another one is sent beside it.
    fn misbehave(&mut self, step: Step) -> bool {
        let Step::Deliver(from, to, lane) = step else {
            return false;
        };
        if self.world.hostile != Some(from) || self.world.crashed.is_some() {
            return false;
        }
        match self.random.below(6) {
            0 => {
                let at = self.world.queue_at(from, to, lane);
                let queue = &mut self.world.queues[at];
                if let Some(item) = queue.items.pop_front() {
                    queue.expected = queue.expected.max(item.sequence + 1);
                }
                true
            }
            1 if self.count < EVENTS_MAX / 4 => {
                let message = super::hostile::any_message(&mut self.random);
                let to = member(self.random.below(self.plan.nodes));
                self.world.send(from, to, message, 7);
                false
            }
            _ => false,
        }
    }

    /// Something from outside, now and then.
    fn disturb(&mut self) {
        let nodes = self.plan.nodes;
        let at = self.random.below(nodes);
        let page = u32::try_from(self.random.below(self.plan.blocks * P));
        let page = PageIndex::new(page.expect("a page"));
        let step = match self.random.below(10) {
            0..=3 => Step::Evict(member(at), page),
            8 => Step::Prefetch(member(at), page),
            4 => Step::Sweep(u32::try_from(self.random.below(self.plan.blocks)).expect("a block")),
            5 => Step::HomeWriteUnanswered(member(at)),
            _ => Step::Reconnect(member(at), member(self.random.below(nodes))),
        };
        self.schedule(step, 0);
    }

    /// Whether a step can be done now, later, or not at all any more.
    fn can(&self, step: Step) -> Option<bool> {
        let node = |member: crate::members::Member| &self.world.nodes[member.index()];
        let can = match step {
            Step::Deliver(from, to, lane) => {
                let queue = &self.world.queues[self.world.queue_at(from, to, lane)];
                if queue.items.is_empty() || !node(to).is_alive {
                    return None;
                }
                self.world.can_deliver(from, to, lane)
            }
            Step::Evict(me, _) => {
                return Some(true).filter(|_| node(me).runs() && node(me).evictor.is_empty());
            }
            Step::HomeWriteUnanswered(me) => {
                return Some(true).filter(|_| node(me).runs() && !node(me).writes.is_empty());
            }
            Step::Reconnect(from, to) => {
                return Some(true).filter(|_| node(from).runs() && node(to).runs());
            }
            Step::Sweep(block) => {
                let keeper = &self.world.nodes[block as usize % self.plan.nodes];
                return Some(true).filter(|_| keeper.runs());
            }
            Step::Fence(me) => return Some(true).filter(|_| node(me).is_alive),
            Step::Crash(_) => true,
            Step::Rest(me)
            | Step::Retry(me)
            | Step::Evictor(me)
            | Step::Responder(me)
            | Step::HomeRead(me)
            | Step::HomeWrite(me)
            | Step::HomeWritten(me, _)
            | Step::HoldOver(me, _)
            | Step::Policy(me)
            | Step::HoldOverEarly(me, _)
            | Step::Prefetch(me, _)
            | Step::Access(me, _) => return Some(true).filter(|_| node(me).runs()),
            Step::DeliverAgain(..) => false,
        };
        Some(can)
    }

    pub(super) fn run(mut self) -> Result<u64, String> {
        self.run_to_the_end()
    }

    /// Runs until nothing happens any more. Returns the number of events.
    pub(super) fn run_to_the_end(&mut self) -> Result<u64, String> {
        for node in 0..self.plan.nodes {
            self.access(node);
        }
        if self.plan.crashes {
            let lost = member(self.random.below(self.plan.nodes));
            let at = 20 * self.delay();
            self.schedule(Step::Crash(lost), at);
        }
        while let Some(step) = self.next_step() {
            if self.count > EVENTS_MAX {
                return Err("the simulation does not end".into());
            }
            match self.can(step) {
                None => continue,
                Some(false) => {
                    let delay = 1 + self.random.below(4) as u64;
                    self.schedule(step, delay);
                    continue;
                }
                Some(true) => {}
            }
            if self.misbehave(step) {
                continue;
            }
            match step {
                Step::HomeWrite(me) if self.plan.disturbs && self.random.one_in(3) => {
                    // The home stores it, and the answer is lost with the connection.
                    self.world.apply(Step::HomeWriteUnanswered(me));
                    self.world.budget.replayed_writes = u8::MAX;
                    let delay = 10 * self.delay();
                    self.schedule(step, delay);
                    continue;
                }
                Step::Crash(_) => {
                    self.world.budget.crashes = 1;
                    for node in 0..self.plan.nodes {
                        let delay = self.delay();
                        self.schedule(Step::Fence(member(node)), delay);
                    }
                }
                Step::Sweep(_) => self.world.budget.sweeps = u8::MAX,
                Step::HomeWriteUnanswered(_) => self.world.budget.replayed_writes = u8::MAX,
                Step::Evict(..) => self.world.budget.evictions = u8::MAX,
                Step::Rest(me) if self.world.nodes[me.index()].accesses < self.plan.accesses => {
                    self.access(me.index());
                }
                _ => {}
            }
            self.world.now = self.now;
            self.world.apply(step);
            if let Some(failure) = self.world.failure.take() {
                return Err(failure);
            }
            for news in std::mem::take(self.world.news.as_mut().expect("a simulation")) {
                let delay = match news.step {
                    Step::HomeWritten(..) if self.plan.is_scarce && self.random.one_in(4) => {
                        100 * self.delay()
                    }
                    Step::Deliver(..)
                    | Step::HomeRead(_)
                    | Step::HomeWrite(_)
                    | Step::HomeWritten(..) => self.delay(),
                    Step::HoldOver(..) => u64::from(news.units),
                    // The host has other work.
                    Step::Retry(_) if self.plan.has_policy && self.random.one_in(20) => {
                        20 * self.delay()
                    }
                    _ => self.random.below(3) as u64,
                };
                self.schedule(news.step, delay);
            }
            self.schedule_policies();
            let often = if self.plan.is_scarce { 4 } else { 24 };
            if self.plan.disturbs && self.random.one_in(often) && !self.ahead.is_empty() {
                self.disturb();
            }
        }
        if let Some(failure) = self.world.failure.take() {
            return Err(failure);
        }
        if self.world.hostile.is_some() {
            return self.world.honest_nodes_end().map(|()| self.count);
        }
        self.world.check_quiescent()?;
        let is_done =
            |node: &super::node::Node<P>| !node.runs() || node.accesses == self.plan.accesses;
        if !self.world.nodes.iter().all(is_done) {
            return Err("a node does not progress".into());
        }
        Ok(self.count)
    }
}

/// Runs the simulation of a seed. Returns the number of its events.
pub(super) fn simulate(seed: u64, mutation: Option<Mutation>) -> Result<u64, String> {
    let mut random = Random::new(seed);
    let plan = Plan::random(&mut random);
    Simulation::new(plan, random, mutation).run()
}

/// Two or more nodes that need the same pages at once.
pub(super) fn contend(nodes: usize, seed: u64, mutation: Option<Mutation>) -> Result<u64, String> {
    let plan = Plan {
        nodes,
        blocks: 2,
        accesses: 10,
        pages_at_once: 8,
        only_writes: true,
        delay: 10,
        disturbs: false,
        crashes: false,
        has_policy: false,
        streams: false,
        is_scarce: false,
    };
    Simulation::new(plan, Random::new(seed), mutation).run()
}

fn simulate_all(seeds: std::ops::Range<u64>) {
    let count = seeds.end - seeds.start;
    let mut events = 0;
    for seed in seeds {
        match simulate(seed, None) {
            Ok(count) => events += count,
            Err(failure) => panic!("seed {seed}: {failure}"),
        }
    }
    println!("{count} simulations, {events} events");
}

#[test]
fn simulations_of_many_nodes_end_with_the_right_bytes() {
    simulate_all(0..10_000);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn a_million_simulations_end_with_the_right_bytes() {
    simulate_all(0..1_000_000);
}

#[test]
fn nodes_that_need_the_same_eight_pages_at_once_progress() {
    for nodes in [2, 3, 4, 8] {
        for seed in 0..20 {
            let result = contend(nodes, seed, None);
            assert!(result.is_ok(), "{nodes} nodes, seed {seed}: {result:?}");
        }
    }
}
