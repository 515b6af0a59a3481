//! A guest's memory over UDP: faulty networks, donors that come and go, and the identity of donors.

use fabric_test_support::udp_proxy::{UdpProxy, Weather};
use fabric_test_support::*;
use fabric_transport::control::ControlStream;
use fabric_transport::stream::Carrier;
use fabric_wire::{FrameKind, LeaseGrant, LeaseRequest, LeaseStatus, ORPHAN_TIME};
use memory_fabric::fabric::{FabricConfig, FabricEvent, Fingerprint, PathKind, TransportKind};
use memory_fabric::link::LinkEvent;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

const GUEST: u64 = 24 * MIB;
const LOCAL: u64 = 16 * MIB;

/// Interval of requests to a donor that may have memory later, of which nothing tells.
const ASK_INTERVAL: Duration = Duration::from_millis(200);

fn over_udp(donor: SocketAddr) -> FabricConfig {
    FabricConfig {
        transport: TransportKind::Udp,
        ..config(GUEST, LOCAL, &[donor])
    }
}

#[test]
fn memory_survives_a_network_that_loses_datagrams() {
    let donor = donor(GUEST);
    let proxy = UdpProxy::new(donor.address(), Weather::Loss(5));
    let running = start(&over_udp(proxy.address));
    assert_eq!(running.fabric.path(), PathKind::Udp);
    let words = Words::of(&running.fabric);
    fill(words, 1);
    verify(words, 1);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| verify(words, 1));
        }
    });
    assert!(proxy.mischief_done() > 50, "too little was lost");
    running.fabric.shutdown();
    assert_eq!((donor.pool().leases(), donor.pool().lent_bytes()), (0, 0));
}

#[test]
fn memory_survives_connections_that_break() {
    let donor = donor(GUEST);
    let running = start(&over_udp(donor.address()));
    let words = Words::of(&running.fabric);
    fill(words, 2);
    for _ in 0..3 {
        donor.break_connections();
        verify(words, 2);
    }
    running.fabric.shutdown();
}

/// Ends the donor under a fabric that reads its memory; returns the reason of the loss.
fn lost(running: Running, end: impl FnOnce()) -> String {
    let words = Words::of(&running.fabric);
    fill(words, 3);
    end();
    std::thread::spawn(move || verify(words, 3));
    let deadline = Instant::now() + PATIENCE / 2;
    let reason = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match running.events.recv_timeout(left).expect("an event") {
            FabricEvent::Link(LinkEvent::Lost { reason, .. }) => break reason,
            FabricEvent::Link(_) => {}
            other => panic!("unexpected {other:?}"),
        }
    };
    // The reader waits for a page that does not arrive, as a vCPU would.
    std::mem::forget(running.fabric);
    reason
}

#[test]
fn a_donor_that_is_gone_is_lost_after_the_grace_time() {
    let donor = donor(GUEST);
    let mut config = over_udp(donor.address());
    config.grace = Duration::from_millis(700);
    let reason = lost(start(&config), || drop(donor));
    assert!(reason.contains("not back within 0.7 s"), "{reason}");
}

#[test]
fn a_donor_that_was_started_again_is_lost_at_once() {
    let first = donor(GUEST);
    let address = first.address();
    let mut again = None;
    let reason = lost(start(&over_udp(address)), || {
        drop(first);
        again = Some(donor_on(address, GUEST));
    });
    assert!(
        reason.contains("no longer has this VM's memory"),
        "{reason}"
    );
}

#[test]
fn the_donor_with_the_fingerprint_is_used_and_another_is_refused() {
    let (right, wrong) = (donor(GUEST), donor(GUEST));
    let of = |fingerprint: Option<Fingerprint>| {
        let mut config = over_udp(right.address());
        config.donors[0].fingerprint = fingerprint;
        config
    };
    start(&of(right.fingerprint())).fabric.shutdown();
    let text = refusal(&of(wrong.fingerprint()));
    let shown = right.fingerprint().expect("it listens on UDP").to_string();
    assert!(
        text.contains(&format!("its fingerprint is {shown}")) && text.contains("another node"),
        "{text}"
    );
    assert_eq!(right.pool().leases(), 0);
}

#[test]
fn auto_takes_udp_only_where_tcp_does_not_pass() {
    let donor = donor(GUEST);
    let auto = |address| FabricConfig {
        transport: TransportKind::Auto,
        ..config(GUEST, LOCAL, &[address])
    };
    let by_tcp = start(&auto(donor.address()));
    assert_eq!(by_tcp.fabric.path(), PathKind::Tcp);
    by_tcp.fabric.shutdown();
    // The donor's TCP port has no listener.
    let proxy = UdpProxy::new(donor.address(), Weather::Fair);
    let by_udp = start(&auto(proxy.address));
    assert_eq!(by_udp.fabric.path(), PathKind::Udp);
    let words = Words::of(&by_udp.fabric);
    fill(words, 4);
    verify(words, 4);
    by_udp.fabric.shutdown();
}

