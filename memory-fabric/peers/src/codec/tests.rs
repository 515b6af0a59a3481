use fabric_coherence::merge::{Entries, MergeMessage};
use fabric_coherence::message::{BlockIndex, HOLD_MAX, Left, Right, Source, Want};
use fabric_coherence::{Member, MemberSet};
use proptest::prelude::*;

use super::*;

/// The last block has fewer pages than others.
const BOUNDS: Bounds = Bounds {
    pages: 5 * BLOCK_PAGES + 3,
    members: 5,
};

fn page() -> impl Strategy<Value = PageIndex> {
    (0..BOUNDS.pages).prop_map(PageIndex::new)
}

fn block() -> impl Strategy<Value = BlockIndex> {
    (0..6_u32).prop_map(BlockIndex)
}

fn number() -> impl Strategy<Value = Number> {
    (0..=Number::MAX.value()).prop_map(|value| Number::new(value).expect("in range"))
}

fn member() -> impl Strategy<Value = Member> {
    (0..BOUNDS.members).prop_map(|place| Member::at(place).expect("in range"))
}

fn right() -> impl Strategy<Value = Right> {
    prop_oneof![Just(Right::Shared), Just(Right::Exclusive)]
}

fn want() -> impl Strategy<Value = Want> {
    prop_oneof![Just(Want::Read), Just(Want::Write), Just(Want::Upgrade)]
}

fn left() -> impl Strategy<Value = Left> {
    prop_oneof![Just(Left::Unchanged), Just(Left::Zero), Just(Left::Home)]
}

fn source() -> impl Strategy<Value = Source> {
    prop_oneof![
        Just(Source::Zero),
        Just(Source::Home),
        Just(Source::Own),
        member().prop_map(Source::Member),
    ]
}

fn grant() -> impl Strategy<Value = Grant> {
    let acks = (0..32_u16).prop_map(MemberSet::from_bits);
    (page(), number(), right(), source(), acks, 0..=HOLD_MAX).prop_map(
        |(page, number, right, source, acks, hold)| Grant {
            page,
            number,
            right,
            source,
            acks,
            hold,
        },
    )
}

fn page_states() -> impl Strategy<Value = Box<[PageAt]>> {
    let one = prop_oneof![Just(PageAt::Zero), Just(PageAt::Home), Just(PageAt::Owner)];
    prop::collection::vec(one, TABLE).prop_map(Vec::into_boxed_slice)
}

fn behind() -> impl Strategy<Value = Box<[Behind]>> {
    let one = prop_oneof![Just(Behind::Zero), Just(Behind::Home)];
    let some = prop::collection::vec(one, TABLE).prop_map(Vec::into_boxed_slice);
    prop_oneof![Just(Box::default()), some]
}

fn of_node() -> impl Strategy<Value = Message> {
    prop_oneof![
        (page(), want(), any::<bool>()).prop_map(|(page, want, early)| Message::Get {
            page,
            want,
            early
        }),
        page().prop_map(|page| Message::PutShared { page }),
        (page(), number(), left()).prop_map(|(page, number, left)| Message::Put {
            page,
            number,
            left
        }),
        (block(), number()).prop_map(|(block, number)| Message::Taken { block, number }),
        (page(), number(), any::<bool>()).prop_map(|(page, number, written)| Message::Unblock {
            page,
            number,
            written
        }),
        (block(), number(), page_states()).prop_map(|(block, number, pages)| {
            Message::SplitState {
                block,
                number,
                pages,
            }
        }),
        (page(), number()).prop_map(|(page, number)| Message::Ack { page, number }),
        (page(), number(), any::<bool>(), any::<bool>()).prop_map(
            |(page, number, dirty, written)| Message::Data {
                page,
                number,
                dirty,
                written
            }
        ),
        Just(Message::TokenWant),
        number().prop_map(|number| Message::TokenBack { number }),
    ]
}

