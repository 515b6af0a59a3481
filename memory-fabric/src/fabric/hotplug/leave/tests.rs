//! A donor whose removal cannot start keeps its lease, and leaves later.

use super::*;
use crate::donor::server::Donor;
use crate::fabric::{DonorAddress, Fabric, FabricConfig, Hotplug, HotplugError};
use crate::homes::{BLOCK_BYTES, BLOCK_PAGES, JOINERS_MAX};
use crate::page::{PageIndex, PageRange};
use crate::support::{MIB, config, donor, start, wait_until};

const GUEST: u64 = 16 * MIB;

fn growing() -> FabricConfig {
    FabricConfig {
        hotplug: Some(PageRange::new(
            PageIndex::new(64 * BLOCK_PAGES),
            32 * BLOCK_PAGES,
        )),
        ..config(GUEST, GUEST, &[])
    }
}

fn at(donor: &Donor) -> Option<DonorAddress> {
    Some(DonorAddress {
        name: None,
        zone: None,
        address: donor.address(),
        fingerprint: None,
        bytes: None,
    })
}

fn hotplug(fabric: &Fabric) -> Hotplug {
    fabric.hotplug().expect("it was asked for")
}

/// The kernel's error when there are too many threads.
fn no_thread(_: Builder, _: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
    Err(io::ErrorKind::WouldBlock.into())
}

#[test]
fn a_donor_for_which_there_is_no_thread_keeps_place_and_lease_and_leaves_later() {
    let joins = donor(64 * MIB);
    let running = start(&growing());
    let hotplug = hotplug(&running.fabric);
    let inner = &hotplug.0;
    let place = inner.shared.nodes.fixed();
    hotplug
        .request(4 * BLOCK_BYTES, at(&joins))
        .expect("it joins");
    inner.disconnect_by(place, no_thread);
    assert_eq!(joins.pool().lent_bytes(), 4 * BLOCK_BYTES);
    {
        let state = inner.lock();
        assert!(state.joiners[place].taken && state.joiners[place].links.is_some());
        assert!(state.leaving.is_empty());
    }
    // It still lends.
    hotplug.plug(0..3).expect("memory");
    assert_eq!(hotplug.homes().added_blocks_at(inner.node_of(place)), 3);
    inner.disconnect_by(place, |_, _| panic!("something of it is plugged"));
    hotplug.request(0, None).expect("nothing is wanted");
    assert_eq!(joins.pool().leases(), 1);
    hotplug.unplug(0..3).expect("unplugged");
    wait_until("it has its memory back", || joins.pool().leases() == 0);
    wait_until("its place is free", || !inner.lock().joiners[place].taken);
    hotplug
        .request(BLOCK_BYTES, at(&joins))
        .expect("it joins again");
    assert_eq!(running.fabric.nodes().len(), place + 2, "at its place");
}

#[test]
fn a_lost_donor_for_which_there_was_no_thread_leaves_at_the_next_request() {
    let running = start(&FabricConfig {
        grace: std::time::Duration::from_millis(50),
        ..growing()
    });
    let hotplug = hotplug(&running.fabric);
    let inner = &hotplug.0;
    let place = inner.shared.nodes.fixed();
    let joins = donor(64 * MIB);
    hotplug
        .request(4 * BLOCK_BYTES, at(&joins))
        .expect("it joins");
    // As if it were lost while no thread can be started.
    inner.lock().joiners[place].lost = true;
    inner.lock().pools.set_usable(inner.node_of(place), false);
    inner.disconnect_by(place, no_thread);
    assert!(inner.lock().joiners[place].taken);
    // The same amount, which it alone lends: so it is not idle.
    let nobody = donor(MIB);
    let refused = hotplug.request(4 * BLOCK_BYTES, at(&nobody));
    assert!(
        matches!(refused, Err(HotplugError::Donor(_))),
        "{refused:?}"
    );
    wait_until("it has left", || !inner.lock().joiners[place].taken);
    wait_until("its lease has ended", || joins.pool().leases() == 0);
}

#[test]
fn when_all_places_are_taken_by_donors_that_lacked_a_thread_the_next_request_finds_one() {
    let running = start(&growing());
    let hotplug = hotplug(&running.fabric);
    let inner = &hotplug.0;
    let donors: Vec<_> = (0..JOINERS_MAX).map(|_| donor(4 * MIB)).collect();
    for (count, donor) in (1..).zip(&donors) {
        hotplug
            .request(count * BLOCK_BYTES, at(donor))
            .expect("it joins");
    }
    // Less is requested, and no thread can be started for the removal.
    inner.lock().pools.request(0);
    for place in inner.shared.nodes.fixed()..inner.shared.nodes.links() {
        inner.disconnect_by(place, no_thread);
    }
    let another = donor(64 * MIB);
    let blocks = JOINERS_MAX as u64 + 1;
    let refused = hotplug.request(blocks * BLOCK_BYTES, at(&another));
    assert!(
        matches!(refused, Err(HotplugError::TooManyDonors(JOINERS_MAX))),
        "{refused:?}"
    );
    wait_until("they have left", || {
        donors.iter().all(|donor| donor.pool().leases() == 0)
    });
    wait_until("there is a place", || {
        hotplug.request(blocks * BLOCK_BYTES, at(&another)).is_ok()
    });
}

#[test]
fn a_donor_that_is_lost_while_a_block_arrives_there_is_reported_after_all() {
    let joins = donor(64 * MIB);
    let running = start(&growing());
    let hotplug = hotplug(&running.fabric);
    let inner = &hotplug.0;
    let place = inner.shared.nodes.fixed();
    hotplug
        .request(4 * BLOCK_BYTES, at(&joins))
        .expect("it joins");
    let node = inner.node_of(place);
    let reason = "killed".to_owned();
    inner.lock().choosing = true;
    let observer = inner.observer_of(place);
    observer(FabricEvent::Link(LinkEvent::Lost { node, reason }));
    assert!(running.events.try_recv().is_err(), "nothing of it is used");
    let home = crate::homes::Home { node, slot: 0 };
    inner.shared.homes.assign(inner.first_block(), home);
    inner.lock().choosing = false;
    inner.disconnect(place);
    let event = running.events.try_recv();
    let is_loss = matches!(&event, Ok(FabricEvent::Link(LinkEvent::Lost { reason, .. }))
        if reason == "killed");
    assert!(is_loss, "{event:?}");
    inner.disconnect(place);
    assert!(running.events.try_recv().is_err(), "it is reported once");
}
