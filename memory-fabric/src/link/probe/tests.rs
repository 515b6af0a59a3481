//! Tests of measuring over real connections.

use super::*;
use crate::donor::pool::Pool;
use crate::donor::server::{Donor, DonorConfig};
use crate::homes::NodeId;
use crate::link::{Leased, Link, LinkConfig};
use crate::stream::Carrier;
use crate::transport::measure::{Effort, MeasureError};
use crate::transport::rdma::DeviceChoice;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

fn effort(messages_max: u64) -> Effort {
    Effort {
        messages_max,
        time_max: LONG,
        silence_max: LONG,
    }
}

fn donor() -> Donor {
    Donor::start(&DonorConfig {
        credentials: None,
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: 8 << 20,
        lease_duration_max: Duration::from_secs(30),
        spin: Duration::from_micros(20),
        rdma: DeviceChoice::None,
        allow: None,
    })
    .expect("a donor")
}

fn leased(donor: &Donor, bytes: u64) -> (Link, RdmaLinkConfig) {
    leased_over(Carrier::Tcp, donor, bytes)
}

fn leased_over(carrier: Carrier, donor: &Donor, bytes: u64) -> (Link, RdmaLinkConfig) {
    let leased = Leased::obtain(LinkConfig {
        carrier,
        local: NodeId(0).into(),
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
    let mut gauge = stream(&config).expect("a connection");
    reads_back(&mut gauge);
    drop(gauge);
    assert_eq!(link.release().pages_written, 512);
}

#[test]
fn what_is_measured_over_tcp_is_what_was_written() {
    let donor = donor();
    let (link, config) = leased(&donor, 2 << 20);
    let mut gauge = stream(&config).expect("a connection");
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
    reads_back(&mut loopback(lease.expect("a lease")));
}

#[test]
fn a_lease_that_ends_is_an_error_and_not_a_wait() {
    let donor = donor();
    let (link, config) = leased(&donor, 1 << 20);
    let mut gauge = stream(&config).expect("a connection");
    link.release();
    let began = Instant::now();
    let found = gauge.calibrate(LONG, LONG);
    assert!(matches!(found, Err(MeasureError::Failed(_))), "{found:?}");
    assert!(began.elapsed() < LONG / 2);
    assert!(stream(&config).is_err(), "no lease");
}
