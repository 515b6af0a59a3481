//! Tests of chains in the hands of several threads.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use virtio_queue::QueueT;

use super::{Ordering, Queue, Ring, Rings};
use crate::lock;
use crate::virtio::server_threads::{LIMIT, ServerThreads, wait_until};
use crate::virtio::test_driver::{Driver, RING_SIZE, STARTED, VERSION_1, ring};
use crate::virtio::{CarriesOut, Chain, VirtioDevice};

/// Where chain `n` has the byte that the device writes.
fn place(head: u16) -> GuestAddress {
    GuestAddress(0x10_0000 + u64::from(head) * 0x1000)
}

/// How long to wait for something that must not happen.
const NOT_YET: Duration = Duration::from_millis(50);

const NEEDS_RESET: u32 = 0x40;

/// A device that reports each chain that it begins, and finishes it on request.
#[derive(Debug)]
struct Held {
    begun: Mutex<Sender<(u16, Sender<Then>)>>,
}

/// The end of a chain in hand.
enum Then {
    Done,
    Panic,
}

impl VirtioDevice for Held {
    fn name(&self) -> &str {
        "held"
    }

    fn device_id(&self) -> u32 {
        2
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[RING_SIZE, RING_SIZE]
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn on_threads(&self) -> Option<&dyn CarriesOut> {
        Some(self)
    }
}

impl CarriesOut for Held {
    fn threads(&self) -> usize {
        3
    }

    fn carry_out(&self, chain: &Chain<'_>, memory: &GuestMemoryMmap) -> u32 {
        let head = chain.head_index();
        let (sender, then) = channel();
        // The receiver is gone when a test has failed.
        let _ = lock(&self.begun).send((head, sender));
        match then.recv_timeout(LIMIT) {
            Ok(Then::Panic) => panic!("as the test wants it"),
            Ok(Then::Done) => {}
            Err(_) => return 0,
        }
        memory.write_obj(7_u8, place(head)).unwrap();
        1
    }
}

struct Bed {
    driver: Driver<Held>,
    begun: Receiver<(u16, Sender<Then>)>,
}

impl Bed {
    fn new() -> Self {
        let (sender, begun) = channel();
        let begun_by = Mutex::new(sender);
        let driver = Driver::of(Held { begun: begun_by });
        driver.start(VERSION_1);
        Self { driver, begun }
    }

    fn offer(&self, queue: u32, head: u16) {
        self.driver.offer(queue, head, &[(place(head).0, 1, true)]);
        self.driver.notify(queue);
    }

    /// The chain that a thread has begun.
    fn begun(&self) -> (u16, Sender<Then>) {
        self.begun.recv_timeout(LIMIT).expect("a chain is begun")
    }

    fn byte(&self, head: u16) -> u8 {
        self.driver.memory.read_obj(place(head)).unwrap()
    }

    fn wait_used(&self, queue: u32, count: u16) {
        wait_until("a chain", || self.driver.used(queue) == count);
    }
}

#[test]
fn chains_are_given_back_in_the_order_in_which_they_are_done() {
    let bed = Bed::new();
    let _threads = ServerThreads::start(&bed.driver.transport, 3);
    for head in [4, 5, 6] {
        bed.offer(0, head);
    }
    let mut in_hand: Vec<_> = (0..3).map(|_| bed.begun()).collect();
    assert_eq!(bed.driver.used(0), 0);
    in_hand.sort_by_key(|(head, _)| *head);
    for (count, at) in [(1, 2), (2, 0), (3, 1)] {
        let (head, then) = &in_hand[at];
        assert_eq!(bed.byte(*head), 0);
        then.send(Then::Done).unwrap();
        bed.wait_used(0, count);
        assert_eq!(bed.driver.last_used(0), (u32::from(*head), 1));
        assert_eq!(bed.byte(*head), 7);
        wait_until("an interrupt", || bed.driver.get(0x60) == 1);
        bed.driver.set(0x64, 1);
    }
    assert_eq!(bed.driver.get(0x70), STARTED);
}

#[test]
fn a_chain_that_waits_does_not_hold_up_those_that_come_later() {
    let bed = Bed::new();
    let _threads = ServerThreads::start(&bed.driver.transport, 2);
    bed.offer(0, 0);
    let (_, waits) = bed.begun();
    for head in 1..50 {
        bed.offer(0, head);
        let (begun, then) = bed.begun();
        assert_eq!(begun, head);
        then.send(Then::Done).unwrap();
        bed.wait_used(0, head);
    }
    waits.send(Then::Done).unwrap();
    bed.wait_used(0, 50);
    assert_eq!(bed.driver.last_used(0), (0, 1));
}

#[test]
fn many_chains_are_all_given_back_once_by_fewer_threads() {
    let bed = Bed::new();
    let _threads = ServerThreads::start(&bed.driver.transport, 3);
    for round in 1..=20 {
        for head in 0..RING_SIZE {
            bed.driver.offer(0, head, &[(place(head).0, 1, true)]);
        }
        bed.driver.notify(0);
        for _ in 0..RING_SIZE {
            bed.begun().1.send(Then::Done).unwrap();
        }
        bed.wait_used(0, RING_SIZE * round);
        let mut heads: Vec<u32> = (0..u64::from(RING_SIZE))
            .map(|at| GuestAddress(ring(0)[2] + 4 + at * 8))
            .map(|place| bed.driver.memory.read_obj(place).unwrap())
            .collect();
        heads.sort_unstable();
        assert_eq!(heads, (0..u32::from(RING_SIZE)).collect::<Vec<_>>());
    }
    assert_eq!(bed.driver.get(0x70), STARTED);
}

#[test]
fn a_reset_waits_for_chains_in_hand_and_takes_none_that_is_left() {
    let bed = Bed::new();
    let _threads = ServerThreads::start(&bed.driver.transport, 2);
    for head in 0..5 {
        bed.offer(0, head);
    }
    let in_hand = [bed.begun(), bed.begun()];
    thread::scope(|scope| {
        let (sender, reset) = channel();
        let (driver, in_hand) = (&bed.driver, &in_hand);
        scope.spawn(move || {
            driver.set(0x70, 0);
            // From here on it belongs to the guest.
            for (head, _) in in_hand {
                let byte: u8 = driver.memory.read_obj(place(*head)).unwrap();
                assert_eq!(byte, 7, "it was done");
            }
            sender.send(()).unwrap();
        });
        for (_, then) in in_hand {
            assert!(reset.recv_timeout(NOT_YET).is_err(), "it did not wait");
            then.send(Then::Done).unwrap();
        }
        reset.recv_timeout(LIMIT).unwrap();
    });
    assert_eq!(bed.driver.used(0), 0, "the rings were the guest's again");
    assert_eq!(bed.driver.get(0x60), 0, "no interrupt was raised");
    assert!(bed.begun.try_recv().is_err(), "another one was taken");
    // It can be used again.
    bed.driver.clear_rings();
    bed.driver.start(VERSION_1);
    bed.offer(0, 9);
    bed.begun().1.send(Then::Done).unwrap();
    bed.wait_used(0, 1);
}

#[test]
fn no_turn_begins_while_a_thread_waits_to_remove_the_rings() {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
    let rings = Rings::new(1);
    rings.start(0, vec![Some(Queue::new(RING_SIZE).unwrap())]);
    // As a thread that does not have the lock yet.
    rings.stopping.fetch_add(1, Ordering::Relaxed);
    let (begun, turns) = channel();
    thread::scope(|scope| {
        let (rings, memory) = (&rings, &memory);
        let turn = move |_: &mut Ring<'_>| {
            begun.send(()).unwrap();
            Ok(())
        };
        let served = scope.spawn(move || rings.serve(0, memory, turn).unwrap());
        let has_begun = turns.recv_timeout(NOT_YET).is_ok();
        rings.stopping.fetch_sub(1, Ordering::Relaxed);
        rings.stop();
        assert!(!has_begun, "a turn came first");
        assert!(served.join().unwrap().is_none());
    });
}

