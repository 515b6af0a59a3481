use super::*;
use crate::udp::connection::UdpStream;
use crate::udp::connection::tests::{PATIENCE, connected, next, send};
use fabric_wire::HEADER_BYTES;
use quinn_proto::Transmit;
use std::io;

/// Bytes that every lingering connection occupies at least.
const OCCUPIED_MIN: usize = DATAGRAM_BUFFER_BYTES;

/// Creates one for a test.
fn lingering(count: usize, bytes: usize, time: Duration) -> &'static Lingering {
    Box::leak(Box::new(Lingering::new(Limits { count, bytes, time })))
}

impl Lingering {
    /// Returns the number of connections and their bytes.
    fn totals(&self) -> (usize, usize) {
        let state = self.lock();
        (state.count, state.bytes)
    }

    /// Waits until there is no connection and no thread.
    fn await_end(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.lock().wake.is_some() {
            assert!(Instant::now() < deadline, "{:?}", self.totals());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.totals(), (0, 0));
    }
}

fn driver(mut stream: UdpStream) -> Box<Driver> {
    stream.driver.take().expect("not dropped")
}

/// Returns how the connection ends, as its user sees it.
fn end_of(stream: &mut UdpStream) -> io::Result<usize> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match stream.read(&mut [0; HEADER_BYTES]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                stream.wait(Some(deadline)).expect("an end");
            }
            end => return end,
        }
    }
}

#[test]
fn a_connection_ends_once_its_data_is_acknowledged() {
    let deadline = Instant::now() + PATIENCE;
    let lingering = lingering(64, 16 << 20, PATIENCE);
    let (mut vm, mut donor) = connected();
    send(&mut donor, 7);
    lingering.keep(driver(donor)).expect("it is kept");
    let (count, bytes) = lingering.totals();
    assert!(
        count == 1 && (OCCUPIED_MIN..1 << 20).contains(&bytes),
        "{count}, {bytes}"
    );
    assert_eq!(next(&mut vm, deadline), 7);
    assert_eq!(end_of(&mut vm).expect("an orderly end"), 0);
    lingering.await_end();
    // Another thread serves those that come later.
    let (mut vm, mut donor) = connected();
    send(&mut donor, 8);
    lingering.keep(driver(donor)).expect("it is kept");
    assert_eq!(next(&mut vm, deadline), 8);
    assert_eq!(end_of(&mut vm).expect("an orderly end"), 0);
    lingering.await_end();
}

/// Sends a datagram to a port that was just closed; the kernel notes that for the socket's next call.
fn meet_closed_port(vm: &UdpStream) {
    vm.socket.send(&[0]).expect("sent");
    let error = vm.socket.take_error().expect("a socket");
    let refused = error.map(|error| error.kind());
    assert_eq!(refused, Some(io::ErrorKind::ConnectionRefused));
    vm.socket.send(&[0]).expect("sent");
}

#[test]
fn what_came_before_the_port_was_closed_comes_first() {
    for sends_first in [false, true] {
        let (mut vm, mut donor) = connected();
        let deadline = Instant::now() + PATIENCE;
        // Packets that discover the path MTU hold a close back.
        while !(vm.is_settled() && donor.is_settled()) {
            assert!(Instant::now() < deadline, "they do not settle");
            vm.poll_io().expect("a connection");
            donor.poll_io().expect("a connection");
        }
        send(&mut donor, 7);
        driver(donor).close();
        meet_closed_port(&vm);
        while sends_first && vm.failed.is_none() {
            assert!(Instant::now() < deadline, "nothing is sent");
            vm.acknowledge();
        }
        assert_eq!(next(&mut vm, deadline), 7);
        assert_eq!(end_of(&mut vm).expect("an orderly end"), 0);
    }
}

#[test]
fn a_connection_whose_peer_is_silent_ends_with_its_time() {
    let time = Duration::from_millis(300);
    let lingering = lingering(64, 16 << 20, time);
    let (mut vm, mut donor) = connected();
    send(&mut donor, 7);
    let started = Instant::now();
    lingering.keep(driver(donor)).expect("it is kept");
    lingering.await_end();
    assert!(started.elapsed() >= time, "{:?}", started.elapsed());
    assert_eq!(next(&mut vm, Instant::now() + PATIENCE), 7);
    assert_eq!(end_of(&mut vm).expect("it is told"), 0);
}

