//! Members that may use a donor, and how much of it.

use super::cluster::Cluster;
use super::{ask, control_as, ends, lease_as};
use fabric_test_support::*;
use fabric_transport::control::{ControlError, ControlStream};
use fabric_transport::rdma::device::Gid;
use fabric_transport::rdma::endpoint::Endpoint;
use fabric_transport::rdma::{ConnectAnswer, ConnectRequest, LinkLayer};
use fabric_transport::stream::Carrier;
use fabric_wire::{FrameKind, LeaseStatus, Refusal, TrafficClass};
use memory_fabric::donor::policy::{Amounts, Rule};
use memory_fabric::donor::server::{Donor, Reloaded};
use std::collections::HashMap;
use std::time::Instant;

fn rule(members: &str, limits: Amounts<Option<u64>>) -> Rule {
    let members = members.parse().expect("a pattern");
    Rule {
        members,
        limits,
        gids: Vec::new(),
    }
}

fn refusal_of(error: &ControlError) -> (Refusal, &str) {
    match error {
        ControlError::Refused { refusal, text, .. } => (*refusal, text),
        other => panic!("{other}"),
    }
}

/// Waits until the donor's accounts satisfy this: it counts connections until their threads end.
fn await_used(donor: &Donor, wanted: impl Fn(&HashMap<String, Amounts<u64>>) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let used = donor.pool().accounts().expect("a policy").used();
        let used = used.into_iter().map(|(who, used)| (who.to_string(), used));
        let used = used.collect();
        if wanted(&used) {
            return;
        }
        assert!(Instant::now() < deadline, "{used:?}");
        std::thread::yield_now();
    }
}

#[test]
fn a_member_that_no_rule_names_gets_no_lease() {
    let prod = Cluster::new("prod");
    let rules = vec![rule("vm/web-*", Amounts::default())];
    let donor = prod.donor_with(16 * MIB, Some(rules));
    for stranger in ["vm/db", "node/web-1"] {
        let mut control = control_as(&prod, &donor, stranger);
        let error = ask(&mut control, MIB).expect_err(stranger);
        let (refusal, text) = refusal_of(&error);
        assert_eq!(refusal, Refusal::NotAllowed);
        assert!(text.contains(&format!("add --allow {stranger}")), "{text}");
    }
    assert_eq!(donor.pool().granted.get(), 0);
    let (_control, _grant) = lease_as(&prod, &donor, "vm/web-1");
    // A policy without rules is one, too.
    let closed = prod.donor_with(16 * MIB, Some(Vec::new()));
    let error = ask(&mut control_as(&prod, &closed, "vm/web-1"), MIB).expect_err("refused");
    assert_eq!(refusal_of(&error).0, Refusal::NotAllowed);
    assert_eq!(closed.pool().granted.get(), 0);
}

#[test]
fn a_member_at_its_limit_is_refused_and_its_neighbour_is_not() {
    let prod = Cluster::new("prod");
    let limits = Amounts {
        bytes: Some(3 * MIB),
        leases: Some(2),
        ..Amounts::default()
    };
    let donor = prod.donor_with(16 * MIB, Some(vec![rule("vm/*", limits)]));
    let (mut neighbour, of_neighbour) = lease_as(&prod, &donor, "vm/db");
    let (mut first, of_first) = lease_as(&prod, &donor, "vm/web");
    let error = ask(&mut control_as(&prod, &donor, "vm/web"), 4 * MIB).expect_err("too much");
    let (refusal, text) = refusal_of(&error);
    assert_eq!(refusal, Refusal::NotAllowed);
    let parts = [
        "vm/web asks for 4194304 bytes of memory and has 1048576",
        "3145728 is its limit",
        "raise bytes=",
    ];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    // What is left, where less is accepted.
    let mut second = control_as(&prod, &donor, "vm/web");
    let mut request = super::lease_request(4 * MIB);
    request.or_less = true;
    let rest: fabric_wire::LeaseGrant = second
        .call(FrameKind::Lease, &request, FrameKind::Granted)
        .expect("less");
    assert_eq!(rest.bytes, 2 * MIB);
    let error = ask(&mut control_as(&prod, &donor, "vm/web"), MIB).expect_err("a third");
    assert!(refusal_of(&error).1.contains("raise leases="), "{error}");
    assert_eq!(donor.pool().lent_bytes(), 4 * MIB);

    // The neighbour works as before, and may use as much.
    let renewed: LeaseStatus = neighbour
        .call(FrameKind::Renew, &of_neighbour.token, FrameKind::Status)
        .expect("its lease");
    assert_eq!(renewed.pages_read, 0);
    let mut pages = control_as(&prod, &donor, "vm/db");
    let urgent = TrafficClass::Urgent;
    pages
        .attach(of_neighbour.token, urgent, &ends())
        .expect("its pages");
    ask(&mut control_as(&prod, &donor, "vm/db"), 2 * MIB).expect("as much");

    // What is released can be used again.
    for (control, token) in [(&mut first, of_first.token), (&mut second, rest.token)] {
        let _: LeaseStatus = control
            .call(FrameKind::Release, &token, FrameKind::Status)
            .expect("released");
    }
    await_used(&donor, |used| {
        used.get("vm/web").is_none_or(|web| web.bytes == 0)
    });
    ask(&mut control_as(&prod, &donor, "vm/web"), 3 * MIB).expect("all of it");
}

