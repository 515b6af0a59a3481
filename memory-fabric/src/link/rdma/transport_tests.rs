//! The transport over a lane that tests hold in their hands, with TCP to a real donor beside it.

mod held;
mod times;

use super::*;
use crate::donor::pool::{Lease, SessionKind};
use crate::donor::server::{Donor, DonorConfig};
use crate::homes::NodeId;
use crate::link::{Leased, Link, LinkConfig};
use crate::page::PAGE_SIZE;
use crate::stream::Carrier;
use crate::stream::Closer;
use crate::transport::Compression;
use crate::transport::rdma::DeviceChoice;
use crate::transport::{Completion, Full, IN_FLIGHT_MAX, Ticket};
use crate::wire::TrafficClass;
use crossbeam_channel::Receiver;
use held::{BY_LANE, HeldLane};
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

const PAGES: u32 = 256;
const PATIENCE: Duration = Duration::from_secs(30);

struct Bed {
    transport: RdmaTransport,
    give: LaneSender,
    back: Receiver<LaneRequest>,
    stats: Arc<RdmaStats>,
    /// For each ticket, the first byte of what came and how many pages.
    came: HashMap<u32, (u8, usize)>,
    /// Tickets of writes, in the order in which they were completed.
    written: Vec<u32>,
    lease: Arc<Lease>,
    _link: Link,
    _donor: Donor,
}

/// The byte that page `number` is full of at the donor.
fn at_donor(number: u64) -> u8 {
    u8::try_from(number % 100).expect("small") + 1
}

impl Bed {
    fn new(class: TrafficClass) -> Self {
        let donor = Donor::start(&DonorConfig {
            credentials: None,
            listen: ([127, 0, 0, 1], 0).into(),
            memory_bytes: u64::from(PAGES) * PAGE_SIZE as u64,
            lease_duration_max: PATIENCE,
            spin: Duration::ZERO,
            rdma: DeviceChoice::None,
            allow: None,
        })
        .expect("a donor");
        let leased = Leased::obtain(LinkConfig {
            local: NodeId(0).into(),
            node: NodeId(1),
            address: donor.address(),
            carrier: Carrier::Tcp,
            vm: "test".into(),
            bytes: u64::from(PAGES) * PAGE_SIZE as u64,
            or_less: false,
            grace: PATIENCE,
        })
        .expect("a lease");
        let lease = donor.pool().find(&leased.grant().token).expect("is there");
        for number in 0..u64::from(PAGES) {
            let page = [at_donor(number); PAGE_SIZE];
            lease
                .write(number * PAGE_SIZE as u64, &page)
                .expect("inside");
        }
        let notifier = EventFd::new(0).expect("an eventfd");
        let observer = Arc::new(|_| {});
        let (link, mut ports) = leased
            .start(vec![(class, notifier)], observer)
            .expect("connects");
        let tcp = TcpTransport::new(
            ports.pop().expect("a port"),
            class,
            false,
            Compression::Off,
            Arc::default(),
        );
        let (give, lanes) = bounded(1);
        let (requests, back) = bounded(4);
        let stats = Arc::<RdmaStats>::default();
        let port = LanePort::new(class, lanes, requests, Arc::clone(&stats));
        Self {
            transport: RdmaTransport::new(port, tcp),
            give,
            back,
            stats,
            came: HashMap::new(),
            written: Vec::new(),
            lease,
            _link: link,
            _donor: donor,
        }
    }

    fn give(&mut self, lane: &HeldLane) {
        self.give.send(Box::new(lane.clone())).expect("taken");
        self.poll();
    }

    fn read(&mut self, ticket: u32) {
        let offset = u64::from(ticket % PAGES) * PAGE_SIZE as u64;
        let posted = self.transport.post_read(Ticket(ticket), offset);
        posted.expect("there is a place");
        self.transport.flush();
    }

    /// Writes a page full of `byte` to the place of its number.
    fn write(&mut self, number: u32, byte: u8) {
        let page = [byte; PAGE_SIZE];
        let offset = u64::from(number) * PAGE_SIZE as u64;
        let posted = self.transport.post_write(Ticket(number), offset, &page);
        posted.expect("there is a place");
        self.transport.flush();
    }

