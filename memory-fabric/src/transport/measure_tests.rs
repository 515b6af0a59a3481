//! Tests of measuring, on a transport whose speed is known, and over real connections.

use super::*;
use crate::donor::pool::Pool;
use crate::donor::server::{Donor, DonorConfig};
use crate::layout::NodeId;
use crate::link::rdma::RdmaLinkConfig;
use crate::link::{Leased, Link, LinkConfig, probe};
use crate::stream::Carrier;
use crate::transport::Interest;
use crate::transport::rdma::DeviceChoice;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Answers each request so long after it was posted, one at a time, with zeroes.
#[derive(Debug)]
struct Slow {
    latency: Duration,
    /// So many requests take so long in place of that, and until somebody has asked what is in flight: so the
    /// silence is noticed, whatever the host does.
    late: (u32, Duration),
    asked: Cell<bool>,
    posted: VecDeque<(Ticket, u32, Instant)>,
    /// Answers with a byte less.
    short: bool,
    zeroes: Vec<u8>,
}

impl Slow {
    fn gauge(latency: Duration, short: bool) -> Gauge {
        Self::new(latency, short).into_gauge()
    }

    fn new(latency: Duration, short: bool) -> Self {
        Self {
            latency,
            late: (0, Duration::ZERO),
            asked: Cell::new(false),
            posted: VecDeque::new(),
            short,
            zeroes: vec![0; 1 << 20],
        }
    }

    fn is_answered(&self, after: Duration) -> bool {
        let (requests, time) = self.late;
        if requests > 0 {
            after >= time && self.asked.get()
        } else {
            after >= self.latency
        }
    }

    fn into_gauge(self) -> Gauge {
        Gauge::new(Box::new(self), 1 << 20, Box::new(|| None))
    }
}

/// Answers after so long, always.
pub(crate) fn slow(latency: Duration) -> Gauge {
    Slow::gauge(latency, false)
}

/// Answers at once, but for the first requests, which take so long.
pub(crate) fn hesitant(requests: u32, time: Duration) -> Gauge {
    Slow {
        late: (requests, time),
        ..Slow::new(Duration::ZERO, false)
    }
    .into_gauge()
}

impl PageTransport for Slow {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post_read_run(ticket, offset, 1)
    }

    fn post_read_run(&mut self, ticket: Ticket, _: u64, pages: u32) -> Result<(), Full> {
        let bytes = pages * PAGE_BYTES;
        self.posted.push_back((ticket, bytes, Instant::now()));
        Ok(())
    }

    fn post_write(&mut self, _: Ticket, _: u64, _: PageSource) -> Result<(), Full> {
        Err(Full)
    }

    fn post_drop(&mut self, _: u64, _: u32) -> Result<(), Full> {
        Err(Full)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        while let Some(&(ticket, bytes, at)) = self.posted.front()
            && self.is_answered(at.elapsed())
        {
            self.posted.pop_front();
            self.asked.set(false);
            self.late.0 = self.late.0.saturating_sub(1);
            let bytes = bytes as usize - usize::from(self.short);
            complete(Completion::ReadRun(ticket, &self.zeroes[..bytes]));
        }
    }

    fn in_flight(&self) -> usize {
        self.asked.set(true);
        self.posted.len()
    }

    fn interests(&self, _: &mut dyn FnMut(Interest)) {}
}

const LONG: Duration = Duration::from_secs(20);

fn effort(messages_max: u64) -> Effort {
    Effort {
        messages_max,
        time_max: LONG,
        silence_max: LONG,
    }
}

#[test]
fn a_round_trip_takes_what_the_link_takes() {
    let latency = Duration::from_millis(2);
    let mut gauge = Slow::gauge(latency, false);
    let mut times = Vec::new();
    let done = gauge.round_trips(
        4096,
        effort(10),
        &mut |time| times.push(time),
        &mut |_, _| {},
    );
    assert_eq!(done, Ok(()));
    assert_eq!(times.len(), 10);
    assert!(times.iter().all(|&time| time >= latency), "{times:?}");
}

