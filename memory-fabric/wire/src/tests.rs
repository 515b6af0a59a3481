use super::*;
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
fn another_version_is_named() {
    let mut header = Frame::new(FrameKind::ReadPage, 0, 0, false).encode(&[]);
    header[2] = 9;
    assert_eq!(
        Frame::decode(&header),
        Err(WireError::Version { theirs: 9 })
    );
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
    // Nothing about it is packed, and its answer is not empty.
    let packed = Frame::new(FrameKind::Probe, 1, 0, false).with_packing(Packing::Lz4);
    let decoded = Frame::decode(&packed.encode(&encode_count(64)));
    assert!(matches!(decoded, Err(WireError::Packing { .. })));
    let empty = Frame::new(FrameKind::ProbeData, 1, 0, false).encode(&[]);
    assert!(matches!(
        Frame::decode(&empty),
        Err(WireError::Length { .. })
    ));
}

proptest! {
    #[test]
    fn headers_round_trip(request: u64, offset: u64, checksummed: bool) {
        let frame = Frame::new(FrameKind::WritePage, request, offset, checksummed);
        let payload = [3; PAGE_SIZE];
        let header = frame.encode(&payload);
        let decoded = Frame::decode(&header).expect("valid");
        prop_assert!(decoded.verify(&header, &payload).is_ok());
        prop_assert_eq!((decoded.request, decoded.offset), (request, offset));
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

    #[test]
    fn no_payload_makes_a_message_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode_message::<LeaseRequest>(FrameKind::Lease, &bytes);
        let _ = decode_message::<ErrorMessage>(FrameKind::Error, &bytes);
        let _ = decode_message::<AttachRequest>(FrameKind::Attach, &bytes);
    }
}
