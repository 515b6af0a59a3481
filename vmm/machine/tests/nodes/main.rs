//! Guests of a few instructions whose vCPUs are on several nodes, on the real KVM of the host. A
//! test whose host has no KVM says `SKIPPED` and does nothing.

mod litmus;
#[path = "../../../../memory-fabric/sharing/tests/native/mesh.rs"]
mod mesh;
mod moves;
mod running;
#[path = "../support/mod.rs"]
mod support;
mod time;

use std::time::{Duration, Instant};

use ssi_hv_machine::Outcome;
use tiny_guests::nodes::{interrupts_between_nodes, slow_ticks_on_two_nodes, work_on_two_nodes};

use running::{LIMIT, Running};
use support::kvm_is_there;

fn works(x2apic: bool) {
    if !kvm_is_there() {
        return;
    }
    let running = Running::start(work_on_two_nodes::code(), x2apic, 0);
    running.wait_for(b'b');
    assert!(running.handle.press_power_button());
    println!("faults: {:?}", running.faults());
    let (primary, secondary, said) = running.finish(LIMIT);
    assert_eq!(said, "lk");
    assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
}

#[test]
fn two_cpus_on_two_nodes_work_together() {
    works(false);
}

#[test]
fn two_cpus_on_two_nodes_work_together_in_x2apic_mode() {
    works(true);
}

#[test]
fn a_program_runs_although_ticks_are_due_before_their_handler_has_ended() {
    if !kvm_is_there() {
        return;
    }
    let running = Running::start(slow_ticks_on_two_nodes::code(), true, 0);
    let begin = Instant::now();
    let (primary, secondary, said) = running.finish(LIMIT);
    println!("{:?}", begin.elapsed());
    assert_eq!(said, "k");
    assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
}

/// Each CPU interrupts the other as often, with a non-maskable interrupt before every eighth.
fn interrupts(x2apic: bool, rounds: u32) {
    if !kvm_is_there() {
        return;
    }
    let running = Running::start(interrupts_between_nodes::code(), x2apic, rounds);
    let begin = Instant::now();
    // A round takes a few milliseconds on a machine that is busy.
    let limit = LIMIT + Duration::from_millis(10) * rounds;
    let (primary, secondary, said) = running.finish(limit);
    println!("{rounds} interrupts each way in {:?}", begin.elapsed());
    assert_eq!(said, "k");
    assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
}

#[test]
fn no_interrupt_between_nodes_is_lost() {
    interrupts(false, 2000);
}

#[test]
fn no_interrupt_between_nodes_is_lost_in_x2apic_mode() {
    interrupts(true, 2000);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn no_interrupt_of_a_hundred_thousand_is_lost() {
    interrupts(false, 100_000);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn no_interrupt_of_a_hundred_thousand_is_lost_in_x2apic_mode() {
    interrupts(true, 100_000);
}
