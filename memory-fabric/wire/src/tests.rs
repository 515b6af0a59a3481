use super::*;
use fabric_homes::{LocalNode, NodeId};
use fabric_pages::page::PAGE_SIZE;
use packing::{Packing, packed_bytes_max};
use proptest::prelude::*;

#[test]
fn a_flipped_bit_anywhere_is_found_by_the_checksum() {
    let payload = [7_u8; PAGE_SIZE];
    let frame = Frame::new(FrameKind::PageData, 0x1234, 0x5000, true);
    let header = frame.encode(&payload);
    let decoded = Frame::decode(&header).expect("valid");
    decoded.verify(&header, &payload).expect("undamaged");
    for bit in [0, 9, 4095 * 8 + 7] {
        let mut damaged = payload;
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(
            decoded.verify(&header, &damaged).is_err(),
            "payload bit {bit}"
        );
    }
    let mut damaged = header;
    damaged[16] ^= 1;
    let decoded = Frame::decode(&damaged).expect("the id may be anything");
    assert!(decoded.verify(&damaged, &payload).is_err());
}

#[test]
fn another_version_is_named_with_this_one() {
    for theirs in [VERSION - 1, VERSION + 1] {
        let mut header = Frame::new(FrameKind::ReadPage, 0, 0, false).encode(&[]);
        header[2] = theirs;
        let error = WireError::Version { theirs };
        assert_eq!(Frame::decode(&header), Err(error.clone()));
        let prefix = header[..PREFIX_BYTES].try_into().expect("so many bytes");
        assert_eq!(Frame::check_prefix(prefix), Err(error.clone()));
        let text = error.to_string();
        assert!(text.contains(&format!("version {theirs} ")), "{text}");
        assert!(text.contains(&format!("this one {VERSION};")), "{text}");
    }
    assert_eq!(Frame::check_prefix(*b"SV\x0e\x01"), Ok(()));
    let foreign = Frame::check_prefix(*b"HTTP");
    assert_eq!(foreign, Err(WireError::Magic(*b"HT")));
}

#[test]
fn the_checksum_covers_sender_and_epoch() {
    let stamp = Stamp {
        node: NodeId(200),
        epoch: 77,
    };
    let header = Frame::new(FrameKind::Written, 1, 0, true).with_stamp(stamp);
    let header = header.encode(&[]);
    for byte in [6, 32, 39] {
        let mut damaged = header;
        damaged[byte] ^= 1;
        let decoded = Frame::decode(&damaged).expect("both may be anything");
        assert!(decoded.verify(&damaged, &[]).is_err(), "byte {byte}");
    }
}

#[test]
fn control_frames_have_no_stamp() {
    let header = Frame::new(FrameKind::Renew, 0, 0, true).encode(&[]);
    assert_eq!(Frame::decode(&header).expect("valid").stamp, Stamp::NONE);
}

#[test]
fn packing_is_told_only_where_there_is_something_to_pack() {
    for packing in [Packing::Plain, Packing::Zeroes, Packing::Lz4] {
        let frame = Frame::new(FrameKind::ReadPage, 1, 0, true).with_packing(packing);
        let decoded = Frame::decode(&frame.encode(&[])).expect("valid");
        assert_eq!((decoded.packing, decoded.checksummed), (packing, true));
    }
    let mut header = Frame::new(FrameKind::ReadPage, 1, 0, false).encode(&[]);
    header[4] = 6;
    let (kind, flags) = (FrameKind::ReadPage, 6);
    let wrong = Err(WireError::Packing { kind, flags });
    assert_eq!(Frame::decode(&header), wrong, "there is no packing 3");
    for kind in [FrameKind::Written, FrameKind::DropPages, FrameKind::Renew] {
        let header = Frame::new(kind, 1, 0, false).with_packing(Packing::Lz4);
        let decoded = Frame::decode(&header.encode(&[0; COUNT_BYTES]));
        assert!(
            matches!(decoded, Err(WireError::Packing { .. })),
            "{kind:?}"
        );
    }
}

