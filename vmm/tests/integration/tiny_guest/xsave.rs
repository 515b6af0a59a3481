//! Guests that use the XSAVE-managed state step by step: see the guest `save_state`.
//!
//! A software KVM interprets instructions, but not all of these: a step at which it stops is
//! skipped.

use ssi_hv::machine::Outcome;
use tiny_guests::save_state;
use vm_memory::{Bytes, GuestAddress};

use crate::support::{kvm_is_there, memory, start_with};

/// Address from which the guest reads its selection of steps.
const STEPS: GuestAddress = GuestAddress(0x20_8000);
const XGETBV: u8 = 1;
const LEAF_SIZE: u8 = 2;
const AVX: u8 = 4;
const XSAVE: u8 = 8;
const XRSTOR: u8 = 16;

/// Returns whether the host's CPU has a flag.
fn host_has(flag: &str) -> bool {
    let host = std::fs::read_to_string("/proc/cpuinfo").expect("/proc/cpuinfo");
    host.split_whitespace().any(|found| found == flag)
}

/// Returns whether KVM interprets guests here: the CPU has no virtualization extension.
fn kvm_is_software() -> bool {
    !host_has("svm") && !host_has("vmx")
}

/// Runs a guest with these steps, whose output must be `expected`.
fn does(steps: u8, expected: &str) {
    if !kvm_is_there() {
        return;
    }
    if !host_has("xsave") || !host_has("avx") {
        println!("SKIPPED: the processor has no XSAVE or no AVX");
        return;
    }
    let memory = memory();
    memory.write_obj(steps, STEPS).expect("inside");
    let (end, said) = start_with(save_state::code(), 1, memory, None).end();
    match end.expect("the host can run the machine") {
        Outcome::Crash(reason)
            if kvm_is_software()
                && expected.starts_with(&said)
                && reason.contains("an instruction that it cannot emulate") =>
        {
            println!("SKIPPED: this software KVM stops after {said:?} of {expected:?}: {reason}");
        }
        outcome => assert_eq!((outcome, said.as_str()), (Outcome::Shutdown, expected)),
    }
}

#[test]
fn a_guest_enables_saved_state_and_sees_how_large_it_is() {
    does(LEAF_SIZE, "xosl");
}

#[test]
fn a_guest_reads_back_which_state_it_enabled() {
    does(XGETBV, "xosg");
}

#[test]
fn a_guest_keeps_what_is_in_its_wide_registers() {
    does(AVX, "xosak");
}

#[test]
fn a_guest_saves_and_restores_its_wide_registers() {
    does(XGETBV | LEAF_SIZE | AVX | XSAVE | XRSTOR, "xosglavrk");
}