fn of_directory() -> impl Strategy<Value = Message> {
    prop_oneof![
        (page(), number(), member()).prop_map(|(page, number, requester)| Message::Invalidate {
            page,
            number,
            requester
        }),
        (page(), number(), member(), right()).prop_map(|(page, number, requester, right)| {
            Message::Fetch {
                page,
                number,
                requester,
                right,
            }
        }),
        (block(), number()).prop_map(|(block, number)| Message::Split { block, number }),
        grant().prop_map(Message::Grant),
        (page(), number()).prop_map(|(page, number)| Message::PutDone { page, number }),
        (block(), number(), behind()).prop_map(|(block, number, behind)| Message::BlockGrant {
            block,
            number,
            behind
        }),
        number().prop_map(|number| Message::TokenGrant { number }),
    ]
}

fn of_home() -> impl Strategy<Value = HomeMessage> {
    prop_oneof![
        page().prop_map(|page| HomeMessage::Read { page }),
        page().prop_map(|page| HomeMessage::Bytes { page }),
        (page(), number()).prop_map(|(page, number)| HomeMessage::Write { page, number }),
        (page(), number(), any::<bool>()).prop_map(|(page, number, refused)| {
            HomeMessage::Written {
                page,
                number,
                refused,
            }
        }),
    ]
}

fn of_merge() -> impl Strategy<Value = MergeMessage> {
    let entries = || any::<[u64; 8]>().prop_map(Entries);
    prop_oneof![
        (page(), 1..=4_u8).prop_map(|(page, level)| MergeMessage::Copy { page, level }),
        (page(), entries()).prop_map(|(page, entries)| MergeMessage::Change { page, entries }),
        (page(), entries(), member()).prop_map(|(page, entries, origin)| MergeMessage::Changed {
            page,
            entries,
            origin
        }),
        page().prop_map(|page| MergeMessage::Applied { page }),
        page().prop_map(|page| MergeMessage::Settled { page }),
        page().prop_map(|page| MergeMessage::Recall { page }),
        (page(), entries()).prop_map(|(page, entries)| MergeMessage::Recalled { page, entries }),
        page().prop_map(|page| MergeMessage::Demoted { page }),
    ]
}