    /// The first byte of a page as the donor has it.
    fn stored(&self, number: u32) -> u8 {
        let mut page = [0; PAGE_SIZE];
        let read = self
            .lease
            .read(u64::from(number) * PAGE_SIZE as u64, &mut page);
        read.expect("inside");
        page[0]
    }

    fn poll(&mut self) {
        let (came, written) = (&mut self.came, &mut self.written);
        self.transport.poll(&mut |completion| {
            let (ticket, bytes) = match completion {
                Completion::Read(ticket, page) | Completion::ReadFrom(_, ticket, page) => {
                    (ticket, page.as_slice())
                }
                Completion::ReadRun(ticket, run) | Completion::ReadRunFrom(_, ticket, run) => {
                    (ticket, run)
                }
                Completion::Dropped(_) => return,
                Completion::Unread(ticket) => panic!("{ticket:?} was not read"),
                Completion::Written(Ticket(ticket)) => {
                    assert!(!written.contains(&ticket), "{ticket} was written twice");
                    written.push(ticket);
                    return;
                }
            };
            let before = came.insert(ticket.0, (bytes[0], bytes.len() / PAGE_SIZE));
            assert!(before.is_none(), "{ticket:?} completed twice");
        });
    }

    fn watched(&self) -> Vec<RawFd> {
        let mut fds = Vec::new();
        self.transport
            .interests(&mut |interest| fds.push(interest.fd));
        fds
    }

    fn poll_until(&mut self, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "{:?}", self.transport);
            self.poll();
            std::thread::yield_now();
        }
    }
}

#[test]
fn reads_go_by_the_lane_and_complete_when_it_says_so() {
    let mut bed = Bed::new(TrafficClass::Urgent);
    let lane = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&lane);
    bed.read(3);
    bed.read(4);
    assert_eq!(lane.hand().posted.len(), 2);
    bed.poll();
    assert!(bed.came.is_empty(), "nothing has completed yet");
    assert_eq!(bed.transport.in_flight(), 2);
    lane.hand().complete = 1;
    assert!(!bed.transport.arm(), "something is there: no sleep");
    assert_eq!(bed.watched(), [7], "one more is outstanding");
    bed.poll();
    assert_eq!(bed.came, HashMap::from([(3, (BY_LANE, 1))]));
    assert_eq!(bed.transport.in_flight(), 1);
    assert_eq!(bed.stats.pages_read.get(), 1);
    lane.hand().complete = 1;
    bed.poll();
    assert!(bed.watched().is_empty(), "nothing to wait for");
}

#[test]
fn a_lane_that_fails_sends_what_was_outstanding_over_tcp_once() {
    let mut bed = Bed::new(TrafficClass::Urgent);
    // Less room than requests, so that some wait for it.
    let lane = HeldLane::new(40);
    bed.give(&lane);
    for ticket in 0..60 {
        bed.read(ticket);
    }
    assert_eq!(lane.hand().posted.len(), 40);
    {
        let mut hand = lane.hand();
        hand.complete = 10;
        hand.fails = true;
    }
    bed.poll_until(|bed| bed.came.len() == 60);
    for (&ticket, &(byte, pages)) in &bed.came {
        let wanted = if ticket < 10 {
            BY_LANE
        } else {
            at_donor(u64::from(ticket))
        };
        assert_eq!((byte, pages), (wanted, 1), "ticket {ticket}");
    }
    assert_eq!(bed.transport.in_flight(), 0);
    match bed.back.try_recv() {
        Ok(LaneRequest::TakeBack(TrafficClass::Urgent, _, Some(_))) => {}
        other => panic!("the lane did not come back with its error: {other:?}"),
    }
}

#[test]
fn reads_go_over_tcp_until_there_is_a_lane_and_by_the_next_lane_after_it() {
    let mut bed = Bed::new(TrafficClass::Urgent);
    bed.read(1);
    bed.poll_until(|bed| bed.came.len() == 1);
    assert_eq!(bed.came[&1].0, at_donor(1));
    let first = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&first);
    first.hand().fails = true;
    bed.poll();
    bed.read(2);
    bed.poll_until(|bed| bed.came.len() == 2);
    assert_eq!(bed.came[&2].0, at_donor(2));
    let second = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&second);
    bed.read(3);
    second.hand().complete = 1;
    bed.poll_until(|bed| bed.came.len() == 3);
    assert_eq!(bed.came[&3].0, BY_LANE);
}

