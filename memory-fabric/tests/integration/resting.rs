//! Control connections that only renew their leases have no threads, and end as others do.

use fabric_test_support::*;
use fabric_transport::control::{ControlError, ControlStream};
use fabric_transport::stream::Carrier;
use fabric_wire::{FrameKind, LeaseGrant, LeaseRequest, LeaseStatus, Refusal, Token};
use memory_fabric::donor::server::Donor;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LENT: u64 = 4096;

pub fn lease_by(
    donor: &Donor,
    carrier: &Carrier,
    duration: Duration,
) -> (ControlStream, LeaseGrant) {
    let mut control = ControlStream::connect_by(donor.address(), carrier).expect("a donor");
    let request = LeaseRequest {
        vm: "vm".into(),
        bytes: LENT,
        or_less: false,
        duration_ms: u32::try_from(duration.as_millis()).expect("short"),
    };
    let grant = control.call(FrameKind::Lease, &request, FrameKind::Granted);
    (control, grant.expect("granted"))
}

fn lease(donor: &Donor) -> (ControlStream, LeaseGrant) {
    lease_by(donor, &Carrier::Tcp, Duration::from_secs(20))
}

pub fn renew(control: &mut ControlStream, token: Token) -> Result<LeaseStatus, ControlError> {
    control.call(FrameKind::Renew, &token, FrameKind::Status)
}

pub fn rest(donor: &Donor, count: usize) {
    wait_until("they rest", || donor.resting() == count);
}

/// Checks that many connections rest, renew, are counted, and leave. Each shows `chain_bytes`.
pub fn many_rest(donor: &Donor, carrier: &Carrier, chain_bytes: usize) {
    const MANY: usize = 100;
    let duration = Duration::from_secs(20);
    let mut leases: Vec<_> = (0..MANY)
        .map(|_| lease_by(donor, carrier, duration))
        .collect();
    rest(donor, MANY);
    assert_eq!(donor.connections(), MANY);
    assert_eq!(donor.waiting_and_established(), (0, MANY));
    let kept = |connections: usize| ((2048 + 2 * chain_bytes) * connections) as u64;
    assert_eq!(donor.buffers().in_use, kept(MANY));
    for _ in 0..3 {
        for (control, grant) in &mut leases {
            renew(control, grant.token).expect("renewed");
        }
    }
    assert_eq!(donor.resting(), MANY);
    let rest_of_them = leases.split_off(MANY / 2);
    for (control, grant) in &mut leases {
        let released: Result<LeaseStatus, _> =
            control.call(FrameKind::Release, &grant.token, FrameKind::Status);
        released.expect("released");
    }
    wait_until("they have left", || donor.connections() == MANY / 2);
    assert_eq!(donor.pool().leases(), MANY / 2);
    assert_eq!(donor.resting(), MANY / 2);
    std::thread::scope(|scope| {
        scope.spawn(|| drop(rest_of_them));
        let started = Instant::now();
        while donor.connections() > 0 && started.elapsed() < PATIENCE {
            let connections = donor.connections();
            let in_use = donor.buffers().in_use;
            assert!(in_use <= kept(connections), "{in_use} of {connections}");
        }
    });
    let left = (donor.connections(), donor.resting());
    assert_eq!((left, donor.buffers().in_use), ((0, 0), 0));
}

#[test]
fn many_control_connections_rest_and_renew() {
    many_rest(&donor(MIB), &Carrier::Tcp, 0);
}

#[test]
fn a_lease_is_resumed_on_a_connection_that_rests_too() {
    let donor = donor(MIB);
    let (old, grant) = lease(&donor);
    rest(&donor, 1);
    let mut new = ControlStream::connect(donor.address()).expect("a donor");
    let resumed: LeaseStatus = new
        .call(FrameKind::Resume, &grant.token, FrameKind::Status)
        .expect("resumed");
    assert_eq!(resumed, LeaseStatus::default());
    rest(&donor, 2);
    drop(old);
    rest(&donor, 1);
    renew(&mut new, grant.token).expect("renewed");
}

