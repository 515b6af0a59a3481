//! Tests of network cards on a socket pair that preserves packets, as a tap does.

use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{EventManager, SubscriberOps};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::tap::tests::Made;
use super::tap_faults::TapFault;
use super::*;
use crate::virtio::rate::tests::{TestClock, rate};
use crate::virtio::server_threads::LIMIT;
use crate::virtio::test_driver::{
    Driver, PART_BYTES, RING_SIZE, SECOND_PART, STARTED, VERSION_1, ring,
};
use crate::virtio::{QueueServer, RateLimiter, RateLimits};

const MERGEABLE: u64 = 1 << 15;
const DATA: u64 = 0x10_0000;

struct Bed {
    driver: Driver<Net>,
    /// The host's network.
    host: UnixDatagram,
}

impl Bed {
    fn new(features: u64) -> Self {
        let (card, host) = Net::on_sockets();
        let driver = Driver::of(card);
        driver.start(VERSION_1 | features);
        assert_eq!((driver.get(8), driver.get(0x70)), (1, STARTED));
        Self { driver, host }
    }

    /// A packet of the host with `bytes` bytes, including its header.
    fn send(&self, bytes: usize) -> Vec<u8> {
        let packet: Vec<u8> = (0..=250).cycle().take(bytes).collect();
        self.host.send(&packet).unwrap();
        packet
    }

    /// The next packet that the guest has sent.
    fn sent(&self) -> Option<Vec<u8>> {
        let mut packet = vec![0; 70_000];
        let bytes = self.host.recv(&mut packet).ok()?;
        packet.truncate(bytes);
        Some(packet)
    }

    fn get(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        let memory = &self.driver.memory;
        memory.read_slice(&mut data, GuestAddress(address)).unwrap();
        data
    }

    /// The chains returned by the queue to the guest: first descriptor and length.
    fn received(&self) -> Vec<(u32, u32)> {
        let read = |at: u64| self.driver.memory.read_obj(GuestAddress(at)).unwrap();
        let entries = ring(0)[2] + 4;
        let place = |at: u16| entries + u64::from(at) * 8;
        (0..self.driver.used(0))
            .map(|at| (read(place(at)), read(place(at) + 4)))
            .collect()
    }
}

/// The guest's view of a packet that spans this many chains.
fn with_count(mut packet: Vec<u8>, chains: u16) -> Vec<u8> {
    packet[10..12].copy_from_slice(&chains.to_le_bytes());
    packet
}

#[test]
fn the_configuration_has_the_address_and_the_features_what_is_left_to_others() {
    let bed = Bed::new(0);
    let driver = &bed.driver;
    assert_eq!(
        (driver.get(0x100), driver.get(0x104)),
        (0x1200_0002, 0x5634)
    );
    let wanted = (1 << 15) | (1 << 12) | (1 << 11) | (1 << 8) | (1 << 7) | (1 << 5) | 3;
    assert_eq!(driver.offered() & 0xff_ffff, wanted);
}

#[test]
fn offloads_of_the_tap_follow_what_the_driver_accepts() {
    let all = OFFLOADS | VERSION_1;
    assert_eq!(offloads(all), 1 | 2 | 4);
    assert_eq!(offloads(all & !(1 << 7)), 1 | 4);
    assert_eq!(offloads(1 << 1), 1);
    // Packets that are segmented late need their checksums late.
    assert_eq!(offloads((1 << 7) | (1 << 8)), 0);
    assert_eq!(offloads(VERSION_1), 0);
}

#[test]
fn what_the_guest_sends_goes_out_as_one_packet() {
    let bed = Bed::new(0);
    let packet: Vec<u8> = (0..100).collect();
    let memory = &bed.driver.memory;
    memory.write_slice(&packet, GuestAddress(DATA)).unwrap();
    bed.driver.offer(
        1,
        0,
        &[
            (DATA, 12, false),
            (DATA + 12, 0, false),
            (DATA + 12, 88, false),
        ],
    );
    bed.driver.serve(1);
    assert_eq!(bed.sent(), Some(packet));
    assert_eq!(bed.driver.last_used(1), (0, 0));
    assert_eq!(bed.driver.get(0x60), 1, "the driver was notified");
}

#[test]
fn what_can_be_no_packet_is_not_sent_and_comes_back() {
    let bed = Bed::new(0);
    let bad: [&[(u64, u32, bool)]; 7] = [
        &[(DATA, 25, false)],
        &[(DATA, 12, false)],
        &[(DATA, 100, true)],
        &[(DATA, 70_000, false)],
        &[(PART_BYTES - 50, 100, false)],
        &[(u64::MAX - 50, 40, false)],
        &[(DATA, 12, false), (PART_BYTES, 100, false)],
    ];
    for chain in bad {
        bed.driver.offer(1, 0, chain);
        bed.driver.serve(1);
        assert_eq!(bed.driver.last_used(1), (0, 0));
        assert_eq!(bed.sent(), None, "{chain:x?}");
    }
    assert_eq!(usize::from(bed.driver.used(1)), bad.len());
    assert_eq!(bed.driver.get(0x70), STARTED, "the device still runs");
}