#[test]
fn a_run_that_waits_for_room_is_not_overtaken_and_survives_a_failure() {
    let mut bed = Bed::new(TrafficClass::Prefetch);
    let lane = HeldLane::new(1);
    bed.give(&lane);
    for (ticket, pages) in [(0, 32), (1, 64), (2, 1)] {
        let offset = u64::from(ticket) * 64 * PAGE_SIZE as u64;
        let posted = bed.transport.post_read_run(Ticket(ticket), offset, pages);
        posted.expect("there is a place");
    }
    bed.transport.flush();
    lane.hand().complete = 1;
    bed.poll();
    assert_eq!(bed.came, HashMap::from([(0, (BY_LANE, 32))]));
    assert_eq!(lane.hand().posted[0].2, 64, "the next in order");
    lane.hand().fails = true;
    bed.poll_until(|bed| bed.came.len() == 3);
    assert_eq!(bed.came[&1], (at_donor(64), 64));
    assert_eq!(bed.came[&2], (at_donor(128), 1));
}

#[test]
fn no_more_than_the_limit_is_outstanding_on_both_ways_together() {
    let mut bed = Bed::new(TrafficClass::Urgent);
    for ticket in 0..32 {
        bed.read(ticket);
    }
    let lane = HeldLane::new(IN_FLIGHT_MAX);
    // Taken without looking for what has come by TCP meanwhile.
    bed.give.send(Box::new(lane)).expect("taken");
    bed.transport.take_lane();
    for ticket in 32..64 {
        bed.read(ticket);
    }
    assert_eq!(bed.transport.in_flight(), IN_FLIGHT_MAX);
    assert_eq!(bed.transport.post_read(Ticket(64), 0), Err(Full));
}

#[test]
fn the_lane_is_given_back_at_the_end() {
    let mut bed = Bed::new(TrafficClass::Urgent);
    bed.give(&HeldLane::new(1));
    drop(bed.transport);
    assert!(matches!(
        bed.back.try_recv(),
        Ok(LaneRequest::TakeBack(_, _, None))
    ));
}

#[test]
fn writes_go_by_the_lane_and_the_donor_knows_nothing_of_them() {
    let mut bed = Bed::new(TrafficClass::Bulk);
    let lane = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&lane);
    bed.write(3, 0x33);
    bed.write(4, 0x44);
    bed.poll();
    assert!(bed.written.is_empty(), "nothing has completed yet");
    assert_eq!(bed.transport.in_flight(), 2);
    lane.hand().complete = 2;
    bed.poll();
    assert_eq!(bed.written, [3, 4]);
    assert_eq!(bed.transport.in_flight(), 0);
    assert_eq!(bed.stats.pages_written.get(), 2);
    assert_eq!(bed.lease.status().pages_written, u64::from(PAGES));
}

#[test]
fn without_room_on_the_lane_a_page_is_written_over_tcp() {
    let mut bed = Bed::new(TrafficClass::Bulk);
    let lane = HeldLane::new(1);
    bed.give(&lane);
    bed.write(3, 0x33);
    bed.write(4, 0x44);
    bed.poll_until(|bed| bed.written == [4]);
    assert_eq!(bed.stored(4), 0x44);
    assert_eq!(bed.stored(3), at_donor(3), "this one is on the lane still");
}

#[test]
fn pages_are_written_behind_drops_and_not_past_them() {
    let mut bed = Bed::new(TrafficClass::Bulk);
    let lane = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&lane);
    bed.transport.post_drop(0, 8).expect("there is a place");
    bed.write(3, 0x33);
    assert!(
        lane.hand().posted.is_empty(),
        "that would overtake the drop"
    );
    bed.poll_until(|bed| bed.written == [3]);
    assert_eq!((bed.stored(2), bed.stored(3)), (0, 0x33));
    bed.write(4, 0x44);
    assert_eq!(lane.hand().posted.len(), 1, "nothing is dropped any more");
}

