//! One suite for all transports: contents, order, matching, cancellation, and faults of networks
//! and peers.

use fabric_test_support::conformance::cases::{self, Bed, CASES, Lines, Options, User};
use fabric_test_support::conformance::remote::{BYTES, Remote, run_over_rdma};
use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::udp_proxy::{UdpProxy, Weather};
use fabric_test_support::{BREAK_INTERVAL, Breaker, donor};
use fabric_transport::stream::Carrier;
use fabric_wire::{FrameKind, Token};
use memory_fabric::donor::loopback::LoopbackTransport;
use memory_fabric::donor::pool::Pool;
use memory_fabric::fabric::Compression;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// UDP with any fingerprint of the donor.
const ANY_UDP: Carrier = Carrier::Udp(None);

const PLAIN: Options = Options {
    compression: Compression::Off,
    checksum: false,
};

const GUARDED: Options = Options {
    compression: Compression::Auto,
    checksum: true,
};

/// Compression off and on, with and without checksums.
const ALL_OPTIONS: [Options; 3] = [
    PLAIN,
    Options {
        compression: Compression::On,
        checksum: false,
    },
    GUARDED,
];

/// The reference: a slab in this process.
struct Loopback(Arc<Pool>);

impl Bed for Loopback {
    fn open(&self, _: Options) -> Lines {
        let time = Duration::from_secs(60);
        let lease = self.0.lend("test".into(), BYTES, false, time);
        let lease = lease.expect("enough memory");
        let user = || User::new(Box::new(LoopbackTransport::new(Arc::clone(&lease))));
        Lines {
            urgent: user(),
            bulk: user(),
            ahead: user(),
            _lease: Box::new(LoopbackLease(Arc::clone(&self.0), lease.token)),
        }
    }

    fn leases(&self) -> usize {
        self.0.leases()
    }

    fn forgets_drops(&self) -> bool {
        true
    }
}

/// Ends its lease on drop.
struct LoopbackLease(Arc<Pool>, Token);

impl Drop for LoopbackLease {
    fn drop(&mut self) {
        self.0.end(&self.1);
    }
}

fn run_all(bed: &dyn Bed) {
    for &(name, case) in CASES {
        for options in ALL_OPTIONS {
            let started = Instant::now();
            case(bed, options);
            println!("{name}, {options:?}: {:?}", started.elapsed());
        }
    }
}

#[test]
fn loopback_conforms() {
    let pool = Pool::new(BYTES, Duration::from_secs(3600));
    run_all(&Loopback(Arc::new(pool)));
}

#[test]
fn tcp_conforms() {
    let donor = donor(BYTES);
    run_all(&Remote::new(&donor, donor.address(), Carrier::Tcp));
}

#[test]
fn udp_conforms() {
    let donor = donor(BYTES);
    run_all(&Remote::new(&donor, donor.address(), ANY_UDP));
}

/// The scenario `rdma_conforms` runs the same on the testbed.
#[test]
#[ignore = "needs an RDMA device: name its address in SSI_HV_RDMA_ADDRESS"]
fn rdma_conforms() {
    let here = std::env::var("SSI_HV_RDMA_ADDRESS").expect("SSI_HV_RDMA_ADDRESS is set");
    run_over_rdma(here.parse().expect("an address"), |name, time| {
        println!("{name}: {time:?}");
    });
}

/// Everything is right over a TCP network that injects `mischief` once into some frames of each
/// class.
fn survives_over_tcp(mischief: Mischief, options: Options) {
    use FrameKind::{PageData, PagesData, Written};
    std::thread::scope(|scope| {
        for kind in [PageData, PagesData, Written] {
            scope.spawn(move || {
                let donor = donor(BYTES);
                let proxy = Proxy::on(kind, donor.address(), mischief, 1);
                let bed = Remote::new(&donor, proxy.address, Carrier::Tcp);
                cases::use_all(&mut bed.open(options));
                assert!(proxy.mischief_done() > 0, "nothing was put to the test");
            });
        }
    });
}

#[test]
fn tcp_survives_frames_that_are_lost_or_come_twice() {
    survives_over_tcp(Mischief::Missing, PLAIN);
    survives_over_tcp(Mischief::Twice, GUARDED);
}

#[test]
fn tcp_survives_answers_in_another_order_and_late_ones() {
    survives_over_tcp(Mischief::Reordered, GUARDED);
    survives_over_tcp(Mischief::Late, PLAIN);
}

#[test]
fn tcp_survives_frames_that_are_cut_short_and_garbage() {
    survives_over_tcp(Mischief::CutShort, PLAIN);
    survives_over_tcp(Mischief::Garbage, PLAIN);
}

#[test]
fn tcp_survives_a_peer_that_falls_silent() {
    survives_over_tcp(Mischief::Silence, GUARDED);
}

/// Everything is right over a UDP network with this fault.
fn survives_over_udp(weather: Weather, options: Options) {
    let donor = donor(BYTES);
    let proxy = UdpProxy::new(donor.address(), weather);
    let bed = Remote::new(&donor, proxy.address, ANY_UDP);
    let mut lines = bed.open(options);
    cases::use_all(&mut lines);
    cases::use_at_once(&mut lines);
    assert!(proxy.mischief_done() > 0, "nothing was put to the test");
}

#[test]
fn udp_survives_datagrams_that_are_lost_or_come_twice() {
    survives_over_udp(Weather::Loss(5), PLAIN);
    survives_over_udp(Weather::Duplication, GUARDED);
}

#[test]
fn udp_survives_datagrams_in_another_order_and_late_ones() {
    survives_over_udp(Weather::Reordering, GUARDED);
    survives_over_udp(Weather::Delay, PLAIN);
}

#[test]
fn udp_survives_datagrams_that_are_cut_short_and_garbage() {
    survives_over_udp(Weather::Truncation, PLAIN);
    survives_over_udp(Weather::Garbage, PLAIN);
}

#[test]
fn udp_survives_a_peer_that_falls_silent() {
    survives_over_udp(Weather::Silence, GUARDED);
}

#[test]
fn connections_may_be_reset_over_tcp() {
    survives_resets(Carrier::Tcp, BREAK_INTERVAL);
}

#[test]
fn connections_may_be_reset_over_udp() {
    // Leaves time for four handshakes with signatures between resets.
    survives_resets(ANY_UDP, Duration::from_secs(1));
}

fn survives_resets(carrier: Carrier, interval: Duration) {
    let donors = [donor(BYTES)];
    let breaker = Breaker::new(&donors, interval);
    let bed = Remote::new(&donors[0], donors[0].address(), carrier);
    let mut lines = bed.open(GUARDED);
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !finished.load(Ordering::Relaxed) {
                breaker.tick();
                std::thread::yield_now();
            }
        });
        // The thread must end even after a panic.
        let used = std::panic::catch_unwind(AssertUnwindSafe(|| {
            while !breaker.is_enough() {
                cases::use_all(&mut lines);
                cases::use_at_once(&mut lines);
            }
        }));
        finished.store(true, Ordering::Relaxed);
        used.unwrap_or_else(|cause| std::panic::resume_unwind(cause));
    });
    breaker.assert_broke();
}
