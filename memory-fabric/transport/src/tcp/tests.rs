//! Donors that answer too little, over a real connection.

use super::*;
use crate::port::LinkRequest;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};

/// Nothing here takes so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// A transport, and what its link and its donor see.
struct Bed {
    transport: TcpTransport,
    connections: Sender<Stream>,
    requests: Receiver<LinkRequest>,
    completed: Arc<AtomicU64>,
}

impl Bed {
    fn new() -> Self {
        let (connections, of_link) = bounded(1);
        let (to_link, requests) = bounded(4);
        let completed = Arc::default();
        let class = TrafficClass::Urgent;
        let port = LinkPort::new(class, to_link, of_link, Arc::clone(&completed));
        let transport = TcpTransport::new(port, class, false, Compression::Off, Arc::default());
        Self {
            transport,
            connections,
            requests,
            completed,
        }
    }

    /// Makes a connection, on which all requests are sent; gives the donor's end.
    fn connect(&mut self) -> TcpStream {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let here = TcpStream::connect(listener.local_addr().expect("bound")).expect("accepted");
        let (donor, _) = listener.accept().expect("a client");
        donor.set_read_timeout(Some(PATIENCE)).expect("a socket");
        self.connections
            .send(Stream::Tcp(here))
            .expect("a transport");
        self.poll();
        donor
    }

    fn poll(&mut self) -> usize {
        let mut answers = 0;
        self.transport.poll(&mut |_| answers += 1);
        answers
    }

    /// Polls until an answer has come.
    fn await_answer(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.poll() == 0 {
            assert!(Instant::now() < deadline, "no answer");
        }
    }

    /// All that is outstanding has been so for as long as is allowed.
    fn let_time_pass(&mut self) {
        for slot in &mut self.transport.slots {
            slot.since -= STALL_TIMEOUT;
        }
    }

    fn stalled(&self) -> bool {
        let request = self.requests.try_recv();
        matches!(request, Ok(LinkRequest::Connection(_, Outage::Stalled)))
    }
}

fn next_request(donor: &mut TcpStream) -> Frame {
    let mut header = [0; HEADER_BYTES];
    donor.read_exact(&mut header).expect("a request");
    Frame::decode(&header).expect("a frame")
}

fn answer(donor: &mut TcpStream, asked: &Frame) {
    let page = [7; PAGE_SIZE];
    let frame = Frame::new(FrameKind::PageData, asked.request, asked.offset, false);
    donor.write_all(&frame.encode(&page)).expect("sent");
    donor.write_all(&page).expect("sent");
}

#[test]
fn a_donor_that_sends_byte_after_byte_and_no_answer_has_stalled() {
    let mut bed = Bed::new();
    bed.transport.post_read(Ticket(1), 0).expect("room");
    let mut donor = bed.connect();
    let asked = next_request(&mut donor);
    let header = Frame::new(FrameKind::PageData, asked.request, 0, false).encode(&[0; PAGE_SIZE]);
    donor.write_all(&header[..1]).expect("sent");
    assert_eq!(bed.poll(), 0);
    assert!(!bed.stalled(), "there is time left");
    bed.let_time_pass();
    donor.write_all(&header[1..2]).expect("sent");
    assert_eq!(bed.poll(), 0);
    assert!(bed.stalled());
}

#[test]
fn a_donor_that_answers_all_requests_but_one_has_stalled() {
    let mut bed = Bed::new();
    bed.transport.post_read(Ticket(1), 0).expect("room");
    let mut donor = bed.connect();
    let _left_out = next_request(&mut donor);
    bed.let_time_pass();
    bed.transport.post_read(Ticket(2), 4096).expect("room");
    bed.transport.flush();
    let asked = next_request(&mut donor);
    answer(&mut donor, &asked);
    bed.await_answer();
    assert!(bed.stalled());
}

#[test]
fn other_answers_are_no_progress_while_the_oldest_request_is_left_out_again() {
    let mut bed = Bed::new();
    bed.transport.post_read(Ticket(1), 0).expect("room");
    bed.transport.post_read(Ticket(2), 4096).expect("room");
    drop(bed.connect());
    let deadline = Instant::now() + PATIENCE;
    while bed.requests.try_recv().is_err() {
        assert!(Instant::now() < deadline, "the end is not noticed");
        bed.poll();
    }
    let mut donor = bed.connect();
    let (oldest, other) = (next_request(&mut donor), next_request(&mut donor));
    let completed = |bed: &Bed| bed.completed.load(Ordering::Relaxed);
    answer(&mut donor, &other);
    bed.await_answer();
    assert_eq!(completed(&bed), 0);
    answer(&mut donor, &oldest);
    bed.await_answer();
    assert_eq!(completed(&bed), 1);
}