#[test]
fn an_evicted_member_loses_leases_and_connections_and_its_neighbour_none() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (mut neighbour, of_neighbour) = lease_as(&prod, &donor, "vm/db");
    let (mut control, grant) = lease_as(&prod, &donor, "vm/web");
    // One that has no lease, over UDP.
    let carrier = Carrier::Quic(prod.expected("vm/web", "alpha"));
    let mut idle = ControlStream::connect_by(donor.address(), &carrier).expect("a donor");
    let urgent = TrafficClass::Urgent;
    let mut pages = control_as(&prod, &donor, "vm/web");
    pages
        .attach(grant.token, urgent, &ends())
        .expect("its pages");
    let deadline = Instant::now() + PATIENCE;
    while donor.evict(&"vm/nobody".parse().expect("a holder")).leases > 0 || donor.members() < 4 {
        assert!(Instant::now() < deadline, "{} members", donor.members());
        std::thread::yield_now();
    }
    let evicted = donor.evict(&"vm/web".parse().expect("a holder"));
    assert_eq!((evicted.leases, evicted.bytes), (1, MIB));
    // The connection for pages may have ended with the lease.
    assert!((2..=3).contains(&evicted.connections), "{evicted:?}");
    for stream in [&mut control, &mut idle, &mut pages] {
        assert!(stream.receive(PATIENCE).is_err(), "it is still open");
    }
    let mut again = control_as(&prod, &donor, "vm/web");
    let resumed: Result<LeaseStatus, _> =
        again.call(FrameKind::Resume, &grant.token, FrameKind::Status);
    let error = resumed.expect_err("its lease has ended").to_string();
    assert!(error.contains("no such lease"), "{error}");
    let renewed: Result<LeaseStatus, _> =
        neighbour.call(FrameKind::Renew, &of_neighbour.token, FrameKind::Status);
    renewed.expect("the neighbour has its lease");
    assert_eq!((donor.pool().leases(), donor.pool().lent_bytes()), (1, MIB));
}

#[test]
fn connections_of_a_member_have_a_limit_that_its_neighbour_does_not_feel() {
    const MOST: usize = 16;
    let prod = Cluster::new("prod");
    let limits = Amounts {
        connections: Some(MOST as u64),
        ..Amounts::default()
    };
    let donor = prod.donor_with(64 * MIB, Some(vec![rule("vm/*", limits)]));
    let mut open: Vec<_> = (0..MOST)
        .map(|_| lease_as(&prod, &donor, "vm/web"))
        .collect();
    let error = ask(&mut control_as(&prod, &donor, "vm/web"), MIB).expect_err("one more");
    let (refusal, text) = refusal_of(&error);
    assert_eq!(refusal, Refusal::NotAllowed);
    assert!(
        text.contains("asks for 1 connection(s) and has 16"),
        "{text}"
    );
    let (_neighbour, _grant) = lease_as(&prod, &donor, "vm/db");
    let (mut ended, grant): (ControlStream, _) = open.pop().expect("one");
    let _: LeaseStatus = ended
        .call(FrameKind::Release, &grant.token, FrameKind::Status)
        .expect("released");
    drop(ended);
    await_used(&donor, |used| used["vm/web"].connections < MOST as u64);
    let (_control, _grant) = lease_as(&prod, &donor, "vm/web");
}