#[test]
fn stopping_a_queue_waits_for_its_chains_and_for_no_others() {
    let bed = Bed::new();
    let _threads = ServerThreads::start(&bed.driver.transport, 2);
    bed.offer(0, 0);
    let (_, first) = bed.begun();
    bed.offer(1, 1);
    let (_, second) = bed.begun();
    let driver = &bed.driver;
    let stop = |queue| {
        driver.set(0x30, queue);
        driver.set(0x44, 0);
        assert_eq!(driver.get(0x44), 0);
    };
    thread::scope(|scope| {
        let (sender, stopped) = channel();
        scope.spawn(move || {
            stop(1);
            sender.send(()).unwrap();
        });
        assert!(stopped.recv_timeout(NOT_YET).is_err(), "it did not wait");
        second.send(Then::Done).unwrap();
        stopped.recv_timeout(LIMIT).unwrap();
    });
    assert_eq!((bed.byte(1), bed.driver.used(1)), (7, 0));
    first.send(Then::Done).unwrap();
    bed.wait_used(0, 1);
}

#[test]
fn a_ring_that_breaks_while_a_chain_is_in_hand_stops_the_device_until_its_reset() {
    let bed = Bed::new();
    let _threads = ServerThreads::start(&bed.driver.transport, 2);
    bed.offer(0, 0);
    let (_, then) = bed.begun();
    // More chains than entries.
    let index = GuestAddress(ring(0)[1] + 2);
    bed.driver
        .memory
        .write_obj(RING_SIZE * 2 + 1, index)
        .unwrap();
    bed.driver.notify(0);
    wait_until("that it stops", || {
        bed.driver.get(0x70) == STARTED | NEEDS_RESET
    });
    thread::scope(|scope| {
        let (sender, reset) = channel();
        let driver = &bed.driver;
        scope.spawn(move || {
            driver.set(0x70, 0);
            sender.send(()).unwrap();
        });
        assert!(reset.recv_timeout(NOT_YET).is_err(), "it did not wait");
        then.send(Then::Done).unwrap();
        reset.recv_timeout(LIMIT).unwrap();
    });
    assert_eq!(bed.driver.used(0), 0, "nothing was given back");
    bed.driver.clear_rings();
    bed.driver.start(VERSION_1);
    bed.offer(0, 3);
    bed.begun().1.send(Then::Done).unwrap();
    bed.wait_used(0, 1);
    assert_eq!(bed.driver.get(0x70), STARTED);
}

#[test]
fn a_thread_that_panics_leaves_no_chain_in_hand() {
    let bed = Bed::new();
    bed.offer(0, 0);
    let transport = Arc::clone(&bed.driver.transport);
    let thread = thread::spawn(move || transport.serve(0));
    bed.begun().1.send(Then::Panic).unwrap();
    assert!(thread.join().is_err());
    // A chain left in hand would make the reset wait forever.
    bed.driver.set(0x70, 0);
    assert_eq!((bed.driver.get(0x70), bed.driver.used(0)), (0, 0));
}
