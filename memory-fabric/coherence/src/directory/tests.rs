//! What the directory decides, message by message.

use super::*;
use crate::members::MemberSet;
use crate::message::{Grant, Left, Right, Source, Want};

const PAGE: PageIndex = PageIndex::new(1);
const BLOCK: BlockIndex = BlockIndex(0);

fn member(place: u8) -> Member {
    Member::at(place).expect("a member")
}

fn number(value: u64) -> Number {
    Number::new(value).expect("a number")
}

/// A directory of one block of two pages, for four nodes.
struct Served {
    directory: Directory<2>,
    sent: Vec<DirectoryAction>,
}

impl Served {
    fn new() -> Self {
        let members = MemberSet::from_bits(0b1111);
        let mut directory = Directory::new(members, std::iter::once(true), 8);
        directory.split_all();
        Self {
            directory,
            sent: Vec::new(),
        }
    }

    fn handle(&mut self, from: u8, message: &Message) -> Result<(), Offence> {
        self.sent.clear();
        self.directory.handle(member(from), message, &mut self.sent)
    }

    fn get(&mut self, from: u8, want: Want, early: bool) -> Grant {
        let get = Message::Get {
            page: PAGE,
            want,
            early,
        };
        self.handle(from, &get).expect("a request");
        let mut grants = self.sent.iter().filter_map(|action| match action {
            DirectoryAction::Send {
                message: Message::Grant(grant),
                ..
            } => Some(*grant),
            _ => None,
        });
        grants.next().expect("a grant")
    }

    /// A request and its unblock; `written`: the owner before had written the page.
    fn serve(&mut self, from: u8, want: Want, written: bool) -> Grant {
        let grant = self.get(from, want, false);
        let unblock = Message::Unblock {
            page: PAGE,
            number: grant.number,
            written,
        };
        self.handle(from, &unblock).expect("an unblock");
        grant
    }
}

#[test]
fn the_first_reader_is_alone_and_the_next_ones_share() {
    let mut served = Served::new();
    let first = served.serve(0, Want::Read, false);
    assert_eq!(
        (first.right, first.source),
        (Right::Exclusive, Source::Zero)
    );
    let second = served.serve(1, Want::Read, false);
    assert_eq!(second.right, Right::Shared);
    assert_eq!(second.source, Source::Member(member(0)));
    let upgrade = served.serve(1, Want::Upgrade, false);
    assert_eq!(upgrade.source, Source::Own);
    assert_eq!(upgrade.acks, MemberSet::of(member(0)));
}

#[test]
fn a_page_that_its_readers_write_next_is_read_exclusively_until_one_does_not() {
    let mut served = Served::new();
    served.serve(0, Want::Write, false);
    let read = served.serve(1, Want::Read, true);
    assert_eq!(read.right, Right::Shared);
    served.serve(1, Want::Upgrade, false);
    let migrated = served.serve(2, Want::Read, true);
    assert_eq!(migrated.right, Right::Exclusive, "it migrates");
    // Member 2 did not write it.
    let last = served.serve(3, Want::Read, false);
    assert_eq!(last.right, Right::Exclusive, "only the unblock says so");
    let shared = served.serve(0, Want::Read, false);
    assert_eq!(
        shared.right,
        Right::Shared,
        "it does not migrate any longer"
    );
}

#[test]
fn the_hold_grows_with_each_page_lost_too_early_and_shrinks_again() {
    let mut served = Served::new();
    let mut holds = Vec::new();
    for (from, early) in [(0, false), (1, true), (0, true), (1, true), (0, false)] {
        let grant = served.get(from, Want::Write, early);
        holds.push(grant.hold);
        let unblock = Message::Unblock {
            page: PAGE,
            number: grant.number,
            written: true,
        };
        served.handle(from, &unblock).expect("an unblock");
    }
    assert_eq!(holds, [0, 1, 2, 3, 2]);
    // It stays contended for a while.
    let mut left = 0;
    for from in (0..2).cycle().skip(1) {
        let grant = served.get(from, Want::Write, false);
        let unblock = Message::Unblock {
            page: PAGE,
            number: grant.number,
            written: true,
        };
        served.handle(from, &unblock).expect("an unblock");
        if grant.hold == 0 {
            break;
        }
        assert_eq!(grant.hold, 1);
        left += 1;
    }
    assert_eq!(left, 8);
}

#[test]
fn a_page_that_is_put_back_is_read_from_where_it_was_left() {
    for (left, source) in [
        (Left::Home, Source::Home),
        (Left::Zero, Source::Zero),
        (Left::Unchanged, Source::Zero),
    ] {
        let mut served = Served::new();
        let number = served.serve(0, Want::Write, false).number;
        let put = Message::Put {
            page: PAGE,
            number,
            left,
        };
        served.handle(0, &put).expect("a put");
        assert_eq!(served.serve(1, Want::Read, false).source, source);
    }
}

#[test]
fn a_block_is_merged_after_quiet_sweeps_of_one_node() {
    let mut served = Served::new();
    served.serve(2, Want::Write, false);
    let mut sweep = |times| {
        served.sent.clear();
        for _ in 0..times {
            served.directory.sweep(BLOCK, &mut served.sent);
        }
        served.sent.len()
    };
    assert_eq!(sweep(MERGE_SWEEPS - 1), 0);
    assert_eq!(sweep(1), 2, "a grant and its deadline");
    let taken = Message::Taken {
        block: BLOCK,
        number: number(2),
    };
    let stranger = served.handle(1, &taken);
    assert_eq!(stranger, Err(Violation::BlockNotAsked(BLOCK).of(member(1))));
    served.handle(2, &taken).expect("the new owner");
    assert_eq!(served.directory.view(PAGE), View::Owned(member(2)));
}

#[test]
fn a_lost_node_takes_the_pages_that_only_it_had() {
    let mut served = Served::new();
    served.serve(1, Want::Write, false);
    assert_eq!(served.directory.clone().fence(member(2)), []);
    let losses = served.directory.fence(member(1));
    assert_eq!(losses, [Loss::Page(PAGE)]);
    let get = Message::Get {
        page: PAGE,
        want: Want::Read,
        early: false,
    };
    assert_eq!(served.handle(0, &get), Ok(()));
    assert!(served.sent.is_empty(), "it has stopped");
}

#[test]
fn a_requester_that_never_unblocks_is_named_when_its_deadline_is_over() {
    let mut served = Served::new();
    let grant = served.get(3, Want::Write, false);
    let deadline = DirectoryAction::PageDeadline {
        page: PAGE,
        number: grant.number,
    };
    assert!(served.sent.contains(&deadline));
    let overdue = served.directory.page_overdue(PAGE, grant.number);
    assert_eq!(overdue, Err(Violation::Silent(PAGE).of(member(3))));
    let unblock = Message::Unblock {
        page: PAGE,
        number: grant.number,
        written: false,
    };
    served.handle(3, &unblock).expect("an unblock");
    assert_eq!(served.directory.page_overdue(PAGE, grant.number), Ok(()));
    let again = served.handle(3, &unblock);
    assert_eq!(again, Err(Violation::UnblockNotAsked(PAGE).of(member(3))));
    // The deadline of one transaction is not that of the next.
    let next = served.get(2, Want::Write, false);
    assert_eq!(served.directory.page_overdue(PAGE, grant.number), Ok(()));
    let overdue = served.directory.page_overdue(PAGE, next.number);
    assert_eq!(overdue, Err(Violation::Silent(PAGE).of(member(2))));
}
