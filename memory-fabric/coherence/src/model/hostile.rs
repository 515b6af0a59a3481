//! A node that breaks the protocol, among nodes that keep it: those end, and blame nobody else.

use fabric_pages::page::PageIndex;
use proptest::prelude::*;

use super::node::Vcpu;
use super::simulate::{P, Plan, Random, Simulation};
use super::world::{World, member};
use crate::cache::Cache;
use crate::directory::Directory;
use crate::members::{Member, MemberSet};
use crate::message::{
    Behind, BlockIndex, Grant, Left, Message, Number, PageAt, Right, Source, Want,
};
use crate::offence::Violation;

/// Any message, mostly about things that exist.
pub(super) fn any_message(random: &mut Random) -> Message {
    let page = PageIndex::new(u32::try_from(random.below(14)).expect("a page"));
    let block = BlockIndex(u32::try_from(random.below(4)).expect("a block"));
    let number = match random.below(20) {
        0 => Number::MAX,
        value => Number::new(value as u64 / 2).expect("a number"),
    };
    let requester = member(random.below(5));
    let flag = random.below(2) == 0;
    let right = [Right::Shared, Right::Exclusive][random.below(2)];
    match random.below(16) {
        0 | 1 => Message::Get {
            page,
            want: [Want::Read, Want::Write, Want::Upgrade][random.below(3)],
            early: flag,
        },
        2 => Message::PutShared { page },
        3 => Message::Put {
            page,
            number,
            left: [Left::Unchanged, Left::Zero, Left::Home][random.below(3)],
        },
        4 => Message::Taken { block, number },
        5 => Message::Unblock {
            page,
            number,
            written: flag,
        },
        6 => Message::SplitState {
            block,
            number,
            pages: vec![[PageAt::Owner, PageAt::Home][random.below(2)]; random.below(3) + 2].into(),
        },
        7 => Message::Invalidate {
            page,
            number,
            requester,
        },
        8 => Message::Fetch {
            page,
            number,
            requester,
            right,
        },
        9 => Message::Split { block, number },
        10 => Message::Grant(Grant {
            page,
            number,
            right,
            source: [
                Source::Zero,
                Source::Home,
                Source::Own,
                Source::Member(requester),
            ][random.below(4)],
            acks: MemberSet::from_bits(u16::try_from(random.below(32)).expect("a set")),
            hold: u8::try_from(random.below(9)).expect("a hold"),
        }),
        11 => Message::PutDone { page, number },
        12 => Message::BlockGrant {
            block,
            number,
            behind: vec![Behind::Home; random.below(2) * P].into(),
        },
        13 => Message::Ack { page, number },
        14 => Message::Data {
            page,
            number,
            dirty: flag,
            written: flag,
        },
        _ => Message::TokenWant,
    }
}

impl World<P> {
    /// All that still waits comes to its deadline: first nodes whose peers do not answer, then
    /// directories, then nodes whose directory does not answer.
    pub(super) fn end_deadlines(&mut self) {
        let mut offences = Vec::new();
        let nodes = || self.members().zip(&self.nodes);
        let honest = || nodes().filter(|(me, node)| self.hostile != Some(*me) && node.runs());
        let pages = || (0..).take(self.truth.len()).map(PageIndex::new);
        for (me, node) in honest() {
            let overdue = pages().filter_map(|page| {
                let number = node.cache.granted_number(page)?;
                node.cache.overdue(page, number).err()
            });
            offences.extend(overdue.map(|offence| (me, offence)));
        }
        if offences.is_empty() {
            let overdue =
                honest().filter_map(|(me, node)| Some((me, node.directory.overdue().err()?)));
            offences.extend(overdue);
        }
        if offences.is_empty() {
            for (me, node) in honest() {
                let overdue = pages().filter_map(|page| node.cache.unanswered(page).err());
                offences.extend(overdue.map(|offence| (me, offence)));
            }
        }
        if self.hostile.is_some() && self.crashed.is_none() {
            for (me, offence) in offences {
                self.blame(me, offence);
            }
        }
    }

    /// Whether nobody waits on the nodes that keep the protocol.
    pub(super) fn honest_nodes_end(&self) -> Result<(), String> {
        let nodes = self.members().zip(&self.nodes);
        for (_, node) in nodes.filter(|(me, _)| self.hostile != Some(*me)) {
            node.directory.check();
            if let Vcpu::Blocked(work) | Vcpu::Trying(work) = node.vcpu {
                return Err(format!("a hostile node lets {:?} hang", work.access));
            }
        }
        Ok(())
    }
}

fn run_with_hostile_node(seed: u64) -> Result<u64, String> {
    let mut random = Random::new(seed);
    let plan = Plan {
        nodes: 3 + random.below(4),
        blocks: 3,
        accesses: 6,
        pages_at_once: 2,
        only_writes: false,
        delay: 1 + random.below(20),
        disturbs: true,
        crashes: false,
        has_policy: false,
        streams: false,
        is_scarce: false,
    };
    let hostile = member(random.below(plan.nodes));
    let mut simulation = Simulation::new(plan, random, None);
    simulation.world.hostile = Some(hostile);
    simulation.run()
}

#[test]
fn a_hostile_node_is_fenced_and_nobody_else_hangs_or_is_blamed() {
    for seed in 0..20_000 {
        if let Err(failure) = run_with_hostile_node(seed) {
            panic!("seed {seed}: {failure}");
        }
    }
}

