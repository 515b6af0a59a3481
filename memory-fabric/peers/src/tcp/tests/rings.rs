//! Messages through rings, over simulated adapters.

use std::sync::Arc;

use super::delivery::Plan;
use super::network::{Faults, Network};
use super::*;
use crate::ring::simulated::{RingFaults, SimulatedRings};

fn rdma(rings: &SimulatedRings, is_demanded: bool) -> Option<RdmaPeers> {
    let rings = Arc::new(rings.clone());
    Some(RdmaPeers { rings, is_demanded })
}

fn healthy() -> SimulatedRings {
    SimulatedRings::new(RingFaults::default(), 1)
}

fn without_device() -> SimulatedRings {
    let faults = RingFaults {
        no_device: true,
        ..RingFaults::default()
    };
    SimulatedRings::new(faults, 1)
}

/// Connects two nodes with these adapters, which are given so much time.
fn connect(rdma: [Option<RdmaPeers>; 2], time: Duration) -> [Result<TcpPeers, String>; 2] {
    let ((first, a), (second, b)) = (listener(), listener());
    let mut one = config(0, first, &[a, b]);
    let mut other = config(1, second, &[a, b]);
    (one.start_timeout, other.start_timeout) = (time, time);
    [one.rdma, other.rdma] = rdma;
    let other = std::thread::spawn(move || TcpPeers::connect(other));
    let one = TcpPeers::connect(one);
    [one, other.join().expect("no panic")].map(|end| end.map_err(|error| error.to_string()))
}

fn connected(rdma: [Option<RdmaPeers>; 2]) -> [TcpPeers; 2] {
    connect(rdma, LIMIT).map(|end| end.expect("connected"))
}

/// How it ends for two nodes that these adapters keep from connecting.
fn not_connected(rdma: [Option<RdmaPeers>; 2]) -> [String; 2] {
    with_time(|time| {
        let ends = connect(rdma.clone(), time);
        let ends = ends.map(|end| end.map(drop).expect_err("not connected"));
        (!ends.iter().any(|end| is_too_late(end))).then_some(ends)
    })
}

fn has_rings(peers: &TcpPeers, other: usize) -> bool {
    peers.links[other].as_ref().expect("a link").has_rings()
}

/// What carries messages to the other node of two, and how many connections were made.
fn path(peers: &TcpPeers) -> (PeerTransport, u32) {
    let paths: Vec<_> = peers.paths().now().collect();
    let [one] = paths[..] else {
        panic!("two nodes: {paths:?}");
    };
    (one.transport, one.connections)
}

#[test]
fn every_message_through_rings_arrives_once_in_the_order_of_its_lane() {
    let faults = RingFaults {
        delayed: 20,
        ..RingFaults::default()
    };
    let rings = SimulatedRings::new(faults, 3);
    let plan = Plan {
        nodes: 3,
        messages: 10_000,
        faults: Faults::default(),
        stall: STALL_DEFAULT,
        rdma: rdma(&rings, true),
    };
    plan.run();
    assert_eq!(rings.breaks(), 0, "no correct node lacks a receive request");
}

#[test]
fn rings_that_break_lose_and_repeat_nothing() {
    let faults = RingFaults {
        delayed: 20,
        break_after: 2 << 20,
        ..RingFaults::default()
    };
    let rings = SimulatedRings::new(faults, 5);
    let plan = Plan {
        nodes: 3,
        messages: 6_000,
        faults: Faults::default(),
        stall: STALL_DEFAULT,
        rdma: rdma(&rings, true),
    };
    plan.run();
    // Two lanes carry pages, 281 MiB in all, and a connection breaks within 4 MiB of each end: three
    // pairs of nodes cannot have sent all of it with fewer breaks than 35, less one for each pair.
    assert!(rings.breaks() >= 32, "only {} broke", rings.breaks());
}

#[test]
fn rings_whose_session_is_cut_are_made_again_and_lose_nothing() {
    let ((first, a), (second, b)) = (listener(), listener());
    let network = Network::new(b, Faults::default(), 1);
    let rings = healthy();
    let mut other = config(1, second, &[a, b]);
    other.rdma = rdma(&rings, false);
    let other = std::thread::spawn(move || TcpPeers::connect(other).expect("connected"));
    let mut one = config(0, first, &[a, network.address]);
    one.rdma = rdma(&rings, false);
    let one = TcpPeers::connect(one).expect("connected");
    let mut both = [one, other.join().expect("no panic")];
    // More often than rings may break by themselves.
    for round in 0..5 {
        exchange(&mut both);
        let before = sessions(&both);
        network.close(true);
        both[0].send(member(1), get(100 + round), None);
        both[0].flush();
        network.close(false);
        let found = reconnect(&mut both, before);
        let found = match found {
            Some(found) => vec![found],
            None => {
                let [one, other] = &mut both;
                receive_after_resume(one, other)
            }
        };
        assert_eq!(found, [(member(0), get(100 + round))]);
        assert!(has_rings(&both[0], 1) && has_rings(&both[1], 0));
    }
}

