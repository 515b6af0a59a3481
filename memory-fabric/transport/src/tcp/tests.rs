//! Donors that answer incompletely, over a real connection.

use super::*;
use crate::port::{LinkRequest, STALL_TIMEOUT};
use crossbeam_channel::{Receiver, Sender, bounded};
use fabric_homes::{BLOCK_PAGES, Home, HomeTable, NodeId};
use fabric_pages::page::{PageIndex, PageRange};
use fabric_wire::{Ends, Stamp};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};

/// Timeout of every wait, far longer than any takes unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

const BLOCK: u32 = 1;
const DONOR: NodeId = NodeId(7);

/// A transport, with the views of its link and its donor.
struct Bed {
    homes: HomeTable,
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
        let added = PageRange::new(PageIndex::new(0), 4 * BLOCK_PAGES);
        let homes = HomeTable::new(NodeId(3), &[], Some(added));
        let ends = Ends {
            local: homes.local_node().clone(),
            donor: DONOR,
        };
        let port = LinkPort::new(class, ends, to_link, of_link, Arc::clone(&completed));
        let transport = TcpTransport::new(port, class, false, Compression::Off, Arc::default());
        Self {
            homes,
            transport,
            connections,
            requests,
            completed,
        }
    }

    /// Establishes a connection, on which all requests are sent; returns the donor's end.
    fn connect(&mut self) -> TcpStream {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let here = TcpStream::connect(listener.local_addr().expect("bound")).expect("accepted");
        let (donor, _) = listener.accept().expect("a client");
        donor.set_read_timeout(Some(PATIENCE)).expect("a socket");
        self.connections
            .send(Stream::Tcp(here.into()))
            .expect("a transport");
        self.poll();
        donor
    }

    fn poll(&mut self) -> usize {
        let mut answers = 0;
        self.transport.poll(&mut |_| answers += 1);
        answers
    }

    /// Starts another epoch.
    fn advance(&self) {
        let (node, slot) = (DONOR, 0);
        if self.homes.unassign(BLOCK).is_none() {
            self.homes.assign(BLOCK, Home { node, slot });
        }
    }

    /// Polls until the connection has failed; returns the reason.
    fn await_outage(&mut self) -> Outage {
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert_eq!(self.poll(), 0, "an answer was taken");
            match self.requests.try_recv() {
                Ok(LinkRequest::Connection(_, why)) => return why,
                _ => assert!(Instant::now() < deadline, "no outage"),
            }
        }
    }

    /// Polls until an answer has arrived.
    fn await_answer(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.poll() == 0 {
            assert!(Instant::now() < deadline, "no answer");
        }
    }

    /// Makes all outstanding requests reach their timeout.
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

/// Returns the stamp of a correct answer.
fn right(asked: &Frame) -> Stamp {
    Stamp {
        node: DONOR,
        ..asked.stamp
    }
}

fn answer(donor: &mut TcpStream, asked: &Frame) {
    answer_as(donor, asked, right(asked));
}

fn answer_as(donor: &mut TcpStream, asked: &Frame, stamp: Stamp) {
    let page = [7; PAGE_SIZE];
    let frame = Frame::new(FrameKind::PageData, asked.request, asked.offset, false);
    let frame = frame.with_stamp(stamp);
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
    let why = bed.await_outage();
    assert!(matches!(why, Outage::Stream(_)), "{why}");
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

#[test]
fn requests_name_this_node_and_the_epoch_in_which_they_are_posted() {
    let mut bed = Bed::new();
    let mut donor = bed.connect();
    for epoch in 1..=3 {
        bed.transport.post_read(Ticket(1), 0).expect("room");
        bed.transport.flush();
        let node = NodeId(3);
        assert_eq!(next_request(&mut donor).stamp, Stamp { node, epoch });
        bed.advance();
    }
}

#[test]
fn an_answer_in_the_epoch_of_its_request_is_taken_when_the_epoch_has_advanced() {
    let mut bed = Bed::new();
    let mut donor = bed.connect();
    bed.transport.post_read(Ticket(1), 0).expect("room");
    bed.transport.flush();
    let older = next_request(&mut donor);
    bed.advance();
    bed.transport.post_read(Ticket(2), 4096).expect("room");
    bed.transport.flush();
    let newer = next_request(&mut donor);
    assert!(newer.stamp.epoch > older.stamp.epoch);
    for asked in [newer, older] {
        answer(&mut donor, &asked);
        bed.await_answer();
    }
    assert!(bed.requests.try_recv().is_err(), "the connection works");
}

#[test]
fn requests_are_sent_again_in_the_epoch_of_then() {
    let mut bed = Bed::new();
    let page = [9; PAGE_SIZE];
    bed.transport
        .post_write(Ticket(1), 8192, &page)
        .expect("room");
    let mut first = bed.connect();
    let before = next_request(&mut first);
    bed.advance();
    bed.advance();
    drop(first);
    let why = bed.await_outage();
    assert!(matches!(why, Outage::Stream(_)), "{why}");
    let mut donor = bed.connect();
    let again = next_request(&mut donor);
    assert_eq!(again.stamp.epoch, before.stamp.epoch + 2);
    assert_eq!(
        (again.kind, again.request, again.offset, again.packing),
        (before.kind, before.request, before.offset, before.packing)
    );
    let mut sent = [0; PAGE_SIZE];
    donor.read_exact(&mut sent).expect("the page");
    assert_eq!(sent, page);
    let written = Frame::new(FrameKind::Written, again.request, again.offset, false);
    // With the epoch of the previous connection: an answer to no request of this connection.
    let stale = Stamp {
        node: DONOR,
        ..before.stamp
    };
    donor
        .write_all(&written.with_stamp(stale).encode(&[]))
        .expect("sent");
    let why = bed.await_outage().to_string();
    assert!(
        why.contains("epoch 1 answers a request of epoch 3"),
        "{why}"
    );
}

#[test]
fn answers_of_another_node_or_another_epoch_are_refused_by_name() {
    type Spoil = fn(Stamp) -> Stamp;
    let wrong: [(Spoil, &str); 4] = [
        (
            |stamp| Stamp {
                node: NodeId(3),
                ..stamp
            },
            "node 3, the connection is that of node 7",
        ),
        (
            |stamp| Stamp {
                node: NodeId(8),
                ..stamp
            },
            "node 8, the connection is that of node 7",
        ),
        (
            |stamp| Stamp { epoch: 0, ..stamp },
            "epoch 0 answers a request of epoch 1",
        ),
        (
            |stamp| Stamp { epoch: 2, ..stamp },
            "epoch 2 answers a request of epoch 1",
        ),
    ];
    for (spoil, text) in wrong {
        let mut bed = Bed::new();
        bed.transport.post_read(Ticket(1), 0).expect("room");
        let mut donor = bed.connect();
        let asked = next_request(&mut donor);
        answer_as(&mut donor, &asked, spoil(right(&asked)));
        let why = bed.await_outage();
        assert!(matches!(why, Outage::Protocol(_)), "{why}");
        assert!(why.to_string().contains(text), "{why} has no {text}");
    }
}