/// The donor's end of an RDMA connection for write-backs, without RDMA. Asked to end, it waits for
/// the test's permission; late WRITEs reach memory just before it ends.
struct LateWrites {
    fenced: Receiver<()>,
    end: crossbeam_channel::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl LateWrites {
    fn begin(lease: &Arc<Lease>, numbers: std::ops::Range<u32>, byte: u8) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let ours = std::net::TcpStream::connect(address).expect("connects");
        let (stream, _) = listener.accept().expect("accepts");
        let kind = SessionKind::Rdma(TrafficClass::Bulk);
        let registered = stream.try_clone().expect("a clone");
        let registered = Closer::Tcp(registered.into());
        let begun = lease.begin_session(kind, registered, 1, PATIENCE);
        begun.expect("there is none");
        let (send, fenced) = crossbeam_channel::bounded(1);
        let (end, ends) = crossbeam_channel::bounded(1);
        let lease = Arc::clone(lease);
        let thread = std::thread::spawn(move || {
            let _ours = ours;
            let mut stream = stream;
            let read = std::io::Read::read(&mut stream, &mut [0]);
            assert_eq!(read.expect("an end"), 0);
            send.send(()).expect("the test receives");
            ends.recv_timeout(PATIENCE).expect("the test continues");
            for number in numbers {
                let page = [byte; PAGE_SIZE];
                let written = lease.write(u64::from(number) * PAGE_SIZE as u64, &page);
                written.expect("inside");
            }
            lease.end_session(kind, 1);
        });
        Self {
            fenced,
            end,
            thread,
        }
    }
}

#[test]
fn a_late_write_of_a_lane_that_failed_never_lands_on_newer_bytes() {
    const OLD: u8 = 0xee;
    let mut bed = Bed::new(TrafficClass::Bulk);
    let lane = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&lane);
    let late = LateWrites::begin(&bed.lease, 0..40, OLD);
    for number in 0..40 {
        bed.write(number, 0x11);
    }
    {
        let mut hand = lane.hand();
        hand.complete = 10;
        hand.fails = true;
    }
    bed.poll();
    assert_eq!(bed.written, (0..10).collect::<Vec<_>>());
    // Another page, and a lane that is there already.
    bed.write(50, 0x22);
    let next = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&next);
    bed.write(51, 0x22);
    late.fenced.recv_timeout(PATIENCE).expect("the fence came");
    for _ in 0..100 {
        bed.poll();
    }
    assert_eq!(bed.written.len(), 10, "the old lane is not at its end yet");
    assert!(next.hand().posted.is_empty(), "a lane before the fence");
    assert_eq!(bed.stored(20), at_donor(20), "nothing passes the fence");
    late.end.send(()).expect("it waits");
    bed.poll_until(|bed| bed.written.len() == 42);
    late.thread.join().expect("no panic");
    for number in 10..40 {
        assert_eq!(bed.stored(number), 0x11, "page {number}");
    }
    assert_eq!((bed.stored(50), bed.stored(51)), (0x22, 0x22));
    bed.poll_until(|bed| bed.transport.in_flight() == 0);
    bed.poll();
    bed.write(60, 0x33);
    assert_eq!(next.hand().posted.len(), 1, "the next lane is in use");
}

#[test]
fn a_lane_that_fails_without_writes_under_way_needs_no_fence() {
    let mut bed = Bed::new(TrafficClass::Bulk);
    let lane = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&lane);
    let late = LateWrites::begin(&bed.lease, 0..0, 0);
    bed.write(1, 0x11);
    {
        let mut hand = lane.hand();
        hand.complete = 1;
        hand.fails = true;
    }
    bed.poll();
    assert_eq!(bed.written, [1]);
    bed.write(2, 0x22);
    bed.poll_until(|bed| bed.written == [1, 2]);
    assert!(late.fenced.try_recv().is_err(), "nothing is to be ended");
    bed.lease.fence_writes(Duration::ZERO).expect_err("not yet");
    late.end.send(()).expect("it waits");
    bed.lease.fence_writes(PATIENCE).expect("it has ended");
    late.thread.join().expect("no panic");
}
