//! The last answer of a donor that closes its UDP connection at once arrives, whatever is lost.

use fabric_test_support::PATIENCE;
use fabric_test_support::udp_proxy::{UdpProxy, Weather};
use fabric_transport::stream::{Carrier, Stream};
use fabric_transport::udp::{Listener, UdpStream};
use fabric_wire::{Frame, FrameKind, HEADER_BYTES};
use std::io::{self, IoSlice};
use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Bytes of the answer, without its header.
const ANSWER_BYTES: usize = 700;

/// Lengths of the answer's datagram, and of no other of the donor after the handshake.
const ANSWER: Range<usize> = 600..1200;

/// Lengths of the second datagram by which the donor discovers the path MTU.
const SECOND_PROBE: Range<usize> = 6000..8000;

/// When the VM has the answer, at the latest: sooner than it would give the donor up.
const ANSWER_TIME: Duration = Duration::from_secs(4);

/// Stops the listener at the end of the test, even after a failure.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn answer() -> Vec<u8> {
    let payload = [7; ANSWER_BYTES];
    let header = Frame::new(FrameKind::Error, 1, 0, true).encode(&payload);
    [header.as_slice(), &payload].concat()
}

/// Has a donor read a request, prepare, answer, and drop its end. Checks that the VM has the
/// answer, and then the orderly end. `begin` is called before the VM connects.
fn the_answer_arrives(
    begin: impl FnOnce(&UdpProxy),
    prepare: impl FnOnce(&mut UdpStream, &UdpProxy) + Send,
) {
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), None).expect("a free port");
    let proxy = UdpProxy::new(listener.address(), Weather::Fair);
    begin(&proxy);
    let stopping = AtomicBool::new(false);
    let deadline = Instant::now() + PATIENCE;
    std::thread::scope(|scope| {
        let _stop = Stop(&stopping);
        let (sender, arrivals) = channel();
        let (listener, stopping, proxy) = (&listener, &stopping, &proxy);
        scope.spawn(move || listener.run(stopping, &mut |arrival| sender.send(arrival).is_ok()));
        let donor = scope.spawn(move || {
            let arrival = arrivals.recv_timeout(PATIENCE).expect("a VM");
            let mut stream = arrival.accept(deadline).expect("a connection");
            let mut request = [0; HEADER_BYTES];
            loop {
                match stream.read(&mut request) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        stream.wait(Some(deadline)).expect("a request");
                    }
                    read => break assert_eq!(read.expect("a request"), request.len()),
                }
            }
            prepare(&mut stream, proxy);
            let answer = answer();
            let written = stream.write_vectored(&[IoSlice::new(&answer)]);
            assert_eq!(written.expect("there is room"), answer.len());
            drop(stream);
            proxy.release();
        });
        let carrier = Carrier::Udp(None);
        let mut vm = Stream::connect(proxy.address, &carrier, PATIENCE).expect("a connection");
        let request = Frame::new(FrameKind::Dropped, 1, 0, false).encode(&[]);
        vm.write_all_by(&request, deadline).expect("there is room");
        // The VM acknowledges what comes meanwhile.
        let until = Instant::now() + ANSWER_TIME;
        let mut received = [0; 2 * ANSWER_BYTES];
        let count = vm.read_by(&mut received, until).expect("an answer");
        assert!(received[..count] == answer(), "{count} bytes");
        let end = vm.read_by(&mut received, until);
        assert_eq!(end.expect("the end"), 0);
        donor.join().expect("the donor's end");
        assert!(proxy.mischief_done() > 0, "nothing was put to the test");
    });
}

/// Drives the donor's end until the second probe is under way, and its acknowledgement withheld.
fn fill_window(stream: &mut UdpStream, proxy: &UdpProxy) {
    let deadline = Instant::now() + PATIENCE;
    while !proxy.is_withholding() || proxy.mischief_done() == 0 {
        assert!(Instant::now() < deadline, "there is no second probe");
        stream.poll_io().expect("a connection");
        let _ = stream.wait(Some(Instant::now() + Duration::from_millis(5)));
    }
}

#[test]
fn while_probes_of_the_path_fill_the_window() {
    the_answer_arrives(|proxy| proxy.withhold_after(SECOND_PROBE), fill_window);
}

#[test]
fn when_its_first_packet_is_lost() {
    the_answer_arrives(|_| (), |_, proxy| proxy.lose_next(ANSWER));
}
