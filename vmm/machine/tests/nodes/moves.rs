//! Both vCPUs of a guest move between two nodes while they work.

use std::thread::{self, JoinHandle};
use std::time::Instant;

use ssi_hv_machine::{MachineHandle, MoveError, Outcome};
use tiny_guests::nodes::{interrupts_between_nodes, work_on_two_nodes};

use super::support::kvm_is_there;
use super::{LIMIT, Running};

/// As many moves are made, of however many guests.
const MOVES: usize = 1000;

/// A vCPU and the node that it moves to. Node 1 lends one CPU.
const WAY: [(u32, u32); 4] = [(1, 0), (0, 1), (0, 0), (1, 1)];

/// Moves vCPUs until the guest has ended. Returns how often.
fn keep_moving(handle: MachineHandle) -> JoinHandle<usize> {
    thread::spawn(move || {
        let way = WAY.iter().cycle();
        let mut moves = 0;
        for (cpu, node) in way {
            match handle.move_vcpu(*cpu, *node) {
                Ok(()) => {
                    let owners = handle.vcpu_nodes().expect("two nodes");
                    let cpu = usize::try_from(*cpu).unwrap();
                    assert_eq!(u32::from(owners[cpu]), *node);
                    moves += 1;
                }
                Err(MoveError::Ended) => break,
                // On a busy host; the deadline is that of the guest.
                Err(MoveError::Late { .. } | MoveError::Moves { .. }) => {}
                Err(error) => panic!("move {moves}: {error}"),
            }
        }
        moves
    })
}

fn works(x2apic: bool, code: &[u8], rounds: u32, presses: bool, said: &str) {
    if !kvm_is_there() {
        return;
    }
    let (begin, mut moves, mut guests) = (Instant::now(), 0, 0);
    while moves < MOVES {
        let running = Running::start(code, x2apic, rounds);
        let moving = keep_moving(running.handle.clone());
        if presses {
            running.wait_for(b'b');
            assert!(running.handle.press_power_button());
        }
        let (primary, secondary, found) = running.finish(LIMIT);
        assert_eq!(found, said);
        assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
        moves += moving.join().unwrap();
        guests += 1;
    }
    println!("{moves} moves of {guests} guests in {:?}", begin.elapsed());
}

#[test]
fn cpus_that_move_work_together() {
    works(false, work_on_two_nodes::code(), 0, true, "lk");
}

#[test]
fn cpus_that_move_work_together_in_x2apic_mode() {
    works(true, work_on_two_nodes::code(), 0, true, "lk");
}

#[test]
fn no_interrupt_of_cpus_that_move_is_lost() {
    works(false, interrupts_between_nodes::code(), 2000, false, "k");
}

#[test]
fn no_interrupt_of_cpus_that_move_is_lost_in_x2apic_mode() {
    works(true, interrupts_between_nodes::code(), 2000, false, "k");
}

#[test]
fn a_move_that_is_not_possible_is_refused_by_name() {
    if !kvm_is_there() {
        return;
    }
    let running = Running::start(interrupts_between_nodes::code(), false, 1_000_000);
    let handle = &running.handle;
    let refused = |cpu, node, text: &str| {
        let error = handle.move_vcpu(cpu, node).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    refused(2, 0, "there is no vCPU 2: the VM has 2");
    refused(300, 0, "there is no vCPU 300");
    refused(1, 2, "there is no node 2: the VM has 2");
    refused(0, 1, "node 1 lends 1 CPUs and runs as many vCPUs");
    handle.move_vcpu(1, 1).expect("it is there");
    handle.pause();
    refused(1, 0, "the VM is paused");
    handle.resume();
    handle.move_vcpu(1, 0).unwrap();
    handle.move_vcpu(0, 1).unwrap();
    refused(1, 1, "node 1 lends 1 CPUs");
    handle.stop();
    let (primary, secondary, _) = running.finish(LIMIT);
    assert_eq!((primary, secondary), (Outcome::Stopped, Outcome::Stopped));
}