#[test]
fn a_lease_keeps_few_control_connections_and_the_newest_ones() {
    let donor = donor(MIB);
    let (first, grant) = lease(&donor);
    let mut resumed = vec![first];
    for _ in 0..10 {
        let mut control = ControlStream::connect(donor.address()).expect("a donor");
        let _: LeaseStatus = control
            .call(FrameKind::Resume, &grant.token, FrameKind::Status)
            .expect("resumed");
        resumed.push(control);
    }
    rest(&donor, 4);
    wait_until("others have left", || donor.connections() == 4);
    let mut newest = resumed.split_off(7);
    for control in &mut newest {
        renew(control, grant.token).expect("renewed");
    }
    for mut control in resumed {
        assert!(control.receive(PATIENCE).is_err(), "it is not closed");
    }
    assert_eq!((donor.pool().leases(), donor.resting()), (1, 4));
}

#[test]
fn requests_that_are_refused_are_refused_as_on_a_thread() {
    let donor = donor(MIB);
    let (mut control, _) = lease(&donor);
    rest(&donor, 1);
    let error = renew(&mut control, Token([1; 16])).expect_err("another token");
    assert!(
        error
            .to_string()
            .contains("not the lease of this connection"),
        "{error}"
    );

    let (mut control, grant) = lease(&donor);
    let error = control
        .call::<_, LeaseStatus>(FrameKind::Attach, &grant.token, FrameKind::Status)
        .expect_err("a control connection");
    assert!(
        matches!(
            &error,
            ControlError::Refused {
                refusal: Refusal::Malformed,
                ..
            }
        ),
        "{error}"
    );
    wait_until("both have left", || donor.connections() == 0);
}

#[test]
fn who_renews_too_often_gets_a_thread_and_is_served() {
    let donor = donor(MIB);
    let (mut control, grant) = lease(&donor);
    rest(&donor, 1);
    for _ in 0..200 {
        renew(&mut control, grant.token).expect("renewed");
    }
    assert_eq!((donor.resting(), donor.connections()), (0, 1));
}

#[test]
fn half_a_request_ends_its_connection_in_time_and_no_other() {
    let donor = donor(MIB);
    let (half, _) = lease(&donor);
    let (mut other, grant) = lease(&donor);
    rest(&donor, 2);
    let mut half = half.into_tcp().expect("TCP");
    let started = Instant::now();
    half.write_all(b"SS").expect("sent");
    half.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = &ended;
        scope.spawn(move || {
            assert!(matches!(half.read(&mut [0; 8]), Ok(0)), "it is not closed");
            ended.store(true, Ordering::SeqCst);
        });
        while !ended.load(Ordering::SeqCst) && started.elapsed() < PATIENCE {
            renew(&mut other, grant.token).expect("renewed");
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    let took = started.elapsed();
    assert!(took >= Duration::from_millis(4500), "{took:?}");
    assert!(took < Duration::from_secs(12), "{took:?}");
    assert_eq!(donor.connections(), 1);
    assert_eq!(donor.pool().leases(), 2, "its VM may connect again");
}

#[test]
fn leases_expire_on_time_while_many_renew_and_their_connections_are_told() {
    const SHORT: Duration = Duration::from_secs(1);
    let donor = donor(MIB);
    let mut renewing: Vec<_> = (0..60).map(|_| lease(&donor)).collect();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = &ended;
        scope.spawn(move || {
            while !ended.load(Ordering::SeqCst) {
                for (control, grant) in &mut renewing {
                    renew(control, grant.token).expect("renewed");
                }
            }
        });
        let (mut silent, grant) = lease_by(&donor, &Carrier::Tcp, SHORT);
        let started = Instant::now();
        let told = silent.receive(PATIENCE).expect_err("it ends");
        let took = started.elapsed();
        ended.store(true, Ordering::SeqCst);
        assert!(
            matches!(
                &told,
                ControlError::Refused {
                    refusal: Refusal::UnknownLease,
                    ..
                }
            ),
            "{told}"
        );
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(donor.pool().find(&grant.token).is_none());
    });
}

#[test]
fn a_node_that_ends_or_loses_its_network_closes_resting_connections() {
    let donor = donor(MIB);
    let (mut broken, _) = lease(&donor);
    rest(&donor, 1);
    donor.break_connections();
    wait_until("it has left", || donor.connections() == 0);
    assert!(broken.receive(PATIENCE).is_err());
    assert_eq!(donor.pool().leases(), 1, "the VM may connect again");
    let leases: Vec<_> = (0..20).map(|_| lease(&donor)).collect();
    rest(&donor, 20);
    drop(donor);
    for (mut control, _) in leases {
        let ended = control.receive(PATIENCE).expect_err("the end");
        let ControlError::Stream(_, cause) = &ended else {
            panic!("{ended}");
        };
        assert_ne!(cause.kind(), std::io::ErrorKind::TimedOut);
    }
}