fn any_message() -> impl Strategy<Value = PeerMessage> {
    prop_oneof![
        of_node().prop_map(PeerMessage::Coherence),
        of_directory().prop_map(PeerMessage::Coherence),
        of_home().prop_map(PeerMessage::Home),
        of_merge().prop_map(PeerMessage::Merge),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn every_message_survives_the_way_there_and_back(message in any_message()) {
        let encoded = encode(&message);
        let kind = encoded.kind();
        prop_assert_eq!(Kind::new(kind as u8), Ok(kind));
        prop_assert_eq!((kind.lane(), kind.has_page()), (message.lane(), message.has_page()));
        prop_assert_eq!(decode(kind, encoded.payload(), BOUNDS), Ok(message));
    }

    #[test]
    fn what_is_decoded_has_one_encoding(
        kind in prop::sample::select(Kind::ALL),
        bytes in prop::collection::vec(prop_oneof![0..4_u8, any::<u8>()], 0..160),
    ) {
        if let Ok(message) = decode(kind, &bytes, BOUNDS) {
            let again = encode(&message);
            prop_assert_eq!((again.kind(), again.payload()), (kind, &bytes[..]));
        }
    }

    #[test]
    fn a_payload_of_another_length_is_refused(message in any_message(), length in 0..160_usize) {
        let encoded = encode(&message);
        let mut bytes = encoded.payload().to_vec();
        bytes.resize(length, 0);
        let decoded = decode(encoded.kind(), &bytes, BOUNDS);
        let is_table = matches!(encoded.kind(), Kind::BlockGrant) && matches!(length, 12 | 76);
        if length != encoded.payload().len() && !is_table {
            let refused = matches!(decoded, Err(DecodeError::Length { .. }));
            prop_assert!(refused, "{decoded:?}");
        }
    }
}

fn hex(message: Message) -> String {
    let encoded = encode(&PeerMessage::Coherence(message));
    let bytes = encoded.payload().iter().map(|byte| format!("{byte:02x}"));
    format!("{:02x}:{}", encoded.kind() as u8, bytes.collect::<String>())
}

#[test]
fn the_bytes_of_messages_are_those_of_this_version() {
    let page = PageIndex::new(0x0102);
    let block = BlockIndex(3);
    let number = Number::new(0x0a0b_0c0d_0e0f).expect("in range");
    let third = Member::at(2).expect("in range");
    let early = true;
    let want = Want::Upgrade;
    assert_eq!(hex(Message::Get { page, want, early }), "01:020100000201");
    let grant = Grant {
        page,
        number,
        right: Right::Exclusive,
        source: Source::Member(third),
        acks: MemberSet::of(third),
        hold: 8,
    };
    let bytes = "0a:020100000f0e0d0c0b0a0000011204000".to_owned() + "8";
    assert_eq!(hex(Message::Grant(grant)), bytes);
    let data = Message::Data {
        page,
        number,
        dirty: false,
        written: true,
    };
    assert_eq!(hex(data), "0e:020100000f0e0d0c0b0a000002");
    let mut pages = vec![PageAt::Zero; TABLE];
    pages[..5].copy_from_slice(&[
        PageAt::Home,
        PageAt::Owner,
        PageAt::Zero,
        PageAt::Owner,
        PageAt::Home,
    ]);
    let split = Message::SplitState {
        block,
        number,
        pages: pages.into(),
    };
    let start = "06:030000000f0e0d0c0b0a00008901";
    assert_eq!(hex(split), format!("{start:0<width$}", width = 3 + 280));
    let mut behind = vec![Behind::Zero; TABLE];
    behind[9] = Behind::Home;
    let granted = Message::BlockGrant {
        block,
        number,
        behind: behind.into(),
    };
    let start = "0c:030000000f0e0d0c0b0a00000002";
    assert_eq!(hex(granted), format!("{start:0<width$}", width = 3 + 152));
    assert_eq!(hex(Message::TokenWant), "0f:");
}

#[test]
fn a_field_out_of_bounds_is_named_with_its_value_and_the_limit() {
    let fails = |kind, bytes: &[u8]| decode(kind, bytes, BOUNDS).unwrap_err().to_string();
    let text = fails(Kind::PutShared, &[3, 10, 0, 0]);
    assert_eq!(text, "page 0xa03 of a memory with 2563 pages");
    let mut taken = [0; 12];
    taken[0] = 6;
    assert_eq!(
        fails(Kind::Taken, &taken),
        "block 0x6 of a memory with 2563 pages"
    );
    let mut done = [0; 12];
    done[10] = 1;
    let text = "number 281474976710656, 281474976710655 is the limit";
    assert_eq!(fails(Kind::PutDone, &done), text);
    let mut invalidate = [0; 13];
    invalidate[12] = 5;
    assert_eq!(
        fails(Kind::Invalidate, &invalidate),
        "member 5 of 5 members"
    );
    let grant = |place: usize, value| {
        let mut bytes = [0; 17];
        bytes[place] = value;
        fails(Kind::Grant, &bytes)
    };
    assert_eq!(grant(12, 2), "right 0x2, 0x1 is the greatest");
    assert_eq!(grant(13, 3), "source 0x3, 0x2 is the greatest");
    assert_eq!(grant(13, 0x15), "member 5 of 5 members");
    assert_eq!(grant(13, 0xff), "member 239 of 5 members");
    assert_eq!(grant(14, 0x20), "the set 0x20 of 5 members");
    assert_eq!(grant(16, 9), "hold 9, 8 is the limit");
    assert_eq!(
        fails(Kind::Get, &[0; 5]),
        "Get with 5 bytes, 6 are expected"
    );
    assert_eq!(
        fails(Kind::Get, &[0, 0, 0, 0, 3, 0]),
        "want 0x3, 0x2 is the greatest"
    );
    assert_eq!(
        fails(Kind::Get, &[0, 0, 0, 0, 0, 2]),
        "flag 0x2, 0x1 is the greatest"
    );
    let mut split = [0; PAYLOAD_BYTES_MAX];
    split[20] = 0xc0;
    assert_eq!(
        fails(Kind::SplitState, &split),
        "page state 0x3, 0x2 is the greatest"
    );
    let text = Kind::new(0).unwrap_err().to_string();
    assert_eq!(text, "there is no message of kind 0");
}
