//! How long an interrupt takes from a vCPU to one that is halted: half of the time from the interrupt
//! to the answer. Both are on nodes that loopback connects, or on one node; the difference is what the
//! link costs. A round trip of as few bytes over another such connection, whose ends wait for it, is
//! measured in the same tries.

#[path = "../../../memory-fabric/sharing/tests/native/mesh.rs"]
mod mesh;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../tests/nodes/running.rs"]
mod running;
#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use ssi_hv_machine::{HostCounter, tsc_khz};
use tiny_guests::nodes::{ROUND_TIMES, time_interrupts_between_nodes};
use vm_memory::{Bytes, GuestAddress};

use running::Running;

/// Each of these measures both.
const TRIES: usize = 5;
/// Interrupts each way, and round trips, of a try.
const ROUNDS: u32 = 2000;
/// Bytes of a message that carries an interrupt.
const MESSAGE_BYTES: usize = 24;

fn p50(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Microseconds of an interrupt between vCPUs of these nodes.
fn interrupt(owners: &[u8; 2], khz: u32) -> f64 {
    let (counter, code) = (
        |_| HostCounter::default(),
        time_interrupts_between_nodes::code(),
    );
    let guest = Running::with_counter(counter, owners, code, true, ROUNDS);
    guest.wait_for(b'k');
    let memory = running::memory_of(&guest.nodes[0]);
    let cycles = (0..u64::from(ROUNDS)).map(|round| {
        let at = GuestAddress(ROUND_TIMES + 4 * round);
        memory.read_obj::<u32>(at).expect("the guest's memory")
    });
    let time = p50(cycles
        .map(|cycles| f64::from(cycles) / f64::from(khz) * 1e3)
        .collect());
    guest.finish(running::LIMIT);
    time / 2.0
}

/// Microseconds of a round trip.
fn round_trip() -> f64 {
    let (mut here, mut there) = running::connection();
    for end in [&here, &there] {
        end.set_nodelay(true).expect("a connection");
        end.set_read_timeout(Some(Duration::from_secs(20)))
            .expect("a connection");
    }
    let echo = thread::spawn(move || {
        let mut message = [0; MESSAGE_BYTES];
        while there.read_exact(&mut message).is_ok() && there.write_all(&message).is_ok() {}
    });
    let mut message = [7; MESSAGE_BYTES];
    let times = (0..ROUNDS).map(|_| {
        let began = Instant::now();
        here.write_all(&message).expect("the other end is there");
        here.read_exact(&mut message).expect("an answer");
        began.elapsed().as_secs_f64() * 1e6
    });
    let time = p50(times.collect());
    drop(here);
    echo.join().expect("it only answers");
    time
}

fn main() {
    if !support::kvm_is_there() {
        return;
    }
    let khz = tsc_khz().expect("KVM says it");
    let mut ratios = Vec::new();
    println!("p50 of {ROUNDS}, us");
    println!("      one node  two nodes  round trip  difference / round trip");
    for number in 1..=TRIES {
        let (near, far) = (interrupt(&[0, 0], khz), interrupt(&[0, 1], khz));
        let round_trip = round_trip();
        let ratio = (far - near) / round_trip;
        println!("try {number} {near:8.1}  {far:9.1}  {round_trip:10.1}  {ratio:8.2}");
        ratios.push(ratio);
    }
    println!("median of the ratios: {:.2}", p50(ratios));
}
