//! VMs that misbehave towards a donor: others' memory stays theirs, the donor stays up.

mod leases;
mod packing;
mod stamps;

use fabric_transport::control::{ControlError, ControlStream};

use fabric_homes::NodeId;
use fabric_test_support::*;
use fabric_wire::packing::{Packer, Packing, unpack};
use fabric_wire::{
    DROP_PAGES_MAX, Ends, ErrorMessage, Frame, FrameKind, HEADER_BYTES, LeaseGrant, LeaseRequest,
    LeaseStatus, ORPHAN_TIME, PROBE_BYTES_MAX, RUN_PAGES_MAX, Refusal, Token, TrafficClass,
    encode_count,
};
use memory_fabric::page::PAGE_SIZE;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

fn lease(donor: SocketAddr, bytes: u64) -> (ControlStream, LeaseGrant) {
    lease_for(donor, bytes, 5000)
}

fn lease_for(donor: SocketAddr, bytes: u64, duration_ms: u32) -> (ControlStream, LeaseGrant) {
    let mut control = ControlStream::connect(donor).expect("a donor");
    let request = LeaseRequest {
        vm: "vm".into(),
        bytes,
        or_less: false,
        duration_ms,
    };
    let grant = control
        .call(FrameKind::Lease, &request, FrameKind::Granted)
        .expect("granted");
    (control, grant)
}

fn attach(donor: SocketAddr, token: Token) -> Result<ControlStream, ControlError> {
    attach_for(donor, token, TrafficClass::Urgent)
}

fn attach_for(
    donor: SocketAddr,
    token: Token,
    class: TrafficClass,
) -> Result<ControlStream, ControlError> {
    let mut stream = ControlStream::connect(donor).expect("a donor");
    stream.attach(token, class, &ends())?;
    Ok(stream)
}

fn ends() -> Ends {
    Ends {
        local: NodeId(0).into(),
        donor: NodeId(1),
    }
}

/// A frame of the node that connections here are made by.
fn frame(kind: FrameKind, request: u64, offset: u64, checksummed: bool) -> Frame {
    Frame::new(kind, request, offset, checksummed).with_stamp(ends().stamp())
}

/// Sends a frame, and gives the answer's header and payload.
fn exchange(stream: &mut TcpStream, frame: &Frame, payload: &[u8]) -> (Frame, Vec<u8>) {
    stream.write_all(&frame.encode(payload)).expect("sent");
    stream.write_all(payload).expect("sent");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).expect("an answer");
    let answer = Frame::decode(&header).expect("a frame");
    let mut payload = vec![0; answer.length];
    stream.read_exact(&mut payload).expect("a payload");
    answer.verify(&header, &payload).expect("undamaged");
    (answer, payload)
}

