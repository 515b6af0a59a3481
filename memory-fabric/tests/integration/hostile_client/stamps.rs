//! Frames of other nodes, other epochs and other versions.

use super::*;
use fabric_wire::{AttachRequest, Stamp, VERSION};

/// The nodes and the epoch of connections here.
const VM: NodeId = NodeId(3);
const DONOR: NodeId = NodeId(9);
const MADE: u64 = 10;

fn request(token: Token, epoch: u64) -> AttachRequest {
    AttachRequest {
        token,
        class: TrafficClass::Urgent,
        node: VM,
        donor: DONOR,
        epoch,
    }
}

/// A connection that was made in this epoch, or why there is none.
fn attach_in(donor: SocketAddr, token: Token, epoch: u64) -> Result<TcpStream, ControlError> {
    let mut stream = ControlStream::connect(donor).expect("a donor");
    stream.send(FrameKind::Attach, &request(token, epoch))?;
    let (frame, _) = stream.receive(PATIENCE)?;
    stream.check_answer(&frame, FrameKind::Attached, DONOR, epoch)?;
    stream.into_tcp()
}

fn read_page(node: NodeId, epoch: u64) -> Frame {
    Frame::new(FrameKind::ReadPage, 7, 0, true).with_stamp(Stamp { node, epoch })
}

#[test]
fn requests_of_the_epoch_of_the_connection_and_later_ones_are_answered_in_their_own() {
    let donor = donor(MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let mut stream = attach_in(donor.address(), grant.token, MADE).expect("attached");
    // In any order, as streams of UDP bring them: one that was sent before the epoch advanced may
    // come after one that was sent later.
    for epoch in [MADE, MADE + 2, MADE + 1, u64::MAX, MADE] {
        let (answer, page) = exchange(&mut stream, &read_page(VM, epoch), &[]);
        assert_eq!((answer.kind, page.len()), (FrameKind::PageData, PAGE_SIZE));
        assert_eq!(answer.stamp, Stamp { node: DONOR, epoch });
    }
}

#[test]
fn requests_of_an_older_epoch_or_another_node_are_refused_by_name_and_not_carried_out() {
    let donor = donor(MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let stale = Refusal::StaleEpoch;
    for (node, epoch, wanted, text) in [
        (VM, MADE - 1, stale, "epoch 9, which is older than 10"),
        (VM, 0, stale, "epoch 0, which is older than 10"),
        (
            DONOR,
            MADE,
            Refusal::Malformed,
            "node 9, the connection is that of node 3",
        ),
        (
            NodeId(0),
            MADE,
            Refusal::Malformed,
            "node 0, the connection is that of node 3",
        ),
    ] {
        let mut stream = attach_in(donor.address(), grant.token, MADE).expect("attached");
        let frame = Frame::new(FrameKind::WritePage, 7, 0, true).with_stamp(Stamp { node, epoch });
        let (answer, message) = exchange(&mut stream, &frame, &[7; PAGE_SIZE]);
        assert_eq!(answer.kind, FrameKind::Error);
        let message = ErrorMessage::decode(&message).expect("a message");
        assert_eq!(message.refusal, wanted, "{}", message.text);
        assert!(
            message.text.contains(text),
            "{} has no {text}",
            message.text
        );
    }
    assert_eq!(donor.pool().status().pages_written, 0);
}

#[test]
fn a_connection_of_an_older_epoch_does_not_replace_one_that_is_in_use() {
    let donor = donor(MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let mut stream = attach_in(donor.address(), grant.token, MADE).expect("attached");
    let stale = |made: u64, newest: u64| match attach_in(donor.address(), grant.token, made) {
        Err(ControlError::Refused { refusal, text, .. }) => {
            assert_eq!(refusal, Refusal::StaleEpoch, "{text}");
            let wanted = format!("epoch {made}, which is older than {newest}");
            assert!(text.contains(&wanted), "{text}");
        }
        other => panic!("not refused: {other:?}"),
    };
    stale(MADE - 1, MADE);
    let (answer, _) = exchange(&mut stream, &read_page(VM, MADE + 5), &[]);
    assert_eq!(
        answer.kind,
        FrameKind::PageData,
        "the connection was left alone"
    );
    // What the connection carried counts for the one after it.
    drop(stream);
    let mut next = attach_in(donor.address(), grant.token, MADE + 5).expect("in that epoch");
    stale(MADE + 4, MADE + 5);
    exchange(&mut next, &read_page(VM, MADE + 5), &[]);
}

/// The frame with which a VM of version 7 asks for memory.
fn lease_of_version_7() -> Vec<u8> {
    let mut frame = vec![0; 32];
    frame[..4].copy_from_slice(&[b'S', b'V', 7, FrameKind::Lease as u8]);
    // The shortest name, a page, and the shortest time.
    frame.extend([1, b'a', 0x80, 0x20, 0, 1]);
    frame[8] = 6;
    frame
}

#[test]
fn a_vm_of_another_version_is_refused_with_both_versions() {
    let donor = donor(MIB);
    let mut newer = Frame::new(FrameKind::Lease, 0, 0, false).encode(&[]);
    newer[2] = VERSION + 1;
    for (frame, theirs) in [(lease_of_version_7(), 7), (newer.to_vec(), VERSION + 1)] {
        let mut stream = TcpStream::connect(donor.address()).expect("a donor");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.write_all(&frame).expect("sent");
        let mut answer = Vec::new();
        // The end may be a reset, since the donor does not read what it cannot understand.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() > HEADER_BYTES, "no answer: {answer:?}");
        assert_eq!(answer[..3], [b'S', b'V', VERSION]);
        let message = ErrorMessage::decode(&answer[HEADER_BYTES..]).expect("a message");
        assert_eq!(message.refusal, Refusal::Malformed);
        for version in [theirs, VERSION] {
            let named = message.text.contains(&version.to_string());
            assert!(named, "{} does not name {version}", message.text);
        }
    }
}