#[test]
fn a_packet_of_the_host_fills_one_chain_or_waits_for_one() {
    let bed = Bed::new(0);
    let packet = bed.send(100);
    bed.driver.serve(0);
    assert_eq!(bed.driver.used(0), 0);
    bed.driver
        .offer(0, 3, &[(DATA, 12, true), (DATA + 12, 1514, true)]);
    bed.driver.serve(0);
    assert_eq!(bed.received(), [(3, 100)]);
    assert_eq!(bed.get(DATA, 100), with_count(packet, 1));
    // Without a packet the chain stays with the device.
    bed.driver.offer(0, 0, &[(DATA, 1526, true)]);
    bed.driver.serve(0);
    assert_eq!(bed.driver.used(0), 1);
    let packet = bed.send(60);
    bed.driver.serve(0);
    assert_eq!(bed.received()[1], (0, 60));
    assert_eq!(bed.get(DATA, 60), with_count(packet, 1));
}

#[test]
fn a_packet_that_no_chain_has_room_for_is_dropped_and_the_next_one_comes() {
    let bed = Bed::new(0);
    bed.send(200);
    let packet = bed.send(50);
    bed.driver.offer(0, 0, &[(DATA, 64, true)]);
    bed.driver.serve(0);
    assert_eq!(bed.received(), [(0, 50)]);
    assert_eq!(bed.get(DATA, 50), with_count(packet, 1));
}

#[test]
fn a_large_packet_goes_over_several_chains_that_come_back_at_once() {
    let bed = Bed::new(MERGEABLE);
    let packet = bed.send(4000);
    for chain in 0..2_u16 {
        let at = DATA + u64::from(chain) * 0x1000;
        bed.driver.offer(0, chain, &[(at, 1526, true)]);
        bed.driver.serve(0);
        assert_eq!(bed.driver.used(0), 0, "not all of it has room");
    }
    bed.driver.offer(0, 2, &[(DATA + 0x2000, 1526, true)]);
    bed.driver.serve(0);
    assert_eq!(bed.received(), [(0, 1526), (1, 1526), (2, 948)]);
    let mut got = bed.get(DATA, 1526);
    got.extend(bed.get(DATA + 0x1000, 1526));
    got.extend(bed.get(DATA + 0x2000, 948));
    assert_eq!(got, with_count(packet, 3));
}

#[test]
fn a_packet_goes_over_so_many_chains_at_the_most() {
    let bed = Bed::new(MERGEABLE);
    bed.send(1000);
    for chain in 0..RING_SIZE {
        bed.driver
            .offer(0, chain, &[(DATA + u64::from(chain) * 16, 10, true)]);
    }
    bed.driver.serve(0);
    assert_eq!(bed.driver.used(0), 0, "dropped");
    let packet = bed.send(20);
    bed.driver.serve(0);
    assert_eq!(bed.received(), [(0, 10), (1, 10)]);
    assert_eq!(bed.get(DATA, 10), with_count(packet, 2)[..10]);
}

#[test]
fn chains_outside_memory_have_no_room() {
    let bed = Bed::new(MERGEABLE);
    let packet = bed.send(100);
    bed.driver.offer(0, 0, &[(PART_BYTES - 10, 200, true)]);
    bed.driver.offer(0, 1, &[(DATA, 200, false)]);
    bed.driver.offer(0, 2, &[(DATA, 200, true)]);
    bed.driver.serve(0);
    assert_eq!(bed.received(), [(0, 0), (1, 0), (2, 100)]);
    assert_eq!(bed.get(DATA, 100), with_count(packet, 3));
}

#[test]
fn a_reset_forgets_the_packet_that_waits() {
    let bed = Bed::new(0);
    bed.send(100);
    bed.driver.serve(0);
    bed.driver.set(0x70, 0);
    bed.driver.start(VERSION_1);
    let packet = bed.send(40);
    bed.driver.offer(0, 0, &[(DATA, 200, true)]);
    bed.driver.serve(0);
    assert_eq!(bed.get(DATA, 40), with_count(packet, 1));
}

