//! Pages in pieces on several donors: no wrong byte and no pause when as many donors are lost at once
//! as there are pieces of parity, and none is read that missed write-backs.

use super::replicas::{GUEST, events, increment};
use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{FabricConfig, FabricEvent, Redundancy, TransportKind};
use memory_fabric::link::LinkEvent;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const LOCAL: u64 = 16 * MIB;

pub(super) fn striped(layout: &str, donors: &[SocketAddr]) -> FabricConfig {
    let mut config = config(GUEST, LOCAL, donors);
    config.redundancy = Redundancy::Stripes(layout.parse().expect("possible"));
    config.checksum = true;
    config
}

fn donors(count: usize) -> (Vec<Option<Donor>>, Vec<SocketAddr>) {
    let donors: Vec<_> = (0..count).map(|_| donor(GUEST)).collect();
    let addresses = donors.iter().map(Donor::address).collect();
    (donors.into_iter().map(Some).collect(), addresses)
}

/// Ends donors at the same time.
fn kill(donors: &mut [Option<Donor>], victims: &[usize]) {
    let killed: Vec<_> = victims.iter().map(|&at| donors[at].take()).collect();
    std::thread::scope(|scope| {
        for donor in killed {
            assert!(donor.is_some(), "it is killed once");
            scope.spawn(|| drop(donor));
        }
    });
}

fn assert_no_pause(running: &Running, seed: u64) {
    let events = events(running);
    let paused = |event: &FabricEvent| matches!(event, FabricEvent::Link(_));
    assert!(!events.iter().any(paused), "seed {seed}: {events:?}");
}

/// Kills as many random donors at once as may be lost, while threads increment words.
fn kill_some(layout: &str, transport: TransportKind, seed: u64, victims: usize) {
    let stripes: memory_fabric::fabric::Layout = layout.parse().expect("possible");
    let (mut donors, addresses) = donors(stripes.pieces());
    let mut config = striped(layout, &addresses);
    config.transport = transport;
    let running = start(&config);
    let mut random = Random(seed);
    let first = random.below(donors.len());
    let second = (first + 1 + random.below(donors.len() - 1)) % donors.len();
    let moment = 10_000 + random.next() % 80_000;
    let mut is_done = victims == 0;
    increment(&running, seed, 120_000, |done| {
        if done >= moment && !is_done {
            kill(&mut donors, &[first, second][..victims]);
            is_done = true;
        }
        is_done
    });
    assert_no_pause(&running, seed);
    let view = running.fabric.view();
    let replicas = view.replicas().expect("redundant");
    assert_eq!(replicas.layout, Some(stripes));
    assert_eq!(
        (replicas.losses, replicas.out.len()),
        (victims as u64, victims)
    );
    let degraded = if victims > 0 { replicas.bytes } else { 0 };
    assert_eq!(replicas.degraded_bytes, degraded);
    running.fabric.shutdown();
}

#[test]
fn no_update_is_lost_when_two_of_six_donors_are_killed_at_once_at_any_moment() {
    for seed in 1..=4 {
        kill_some("4+2", TransportKind::Tcp, seed, 2);
    }
    kill_some("4+2", TransportKind::Tcp, 7, 1);
    kill_some("4+2", TransportKind::Tcp, 8, 0);
}

#[test]
fn nor_with_other_numbers_of_pieces_and_over_udp() {
    kill_some("2+1", TransportKind::Tcp, 11, 1);
    kill_some("2+2", TransportKind::Tcp, 12, 2);
    kill_some("8+2", TransportKind::Tcp, 13, 2);
    kill_some("4+2", TransportKind::Udp, 14, 2);
}

#[test]
fn donors_hold_half_as_much_more_as_there_is_and_are_read_as_little_as_possible() {
    let (_donors, addresses) = donors(6);
    let running = start(&striped("4+2", &addresses));
    let words = Words::of(&running.fabric);
    fill(words, 3);
    verify(words, 3);
    let placement = running.fabric.view().placement();
    let replicas = running.fabric.view().replicas().expect("redundant");
    let sum = |of: fn(&memory_fabric::fabric::DonorPlacement) -> u64| {
        placement.donors.iter().map(of).sum::<u64>()
    };
    assert_eq!(sum(|donor| donor.home_bytes), replicas.bytes);
    assert_eq!(sum(|donor| donor.copy_bytes), replicas.bytes / 2);
    let nodes = running.fabric.shutdown();
    let (mut written, mut fetched) = (0, 0);
    for node in &nodes[1..] {
        let own = node.own_count.expect("the donor reported its counters");
        assert_eq!(own.pages_written, node.pages_written_back);
        assert_eq!(own.pages_read, node.pages_fetched);
        assert_eq!(node.pages_written_back, nodes[1].pages_written_back);
        written += own.pages_written;
        fetched += own.pages_read;
    }
    assert!(written > 6 * 8_000, "{nodes:?}");
    // All are read alike: which pieces are data differs from block to block.
    let most = nodes[1..].iter().map(|node| node.pages_fetched).max();
    assert!(most.expect("six") < fetched / 3, "{nodes:?}");
}