#[test]
fn ends_of_adapters_are_given_back() {
    let rings = healthy();
    let both = connected([rdma(&rings, false), rdma(&rings, false)]);
    assert!(has_rings(&both[0], 1) && has_rings(&both[1], 0));
    assert_eq!(both.each_ref().map(path), [(PeerTransport::Rdma, 1); 2]);
    assert_eq!(rings.ends(), 2);
    drop(both);
    let deadline = Instant::now() + LIMIT;
    while rings.ends() > 0 {
        assert!(Instant::now() < deadline, "{} ends remain", rings.ends());
        std::thread::yield_now();
    }
}

/// Sends a message each way.
fn exchange(both: &mut [TcpPeers; 2]) {
    let [one, other] = both;
    one.send(member(1), get(1), None);
    one.flush();
    assert_eq!(receive_after_resume(one, other), [(member(0), get(1))]);
    other.send(member(0), get(2), None);
    other.flush();
    assert_eq!(receive_after_resume(other, one), [(member(1), get(2))]);
}

#[test]
fn tcp_takes_the_place_of_rings_that_cannot_be_made() {
    let silent = RingFaults {
        is_silent: true,
        ..RingFaults::default()
    };
    for [one, other] in [
        [Some(without_device()), Some(healthy())],
        [Some(healthy()), Some(without_device())],
        [Some(healthy()), None],
        [None, Some(healthy())],
        // They can be made, and nothing arrives.
        [silent, silent].map(|faults| Some(SimulatedRings::new(faults, 1))),
    ] {
        let use_of = |rings: Option<SimulatedRings>| rings.and_then(|rings| rdma(&rings, false));
        let mut both = connected([use_of(one), use_of(other)]);
        assert_eq!(both.each_ref().map(path), [(PeerTransport::Tcp, 1); 2]);
        assert!(!has_rings(&both[0], 1) && !has_rings(&both[1], 0));
        exchange(&mut both);
    }
}

#[test]
fn rings_that_break_again_and_again_are_not_made_any_more_unless_demanded() {
    for is_demanded in [false, true] {
        let rings = healthy();
        let mut both = connected([rdma(&rings, is_demanded), rdma(&rings, is_demanded)]);
        for _ in 0..3 {
            assert!(has_rings(&both[0], 1));
            exchange(&mut both);
            let before = sessions(&both);
            rings.break_all();
            assert_eq!(reconnect(&mut both, before), None);
        }
        let now = match is_demanded {
            true => PeerTransport::Rdma,
            false => PeerTransport::Tcp,
        };
        assert_eq!(both.each_ref().map(path), [(now, 4); 2]);
        assert_eq!(has_rings(&both[0], 1), is_demanded);
        assert_eq!(has_rings(&both[1], 0), is_demanded);
        exchange(&mut both);
    }
}

/// The ends of the connections of both nodes, which differ for each connection.
fn sessions(both: &[TcpPeers; 2]) -> [Option<[SocketAddr; 2]>; 2] {
    let ends = |peers: &TcpPeers, other: usize| peers.links[other].as_ref()?.ends();
    [ends(&both[0], 1), ends(&both[1], 0)]
}

/// Waits until both nodes have another connection than `before`. Returns what arrived meanwhile.
fn reconnect(
    both: &mut [TcpPeers; 2],
    before: [Option<[SocketAddr; 2]>; 2],
) -> Option<(Member, PeerMessage)> {
    let deadline = Instant::now() + LIMIT;
    let mut found = None;
    loop {
        let now = sessions(both);
        if (0..2).all(|end| now[end].is_some() && now[end] != before[end]) {
            return found;
        }
        assert!(Instant::now() < deadline, "{now:?} after {before:?}");
        for one in both.iter_mut() {
            let take = &mut |from, message, _: Option<&PageBytes>| {
                assert_eq!(found.replace((from, message)), None);
            };
            one.receive(take).expect("a peer");
            one.flush();
        }
    }
}

#[test]
fn demanded_rings_that_cannot_be_made_end_the_start_with_the_reason() {
    let [one, other] = not_connected([rdma(&without_device(), true), rdma(&healthy(), true)]);
    let text = "member 1 is no peer of this node: RDMA is demanded, and not possible: this host has \
                no RDMA device";
    assert_eq!(one, text);
    let text = "RDMA is demanded, and not possible: at the other end, this host has no RDMA device";
    assert!(other.ends_with(text), "{other}");
}

#[test]
fn a_node_that_demands_rdma_and_one_without_are_refused_by_name() {
    let [one, other] = not_connected([rdma(&healthy(), true), None]);
    let what = "another choice of RDMA, which one of the two nodes demands";
    let refused = "the other node refused this one, which has";
    assert_eq!(
        one,
        format!("member 1 is no peer of this node: {refused} {what}")
    );
    assert!(
        other.ends_with(&format!("the other node has {what}")),
        "{other}"
    );
}