#[test]
fn a_host_that_takes_no_more_holds_packets_back_and_loses_none() {
    let bed = Bed::new(0);
    let packet: Vec<u8> = (0..200).collect();
    let memory = &bed.driver.memory;
    memory.write_slice(&packet, GuestAddress(DATA)).unwrap();
    // More than the sockets hold.
    let mut sent = 0_u16;
    loop {
        assert!(sent < 10_000, "the sockets hold everything");
        bed.driver.offer(1, 0, &[(DATA, 200, false)]);
        bed.driver.serve(1);
        if bed.driver.used(1) == sent {
            break;
        }
        sent += 1;
    }
    let mut seen = 0;
    while bed.sent().is_some() {
        seen += 1;
    }
    assert_eq!(seen, sent);
    bed.driver.serve(1);
    assert_eq!(bed.driver.used(1), sent + 1);
    assert_eq!(bed.sent(), Some(packet), "the one that was held back");
}

#[test]
fn packets_of_the_host_wake_the_loop_once() {
    let bed = Bed::new(0);
    let mut manager = EventManager::<QueueServer>::new().unwrap();
    manager.add_subscriber(QueueServer::new(Arc::clone(&bed.driver.transport)));
    while manager.run_with_timeout(0).unwrap() > 0 {}
    // Without a chain the packet stays in the socket, and the loop does not spin.
    let packet = bed.send(100);
    assert!(manager.run_with_timeout(1000).unwrap() > 0);
    assert_eq!(manager.run_with_timeout(0).unwrap(), 0);
    bed.driver.offer(0, 0, &[(DATA, 200, true)]);
    bed.driver.notify(0);
    assert!(manager.run_with_timeout(1000).unwrap() > 0);
    assert_eq!(bed.get(DATA, 100), with_count(packet, 1));
    bed.driver.offer(0, 0, &[(DATA, 200, true)]);
    let packet = bed.send(70);
    while bed.driver.used(0) < 2 {
        assert!(manager.run_with_timeout(1000).unwrap() > 0);
    }
    assert_eq!(bed.get(DATA, 70), with_count(packet, 1));
}

/// A card that may have this many packets at once in each direction, and as many each second.
fn limited(packets: u64) -> (Bed, TestClock, Arc<RateLimiter>) {
    let clock = TestClock::new();
    let limits = RateLimits {
        operations: rate(packets),
        bytes: None,
    };
    let limiter = Arc::new(clock.limiter(limits, 2));
    let (card, host) = Net::on_sockets();
    let driver = Driver::of(card.limited(Arc::clone(&limiter)));
    driver.start(VERSION_1);
    (Bed { driver, host }, clock, limiter)
}

#[test]
fn packets_beyond_the_limit_wait_in_their_direction_and_lose_no_order() {
    let (bed, clock, limiter) = limited(2);
    let memory = &bed.driver.memory;
    for number in 0..4_u16 {
        let place = DATA + u64::from(number) * 256;
        let byte = u8::try_from(number).unwrap();
        memory
            .write_slice(&[byte; 100], GuestAddress(place))
            .unwrap();
        bed.driver.offer(1, number, &[(place, 100, false)]);
    }
    bed.driver.serve(1);
    assert_eq!((bed.driver.used(1), limiter.throttled()), (2, 1));
    assert_eq!(bed.sent(), Some(vec![0; 100]));
    assert_eq!(bed.sent(), Some(vec![1; 100]));
    assert_eq!(bed.sent(), None);

    // The other direction has a limit of its own.
    let packets: Vec<_> = (60..63).map(|bytes| bed.send(bytes)).collect();
    for number in 0..3_u16 {
        let place = DATA + 0x1_0000 + u64::from(number) * 256;
        bed.driver.offer(0, number, &[(place, 200, true)]);
    }
    bed.driver.serve(0);
    assert_eq!((bed.driver.used(0), limiter.throttled()), (2, 2));

    clock.advance(Duration::from_millis(501));
    for queue in 0..2 {
        bed.driver.serve(queue);
    }
    assert_eq!((bed.driver.used(0), bed.driver.used(1)), (3, 3));
    assert_eq!(bed.sent(), Some(vec![2; 100]));
    for (number, packet) in (0..).zip(packets) {
        let place = DATA + 0x1_0000 + number * 256;
        assert_eq!(bed.get(place, packet.len()), with_count(packet, 1));
    }
    clock.advance(Duration::from_millis(501));
    bed.driver.serve(1);
    assert_eq!(bed.sent(), Some(vec![3; 100]));
}

#[test]
fn the_timer_of_a_throttled_card_wakes_the_loop_and_no_loop_spins() {
    let limits = RateLimits {
        operations: rate(20),
        bytes: None,
    };
    let limiter = Arc::new(RateLimiter::new("net1", limits, 2).unwrap());
    let (card, host) = Net::on_sockets();
    let driver = Driver::of(card.limited(Arc::clone(&limiter)));
    driver.start(VERSION_1);
    let bed = Bed { driver, host };
    let mut manager = EventManager::<QueueServer>::new().unwrap();
    manager.add_subscriber(QueueServer::new(Arc::clone(&bed.driver.transport)));
    for number in 0..40 {
        bed.driver.offer(1, number, &[(DATA, 100, false)]);
    }
    bed.driver.notify(1);
    let started = Instant::now();
    while bed.driver.used(1) < 40 {
        assert!(started.elapsed() < LIMIT, "{} are sent", bed.driver.used(1));
        manager.run_with_timeout(1000).unwrap();
    }
    // 20 of them at once, and the last of the others after at least 19 more were earned.
    assert!(
        started.elapsed() >= Duration::from_millis(950),
        "{:?}",
        started.elapsed()
    );
    assert!(limiter.throttled() <= 40, "{}", limiter.throttled());
}