#[test]
fn measuring_ends_with_its_time_and_a_silent_link_is_an_error() {
    let mut gauge = Slow::gauge(Duration::from_millis(2), false);
    let began = Instant::now();
    let found = gauge.calibrate(Duration::from_millis(60), LONG);
    assert!(found.is_ok_and(|found| found.page >= Duration::from_millis(2)));
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "64 trips are 128 ms"
    );
    let mut gauge = Slow::gauge(LONG, false);
    let silence = Duration::from_millis(30);
    assert_eq!(
        gauge.calibrate(silence, silence),
        Err(MeasureError::Silent(silence))
    );
}

#[test]
fn one_answer_that_is_late_is_not_taken_for_the_links_speed() {
    let late = Duration::from_millis(200);
    let mut gauge = Slow {
        late: (1, late),
        asked: Cell::new(true),
        ..Slow::new(Duration::ZERO, false)
    }
    .into_gauge();
    let found = gauge.calibrate(late / 10, LONG).expect("answers");
    assert!(found.small < late, "{found:?}");
}

#[test]
fn a_connection_that_gives_up_later_than_measuring_says_why() {
    let mut gauge = Slow::gauge(LONG, false);
    let silence = Duration::from_millis(10);
    // It gives up when it was asked for the third time after that.
    let silent = Arc::new(AtomicBool::new(false));
    let (is_silent, asked) = (Arc::clone(&silent), AtomicUsize::new(0));
    gauge.failure = Box::new(move || {
        let ends = is_silent.load(Ordering::SeqCst) && asked.fetch_add(1, Ordering::SeqCst) >= 2;
        ends.then(|| "READ failed".to_owned())
    });
    assert_eq!(
        gauge.calibrate(silence, silence),
        Err(MeasureError::Silent(silence))
    );
    silent.store(true, Ordering::SeqCst);
    let failed = Silence::Failed("READ failed".to_owned());
    assert_eq!(gauge.outlast_silence(LONG), failed);
    gauge.failure = Box::new(|| None);
    assert_eq!(gauge.outlast_silence(silence), Silence::Lasts);
}

#[test]
fn a_stream_keeps_requests_outstanding() {
    let latency = Duration::from_millis(5);
    let mut gauge = Slow::gauge(latency, false);
    let rate = gauge.stream(4096, 16, effort(64), &mut |_, _| {});
    let rate = rate.expect("a stream");
    assert_eq!((rate.messages, rate.bytes), (64, 64 * 4096));
    assert!(
        rate.time >= latency * 4 && rate.time < latency * 64,
        "{rate:?}"
    );
}

#[test]
fn an_answer_of_another_length_is_an_error() {
    let wrong = Err(MeasureError::Length {
        asked: 4096,
        came: 4095,
    });
    let mut gauge = Slow::gauge(Duration::ZERO, true);
    let trips = gauge.round_trips(4096, effort(1), &mut |_| {}, &mut |_, _| {});
    assert_eq!(trips, wrong);
    let mut gauge = Slow::gauge(Duration::ZERO, true);
    let stream = gauge.stream(4096, 2, effort(2), &mut |_, _| {});
    assert_eq!(stream.map(drop), wrong);
}

#[test]
fn a_transport_without_parts_of_pages_says_so() {
    let gauge = Slow::gauge(Duration::ZERO, false);
    assert!(!gauge.takes(64) && gauge.takes(4096) && !gauge.takes(1 << 20));
    assert_eq!(gauge.nearest(64), 4096);
}

fn donor() -> Donor {
    Donor::start(&DonorConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: 8 << 20,
        lease_duration_max: Duration::from_secs(30),
        spin: Duration::from_micros(20),
        rdma: DeviceChoice::None,
    })
    .expect("a donor")
}

fn leased(donor: &Donor, bytes: u64) -> (Link, RdmaLinkConfig) {
    leased_over(Carrier::Tcp, donor, bytes)
}

