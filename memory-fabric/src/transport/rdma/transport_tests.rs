//! The transport over a lane that tests hold in their hands, with TCP to a real donor beside it.

use super::*;
use crate::donor::server::{Donor, DonorConfig};
use crate::layout::NodeId;
use crate::link::rdma::{Ask, LaneSender, RdmaStats};
use crate::link::{Leased, Link, LinkConfig};
use crate::stream::Carrier;
use crate::transport::Compression;
use crate::transport::rdma::DeviceChoice;
use crate::wire::TrafficClass;
use crossbeam_channel::Receiver;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

const PAGES: u32 = 256;
const PATIENCE: Duration = Duration::from_secs(30);
/// What a lane answers, and no donor has.
const BY_LANE: u8 = 0xaa;

#[derive(Debug, Default)]
struct Hand {
    /// READs that were added, and those that were posted.
    added: Vec<(u16, u64, usize)>,
    posted: Vec<(u16, u64, usize)>,
    /// How many of those may complete now, from the first on.
    complete: usize,
    /// READs for which there is room at once.
    room: usize,
    fails: bool,
}

#[derive(Clone, Debug)]
struct HeldLane(Arc<Mutex<Hand>>);

impl HeldLane {
    fn new(room: usize) -> Self {
        let hand = Hand {
            room,
            ..Hand::default()
        };
        Self(Arc::new(Mutex::new(hand)))
    }

    fn hand(&self) -> MutexGuard<'_, Hand> {
        self.0.lock().expect("no test panics with it")
    }
}

impl ReadLane for HeldLane {
    fn add(&mut self, number: u16, offset: u64, pages: usize) -> bool {
        let mut hand = self.hand();
        let fits = hand.added.len() + hand.posted.len() < hand.room;
        if fits {
            hand.added.push((number, offset, pages));
        }
        fits
    }

    fn post(&mut self) -> Result<(), RdmaError> {
        let mut hand = self.hand();
        let added = std::mem::take(&mut hand.added);
        hand.posted.extend(added);
        Ok(())
    }

    fn poll(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError> {
        let (done, fails) = {
            let mut hand = self.hand();
            let count = std::mem::take(&mut hand.complete).min(hand.posted.len());
            (hand.posted.drain(..count).collect::<Vec<_>>(), hand.fails)
        };
        for &(number, _, pages) in &done {
            complete(number, &vec![BY_LANE; pages * PAGE_SIZE]);
        }
        if fails {
            return Err(RdmaError::CalledBack("a test".to_owned()));
        }
        Ok(!done.is_empty())
    }

    fn arm(&mut self) -> bool {
        self.hand().complete == 0
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(7)
    }
}

struct Bed {
    transport: RdmaTransport,
    give: LaneSender,
    back: Receiver<Ask>,
    stats: Arc<RdmaStats>,
    /// For each ticket, the first byte of what came and how many pages.
    came: HashMap<u32, (u8, usize)>,
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
            listen: ([127, 0, 0, 1], 0).into(),
            memory_bytes: u64::from(PAGES) * PAGE_SIZE as u64,
            lease_duration_max: PATIENCE,
            spin: Duration::ZERO,
            rdma: DeviceChoice::None,
        })
        .expect("a donor");
        let leased = Leased::obtain(LinkConfig {
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
        let bell = EventFd::new(0).expect("an eventfd");
        let observer = Arc::new(|_| {});
        let (link, mut ports) = leased
            .start(vec![(class, bell)], observer)
            .expect("connects");
        let tcp = TcpTransport::new(
            ports.pop().expect("a port"),
            class,
            false,
            Compression::Off,
            Arc::default(),
        );
        let (port, give, back) = LanePort::alone(class);
        let stats = port.stats();
        Self {
            transport: RdmaTransport::new(port, tcp),
            give,
            back,
            stats,
            came: HashMap::new(),
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

    fn poll(&mut self) {
        let came = &mut self.came;
        self.transport.poll(&mut |completion| {
            let (ticket, bytes) = match completion {
                Completion::Read(ticket, page) => (ticket, page.as_slice()),
                Completion::ReadRun(ticket, run) => (ticket, run),
                other => panic!("{other:?} was not asked for"),
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
        Ok(Ask::Back(TrafficClass::Urgent, _, Some(_))) => {}
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
    bed.transport.lane = Some(Box::new(lane));
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
    assert!(matches!(bed.back.try_recv(), Ok(Ask::Back(_, _, None))));
}