#[test]
fn a_tap_that_vanishes_is_reported_and_does_not_keep_the_loop_busy() {
    let Some(made) = Made::new("b") else { return };
    let tap = Tap::open(&made.0).unwrap();
    let driver = Driver::of(Net::new(1, tap, "02:00:00:12:34:56".parse().unwrap()));
    driver.start(VERSION_1);
    let mut manager = EventManager::<QueueServer>::new().unwrap();
    manager.add_subscriber(QueueServer::new(Arc::clone(&driver.transport)));
    while manager.run_with_timeout(0).unwrap() > 0 {}
    let reported = || driver.device.faults.has(TapFault::Gone);
    assert!(!reported());

    // The guest has nothing to send, and may never have.
    drop(made);
    let deadline = Instant::now() + LIMIT;
    while !reported() {
        assert!(Instant::now() < deadline, "nothing is reported");
        manager.run_with_timeout(100).unwrap();
    }
    let turns = (0..100).take_while(|_| manager.run_with_timeout(0).unwrap() > 0);
    assert!(turns.count() < 100, "the loop spins");

    // Chains that the guest sends are returned in any case.
    driver.offer(1, 0, &[(DATA, 100, false)]);
    driver.notify(1);
    while driver.used(1) == 0 {
        assert!(manager.run_with_timeout(1000).unwrap() > 0);
    }
    assert_eq!(driver.get(0x70), STARTED, "the device still runs");
}

proptest! {
    #[test]
    fn no_ring_makes_the_device_panic_or_hang(
        descriptors in proptest::collection::vec(
            (
                prop_oneof![DATA..DATA + 0x1_0000, 0..2 * SECOND_PART, any::<u64>()],
                prop_oneof![0_u32..3000, any::<u32>()],
                0_u32..16,
                prop_oneof![0_u16..16, any::<u16>()],
            ),
            16,
        ),
        heads in proptest::collection::vec(prop_oneof![0_u16..16, any::<u16>()], 0..16),
        queue in 0_u32..2,
        features in prop_oneof![Just(0), Just(MERGEABLE), Just(MERGEABLE | (1 << 29))],
        packets in proptest::collection::vec(0_usize..5000, 0..6),
    ) {
        let bed = Bed::new(features);
        for (at, (address, bytes, flags, next)) in (0..).zip(descriptors) {
            bed.driver.descriptor(queue, at, address, bytes, flags, next);
        }
        for head in &heads {
            bed.driver.make_available(queue, *head);
        }
        for bytes in packets {
            bed.send(bytes);
            bed.driver.serve(0);
            bed.driver.serve(1);
        }
        let status = bed.driver.get(0x70);
        prop_assert!(status == STARTED || status == STARTED | 0x40, "{:#x}", status);
    }

    #[test]
    fn packets_arrive_whole_and_in_order_whatever_the_chains_are(
        sizes in proptest::collection::vec(12_usize..4000, 1..8),
        chains in proptest::collection::vec(100_u32..2000, 40),
    ) {
        let bed = Bed::new(MERGEABLE);
        let places: Vec<u64> = (0..40).map(|at| DATA + at * 0x1000).collect();
        for ((at, place), bytes) in (0_u16..).zip(&places).zip(&chains) {
            bed.driver.offer(0, at, &[(*place, *bytes, true)]);
        }
        let sent: Vec<_> = sizes.iter().map(|size| bed.send(*size)).collect();
        for _ in 0..3 {
            bed.driver.serve(0);
        }
        let received = bed.received();
        let mut next = received.iter();
        for packet in sent {
            let Some((head, written)) = next.next() else { break };
            let place = |head: &u32| places[usize::try_from(*head).unwrap()];
            let count = bed.get(place(head) + 10, 2);
            let count = u16::from_le_bytes([count[0], count[1]]);
            let mut got = bed.get(place(head), usize::try_from(*written).unwrap());
            for _ in 1..count {
                let (head, written) = next.next().expect("all of its chains");
                got.extend(bed.get(place(head), usize::try_from(*written).unwrap()));
            }
            prop_assert_eq!(got, with_count(packet, count));
        }
        prop_assert_eq!(next.count(), 0, "nothing beside the packets");
    }
}