/// A host that is starved of processor time answers late; no kernel answers for it as with TCP.
#[test]
fn a_donor_that_is_late_at_the_start_is_waited_for_and_the_lease_of_another_kept() {
    let (brief, late) = (donor_for(GUEST, Duration::from_secs(1)), donor(GUEST));
    let proxy = UdpProxy::new(late.address(), Weather::Fair);
    proxy.withhold();
    let config = FabricConfig {
        transport: TransportKind::Udp,
        ..config(GUEST, LOCAL, &[brief.address(), proxy.address])
    };
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| start(&config));
        // Three attempts fit into the time of a reconnection.
        let deadline = Instant::now() + PATIENCE;
        while proxy.clients() < 4 {
            assert!(Instant::now() < deadline, "{} attempts", proxy.clients());
            assert!(!starting.is_finished(), "{} attempts", proxy.clients());
            std::thread::yield_now();
        }
        proxy.release();
        let running = starting.join().expect("a start");
        let words = Words::of(&running.fabric);
        fill(words, 5);
        verify(words, 5);
        running.fabric.shutdown();
    });
    assert_eq!((brief.pool().leases(), late.pool().leases()), (0, 0));
}

#[test]
fn a_donor_on_all_addresses_answers_from_the_one_that_a_vm_uses() {
    // Not the one from which this host sends by itself.
    let second = Ipv4Addr::new(127, 0, 0, 2);
    let mut listening: Vec<IpAddr> = vec![Ipv4Addr::UNSPECIFIED.into()];
    // For both families, where this host has IPv6.
    let both = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
    listening.extend(both.map(|_| IpAddr::from(Ipv6Addr::UNSPECIFIED)));
    for address in listening {
        let donor = donor_on((address, 0).into(), GUEST);
        let running = start(&over_udp((second, donor.address().port()).into()));
        let words = Words::of(&running.fabric);
        fill(words, 6);
        verify(words, 6);
        running.fabric.shutdown();
    }
}

#[test]
fn an_absent_donor_is_named_within_the_deadline() {
    let nobody = UdpSocket::bind(("127.0.0.1", 0)).expect("a free port");
    let silent = nobody.local_addr().expect("bound");
    let started = Instant::now();
    let text = refusal(&over_udp(silent));
    assert!(text.contains(&silent.to_string()), "{text}");
    assert!(text.contains("timed out"), "{text}");
    assert!(started.elapsed() < Duration::from_secs(10));
    drop(nobody);
    let text = refusal(&over_udp(silent));
    assert!(
        text.contains("no process listens on that UDP port"),
        "{text}"
    );
}

/// No kernel closes the connection of a process that was killed, and nobody uses it.
#[test]
fn the_memory_of_a_vm_that_was_killed_is_not_kept_for_its_whole_lease() {
    let duration = Duration::from_secs(600);
    let donor = donor_for(GUEST, duration);
    let proxy = UdpProxy::new(donor.address(), Weather::Fair);
    let mut control = ControlStream::connect_by(proxy.address, &Carrier::Udp(None)).expect("one");
    let request = LeaseRequest {
        vm: "killed".into(),
        bytes: GUEST,
        or_less: false,
        duration_ms: 600_000,
    };
    let granted = control.call(FrameKind::Lease, &request, FrameKind::Granted);
    let LeaseGrant { token, .. } = granted.expect("a lease");
    // Until nothing is under way that the donor would send again, such as probes of the path.
    for _ in 0..30 {
        let renewed = control.call(FrameKind::Renew, &token, FrameKind::Status);
        let _: LeaseStatus = renewed.expect("a renewal");
        control.settle();
    }
    // From now on the port to which the donor sends is closed, and nothing more comes from it.
    drop(proxy);
    // It may reconnect for a while, and the memory is needed after that.
    let deadline = Instant::now() + ORPHAN_TIME + PATIENCE;
    let other = loop {
        let mut other = ControlStream::connect(donor.address()).expect("a donor");
        match other.call::<_, LeaseGrant>(FrameKind::Lease, &request, FrameKind::Granted) {
            Ok(_) => break other,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(ASK_INTERVAL);
    };
    drop((control, other));
}

#[test]
fn many_connect_at_once() {
    // Their first datagrams arrive while sockets of others are being created.
    let donor = donor(16 * GUEST);
    let address = donor.address();
    std::thread::scope(|scope| {
        for seed in 0..8 {
            scope.spawn(move || {
                let running = start(&over_udp(address));
                let words = Words::of(&running.fabric);
                fill(words, seed);
                verify(words, seed);
                running.fabric.shutdown();
            });
        }
    });
    assert_eq!(donor.pool().leases(), 0);
}
