//! A member that breaks the protocol, on real connections to nodes that work: what it did is named, it
//! is fenced, and no other node waits for ever.

mod relay;
mod vm;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fabric_coherence::message::{Grant, Left, PageAt, Right, Source, Want};
use fabric_coherence::{BlockIndex, MemberSet, Message, Number, Violation, directory};
use fabric_peers::{HomeMessage, PeerMessage};

use self::relay::relay;
use self::vm::{
    BLOCK, EPOCH, HOSTILE, LIMIT, OLD_EPOCH, OWNED, UNUSED, Vm, fenced, get, has_owned, number,
    page,
};
use crate::mesh::member;

/// What the hostile member sends to the home of a block, and what that is.
type Offence = fn(u8) -> (Message, Violation);

const OFFENCES: [Offence; 13] = [
    // Pages and blocks that it does not own.
    |home| {
        let (page, number) = (page(home, 0), Number::MAX);
        let left = Left::Home;
        let violation = Violation::NumberNotGranted(page, number);
        (Message::Put { page, number, left }, violation)
    },
    |home| {
        let (block, number) = (BlockIndex(home.into()), Number::MAX);
        let violation = Violation::BlockNotAsked(block);
        (Message::Taken { block, number }, violation)
    },
    |home| {
        let (block, number) = (BlockIndex(home.into()), number(1));
        let pages = vec![PageAt::Owner; BLOCK].into();
        let violation = Violation::BlockNotAsked(block);
        let state = Message::SplitState {
            block,
            number,
            pages,
        };
        (state, violation)
    },
    |home| {
        let (page, number) = (page(home, UNUSED), number(1));
        let data = Message::Data {
            page,
            number,
            dirty: true,
            written: true,
        };
        (data, Violation::DataNotAsked(page))
    },
    // What it owns.
    |home| {
        let page = page(home, OWNED);
        (Message::PutShared { page }, Violation::DroppedOwned(page))
    },
    |home| {
        let (page, want) = (page(home, OWNED), Want::Write);
        let early = false;
        let get = Message::Get { page, want, early };
        (get, Violation::AlreadyHeld(page))
    },
    // Answers that were not asked.
    |home| {
        let (page, number) = (page(home, UNUSED), number(1));
        let violation = Violation::AckNotAsked(page);
        (Message::Ack { page, number }, violation)
    },
    |home| {
        let (page, number) = (page(home, 1), Number::MAX);
        let unblock = Message::Unblock {
            page,
            number,
            written: true,
        };
        (unblock, Violation::UnblockNotAsked(page))
    },
    |_| {
        let number = number(1);
        (Message::TokenBack { number }, Violation::Token)
    },
    // As the directory, which it is not.
    |home| {
        let (page, number) = (page(home, 2), Number::MAX);
        let grant = Grant {
            page,
            number,
            right: Right::Exclusive,
            source: Source::Zero,
            acks: MemberSet::EMPTY,
            hold: 0,
        };
        (Message::Grant(grant), Violation::ElsewhereDirectory(page))
    },
    |home| {
        let (page, number) = (page(home, 0), Number::MAX);
        let fetch = Message::Fetch {
            page,
            number,
            requester: member(HOSTILE),
            right: Right::Exclusive,
        };
        (fetch, Violation::ElsewhereDirectory(page))
    },
    |home| {
        let (page, number) = (page(home, 1), Number::MAX);
        let invalidate = Message::Invalidate {
            page,
            number,
            requester: member(1 - home),
        };
        (invalidate, Violation::ElsewhereDirectory(page))
    },
    |home| {
        let (block, number) = (BlockIndex(home.into()), Number::MAX);
        let violation = Violation::BlockNotHeld(block);
        (Message::Split { block, number }, violation)
    },
];

#[test]
fn a_member_that_breaks_the_protocol_is_named_and_fenced() {
    for (offence, victim) in OFFENCES.iter().zip([0, 1].into_iter().cycle()) {
        let mut vm = Vm::start();
        vm.own(victim);
        let (message, violation) = offence(victim);
        vm.send(victim, PeerMessage::Coherence(message));
        vm.ends(victim, &fenced(violation));
    }
}