#[test]
fn packed_pages_have_limits_of_their_own() {
    for (kind, pages) in [
        (FrameKind::PageData, 1),
        (FrameKind::WritePage, 1),
        (FrameKind::PagesData, RUN_PAGES_MAX as usize),
    ] {
        let frame = Frame::new(kind, 1, 0, false).with_packing(Packing::Lz4);
        let payload = vec![0; packed_bytes_max(pages) + 1];
        for (bytes, allowed) in [(1, false), (2, true), (payload.len() - 1, true)] {
            let decoded = Frame::decode(&frame.encode(&payload[..bytes]));
            assert_eq!(decoded.is_ok(), allowed, "{kind:?} {bytes}");
        }
        let decoded = Frame::decode(&frame.encode(&payload));
        assert!(matches!(decoded, Err(WireError::Length { .. })), "{kind:?}");
    }
}

#[test]
fn a_token_is_not_printed() {
    assert_eq!(format!("{:?}", Token([0xab; 16])), "Token(..)");
}

#[test]
fn a_run_has_at_least_a_page_and_at_most_the_limit() {
    assert_eq!(decode_run(&encode_count(1)), Ok(1));
    assert_eq!(decode_run(&encode_count(RUN_PAGES_MAX)), Ok(RUN_PAGES_MAX));
    for pages in [0, RUN_PAGES_MAX + 1, u32::MAX] {
        assert_eq!(decode_run(&encode_count(pages)), Err(WireError::Run(pages)));
    }
    assert!(decode_run(&[1, 0, 0]).is_err());
}

#[test]
fn a_probe_asks_for_at_least_a_byte_and_at_most_the_limit() {
    for bytes in [1, 64, PROBE_BYTES_MAX] {
        assert_eq!(decode_probe(&encode_count(bytes)), Ok(bytes));
    }
    for bytes in [0, PROBE_BYTES_MAX + 1, u32::MAX] {
        assert_eq!(
            decode_probe(&encode_count(bytes)),
            Err(WireError::Probe(bytes))
        );
    }
    assert!(decode_probe(&[1, 0, 0]).is_err());
    // A probe has no packing, and its answer is not empty.
    let packed = Frame::new(FrameKind::Probe, 1, 0, false).with_packing(Packing::Lz4);
    let decoded = Frame::decode(&packed.encode(&encode_count(64)));
    assert!(matches!(decoded, Err(WireError::Packing { .. })));
    let empty = Frame::new(FrameKind::ProbeData, 1, 0, false).encode(&[]);
    assert!(matches!(
        Frame::decode(&empty),
        Err(WireError::Length { .. })
    ));
}

#[test]
fn pieces_are_eighths_of_pages_and_no_more_than_a_run_has() {
    let unit = u32::try_from(PIECE_BYTES).expect("small");
    let most = u32::try_from(PIECES_BYTES_MAX).expect("small");
    for bytes in [unit, 3 * unit, most] {
        assert_eq!(decode_pieces(&encode_count(bytes)), Ok(bytes));
    }
    for bytes in [0, 1, unit + 1, most + unit, u32::MAX] {
        let error = decode_pieces(&encode_count(bytes)).expect_err("refused");
        assert_eq!(error, WireError::Pieces(bytes));
        let text = error.to_string();
        assert!(text.contains(&format!("piece of {bytes} bytes")), "{text}");
        assert!(text.contains("multiples of 512 up to 131072"), "{text}");
    }
    assert!(decode_pieces(&[1, 0, 0]).is_err());
    for (kind, most) in [
        (FrameKind::WritePiece, PIECE_BYTES_MAX),
        (FrameKind::PieceData, PIECES_BYTES_MAX),
    ] {
        let decoded = |bytes: usize| {
            let frame = Frame::new(kind, 1, 0, false);
            Frame::decode(&frame.encode(&vec![7; bytes]))
        };
        assert!(
            decoded(PIECE_BYTES).is_ok() && decoded(most).is_ok(),
            "{kind:?}"
        );
        for bytes in [0, PIECE_BYTES - 1, most + 1] {
            let refused = matches!(decoded(bytes), Err(WireError::Length { .. }));
            assert!(refused, "{kind:?} of {bytes}");
        }
    }
}

