//! Packed pages in requests of hostile VMs.

use super::*;

#[test]
fn pages_are_packed_as_far_as_the_request_allows() {
    let donor = donor(4 * MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let stream = attach(donor.address(), grant.token).expect("attached");
    let mut stream = stream.into_tcp().expect("TCP");
    let page = PAGE_SIZE as u64;
    let text: Vec<u8> = b"page by page "
        .iter()
        .copied()
        .cycle()
        .take(PAGE_SIZE)
        .collect();
    let mut packer = Packer::new(1);
    let packed = packer.pack(&text, Packing::Lz4).expect("smaller").to_vec();
    // Page 0 is never written; page 1 is written packed; page 2 is filled, and made zero again.
    for (number, packing, payload) in [
        (1, Packing::Lz4, &packed[..]),
        (2, Packing::Plain, &text),
        (2, Packing::Zeroes, &[0, 0]),
    ] {
        let asked = frame(FrameKind::WritePage, number, number * page, true);
        let (answer, _) = exchange(&mut stream, &asked.with_packing(packing), payload);
        assert_eq!(answer.kind, FrameKind::Written);
    }
    for packing in [Packing::Plain, Packing::Zeroes, Packing::Lz4] {
        for (number, wanted) in [
            (0, vec![0; PAGE_SIZE]),
            (1, text.clone()),
            (2, vec![0; PAGE_SIZE]),
        ] {
            let asked = frame(FrameKind::ReadPage, 9, number * page, true);
            let (answer, payload) = exchange(&mut stream, &asked.with_packing(packing), &[]);
            let plain = packing == Packing::Plain || (packing == Packing::Zeroes && number == 1);
            assert_eq!(
                answer.packing == Packing::Plain,
                plain,
                "{packing:?}, page {number}"
            );
            if plain {
                assert_eq!(payload, wanted);
                continue;
            }
            let mut unpacked = vec![7; PAGE_SIZE];
            assert_eq!(unpack(&payload, &mut unpacked), Ok(1));
            assert_eq!(unpacked, wanted);
            assert!(payload.len() < if number == 1 { 200 } else { 3 });
        }
        let asked = frame(FrameKind::ReadPages, 9, 0, true).with_packing(packing);
        let (answer, payload) = exchange(&mut stream, &asked, &encode_count(3));
        let wanted = [vec![0; PAGE_SIZE], text.clone(), vec![0; PAGE_SIZE]].concat();
        let mut unpacked = vec![7; 3 * PAGE_SIZE];
        match answer.packing {
            Packing::Plain => unpacked = payload,
            _ => drop(unpack(&payload, &mut unpacked).expect("three pages")),
        }
        assert_eq!(answer.packing, packing);
        assert_eq!(unpacked, wanted);
    }
}

#[test]
fn packed_pages_that_are_wrong_are_refused_and_not_stored() {
    let donor = donor(4 * MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let mut packer = Packer::new(1);
    let packed = packer.pack(&[7; PAGE_SIZE], Packing::Lz4).expect("smaller");
    let mut cut = packed.to_vec();
    cut.pop();
    let longer = [packed, &[0, 0]].concat();
    let overlong = [&[0xff, 0xff], &packed[2..]].concat();
    // Without end: a bomb, were there room for what it gives.
    let mut bomb = vec![0xff; 3000];
    bomb[..6].copy_from_slice(&[0xb6, 0x0b, 0x1f, 1, 1, 0]);
    for (payload, why) in [
        (&cut[..], "cut short in page 0"),
        (&longer, "2 bytes are behind the last page"),
        (&overlong, "65535 bytes, 4096 is the limit"),
        (&bomb, "no LZ4 block of a page"),
        (&[2, 0, 0, 0], "page 0 "),
        (&[7], "1 bytes, 2 to 3584 are allowed"),
        (&[7; 3585], "3585 bytes, 2 to 3584 are allowed"),
    ] {
        let stream = attach(donor.address(), grant.token).expect("attached");
        let mut stream = stream.into_tcp().expect("TCP");
        let asked = frame(FrameKind::WritePage, 7, 0, false).with_packing(Packing::Lz4);
        let (answer, message) = exchange(&mut stream, &asked, payload);
        assert_eq!(answer.kind, FrameKind::Error);
        let message = ErrorMessage::decode(&message).expect("a message");
        assert_eq!(message.refusal, Refusal::Malformed, "{}", message.text);
        assert!(message.text.contains(why), "{} has no {why}", message.text);
    }
    assert_eq!(donor.pool().status().pages_written, 0);
    let stream = attach(donor.address(), grant.token).expect("attached");
    let mut stream = stream.into_tcp().expect("TCP");
    let asked = frame(FrameKind::ReadPage, 7, 0, false);
    assert_eq!(exchange(&mut stream, &asked, &[]).1, [0; PAGE_SIZE]);
}