#[test]
fn new_rules_evict_whom_they_do_not_name_and_leave_others_what_they_have() {
    let prod = Cluster::new("prod");
    let rules = vec![
        rule("vm/web", Amounts::default()),
        rule("vm/db", Amounts::default()),
    ];
    let donor = prod.donor_with(16 * MIB, Some(rules.clone()));
    let (mut web, of_web) = lease_as(&prod, &donor, "vm/web");
    let (mut db, of_db) = lease_as(&prod, &donor, "vm/db");
    let mut idle = control_as(&prod, &donor, "vm/web");
    let deadline = Instant::now() + PATIENCE;
    while donor.members() < 3 {
        assert!(Instant::now() < deadline, "{} members", donor.members());
        std::thread::yield_now();
    }
    // Rules that say the same end nothing.
    let reloaded = donor.reload(Some(rules)).expect("credentials");
    assert_eq!(reloaded, Some(Reloaded::default()));
    let less = Amounts {
        bytes: Some(MIB / 2),
        ..Amounts::default()
    };
    let rules = vec![rule("vm/db", less), rule("vm/late", Amounts::default())];
    let reloaded = donor.reload(Some(rules)).expect("credentials");
    let reloaded = reloaded.expect("credentials");
    assert_eq!((reloaded.leases, reloaded.bytes), (1, MIB));
    // The one with the lease may have ended with it.
    assert!((1..=2).contains(&reloaded.connections), "{reloaded:?}");
    for stream in [&mut web, &mut idle] {
        assert!(stream.receive(PATIENCE).is_err(), "it is still open");
    }
    let resumed: Result<LeaseStatus, _> = control_as(&prod, &donor, "vm/web").call(
        FrameKind::Resume,
        &of_web.token,
        FrameKind::Status,
    );
    let error = resumed.expect_err("it is not named");
    assert_eq!(refusal_of(&error).0, Refusal::NotAllowed);
    // The other one has more than its new limit: it keeps that, and gets no more.
    let renewed: Result<LeaseStatus, _> =
        db.call(FrameKind::Renew, &of_db.token, FrameKind::Status);
    renewed.expect("its lease");
    let error = ask(&mut control_as(&prod, &donor, "vm/db"), MIB).expect_err("beyond its limit");
    assert!(
        refusal_of(&error)
            .1
            .contains("has 1048576, 524288 is its limit"),
        "{error}"
    );
    let (_late, _grant) = lease_as(&prod, &donor, "vm/late");
    // Rules that come with credentials that cannot be used change nothing.
    let certificate = prod.directory_of("node/alpha").join("cert.pem");
    std::fs::write(certificate, "none").expect("written");
    assert!(donor.reload(Some(Vec::new())).is_err());
    let renewed: Result<LeaseStatus, _> =
        db.call(FrameKind::Renew, &of_db.token, FrameKind::Status);
    renewed.expect("its lease");
}

/// An end of an RDMA connection at a port with this address.
pub fn endpoint(port: &str) -> Endpoint {
    Endpoint {
        queue_pair: 17,
        packet_number: 1,
        link: LinkLayer::Ethernet,
        lid: 0,
        gid: Gid::from_ip(port.parse().expect("an address")),
        mtu_bytes: 1024,
        reads_answered: 16,
    }
}

#[test]
fn a_port_for_rdma_is_that_of_the_peer_or_named_by_its_rule() {
    let prod = Cluster::new("prod");
    let mut rules = vec![
        rule("vm/web", Amounts::default()),
        rule("vm/db", Amounts::default()),
    ];
    let named = "10.78.0.2".parse().expect("an address");
    rules[0].gids = vec![named];
    let donor = prod.donor_with(16 * MIB, Some(rules));
    let asks = |holder: &str, port: &str| {
        let (_kept, grant) = lease_as(&prod, &donor, holder);
        let request = ConnectRequest {
            attach: ends().attach(grant.token, TrafficClass::Urgent),
            endpoint: endpoint(port),
        };
        let mut control = control_as(&prod, &donor, holder);
        let answer =
            control.call::<_, ConnectAnswer>(FrameKind::Connect, &request, FrameKind::Connected);
        let error = answer.expect_err("this node has no device");
        let (refusal, text) = refusal_of(&error);
        assert_eq!(refusal, Refusal::NoRdma, "{text}");
        text.to_owned()
    };
    let stranger = |text: &str| text.contains("the other end's RDMA port has the address");
    // The node comes to its own device only for ports that are the peer's.
    let none = "--rdma-device none";
    for (holder, port) in [
        ("vm/web", "127.0.0.1"),
        ("vm/web", "10.78.0.2"),
        ("vm/db", "127.0.0.1"),
    ] {
        let text = asks(holder, port);
        assert!(text.contains(none), "{holder} {port}: {text}");
    }
    for (holder, port) in [
        ("vm/web", "10.78.0.3"),
        ("vm/db", "10.78.0.2"),
        ("vm/db", "::1"),
    ] {
        let text = asks(holder, port);
        assert!(stranger(&text), "{holder} {port}: {text}");
        assert!(text.contains(&format!("gids={port}")), "{text}");
    }
}