fn leased_over(carrier: Carrier, donor: &Donor, bytes: u64) -> (Link, RdmaLinkConfig) {
    let leased = Leased::obtain(LinkConfig {
        carrier,
        node: NodeId(1),
        address: donor.address(),
        vm: "measured".into(),
        bytes,
        or_less: false,
        grace: Duration::from_secs(1),
    });
    let leased = leased.expect("a lease");
    let config = leased.rdma_config();
    let (link, _) = leased.start(Vec::new(), Arc::new(|_| {})).expect("a link");
    (link, config)
}

fn byte_at(place: u64) -> u8 {
    let mixed = (place / 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed.to_le_bytes()[usize::try_from(place % 8).expect("small")]
}

/// Every byte that is measured is one that was written, for each size.
fn reads_back(gauge: &mut Gauge) {
    let filled = gauge.fill(effort(u64::MAX), &mut |offset, page| {
        for (place, byte) in (offset..).zip(page.iter_mut()) {
            *byte = byte_at(place);
        }
    });
    assert_eq!(filled.expect("filled").bytes, 2 << 20);
    for bytes in [1, 64, 100, 4096, 5000, 65_536, 1 << 20] {
        assert!(gauge.takes(bytes), "{bytes}");
        let (mut trips, mut verified) = (0, 0);
        let mut check = |offset: u64, came: &[u8]| {
            assert_eq!(came.len(), bytes as usize);
            let wrong = (offset..)
                .zip(came)
                .find(|&(place, &byte)| byte != byte_at(place));
            assert_eq!(wrong, None, "{bytes} bytes at {offset:#x}");
            verified += 1;
        };
        let counted = gauge.round_trips(bytes, effort(5), &mut |_| trips += 1, &mut check);
        assert_eq!(counted, Ok(()));
        let rate = gauge
            .stream(bytes, 8, effort(20), &mut check)
            .expect("streamed");
        assert_eq!((trips, verified), (5, 25));
        assert_eq!(rate.bytes, 20 * u64::from(bytes));
    }
    let found = gauge
        .calibrate(Duration::from_millis(200), LONG)
        .expect("measured");
    assert!(found.stream_bytes_per_second > 0.0 && found.page > Duration::ZERO);
}

#[test]
fn what_is_measured_over_udp_is_what_was_written() {
    let donor = donor();
    let (link, config) = leased_over(Carrier::Udp(None), &donor, 2 << 20);
    let mut gauge = probe::stream(&config).expect("a connection");
    reads_back(&mut gauge);
    drop(gauge);
    assert_eq!(link.release().pages_written, 512);
}

#[test]
fn what_is_measured_over_tcp_is_what_was_written() {
    let donor = donor();
    let (link, config) = leased(&donor, 2 << 20);
    let mut gauge = probe::stream(&config).expect("a connection");
    reads_back(&mut gauge);
    drop(gauge);
    let own = link.release();
    assert_eq!(own.pages_read, 0, "probes are no pages");
    assert_eq!(own.pages_written, 512);
}

#[test]
fn what_is_measured_over_loopback_is_what_was_written() {
    let pool = Pool::new(8 << 20, Duration::from_secs(30));
    let lease = pool.lend("measured".into(), 2 << 20, false, LONG);
    reads_back(&mut probe::loopback(lease.expect("a lease")));
}

#[test]
fn a_lease_that_ends_is_an_error_and_not_a_wait() {
    let donor = donor();
    let (link, config) = leased(&donor, 1 << 20);
    let mut gauge = probe::stream(&config).expect("a connection");
    link.release();
    let began = Instant::now();
    let found = gauge.calibrate(LONG, LONG);
    assert!(matches!(found, Err(MeasureError::Failed(_))), "{found:?}");
    assert!(began.elapsed() < LONG / 2);
    assert!(probe::stream(&config).is_err(), "no lease");
}