#[test]
fn a_member_that_answers_as_a_home_that_was_not_asked_is_named() {
    let mut vm = Vm::start();
    vm.own(1);
    let page = page(1, UNUSED);
    let written = HomeMessage::Written {
        page,
        number: number(1),
        refused: false,
    };
    vm.send(1, PeerMessage::Home(written));
    let reason = format!("it answers as the home of {page}, which was not asked");
    let hostile = member(HOSTILE);
    vm.ends(1, &format!("{hostile} broke the protocol: {reason}"));
}

#[test]
fn a_member_that_writes_back_a_grant_that_never_was_is_named_and_fenced() {
    let mut vm = Vm::start();
    vm.own(0);
    let (page, number) = (page(0, OWNED), Number::MAX);
    vm.send(0, PeerMessage::Home(HomeMessage::Write { page, number }));
    vm.ends(0, &fenced(Violation::NumberNotGranted(page, number)));
}

#[test]
fn what_is_written_back_by_a_member_that_does_not_own_it_is_not_stored() {
    let mut vm = Vm::start();
    let number = vm.own(0);
    vm.write_back(0, number, 0xdb);
    vm.give_back(0, number);
    vm.write_back(0, number, 0xee);
    for (node, expected) in [(1, 0xdbdb_dbdb_dbdb_dbdb), (0, 0xdbdb_dbdb_dbdb_dbdc)] {
        let found = vm.nodes[node].touch(page(0, OWNED));
        vm.work_on();
        assert_eq!(found.recv_timeout(LIMIT), Ok(expected), "at node {node}");
    }
}

#[test]
fn a_member_that_floods_requests_is_named_and_fenced() {
    let mut vm = Vm::start();
    vm.own(0);
    let most = directory::OPEN_MAX;
    for number in 0..=u32::from(most) {
        vm.send(0, get(page(0, UNUSED + number)));
    }
    vm.ends(0, &fenced(Violation::Flooding(most)));
}

/// Of what the nodes have to wait for at most.
const TIME_MAX: Duration = Duration::from_secs(5);

#[test]
fn a_member_that_never_unblocks_is_named_and_fenced() {
    let mut vm = Vm::with(TIME_MAX, |_| None);
    vm.own(0);
    let page = page(0, UNUSED);
    vm.send(0, get(page));
    // It waits for the unblock as well.
    vm.nodes[1].touch(page);
    vm.ends(0, &fenced(Violation::Silent(page)));
}

#[test]
fn an_owner_that_never_sends_its_page_is_named() {
    let mut vm = Vm::with(TIME_MAX, |_| None);
    vm.own(0);
    let page = page(0, OWNED);
    vm.nodes[1].touch(page);
    // It knows who has to answer, and the directory does not.
    let (text, _) = vm.end_of(1);
    assert_eq!(text, fenced(Violation::Silent(page)));
    let (text, _) = vm.end_of(0);
    let expected = format!("{} is lost: ", member(1));
    assert!(text.starts_with(&expected), "{text}");
}

#[test]
fn a_member_that_sends_an_old_epoch_is_named_and_fenced() {
    let is_old = Arc::default();
    let mut vm = Vm::with(LIMIT, |to| Some(relay(to, &is_old)));
    vm.own(0);
    is_old.store(true, Ordering::Relaxed);
    // Of this epoch it is correct.
    let page = page(0, UNUSED);
    vm.send(0, PeerMessage::Coherence(Message::PutShared { page }));
    let hostile = member(HOSTILE);
    let reason = format!("uses epoch {OLD_EPOCH}, this is epoch {EPOCH}");
    vm.ends(0, &format!("{hostile} broke the protocol: {reason}"));
}

#[test]
fn a_member_that_is_gone_is_named_by_all() {
    let mut vm = Vm::start();
    vm.own(0);
    // Its connections end, and nothing listens at its address any longer.
    vm.hostile = None;
    for node in [0, 1] {
        let (text, losses) = vm.end_of(node);
        let expected = format!("{} is lost: ", member(HOSTILE));
        assert!(text.starts_with(&expected), "{text} of node {node}");
        assert_eq!(has_owned(&losses, 0), node == 0, "{losses:?}");
    }
}
