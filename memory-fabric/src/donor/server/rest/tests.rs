//! What renewals do not wait for, and connections without a thread.

use super::*;
use crate::control::{ControlError, ControlStream};
use crate::donor::server::{Donor, DonorConfig};
use crate::transport::rdma::DeviceChoice;
use crate::wire::{LeaseGrant, LeaseRequest, LeaseStatus, Token};

/// Timeout of every wait, far longer than any takes unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

fn donor() -> Donor {
    let config = DonorConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: 1 << 20,
        lease_duration_max: Duration::from_secs(30),
        spin: Duration::ZERO,
        rdma: DeviceChoice::None,
        credentials: None,
        allow: None,
    };
    Donor::start(&config).expect("a donor on loopback")
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "not in time: {what}");
        std::thread::yield_now();
    }
}

/// A control connection that rests, beside `others`.
fn lease(donor: &Donor, others: usize) -> (ControlStream, Token) {
    let mut control = ControlStream::connect(donor.address()).expect("a donor");
    let request = LeaseRequest {
        vm: "vm".into(),
        bytes: 4096,
        or_less: false,
        duration_ms: 20_000,
    };
    let grant = control.call(FrameKind::Lease, &request, FrameKind::Granted);
    let grant: LeaseGrant = grant.expect("granted");
    wait_until("it rests", || donor.resting() == others + 1);
    (control, grant.token)
}

fn renew(control: &mut ControlStream, token: Token) -> Result<LeaseStatus, ControlError> {
    control.call(FrameKind::Renew, &token, FrameKind::Status)
}

#[test]
fn renewals_do_not_wait_for_connections_that_leave() {
    let donor = donor();
    let (mut renewing, token) = lease(&donor, 0);
    let (mut releasing, released) = lease(&donor, 1);
    let (closed, _) = lease(&donor, 2);
    // A connection that ends, or gets a thread, needs this.
    let places = donor.shared.open();
    drop(closed);
    let sent = releasing.send(FrameKind::Release, &released);
    sent.expect("sent");
    for _ in 0..3 {
        renew(&mut renewing, token).expect("renewed");
    }
    assert_eq!(donor.pool().leases(), 3, "the lock is not held");
    drop(places);
    releasing.receive(PATIENCE).expect("released");
    wait_until("both have left", || donor.connections() == 1);
    assert_eq!(donor.pool().leases(), 2);
}

#[test]
fn a_release_ends_its_lease_and_others_are_refused_when_all_threads_are_taken() {
    let donor = donor();
    let (mut renewing, token) = lease(&donor, 0);
    let (mut releasing, released) = lease(&donor, 1);
    let (mut asking, asked) = lease(&donor, 2);
    donor.shared.fill();
    let status: Result<LeaseStatus, _> =
        releasing.call(FrameKind::Release, &released, FrameKind::Status);
    status.expect("released");
    assert!(donor.pool().find(&released).is_none());
    wait_until("its memory is free", || {
        donor.pool().lent_bytes() == 2 * 4096
    });
    let refused = asking
        .call::<_, LeaseStatus>(FrameKind::Attach, &asked, FrameKind::Status)
        .expect_err("no thread");
    let ControlError::Refused { refusal, text, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!(refusal, Refusal::Busy);
    assert!(text.contains("3072"), "{text}");
    assert_eq!(donor.pool().leases(), 2, "its VM may connect again");
    renew(&mut renewing, token).expect("renewed");
}
