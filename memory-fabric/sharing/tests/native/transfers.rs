//! How long the transfers of a page between two processes take.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fabric_pages::guest_memory::GuestMemory;

use crate::programs::{Program, word};

/// Pages of a measurement: most of a block.
const SAMPLES: usize = 500;

const BLOCK: usize = 2 << 20;

/// One node gets pages that the other one has written: to write, to read, and to write what both read.
pub const TRANSFERS: Program = Program {
    roles: 2,
    bytes: |rounds| (rounds + 1) * BLOCK,
    run: |memory, role, rounds| {
        let mut times: [Vec<Duration>; 3] = Default::default();
        let mut turn = 0;
        for round in 1..=rounds {
            let mut work = |who: usize, touch: &mut dyn FnMut(usize)| {
                if role == who {
                    (0..SAMPLES).for_each(|page| touch(round * BLOCK + (page << 12)));
                }
                turn += 1;
                wait_for_both(memory, turn);
            };
            let write = |at: usize| word(memory, at).store(1, Ordering::Relaxed);
            let [written, read, upgraded] = &mut times;
            work(1, &mut |at| write(at));
            work(0, &mut |at| written.push(timed(|| write(at))));
            work(1, &mut |at| {
                let load = || word(memory, at).load(Ordering::Relaxed);
                read.push(timed(|| assert_eq!(load(), 1)));
            });
            work(0, &mut |at| upgraded.push(timed(|| write(at))));
        }
        let names = ["GetM", "GetS", "Upgrade"].into_iter();
        let measured = names.zip(times).filter(|(_, times)| !times.is_empty());
        let said = measured.map(|(name, mut times)| {
            times.sort_unstable();
            let at = |part: usize| times[times.len() * part / 100];
            format!("{name} p25 {:?} p50 {:?} p90 {:?}", at(25), at(50), at(90))
        });
        said.collect::<Vec<_>>().join(", ")
    },
};

fn timed(touch: impl FnOnce()) -> Duration {
    let started = Instant::now();
    touch();
    started.elapsed()
}

/// Waits without a poll: whoever measures has the processors.
fn wait_for_both(memory: &GuestMemory, turn: u64) {
    let arrived = word(memory, 0);
    arrived.fetch_add(1, Ordering::SeqCst);
    while arrived.load(Ordering::SeqCst) < 2 * turn {
        std::thread::sleep(Duration::from_millis(3));
    }
}

#[test]
#[ignore = "a measurement"]
fn time_for_a_transfer() {
    crate::processes::run("transfers", 5, usize::MAX);
}