#[test]
fn pieces_of_killed_donors_are_made_again_on_others_and_more_may_be_killed() {
    for seed in 1..=2 {
        let (mut donors, addresses) = donors(8);
        let mut config = striped("4+2", &addresses);
        config.grace = Duration::from_millis(200);
        let running = start(&config);
        let view = running.fabric.view().clone();
        let mut random = Random(seed);
        let mut order: Vec<usize> = (0..8).collect();
        for at in 0..4 {
            order.swap(at, at + random.below(8 - at));
        }
        let mut rounds = 0;
        let moment = 20_000 + random.next() % 40_000;
        increment(&running, seed, 120_000, |done| {
            let replicas = view.replicas().expect("redundant");
            let is_whole = replicas.degraded_bytes == 0 && replicas.losses == 2;
            if (rounds == 0 && done > moment) || (rounds == 1 && is_whole) {
                kill(&mut donors, &order[rounds * 2..][..2]);
                rounds += 1;
            }
            rounds == 2
        });
        assert_no_pause(&running, seed);
        let replicas = view.replicas().expect("redundant");
        assert!(
            replicas.repaired_bytes > 0 && replicas.losses == 4,
            "{replicas:?}"
        );
        running.fabric.shutdown();
    }
}

/// Links are cut and restored in turn, each time only when all pieces are valid again.
#[test]
fn a_donor_that_returns_is_not_read_before_it_has_what_it_missed() {
    let (_donors, addresses) = donors(3);
    let proxies: Vec<_> = addresses
        .iter()
        .map(|&address| Proxy::new(address, Mischief::None, 0))
        .collect();
    let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.address).collect();
    let running = start(&striped("2+1", &addresses));
    let view = running.fabric.view().clone();
    let mut cuts = 0_usize;
    let mut cut_at: Option<u64> = None;
    increment(&running, 7, 100_000, |done| {
        let replicas = view.replicas().expect("redundant");
        match cut_at {
            None if replicas.degraded_bytes == 0 && done > 20_000 && cuts < 3 => {
                proxies[cuts].cut(true);
                cut_at = Some(done);
            }
            Some(before) if !replicas.out.is_empty() && done > before + 20_000 => {
                proxies[cuts].cut(false);
                cut_at = None;
                cuts += 1;
                let deadline = Instant::now() + PATIENCE;
                while view.replicas().expect("redundant").degraded_bytes > 0 {
                    assert!(Instant::now() < deadline, "the pieces are not restored");
                    std::thread::yield_now();
                }
            }
            _ => {}
        }
        cuts == 3
    });
    assert_no_pause(&running, 7);
    running.fabric.shutdown();
}

#[test]
fn the_loss_of_more_donors_than_there_is_parity_is_a_loss_that_is_named() {
    let (mut donors, addresses) = donors(3);
    let mut config = striped("2+1", &addresses);
    config.grace = Duration::from_millis(300);
    let running = start(&config);
    fill(Words::of(&running.fabric), 5);
    kill(&mut donors, &[0]);
    let next = || running.events.recv_timeout(PATIENCE).expect("an event");
    let event = next();
    assert!(
        matches!(&event, FabricEvent::Degraded { node, .. } if node.0 == 1),
        "{event:?}"
    );
    verify(Words::of(&running.fabric), 5);
    kill(&mut donors, &[1]);
    let event = next();
    assert!(
        matches!(&event, FabricEvent::Link(LinkEvent::Down { node, .. }) if node.0 == 2),
        "{event:?}"
    );
    let event = next();
    assert!(
        matches!(&event, FabricEvent::Link(LinkEvent::Lost { node, .. }) if node.0 == 2),
        "{event:?}"
    );
    running.fabric.shutdown();
}

#[test]
fn discarded_pages_are_zero_and_their_neighbours_survive_a_loss() {
    let (mut donors, addresses) = donors(6);
    let running = start(&striped("4+2", &addresses));
    let words = Words::of(&running.fabric);
    fill(words, 11);
    // Neither the first nor the last page of what is dropped begins a page of a donor.
    let (first, end) = (1_023, words.pages() / 2 + 1);
    let discarder = running.fabric.discarder();
    discarder
        .discard(&[range(first, end - first)])
        .expect("discarded");
    kill(&mut donors, &[1, 4]);
    for page in 0..words.pages() {
        match page {
            _ if (first..end).contains(&page) => assert_all(words, page..page + 1, 0),
            _ => verify_page(words, 11, page),
        }
    }
    running.fabric.shutdown();
}

#[test]
fn what_donors_cannot_hold_in_stripes_is_refused_with_numbers() {
    let (_donors, addresses) = donors(5);
    let text = refusal(&striped("4+2", &addresses));
    assert!(
        text.contains("5 donor(s)") && text.contains("at least 6"),
        "{text}"
    );
    let small: Vec<_> = (0..3).map(|_| donor(8 * MIB)).collect();
    let addresses: Vec<_> = small.iter().map(Donor::address).collect();
    let text = refusal(&striped("2+1", &addresses));
    assert!(
        text.contains("stripes of 2+1") && text.contains("16 MiB") && text.contains("by 16 MiB"),
        "{text}"
    );
    let mut over_rdma = striped("2+1", &addresses);
    over_rdma.transport = TransportKind::Rdma;
    assert!(refusal(&over_rdma).contains("another transport"));
}
