//! Tests of how connections between guest and host end: nothing that was sent before is lost.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::connection::BUFFER_BYTES;
use super::packet::{Header, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};
use super::test_bed::{Bed, SENT, answer, first, rest};
use crate::virtio::lost::testing::Lost;

fn of(guest: Header, op: u16) -> Header {
    Header { op, ..guest }
}

fn shutdown(guest: Header, flags: u32) -> Header {
    Header {
        flags,
        ..of(guest, op::SHUTDOWN)
    }
}

/// Sends until the host's socket and the device's buffer are full; returns how many bytes.
fn fill(bed: &Bed, guest: Header) -> usize {
    let data = [7; 4096];
    let (mut sent, mut forwarded) = (0_u32, 0_u32);
    while sent - forwarded + 4096 <= BUFFER_BYTES {
        bed.send(of(guest, op::DATA), &data);
        sent += 4096;
        bed.send(of(guest, op::CREDIT_REQUEST), &[]);
        while let Some((header, _)) = bed.packet() {
            assert_eq!(header.op, op::CREDIT_UPDATE);
            forwarded = header.forwarded;
        }
        assert!(sent < 64 << 20, "nothing holds it back");
    }
    assert!(sent > forwarded);
    usize::try_from(sent).unwrap()
}

/// Reads until the end; the device gets the CPU in between. Returns how many bytes came.
fn taken(bed: &Bed, client: &mut UnixStream) -> usize {
    client.set_nonblocking(true).unwrap();
    let (mut all, mut bytes) = (0, [0; 8192]);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        assert!(
            Instant::now() < deadline,
            "it does not end after {all} bytes"
        );
        match client.read(&mut bytes) {
            Ok(0) => return all,
            Ok(count) => all += count,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                assert!(bed.packet().is_none());
            }
        }
    }
}

#[test]
fn what_a_guest_sent_before_it_closed_reaches_a_slow_host_after_its_reset() {
    let bed = Bed::new();
    let (mut client, guest) = bed.connected(52);
    let sent = fill(&bed, guest);
    bed.send(shutdown(guest, SHUTDOWN_SEND | SHUTDOWN_RECEIVE), &[]);
    assert!(bed.packet().is_none(), "the host has not taken everything");
    // Its timer for the end of the connection.
    bed.send(of(guest, op::RESET), &[]);
    assert!(bed.packet().is_none());
    // The ports are free at once.
    bed.send(of(guest, op::DATA), b"late");
    bed.expect(op::RESET);
    assert_eq!(taken(&bed, &mut client), sent);
}

#[test]
fn a_reset_without_an_end_before_it_drops_what_was_not_taken() {
    let bed = Bed::new();
    let (mut client, guest) = bed.connected(52);
    let sent = fill(&bed, guest);
    bed.send(of(guest, op::RESET), &[]);
    assert!(taken(&bed, &mut client) < sent);
}

#[test]
fn an_answer_that_was_sent_before_the_host_closed_is_not_lost_by_what_the_guest_sends() {
    let bed = Bed::new();
    let (mut client, guest) = bed.connected(52);
    client.write_all(b"too large").unwrap();
    drop(client);
    for _ in 0..2 {
        bed.send(of(guest, op::DATA), b"more of it");
    }
    assert_eq!(bed.expect(op::DATA).1, b"too large");
    let (end, _) = bed.expect(op::SHUTDOWN);
    assert_eq!(end.flags, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    // Nothing holds the guest back meanwhile.
    assert_eq!(end.forwarded, 20);
    bed.send(of(guest, op::RESET), &[]);
    assert!(bed.packet().is_none());
}

#[test]
fn a_stream_of_which_a_packet_is_on_a_lost_page_ends() {
    let bed = Bed::new();
    let (client, guest) = bed.connected(52);
    bed.send(of(guest, op::DATA), b"before");
    {
        let _lost = Lost::at(&bed.driver.memory, SENT + 0x1000);
        bed.send(of(guest, op::DATA), &[1; 5000]);
    }
    bed.expect(op::RESET);
    bed.send(of(guest, op::DATA), b"after it");
    bed.expect(op::RESET);
    assert_eq!(rest(client), b"before");
}

#[test]
fn a_guest_that_ends_in_two_steps_is_answered() {
    let bed = Bed::new();
    let listener = bed.listener(9000);
    bed.send(first(1025, 9000, op::REQUEST), &[]);
    let (response, _) = bed.expect(op::RESPONSE);
    let (host, _) = listener.accept().unwrap();
    let guest = answer(&response);
    bed.send(of(guest, op::DATA), b"bye");
    bed.send(shutdown(guest, SHUTDOWN_SEND), &[]);
    assert!(bed.packet().is_none());
    bed.send(shutdown(guest, SHUTDOWN_SEND | SHUTDOWN_RECEIVE), &[]);
    bed.expect(op::RESET);
    assert_eq!(rest(host), b"bye");
}
