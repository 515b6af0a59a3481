//! When a donor is given up, and when not.

use super::*;
use crate::donor::server::{Donor, DonorConfig};
use crate::homes::NodeId;
use crate::link::{Leased, Link, LinkPort};
use crate::stream::Carrier;
use crate::support::{PATIENCE, wait_until};
use crate::transport::rdma::DeviceChoice;
use crossbeam_channel::unbounded;
use vmm_sys_util::eventfd::EFD_NONBLOCK;

/// Times of a release that a busy host does not exceed when nothing hinders it.
const AMPLE: Duration = PATIENCE;

/// A grace time that is over at the next look at the clock: each break comes after that of the one
/// before, without waiting for it.
const NO_GRACE: Duration = Duration::from_nanos(1);

fn donor() -> Donor {
    let donor = Donor::start(&DonorConfig {
        credentials: None,
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: 4096,
        // So that the link renews once a second, and keeps the lease if it does so seconds late.
        lease_duration_max: Duration::from_secs(4),
        spin: Duration::ZERO,
        rdma: DeviceChoice::None,
        allow: None,
    });
    donor.expect("a donor on loopback")
}

fn config(donor: &Donor, grace: Duration) -> LinkConfig {
    LinkConfig {
        local: NodeId(0).into(),
        node: NodeId(1),
        address: donor.address(),
        carrier: Carrier::Tcp,
        vm: "test".into(),
        bytes: 4096,
        or_less: false,
        grace,
    }
}

fn link(
    donor: &Donor,
    classes: &[TrafficClass],
    grace: Duration,
) -> (Link, Vec<LinkPort>, Receiver<LinkEvent>) {
    let leased = Leased::obtain(config(donor, grace));
    let (sender, events) = unbounded();
    let observer = Arc::new(move |event| drop(sender.send(event)));
    let notifier = |&class| (class, EventFd::new(EFD_NONBLOCK).expect("an eventfd"));
    let classes = classes.iter().map(notifier).collect();
    let started = leased.expect("a lease").start(classes, observer);
    let (link, ports) = started.expect("connections");
    (link, ports, events)
}

#[test]
fn an_idle_vm_whose_control_connection_breaks_now_and_then_keeps_its_donor() {
    let donor = donor();
    let (link, _, events) = link(&donor, &[], NO_GRACE);
    let stats = link.stats();
    for outages in 1..4 {
        donor.break_connections();
        wait_until("the break is not noticed", || stats.breaks.get() >= outages);
        // The next break comes after a renewal: one that met a connection on which the lease is
        // not resumed yet would be an attempt that failed.
        let before = stats.round_trip();
        wait_until("the lease is not renewed", || stats.round_trip() != before);
        assert_eq!(events.try_iter().collect::<Vec<_>>(), []);
    }
    assert_eq!(stats.breaks.get(), 3, "each is an outage");
    drop(link);
    assert_eq!(donor.pool().leases(), 0, "the lease was not returned");
}

#[test]
fn a_port_that_lost_an_idle_connection_twice_is_connected_again() {
    let donor = donor();
    let (link, ports, events) = link(&donor, &[TrafficClass::Urgent], NO_GRACE);
    let port = &ports[0];
    let mut held = port.take_connection().expect("the first one");
    for _ in 0..2 {
        donor.break_connections();
        port.request_connection(fabric_transport::port::Outage::Initial);
        let deadline = Instant::now() + PATIENCE;
        held = loop {
            if let Some(stream) = port.take_connection() {
                break stream;
            }
            assert!(Instant::now() < deadline, "no new connection");
            std::thread::yield_now();
        };
        let lost = |event: &LinkEvent| matches!(event, LinkEvent::Lost { .. });
        assert!(!events.try_iter().any(|event| lost(&event)));
    }
    drop((held, link));
}

#[test]
fn a_port_whose_connections_complete_nothing_is_lost_after_the_grace_time() {
    let donor = donor();
    let grace = Duration::from_millis(50);
    let (link, ports, events) = link(&donor, &[TrafficClass::Urgent], grace);
    let deadline = Instant::now() + PATIENCE;
    let lost = loop {
        // As a transport does on whose connection nothing is answered.
        if ports[0].take_connection().is_some() {
            ports[0].request_connection(fabric_transport::port::Outage::Stalled);
        }
        match events.try_recv() {
            Ok(LinkEvent::Lost { reason, .. }) => break reason,
            _ => assert!(Instant::now() < deadline, "it is kept for ever"),
        }
        std::thread::yield_now();
    };
    assert!(lost.contains("not back within 0.05 s"), "{lost}");
    assert_eq!(link.stats().breaks.get(), 1, "it is one outage");
    drop(link);
}

/// Returns a keeper with a lease and a control connection, and no thread.
fn keeper(donor: &Donor) -> Keeper {
    let mut leased = Leased::obtain(config(donor, Duration::from_secs(10))).expect("a lease");
    let (config, grant) = (leased.config.clone(), leased.grant.clone());
    let control = leased.control.take();
    let stats = Arc::new(LinkStats::new(leased.round_trip));
    let observer = Arc::new(|event| panic!("unexpected {event:?}"));
    Keeper::connect(config, grant, control, Vec::new(), observer, stats).expect("no connections")
}

#[test]
fn a_lease_whose_control_connection_broke_is_returned_on_another() {
    let donor = donor();
    let mut keeper = keeper(&donor);
    donor.break_connections();
    keeper.release(AMPLE, AMPLE);
    assert_eq!(donor.pool().leases(), 0, "the lease was not returned");
}

#[test]
fn a_lease_is_returned_in_an_outage_of_its_control_connection() {
    let donor = donor();
    let mut keeper = keeper(&donor);
    keeper.control = None;
    keeper.release(AMPLE, AMPLE);
    assert_eq!(donor.pool().leases(), 0, "the lease was not returned");
}

#[test]
fn a_release_whose_answer_does_not_come_is_repeated() {
    let donor = donor();
    let mut keeper = keeper(&donor);
    // A donor that takes the request and answers nothing.
    let silent = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = silent.local_addr().expect("bound");
    let control = ControlStream::connect_by(address, &Carrier::Tcp).expect("a connection");
    keeper.control = Some(control);
    keeper.release(Duration::from_millis(1), AMPLE);
    assert_eq!(donor.pool().leases(), 0, "the lease was not returned");
}

#[test]
fn a_lease_that_has_ended_is_not_returned_again() {
    let donor = donor();
    let mut keeper = keeper(&donor);
    donor.pool().end(&keeper.grant.token).expect("the lease");
    keeper.control = None;
    let started = Instant::now();
    keeper.release(AMPLE, AMPLE);
    assert!(started.elapsed() < AMPLE / 2, "it was tried again");
}

#[test]
fn a_donor_whose_process_has_ended_is_not_waited_for() {
    let donor = donor();
    let mut keeper = keeper(&donor);
    drop(donor);
    let started = Instant::now();
    keeper.release(AMPLE, AMPLE);
    assert!(started.elapsed() < AMPLE / 2, "it was tried again");
}

#[test]
fn a_donor_that_does_not_answer_is_given_up_in_time() {
    let donor = donor();
    let mut keeper = keeper(&donor);
    // It takes connections and is silent on them.
    let silent = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    keeper.config.address = silent.local_addr().expect("bound");
    keeper.control = None;
    let (answer, retry) = (AMPLE, Duration::from_millis(300));
    let started = Instant::now();
    keeper.release(answer, retry);
    let took = started.elapsed();
    assert!((retry..AMPLE / 2).contains(&took), "{took:?}");
    assert_eq!(donor.pool().leases(), 1);
}