#[test]
fn a_connection_ends_when_its_peer_or_another_thread_closes_it() {
    let lingering = lingering(64, 16 << 20, PATIENCE * 10);
    let (vm, mut donor) = connected();
    send(&mut donor, 7);
    lingering.keep(driver(donor)).expect("it is kept");
    drop(vm);
    lingering.await_end();
    let (_vm, mut donor) = connected();
    send(&mut donor, 7);
    let closer = donor.closer();
    lingering.keep(driver(donor)).expect("it is kept");
    closer.close();
    lingering.await_end();
}

#[test]
fn a_panic_of_the_protocol_takes_no_room_from_later_connections() {
    let lingering = lingering(1, 16 << 20, PATIENCE);
    let (_vm, mut donor) = connected();
    send(&mut donor, 7);
    donor.unsent = Some(Transmit {
        destination: donor.peer,
        ecn: None,
        // More than there is.
        size: usize::MAX,
        segment_size: None,
        src_ip: None,
    });
    lingering.keep(driver(donor)).expect("it is kept");
    lingering.await_end();
    let (vm, mut donor) = connected();
    send(&mut donor, 8);
    lingering.keep(driver(donor)).expect("it is kept");
    drop(vm);
    lingering.await_end();
}

#[test]
fn what_exceeds_the_limits_is_left_to_its_owner() {
    let few = lingering(2, 16 << 20, PATIENCE);
    let small = lingering(64, OCCUPIED_MIN, PATIENCE);
    let mut vms = Vec::new();
    for number in 0..3 {
        let (vm, mut donor) = connected();
        vms.push(vm);
        send(&mut donor, number);
        let refused = small.keep(driver(donor)).expect_err("too many bytes");
        assert_eq!(few.keep(refused).is_ok(), number < 2);
    }
    assert_eq!((few.totals().0, small.totals()), (2, (0, 0)));
    assert!(small.lock().wake.is_none(), "a thread without a connection");
    drop(vms);
    few.await_end();
}

#[test]
fn a_connection_without_last_data_is_left_to_its_owner() {
    let lingering = lingering(64, 16 << 20, PATIENCE);
    let refuses = |stream: UdpStream| lingering.keep(driver(stream)).is_err();
    // Nothing was sent, or all is acknowledged.
    let (mut vm, mut donor) = connected();
    let deadline = Instant::now() + PATIENCE;
    send(&mut donor, 7);
    assert!(donor.has_unacknowledged(0));
    assert_eq!(next(&mut vm, deadline), 7);
    while donor.has_unacknowledged(0) {
        assert!(Instant::now() < deadline, "it is not acknowledged");
        let _ = vm.poll_io();
        donor.poll_io().expect("a connection");
    }
    assert!(refuses(donor));
    // A VM's.
    let (mut vm, _donor) = connected();
    send(&mut vm, 7);
    assert!(refuses(vm));
    // After a failure, and in the middle of a frame.
    let (_vm, mut donor) = connected();
    send(&mut donor, 7);
    donor.closer().close();
    assert!(refuses(donor));
    let (_vm, mut donor) = connected();
    send(&mut donor, 7);
    donor.writing = Some((0, 1));
    assert!(refuses(donor));
    assert!(
        lingering.lock().wake.is_none(),
        "a thread without a connection"
    );
}

#[test]
fn unacknowledged_bytes_are_counted() {
    let (_vm, mut donor) = connected();
    for number in 1..=10 {
        send(&mut donor, number);
    }
    let sent = 10 * HEADER_BYTES as u64;
    assert!(donor.has_unacknowledged(0) && donor.has_unacknowledged(sent - 1));
    assert!(!donor.has_unacknowledged(sent));
    assert!(donor.has_unacknowledged(0), "asking has no effect");
}