proptest! {
    #[test]
    fn headers_round_trip(
        request: u64, offset: u64, node: u8, epoch: u64, checksummed: bool,
    ) {
        let stamp = Stamp { node: NodeId(node), epoch };
        let frame = Frame::new(FrameKind::WritePage, request, offset, checksummed);
        let frame = frame.with_stamp(stamp);
        let payload = [3; PAGE_SIZE];
        let header = frame.encode(&payload);
        let decoded = Frame::decode(&header).expect("valid");
        prop_assert!(decoded.verify(&header, &payload).is_ok());
        prop_assert_eq!((decoded.request, decoded.offset), (request, offset));
        prop_assert_eq!(decoded.stamp, stamp);
        prop_assert_eq!(decoded.length, PAGE_SIZE);
    }

    #[test]
    fn no_header_makes_decode_panic_or_accept_too_long_a_payload(bytes: [u8; HEADER_BYTES]) {
        if let Ok(frame) = Frame::decode(&bytes) {
            let most = match frame.kind {
                FrameKind::ProbeData => PROBE_BYTES_MAX as usize,
                _ => PAYLOAD_BYTES_MAX,
            };
            prop_assert!(frame.length <= most);
        }
    }

    /// A donor answers requests of its connection's node from the connection's epoch on, in any
    /// order, and the VM accepts the answers to its own requests only.
    #[test]
    fn requests_since_the_connection_was_made_are_answered_and_no_others(
        nodes in prop::collection::vec(any::<u8>(), 3), made in 1_u64..8,
        requests in prop::collection::vec((0_usize..3, 0_u64..16), 1..20), other: u64,
    ) {
        let ends = Ends { local: LocalNode::new(NodeId(nodes[0])), donor: NodeId(nodes[1]) };
        let attach = ends.attach(Token([1; 16]), TrafficClass::Urgent);
        prop_assert_eq!((attach.node.0, attach.donor.0, attach.epoch), (nodes[0], nodes[1], 1));
        let mut attached = Attached::new(&AttachRequest { epoch: made, ..attach });
        let accepted = attached.accepted();
        prop_assert_eq!(accepted, Stamp { node: ends.donor, epoch: made });
        let mut newest = made;
        for (sender, epoch) in requests {
            let node = NodeId(nodes[sender]);
            let asked = Frame::new(FrameKind::ReadPage, 9, 0, false);
            let asked = asked.with_stamp(Stamp { node, epoch });
            match attached.check(&asked) {
                Ok(stamp) => {
                    prop_assert!(node == attach.node && epoch >= made);
                    newest = newest.max(epoch);
                    let answer = Frame::new(FrameKind::PageData, 9, 0, false).with_stamp(stamp);
                    prop_assert_eq!(answer.check_answer(ends.donor, epoch), Ok(()));
                    if other != epoch {
                        let (kind, found) = (answer.kind, epoch);
                        prop_assert_eq!(
                            answer.check_answer(ends.donor, other),
                            Err(WireError::AnswerEpoch { kind, found, asked: other })
                        );
                    }
                }
                Err(WireError::Sender { found, expected, .. }) => {
                    prop_assert!(found == node && expected == attach.node && node != expected);
                }
                Err(WireError::StaleEpoch { found, current, .. }) => {
                    prop_assert!(node == attach.node && found == epoch && current == made);
                    prop_assert!(epoch < made);
                }
                Err(other) => panic!("{other}"),
            }
            prop_assert_eq!(attached.newest_epoch(), newest);
        }
    }

    #[test]
    fn no_payload_makes_a_message_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode_message::<LeaseRequest>(FrameKind::Lease, &bytes);
        let _ = decode_message::<ErrorMessage>(FrameKind::Error, &bytes);
        let _ = decode_message::<AttachRequest>(FrameKind::Attach, &bytes);
    }
}
