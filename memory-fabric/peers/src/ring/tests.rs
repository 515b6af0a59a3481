//! Streams over simulated adapters.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_host::metrics::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::closer::Closer;
use super::credit::Note;
use super::simulated::{RingFaults, SimulatedRings};
use super::*;

fn streams(rings: &SimulatedRings) -> [RingStream; 2] {
    let closer = Closer::start().expect("a thread");
    rings
        .pair()
        .map(|port| RingStream::new(port, closer.clone(), Arc::default()))
}

/// A stream, and an adapter at the other end that does what no correct node does.
fn stream_and_port() -> (RingStream, Box<dyn RingPort>) {
    let [port, hostile] = SimulatedRings::new(RingFaults::default(), 1).pair();
    let closer = Closer::start().expect("a thread");
    (RingStream::new(port, closer, Arc::default()), hostile)
}

fn is_readable(stream: &RingStream) -> bool {
    let fd = stream.event_fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).expect("a descriptor") > 0
}

fn would_block(result: io::Result<usize>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// The byte at this place of a stream.
fn byte(place: usize) -> u8 {
    u8::try_from(place * 7 % 251).expect("small")
}

#[test]
fn bytes_arrive_once_and_in_order_through_many_turns_of_the_ring() {
    for seed in 1..6 {
        let faults = RingFaults {
            delayed: 3,
            ..RingFaults::default()
        };
        let [mut one, mut other] = streams(&SimulatedRings::new(faults, seed));
        let total = 12 * RING_BYTES + 1234;
        let (mut sent, mut received) = (0, 0);
        let mut buffer = vec![0; 70_000];
        // Frames of 1 to 9000 bytes, in two parts, read in pieces of other sizes.
        let deadline = Instant::now() + Duration::from_secs(60);
        while received < total {
            assert!(Instant::now() < deadline, "{received} of {total}");
            let size = (1 + sent * 31 % 9000).min(total - sent);
            let frame: Vec<u8> = (sent..sent + size).map(byte).collect();
            let (head, tail) = frame.split_at(size / 3);
            match one.write(&[IoSlice::new(head), IoSlice::new(tail)]) {
                Ok(count) => sent += count,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            let most = 1 + received * 13 % buffer.len();
            match other.read(&mut buffer[..most]) {
                Ok(count) => {
                    for byte_now in &buffer[..count] {
                        assert_eq!(*byte_now, byte(received), "at {received}, seed {seed}");
                        received += 1;
                    }
                }
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        assert_eq!(sent, total);
        assert!(would_block(other.read(&mut buffer)), "nothing is repeated");
    }
}

#[test]
fn a_writer_stops_at_the_size_of_the_ring_and_at_the_number_of_writes() {
    let rings = SimulatedRings::new(RingFaults::default(), 1);
    let [mut one, mut other] = streams(&rings);
    let large = vec![5; RING_BYTES + 1];
    let taken = one.write(&[IoSlice::new(&large)]).expect("an empty ring");
    assert_eq!(taken, RING_BYTES);
    assert!(would_block(one.write(&[IoSlice::new(&large)])) && !one.has_room());
    // What was read is room when a quarter of it is returned.
    let mut buffer = vec![0; CREDIT_BYTES - 1];
    assert_eq!(other.read(&mut buffer).expect("bytes"), buffer.len());
    assert!(would_block(one.write(&[IoSlice::new(&large)])));
    assert_eq!(other.read(&mut buffer[..1]).expect("bytes"), 1);
    let taken = one.write(&[IoSlice::new(&large)]).expect("room");
    assert_eq!(taken, CREDIT_BYTES);

    let [mut one, mut other] = streams(&rings);
    let mut writes = 0;
    while one.write(&[IoSlice::new(&[1])]).is_ok() {
        writes += 1;
    }
    assert_eq!(writes, NOTES_MAX);
    let mut buffer = [0; 4 * NOTES_MAX];
    assert_eq!(other.read(&mut buffer).expect("bytes"), NOTES_MAX);
    assert_eq!(one.write(&[IoSlice::new(&[1])]).expect("room"), 1);
}

#[test]
fn a_sleeping_reader_and_a_writer_that_waits_for_room_are_woken() {
    let [mut one, mut other] = streams(&SimulatedRings::new(RingFaults::default(), 1));
    other.arm();
    assert!(!other.is_readable() && !is_readable(&other));
    let ring = vec![1; RING_BYTES];
    let taken = one.write(&[IoSlice::new(&ring)]).expect("room");
    assert_eq!(taken, RING_BYTES);
    assert!(is_readable(&other) && other.is_readable());
    one.arm();
    let _ = one.is_readable();
    one.arm();
    assert!(!one.has_room() && !is_readable(&one));
    let mut buffer = vec![0; RING_BYTES];
    assert_eq!(other.read(&mut buffer).expect("bytes"), RING_BYTES);
    assert!(is_readable(&one) && !one.is_readable() && one.has_room());
}

#[test]
fn what_arrived_before_a_connection_breaks_is_read() {
    let rings = SimulatedRings::new(RingFaults::default(), 1);
    let [mut one, mut other] = streams(&rings);
    one.write(&[IoSlice::new(&[1, 2, 3])]).expect("room");
    rings.break_all();
    let mut buffer = [0; 8];
    assert_eq!(other.read(&mut buffer).expect("bytes"), 3);
    assert_eq!(buffer[..3], [1, 2, 3]);
    let error = other.read(&mut buffer).expect_err("broken");
    assert!(error.to_string() == "link down" && !is_offence(&error));
    assert!(one.write(&[IoSlice::new(&[4])]).is_err());
}

#[test]
fn lengths_that_cannot_be_are_offences_with_their_values() {
    let offence_of = |notes: &[Note]| {
        let (mut stream, mut port) = stream_and_port();
        stream.write(&[IoSlice::new(&[1; 10])]).expect("room");
        for note in notes {
            let write = RingWrite {
                offset: 0,
                bytes: 0,
                value: note.encode(),
            };
            port.post(&[write]).expect("posted");
        }
        assert!(stream.is_readable());
        let mut buffer = vec![0; RING_BYTES];
        loop {
            match stream.read(&mut buffer) {
                Ok(count) => assert!(count > 0),
                Err(error) => {
                    assert!(is_offence(&error), "{error}");
                    break error.to_string();
                }
            }
        }
    };
    let text = offence_of(&[Note::Bytes(0)]);
    assert_eq!(text, "wrote 0 bytes, and there is room for 262144");
    let text = offence_of(&[Note::Bytes(RING_BYTES + 1)]);
    assert_eq!(text, "wrote 262145 bytes, and there is room for 262144");
    let text = offence_of(&[Note::Bytes(200_000), Note::Bytes(62_145)]);
    assert_eq!(text, "wrote 62145 bytes, and there is room for 62144");
    let bytes = offence_of(&[Note::Credit {
        bytes: 11,
        notes: 1,
    }]);
    assert_eq!(bytes, "returned 11 bytes of 1 WRITEs, and has 10 of 1");
    let nothing = offence_of(&[Note::Credit { bytes: 0, notes: 0 }]);
    assert_eq!(nothing, "returned 0 bytes of 0 WRITEs, and has 10 of 1");
    let notes = offence_of(&[Note::Credit {
        bytes: 10,
        notes: 2,
    }]);
    assert_eq!(notes, "returned 10 bytes of 2 WRITEs, and has 10 of 1");
}

#[test]
fn who_writes_without_receive_requests_breaks_only_the_own_connection() {
    let (mut stream, mut port) = stream_and_port();
    let write = RingWrite {
        offset: 0,
        bytes: 1,
        value: Note::Bytes(1).encode(),
    };
    let mut posted = 0;
    let error = loop {
        port.post(&[write]).expect("posted");
        posted += 1;
        match port.poll() {
            Ok(_) => assert!(posted <= RECEIVES + 1, "{posted} WRITEs"),
            Err(error) => break error.to_string(),
        }
    };
    assert_eq!(error, "RNR retry counter exceeded");
    let error = stream.read(&mut [0; 1]).and_then(|_| {
        let mut buffer = [0; RING_BYTES];
        stream
            .read(&mut buffer)
            .and_then(|_| stream.read(&mut buffer))
    });
    let error = error.expect_err("broken").to_string();
    assert_eq!(error, "wrote 128 times without room for more");
}

#[test]
fn every_write_is_timed_from_its_posting_to_its_completion() {
    const MOMENT: Duration = Duration::from_millis(20);
    let begun = Instant::now();
    let rings = SimulatedRings::new(RingFaults::default(), 1);
    let closer = Closer::start().expect("a thread");
    let times = [Arc::<Histogram>::default(), Arc::default()];
    let mut all = times.iter();
    let [mut one, mut other] = rings.pair().map(|port| {
        let times = all.next().expect("one for each");
        RingStream::new(port, closer.clone(), Arc::clone(times))
    });
    for count in 0..CREDIT_NOTES {
        assert_eq!(times[0].summary().count, count as u64, "none counts early");
        one.write(&[IoSlice::new(&[1; 40])]).expect("room");
        let posted = Instant::now();
        // Time passes, which is what is measured.
        while count == 0 && posted.elapsed() < MOMENT {
            std::hint::spin_loop();
        }
        assert!(!one.is_readable(), "it only takes what has completed");
    }
    let summary = times[0].summary();
    assert_eq!(summary.count, CREDIT_NOTES as u64);
    assert!(
        summary.max >= MOMENT && summary.max <= begun.elapsed(),
        "{summary:?}"
    );
    assert!(summary.p50 < MOMENT, "{summary:?}");
    // What was read is returned by a WRITE, which counts too.
    let mut buffer = [0; 40 * CREDIT_NOTES];
    assert_eq!(other.read(&mut buffer).expect("bytes"), buffer.len());
    assert!(!other.is_readable());
    assert_eq!(times[1].summary().count, 1);
}
