//! Litmus tests of guests whose vCPUs are in two processes.

use std::time::Duration;

use tiny_guests::nodes::{LAP, litmus_on_two_nodes, straddle_on_two_nodes};

use super::{Guest, WORK, run_in_two_processes};
use crate::support::{LIMIT, kvm_is_there};

/// Runs a guest whose `rounds` take at most so long each on a machine that is busy.
fn run(code: fn() -> &'static [u8], rounds: u32, time_max: Duration, secured: bool) {
    if !kvm_is_there() {
        return;
    }
    let guest = Guest {
        code,
        secured,
        rounds,
        // A letter before `!` would be that of the test with a forbidden outcome.
        says: "k",
        limit: LIMIT + time_max * rounds,
        ..WORK
    };
    run_in_two_processes(guest, |_, _| Ok(()));
}

/// Rounds of each of the tests.
fn litmus(rounds: u32, secured: bool) {
    let laps = rounds.div_ceil(LAP);
    run(
        litmus_on_two_nodes::code,
        laps,
        Duration::from_secs(30),
        secured,
    );
}

#[test]
fn no_outcome_is_forbidden_and_no_store_lost() {
    litmus(LAP, false);
}

#[test]
fn no_outcome_is_forbidden_and_no_store_lost_under_tls() {
    litmus(LAP, true);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn no_outcome_of_a_hundred_thousand_is_forbidden() {
    litmus(100_000, false);
}

/// Whether KVM interprets guests here: the processor has no virtualization extension. It does not do a
/// locked instruction at once whose operand is in two pages.
fn kvm_interprets() -> bool {
    let host = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let mut flags = host.split_whitespace();
    let interprets = !flags.any(|flag| flag == "svm" || flag == "vmx");
    if interprets {
        println!("SKIPPED: this KVM interprets guests, and splits what straddles pages");
    }
    interprets
}

fn straddling(rounds: u32) {
    if !kvm_interprets() {
        run(
            straddle_on_two_nodes::code,
            rounds,
            Duration::from_millis(50),
            false,
        );
    }
}

#[test]
fn increments_that_straddle_pages_are_exact() {
    straddling(1000);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn a_million_increments_that_straddle_pages_are_exact() {
    // Of two CPUs, to four counters.
    straddling(125_000);
}
