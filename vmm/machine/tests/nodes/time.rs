//! The counters of two hosts drift apart while a guest has a vCPU on each.
//!
//! A KVM without hardware gives all vCPUs the host's counter, whatever their offset: there the guest
//! only sees that its counters agree, and the comparisons and corrections are checked from outside.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ssi_hv_machine::{HostCounter, MoveError, Outcome, WhileStopped};
use tiny_guests::nodes::{TURNS, time_on_two_nodes};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::support::kvm_is_there;
use super::{LIMIT, Running};

/// How long the guest compares, in units of 2^20 ticks: some 4 s.
const TIME: u32 = 10_000;

/// The drift in millionths. It is far larger than that of real hosts, because a message of the guest
/// takes milliseconds where KVM interprets it.
const DRIFT: i64 = 8000;
/// What the vCPUs' counters may be away from the primary's at the end: 4 s of the drift are 32 ms.
const ERROR_MAX: Duration = Duration::from_millis(10);

/// Watches what the vCPUs of the second node count while they are said to be out of the guest.
#[derive(Debug)]
struct Watch {
    memory: GuestMemoryMmap,
    /// The guest's CPUs from this one on are on the node.
    from: Arc<AtomicUsize>,
    looks: Arc<AtomicU32>,
    /// How often one counted.
    violations: Arc<AtomicU32>,
}

impl Watch {
    fn turns(&self) -> Vec<u32> {
        let turns = TURNS.iter().skip(self.from.load(Ordering::SeqCst));
        let turns = turns.map(|turns| self.memory.read_obj(GuestAddress(*turns)).unwrap());
        turns.collect()
    }
}

impl WhileStopped for Watch {
    fn stopped(&self) {
        let before = self.turns();
        let until = Instant::now() + Duration::from_micros(50);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        let after = self.turns();
        // A CPU may finish the instruction that KVM emulates, when the page that this waits for is
        // there: that counts once. One that is in the guest counts several times.
        let counted = before.iter().zip(&after);
        let counted = counted.map(|(before, after)| after.wrapping_sub(*before));
        let moved = before.len() == after.len() && counted.max() > Some(1);
        self.violations
            .fetch_add(u32::from(moved), Ordering::SeqCst);
        self.looks
            .fetch_add(u32::from(!after.is_empty()), Ordering::SeqCst);
    }
}

/// Runs the guest with a second node, which lends as many CPUs and whose host's counter drifts. Its vCPUs
/// move along `first`, and then along `way` until it ends.
fn drifts(ppm: i64, lent: usize, first: &[(u32, u32)], way: &[(u32, u32)]) {
    if !kvm_is_there() {
        return;
    }
    let begin = Instant::now();
    let from = Arc::new(AtomicUsize::new(TURNS.len()));
    let (looks, violations) = <(Arc<AtomicU32>, Arc<AtomicU32>)>::default();
    let counter = |memory| {
        let watch = Watch {
            memory,
            from: Arc::clone(&from),
            looks: Arc::clone(&looks),
            violations: Arc::clone(&violations),
        };
        HostCounter::drifting(ppm, Some(Arc::new(watch)))
    };
    let code = time_on_two_nodes::code();
    let owners = [0, 1, 1];
    let running = Running::with_counter(counter, &owners[..=lent], code, true, TIME);
    for (cpu, node) in first {
        running.handle.move_vcpu(*cpu, *node).unwrap();
    }
    if way.is_empty() {
        let all_are_there = first.contains(&(0, 1));
        from.store(usize::from(!all_are_there), Ordering::SeqCst);
    }
    let mut moves = 0;
    for (cpu, node) in way.iter().cycle() {
        match running.handle.move_vcpu(*cpu, *node) {
            Ok(()) => moves += 1,
            Err(MoveError::Ended) => break,
            Err(MoveError::Late { .. } | MoveError::Moves { .. }) => {}
            Err(error) => panic!("move {moves}: {error}"),
        }
    }
    let kept = running.kept.clone();
    let (primary, secondary, said) = running.finish(LIMIT);
    let time = kept.0.lock().unwrap().time;
    println!("{ppm} ppm, {moves} moves, {time:?}, {:?}", begin.elapsed());
    assert_eq!(
        said, "k",
        "`t`: time went back, `m`: a message came before it was sent"
    );
    assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
    assert!(time.corrections > 50, "{time:?}");
    // Against the drift, of which a tenth is at least 3 ms.
    let corrected = time.corrected_ns * -ppm.signum();
    assert!(corrected > 3_000_000, "{time:?}");
    assert!(
        time.error_max.is_some_and(|error| error < ERROR_MAX),
        "{time:?}"
    );
    if way.is_empty() {
        let (looks, moved) = (
            looks.load(Ordering::SeqCst),
            violations.load(Ordering::SeqCst),
        );
        assert!(looks > 50, "{looks}");
        assert_eq!(moved, 0, "of {looks}: a vCPU was in the guest");
    }
}

#[test]
fn no_message_from_a_host_whose_counter_is_fast_comes_early() {
    drifts(DRIFT, 1, &[], &[]);
}

#[test]
fn no_message_to_a_host_whose_counter_is_slow_comes_early() {
    drifts(-DRIFT, 1, &[], &[]);
}

#[test]
fn time_does_not_go_back_on_cpus_that_move_between_hosts_that_drift() {
    drifts(DRIFT, 1, &[], &[(1, 0), (1, 1)]);
}

#[test]
fn all_cpus_of_a_node_get_its_time_at_once() {
    drifts(-DRIFT, 2, &[(2, 0), (0, 1)], &[]);
}
