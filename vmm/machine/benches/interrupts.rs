//! How long an interrupt takes from a vCPU to one that is halted: half of the time from the interrupt
//! to the answer. Both are on one node, or on two that loopback connects, at once or through a relay
//! that delays all bytes as a network does. A round trip of as few bytes over another such connection,
//! whose ends wait for it, is measured in the same tries.

#[path = "../../../memory-fabric/sharing/tests/native/mesh.rs"]
mod mesh;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../tests/nodes/running.rs"]
mod running;
#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
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

/// What the relay delays each message.
const DELAY: Duration = Duration::from_micros(100);

/// Passes on what comes from one end to the other, [`DELAY`] later.
fn relay(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = [0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        thread::sleep(DELAY);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // The other end sees the end, too.
    let _ = to.shutdown(Shutdown::Both);
}

/// Both ends of a connection, through the relay or not.
fn connection(is_delayed: bool) -> (TcpStream, TcpStream) {
    if !is_delayed {
        return running::connection();
    }
    let ((here, near), (far, there)) = (running::connection(), running::connection());
    for end in [&near, &far] {
        end.set_nodelay(true).expect("a connection");
    }
    let clone = |end: &TcpStream| end.try_clone().expect("a descriptor");
    let (from, to) = (clone(&near), clone(&far));
    thread::spawn(move || relay(from, to));
    thread::spawn(move || relay(far, near));
    (here, there)
}

/// Microseconds of an interrupt between vCPUs of these nodes.
fn interrupt(owners: &[u8; 2], is_delayed: bool, khz: u32) -> f64 {
    let (counter, code) = (
        |_| HostCounter::default(),
        time_interrupts_between_nodes::code(),
    );
    let guest = Running::over(connection(is_delayed), counter, owners, code, true, ROUNDS);
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
fn round_trip(is_delayed: bool) -> f64 {
    let (mut here, mut there) = connection(is_delayed);
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
    let mut all = [const { Vec::new() }; 2];
    println!("p50 of {ROUNDS}, us       at once                       delayed by {DELAY:?}");
    println!("       one node  two nodes  round trip  ratio  two nodes  round trip  ratio");
    for number in 1..=TRIES {
        print!("try {number}  {:8.1}", interrupt(&[0, 0], false, khz));
        for (is_delayed, ratios) in [false, true].into_iter().zip(&mut all) {
            let far = interrupt(&[0, 1], is_delayed, khz);
            let round_trip = round_trip(is_delayed);
            let ratio = far / round_trip;
            print!("  {far:9.1}  {round_trip:10.1}  {ratio:5.2}");
            ratios.push(ratio);
        }
        println!();
    }
    let [at_once, delayed] = all.map(p50);
    println!("medians of the ratios: {at_once:.2}, {delayed:.2}");
}
