//! Sealed pages in pieces, some of them at hostile donors: no wrong byte is installed, these donors go
//! out of use, and the guest continues as long as enough pieces are right.

use super::drain_replicas::joins;
use super::sealed::page;
use fabric_test_support::hostile::{Forgery, Hostile, Slab};
use fabric_test_support::*;
use memory_fabric::JOINERS_MAX;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{
    Fabric, FabricConfig, FabricEvent, FabricObserver, Redundancy, Sealing,
};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;
/// Forged answers of each kind.
const TRIES: u64 = 10_000;

fn sealed(layout: &str, donors: &[SocketAddr]) -> FabricConfig {
    let mut config = config(GUEST, LOCAL, donors);
    config.redundancy = Redundancy::Stripes(layout.parse().expect("possible"));
    config.seal = Sealing::On;
    config
}

/// Donors, the first of which are behind hostile ones.
fn donors(count: usize, hostile: usize) -> (Vec<Donor>, Vec<Hostile>, Vec<SocketAddr>) {
    let donors: Vec<_> = (0..count).map(|_| donor(GUEST)).collect();
    let proxies = donors.iter().take(hostile);
    let proxies: Vec<_> = proxies
        .map(|donor| Hostile::new(donor.address(), Slab::new()))
        .collect();
    let mut addresses: Vec<_> = donors.iter().map(Donor::address).collect();
    for (address, proxy) in addresses.iter_mut().zip(&proxies) {
        *address = proxy.address;
    }
    (donors, proxies, addresses)
}

#[test]
fn wrong_pieces_that_are_sent_once_end_no_vm_and_put_no_donor_out() {
    let forgeries = [
        Forgery::FlippedBit,
        Forgery::OtherPage,
        Forgery::OldVersion,
        Forgery::Torn,
    ];
    for (number, forgery) in forgeries.into_iter().enumerate() {
        let (_donors, hostile, addresses) = donors(6, 1);
        let mut config = sealed("4+2", &addresses);
        config.prefetch = number % 2 == 0;
        let running = start(&config);
        let words = Words::of(&running.fabric);
        fill(words, 1);
        fill(words, 2);
        hostile[0].forge(forgery);
        wait_until("enough pieces are forged", || {
            verify(words, 2);
            hostile[0].forgeries() >= TRIES / 4
        });
        hostile[0].forge(Forgery::None);
        verify(words, 2);
        let rejected = running.fabric.stats().sealing.rejected.get();
        println!(
            "{forgery:?}: {} forged, {rejected} rejected",
            hostile[0].forgeries()
        );
        assert!(rejected > TRIES / 8, "{rejected}");
        let events: Vec<_> = running.events.try_iter().collect();
        assert!(events.is_empty(), "{events:?}");
        running.fabric.shutdown();
    }
}

#[test]
fn hostile_donors_go_out_one_after_the_other_and_the_vm_ends_with_one_too_many() {
    in_own_process(
        "sealed_stripes::hostile_donors_go_out_one_after_the_other_and_the_vm_ends_with_one_too_many",
        || {
            let (_donors, hostile, addresses) = donors(6, 3);
            let (sender, events) = channel();
            let sender = Mutex::new(sender);
            let observer: FabricObserver = Arc::new(move |event| {
                let _ = sender.lock().unwrap().send(event);
            });
            let fabric = Fabric::start(&sealed("4+2", &addresses), &observer).expect("it starts");
            let words = Words::of(&fabric);
            fill(words, 1);
            for (number, one) in hostile.iter().enumerate().take(2) {
                one.forge_all();
                one.forge(Forgery::FlippedBit);
                verify(words, 1);
                let event = events.recv_timeout(PATIENCE).expect("an event");
                let FabricEvent::Degraded { node, reason } = event else {
                    panic!("unexpected {event:?}");
                };
                assert_eq!(usize::from(node.0), number + 1);
                assert!(reason.starts_with("it sent 3 pieces of pages"), "{reason}");
            }
            fill(words, 2);
            verify(words, 2);
            let replicas = fabric.view().replicas().expect("striped");
            assert_eq!((replicas.losses, replicas.out.len()), (2, 2));
            assert!((6..20).contains(&replicas.wrong_pieces), "{replicas:?}");
            hostile[2].forge_all();
            hostile[2].forge(Forgery::FlippedBit);
            // What opens no more is given to nobody.
            let device = std::thread::spawn(move || {
                let file = tempfile::tempfile()?;
                (0..words.pages())
                    .try_for_each(|number| file.write_at(page(words, number), 0).map(|_| ()))
            });
            let event = events.recv_timeout(PATIENCE).expect("an event");
            let FabricEvent::Failed(reason) = event else {
                panic!("unexpected {event:?}");
            };
            assert!(reason.contains("fewer than 4 of its pieces"), "{reason}");
            assert!(!device.is_finished());
            fabric.shutdown();
            let error = device.join().expect("no panic").expect_err("no page");
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");
        },
    );
}

#[test]
fn a_donor_that_sent_wrong_pieces_is_remembered_when_another_one_has_its_place() {
    let (honest, hostile, _) = donors(4, 1);
    let addresses: Vec<_> = honest[1..].iter().map(Donor::address).collect();
    let running = start(&sealed("2+1", &addresses));
    let drains = running.fabric.drains().expect("donors");
    let view = running.fabric.view();
    let words = Words::of(&running.fabric);
    fill(words, 1);
    let joining = joins(hostile[0].address, None);
    let node = view.nodes()[1].id;
    drains.drain(node, &[joining]).expect("it has room");
    wait_until("the first donor has left", || {
        view.drain().is_some_and(|drain| drain.is_over())
    });
    assert!(drains.distrusted().is_empty());
    hostile[0].forge_all();
    hostile[0].forge(Forgery::FlippedBit);
    wait_until("the donor is out", || {
        verify(words, 1);
        view.replicas().is_some_and(|now| !now.lost.is_empty())
    });
    let distrusted = BTreeSet::from([hostile[0].address]);
    assert_eq!(drains.distrusted(), distrusted);
    assert!(drains.spare_bytes_min() >= 2 * MIB);
    let spares: Vec<_> = (0..JOINERS_MAX).map(|_| donor(GUEST)).collect();
    for spare in &spares {
        let spare = joins(spare.address(), None);
        drains.join_for_copies(&spare).expect("it lends");
        wait_until("all pieces have places", || {
            view.replicas().is_some_and(|now| now.degraded_bytes == 0)
        });
    }
    assert_eq!(spares.last().map(|spare| spare.pool().leases()), Some(1));
    assert_eq!(drains.distrusted(), distrusted, "its place has another one");
    verify(words, 1);
    running.fabric.shutdown();
}