fn refused(result: Result<ControlStream, ControlError>) -> Refusal {
    match result {
        Err(ControlError::Refused { refusal, .. }) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_made_up_token_opens_nothing() {
    let donor = donor(MIB);
    let _lease = lease(donor.address(), MIB);
    let result = attach(donor.address(), Token([0x55; 16]));
    assert_eq!(refused(result), Refusal::UnknownLease);
}

#[test]
fn pages_outside_the_lease_are_refused() {
    let donor = donor(4 * MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    for offset in [MIB, u64::MAX - 4095, 12] {
        let mut stream = attach(donor.address(), grant.token)
            .expect("attached")
            .into_tcp()
            .expect("TCP");
        stream
            .write_all(&frame(FrameKind::ReadPage, 7, offset, false).encode(&[]))
            .expect("sent");
        let mut stream = stream_frames(stream);
        match stream.receive(PATIENCE) {
            Err(ControlError::Refused {
                refusal: Refusal::OutOfRange,
                text,
                ..
            }) => {
                assert!(text.contains("0x100000"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn probes_are_for_connections_that_measure_and_stay_inside_the_lease() {
    let donor = donor(4 * MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let asked = |class, offset, bytes: u32| {
        let stream = attach_for(donor.address(), grant.token, class).expect("attached");
        let mut stream = stream.into_tcp().expect("TCP");
        let payload = encode_count(bytes);
        let mut sent = Vec::from(frame(FrameKind::Probe, 7, offset, false).encode(&payload));
        sent.extend(payload);
        stream.write_all(&sent).expect("sent");
        match stream_frames(stream).receive(PATIENCE) {
            Err(ControlError::Refused { refusal, .. }) => refusal,
            other => panic!("{class:?} {offset:#x} {bytes}: {other:?}"),
        }
    };
    let page = PAGE_SIZE as u64;
    for class in [
        TrafficClass::Urgent,
        TrafficClass::Bulk,
        TrafficClass::Prefetch,
    ] {
        assert_eq!(asked(class, 0, 64), Refusal::Malformed, "{class:?}");
    }
    for bytes in [0, PROBE_BYTES_MAX + 1, u32::MAX] {
        assert_eq!(asked(TrafficClass::Probe, 0, bytes), Refusal::Malformed);
    }
    for (offset, bytes) in [
        (page, PROBE_BYTES_MAX),
        (MIB, 1),
        (12, 64),
        (u64::MAX - 4095, 64),
    ] {
        let refusal = asked(TrafficClass::Probe, offset, bytes);
        assert_eq!(refusal, Refusal::OutOfRange, "{offset:#x} {bytes}");
    }
    assert_eq!(donor.pool().status().pages_read, 0);
}

#[test]
fn pages_to_be_dropped_are_those_of_the_lease_and_not_too_many() {
    let donor = donor(4 * MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let page = PAGE_SIZE as u64;
    for (offset, pages) in [
        (0, 0),
        (0, 257),
        (MIB, 1),
        (MIB - page, 2),
        (12, 1),
        (u64::MAX - 4095, 1),
        (0, u32::MAX),
        (page, DROP_PAGES_MAX + 1),
    ] {
        let mut stream = attach(donor.address(), grant.token)
            .expect("attached")
            .into_tcp()
            .expect("TCP");
        let payload = encode_count(pages);
        let mut bytes = Vec::from(frame(FrameKind::DropPages, 7, offset, false).encode(&payload));
        bytes.extend(payload);
        stream.write_all(&bytes).expect("sent");
        let mut stream = stream_frames(stream);
        match stream.receive(PATIENCE) {
            Err(ControlError::Refused {
                refusal: Refusal::OutOfRange,
                text,
                ..
            }) => assert!(text.contains("0x100000"), "{text}"),
            other => panic!("{offset:#x} {pages}: {other:?}"),
        }
    }
    assert_eq!(donor.pool().status().pages_dropped, 0);
    // A frame without its number of pages is no frame.
    let stream = attach(donor.address(), grant.token).expect("attached");
    let mut stream = stream.into_tcp().expect("TCP");
    stream
        .write_all(&frame(FrameKind::DropPages, 7, 0, false).encode(&[]))
        .expect("sent");
    let result = stream_frames(stream).receive(PATIENCE);
    let malformed = matches!(
        result,
        Err(ControlError::Refused {
            refusal: Refusal::Malformed,
            ..
        })
    );
    assert!(malformed, "{result:?}");
}

#[test]
fn runs_that_nobody_may_ask_for_are_refused() {
    let donor = donor(4 * MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let page = PAGE_SIZE as u64;
    for (offset, pages, wanted) in [
        (0, 0, Refusal::Malformed),
        (0, RUN_PAGES_MAX + 1, Refusal::Malformed),
        (0, u32::MAX, Refusal::Malformed),
        (MIB - page, 2, Refusal::OutOfRange),
        (MIB, 1, Refusal::OutOfRange),
        (u64::MAX - 4095, 64, Refusal::OutOfRange),
        (12, 1, Refusal::OutOfRange),
    ] {
        let mut stream = attach(donor.address(), grant.token)
            .expect("attached")
            .into_tcp()
            .expect("TCP");
        let run = encode_count(pages);
        let header = frame(FrameKind::ReadPages, 7, offset, false).encode(&run);
        stream.write_all(&header).expect("sent");
        stream.write_all(&run).expect("sent");
        match stream_frames(stream).receive(PATIENCE) {
            Err(ControlError::Refused { refusal, .. }) => assert_eq!(refusal, wanted),
            other => panic!("{offset:#x}, {pages}: {other:?}"),
        }
    }
    assert_eq!(donor.pool().status().pages_read, 0);
}

#[test]
fn a_new_connection_takes_the_place_of_the_old() {
    let donor = donor(MIB);
    let (_control, grant) = lease(donor.address(), MIB);
    let mut old = attach(donor.address(), grant.token)
        .expect("attached")
        .into_tcp()
        .expect("TCP");
    let _new = attach(donor.address(), grant.token).expect("attached again");
    old.set_read_timeout(Some(PATIENCE)).expect("a socket");
    assert!(
        matches!(old.read(&mut [0; 16]), Ok(0) | Err(_)),
        "the old one was not closed"
    );
}

fn stream_frames(stream: TcpStream) -> impl ReceiveFrame {
    struct Frames(TcpStream);
    impl ReceiveFrame for Frames {
        fn receive(&mut self, timeout: Duration) -> Result<(), ControlError> {
            let peer = self.0.peer_addr().expect("connected");
            self.0.set_read_timeout(Some(timeout)).expect("a socket");
            let broken = |error| ControlError::Stream(peer, error);
            let mut header = [0; HEADER_BYTES];
            self.0.read_exact(&mut header).map_err(broken)?;
            let frame = Frame::decode(&header).expect("a frame");
            let mut payload = vec![0; frame.length];
            self.0.read_exact(&mut payload).map_err(broken)?;
            if frame.kind == FrameKind::Error {
                let message: fabric_wire::ErrorMessage =
                    fabric_wire::decode_message(frame.kind, &payload).expect("a message");
                let (refusal, text) = (message.refusal, message.text);
                return Err(ControlError::Refused {
                    address: peer,
                    refusal,
                    text,
                });
            }
            Ok(())
        }
    }
    Frames(stream)
}

trait ReceiveFrame {
    fn receive(&mut self, timeout: Duration) -> Result<(), ControlError>;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_bytes_bring_a_donor_down(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        valid_start: bool,
        kind in 0_u8..40,
    ) {
        let donor = donor(MIB);
        let mut stream = TcpStream::connect(donor.address()).expect("a donor");
        let mut sent = bytes;
        if valid_start && sent.len() >= HEADER_BYTES {
            let header = Frame::new(FrameKind::Lease, 0, 0, false).encode(&[]);
            sent[..8].copy_from_slice(&header[..8]);
            sent[3] = kind;
            sent[10..12].fill(0);
        }
        let _ = stream.write_all(&sent);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        // It answers or hangs up, but it does not wait for ever...
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        // ...and still lends to others.
        let (_control, grant) = lease(donor.address(), MIB / 2);
        prop_assert_eq!(grant.bytes, MIB / 2);
    }
}
