use super::UdpStream;
use crate::port::{LinkPort, LinkRequest};
use crate::stream::Stream;
use crate::tcp::TcpTransport;
use crate::udp::Expected;
use crate::udp::listener::Listener;
use crate::{Compression, PageTransport};
use crossbeam_channel::bounded;
use fabric_homes::{BLOCK_PAGES, HomeTable, NodeId};
use fabric_pages::page::{PageIndex, PageRange};
use fabric_wire::{Ends, Frame, FrameKind, HEADER_BYTES, TrafficClass};
use std::io::{self, IoSlice};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Number of frames exchanged.
const ROUNDS: u64 = 3000;
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Stops the listener at the end of the test, even after a failure.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Returns the next frame's number, as a polling user of the stream receives it.
pub(super) fn next(stream: &mut UdpStream, deadline: Instant) -> u64 {
    let mut frame = [0; HEADER_BYTES];
    loop {
        match stream.read(&mut frame) {
            Ok(count) => {
                assert_eq!(count, frame.len(), "frames come whole");
                return Frame::decode(&frame).expect("a frame").request;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // The user sleeps now until the socket becomes readable.
                assert!(!stream.is_ready(), "a frame would be slept on");
                assert!(Instant::now() < deadline, "nothing comes");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

pub(super) fn send(stream: &mut UdpStream, number: u64) {
    let frame = Frame::new(FrameKind::Dropped, number, 0, false).encode(&[]);
    let sent = stream.write_vectored(&[IoSlice::new(&frame)]);
    assert_eq!(sent.expect("there is room"), frame.len());
}

/// Returns both ends of a new connection: the VM's and the donor's.
pub(super) fn connected() -> (UdpStream, UdpStream) {
    let deadline = Instant::now() + PATIENCE;
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), None).expect("a free port");
    let stopping = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stopping);
        let (sender, arrivals) = channel();
        let (listener, stopping) = (&listener, &stopping);
        scope.spawn(move || {
            listener.run(stopping, &mut |arrival| sender.send(arrival).is_ok());
        });
        let donor = scope.spawn(move || {
            let arrival = arrivals.recv_timeout(PATIENCE).expect("a VM");
            arrival.accept(deadline).expect("a connection")
        });
        let any = Expected::Fingerprint(None);
        let vm = UdpStream::connect(listener.address(), &any, deadline).expect("a connection");
        (vm, donor.join().expect("the donor's end"))
    })
}

#[test]
fn a_reader_that_is_told_to_wait_has_taken_all_that_came() {
    let deadline = Instant::now() + PATIENCE;
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), None).expect("a free port");
    let stopping = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stopping);
        let (sender, arrivals) = channel();
        let (listener, stopping) = (&listener, &stopping);
        scope.spawn(move || {
            listener.run(stopping, &mut |arrival| sender.send(arrival).is_ok());
        });
        let donor = scope.spawn(move || {
            let arrival = arrivals.recv_timeout(PATIENCE).expect("a VM");
            let mut stream = arrival.accept(deadline).expect("a connection");
            for _ in 0..ROUNDS {
                let number = next(&mut stream, deadline);
                send(&mut stream, number);
            }
        });
        let any = Expected::Fingerprint(None);
        let mut vm = UdpStream::connect(listener.address(), &any, deadline).expect("a connection");
        for number in 0..ROUNDS {
            send(&mut vm, number);
            assert_eq!(next(&mut vm, deadline), number);
        }
        donor.join().expect("the donor's end");
    });
}

#[test]
fn a_connection_has_few_buffers_until_its_limits_are_lifted() {
    let deadline = Instant::now() + PATIENCE;
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), None).expect("a free port");
    let stopping = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stopping);
        let (sender, arrivals) = channel();
        let (listener, stopping) = (&listener, &stopping);
        scope.spawn(move || {
            listener.run(stopping, &mut |arrival| sender.send(arrival).is_ok());
        });
        let donor = scope.spawn(move || {
            let arrival = arrivals.recv_timeout(PATIENCE).expect("a VM");
            let mut stream = arrival.accept(deadline).expect("a connection");
            let buffers = |stream: &UdpStream| (stream.input.len(), stream.output.capacity());
            for number in 0..ROUNDS {
                // More may arrive at once than one call takes.
                assert_eq!(next(&mut stream, deadline), number);
                send(&mut stream, number);
                if number == ROUNDS / 2 {
                    let (input, output) = buffers(&stream);
                    assert_eq!(input, 64 << 10);
                    assert!(output <= 16 << 10, "{output}");
                    stream.lift_limits(TrafficClass::Urgent);
                }
            }
            let (input, output) = buffers(&stream);
            assert_eq!(input, 256 << 10);
            assert!(output >= 64 << 10, "{output}");
        });
        let any = Expected::Fingerprint(None);
        let mut vm = UdpStream::connect(listener.address(), &any, deadline).expect("a connection");
        let mut answered = 0;
        for number in 0..ROUNDS {
            send(&mut vm, number);
            if number % 16 == 15 {
                while answered <= number {
                    assert_eq!(next(&mut vm, deadline), answered);
                    answered += 1;
                }
            }
        }
        while answered < ROUNDS {
            assert_eq!(next(&mut vm, deadline), answered);
            answered += 1;
        }
        donor.join().expect("the donor's end");
    });
}

#[test]
fn a_donor_that_sends_what_was_not_asked_for_keeps_no_thread_awake() {
    let (vm, mut donor) = connected();
    let (connections, of_link) = bounded(1);
    let (to_link, requests) = bounded(4);
    let added = PageRange::new(PageIndex::new(0), BLOCK_PAGES);
    let homes = HomeTable::new(NodeId(3), &[], Some(added));
    let ends = Ends {
        local: homes.local_node().clone(),
        donor: NodeId(7),
    };
    let class = TrafficClass::Urgent;
    let port = LinkPort::new(class, ends, to_link, of_link, Arc::default());
    let mut transport = TcpTransport::new(port, class, false, Compression::Off, Arc::default());
    connections.send(Stream::Udp(vm)).expect("a transport");
    let mut poll = || transport.poll(&mut |_| panic!("nothing was asked for"));
    poll();
    send(&mut donor, 1);
    let deadline = Instant::now() + PATIENCE;
    while !matches!(requests.try_recv(), Ok(LinkRequest::Connection(..))) {
        assert!(Instant::now() < deadline, "it is kept");
        poll();
    }
    assert!(transport.arm(), "the thread may sleep");
}