/// Random accesses between some nodes, cut off in the middle, then any messages to all parts.
fn flood(seed: u64, steps: usize, messages: usize) -> Vec<Violation> {
    let mut random = Random::new(seed);
    let mut world = World::<P>::new(
        4,
        3 * P,
        super::explore::Budget {
            accesses: 20,
            evictions: 20,
            sweeps: 4,
            prefetches: 20,
            ..Default::default()
        },
        false,
    );
    for _ in 0..steps {
        let mut possible = Vec::new();
        world.system_steps(&mut possible);
        if possible.is_empty() || random.below(4) == 0 {
            world.outside_steps(&mut possible);
        }
        match possible.len() {
            0 => break,
            count => world.apply(possible[random.below(count)]),
        }
    }
    assert_eq!(world.failure, None);
    let mut found = Vec::new();
    let node = &mut world.nodes[random.below(4)];
    for _ in 0..messages {
        let message = any_message(&mut random);
        let from = member(random.below(5));
        let (mut directed, mut cached) = (Vec::new(), Vec::new());
        found.extend(node.directory.handle(from, &message, &mut directed).err());
        node.directory.check();
        found.extend(node.cache.handle(from, &message, &mut cached).err());
    }
    found.into_iter().map(|offence| offence.violation).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_message_in_any_state_is_handled_or_named(
        seed in any::<u64>(), steps in 0_usize..200, messages in 1_usize..200,
    ) {
        flood(seed, steps, messages);
    }
}

#[test]
fn arbitrary_messages_are_named_in_many_ways() {
    let violations = (0..200).flat_map(|seed| flood(seed, 100, 200));
    let kinds: std::collections::HashSet<_> = violations
        .map(|violation| std::mem::discriminant(&violation))
        .collect();
    assert!(kinds.len() >= 15, "only {} kinds", kinds.len());
}

fn members(count: u8) -> MemberSet {
    let members = (0..count).filter_map(Member::at);
    members.fold(MemberSet::EMPTY, MemberSet::with)
}

#[test]
fn a_node_that_floods_requests_is_named() {
    let keeper = std::iter::repeat_n(true, 1);
    let mut directory = Directory::<P>::new(members(3), keeper, 2);
    let mut sink = Vec::new();
    let get = |number| Message::Get {
        page: PageIndex::new(number),
        want: Want::Read,
        early: false,
    };
    directory
        .handle(member(0), &get(0), &mut sink)
        .expect("a request");
    for number in 0..2 {
        directory
            .handle(member(1), &get(number), &mut sink)
            .expect("a request");
    }
    let flood = directory.handle(member(1), &get(2), &mut sink);
    assert_eq!(flood, Err(Violation::Flooding(2).of(member(1))));
    let other = directory.handle(member(2), &get(2), &mut sink);
    assert_eq!(other, Ok(()), "others are served");
}

#[test]
fn what_was_not_asked_is_named() {
    let mut cache = Cache::<P>::new(member(0), members(3), std::iter::once(member(0)));
    let (page, number) = (PageIndex::new(1), Number::ZERO);
    let mut handle = |message| cache.handle(member(2), &message, &mut Vec::new());
    let peer = member(2);
    assert_eq!(
        handle(Message::Ack { page, number }),
        Err(Violation::AckNotAsked(page).of(peer))
    );
    let data = Message::Data {
        page,
        number,
        dirty: false,
        written: false,
    };
    assert_eq!(handle(data), Err(Violation::DataNotAsked(page).of(peer)));
    let invalidate = Message::Invalidate {
        page,
        number,
        requester: member(1),
    };
    let elsewhere = Violation::ElsewhereDirectory(page);
    assert_eq!(handle(invalidate), Err(elsewhere.of(peer)));
    let stranger = cache.handle(
        member(9),
        &Message::PutDone { page, number },
        &mut Vec::new(),
    );
    assert_eq!(stranger, Err(Violation::NotAMember.of(member(9))));
}

/// Messages and actions of one write, with that many readers before it.
fn work_of_a_write(nodes: usize, readers: usize) -> usize {
    let keeper = std::iter::repeat_n(true, 1);
    let count = u8::try_from(nodes).expect("a count");
    let mut directory = Directory::<P>::new(members(count), keeper, 8);
    directory.split_all();
    let mut sink = Vec::new();
    let page = PageIndex::new(0);
    let mut number = 0;
    let mut serve = |from: usize, want| {
        let get = Message::Get {
            page,
            want,
            early: false,
        };
        sink.clear();
        directory
            .handle(member(from), &get, &mut sink)
            .expect("a request");
        number += 1;
        let unblock = Message::Unblock {
            page,
            number: Number::new(number).expect("a number"),
            written: true,
        };
        let actions = sink.len();
        directory
            .handle(member(from), &unblock, &mut sink)
            .expect("an unblock");
        actions
    };
    for reader in 0..readers {
        serve(reader, Want::Read);
    }
    serve(nodes - 1, Want::Write)
}

#[test]
fn the_work_of_a_request_does_not_grow_with_the_number_of_nodes() {
    for readers in [0, 1] {
        let work = work_of_a_write(2, readers);
        for nodes in 3..=16 {
            assert_eq!(work_of_a_write(nodes, readers), work, "{nodes} nodes");
        }
    }
}
