//! Links between nodes that are slow now and then, and are cut.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The longest delay of what is on its way. It differs from link to link and from one direction to the
/// other, so that messages overtake others that left before.
const DELAY_US_MAX: u64 = 2_000;

/// One part in so many is delayed.
const DELAYED: u64 = 8;

/// Time between two cuts of a link, in milliseconds.
const CUT_MS: std::ops::Range<u64> = 50..400;

/// What happened on all links.
#[derive(Debug, Default)]
pub struct Faults {
    pub cuts: AtomicU64,
    pub delays: AtomicU64,
}

/// A generator of numbers (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn next_cut(&mut self) -> Instant {
        let time = CUT_MS.start + self.below(CUT_MS.end - CUT_MS.start);
        Instant::now() + Duration::from_millis(time)
    }
}

/// Starts a link to an address. Returns where its near end listens. It ends with this process.
pub fn link(to: SocketAddr, seed: u64, faults: &Arc<Faults>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("bound");
    let faults = Arc::clone(faults);
    std::thread::spawn(move || {
        for (near, number) in listener.incoming().flatten().zip(1..) {
            // A refused connection is one more cut.
            let Ok(far) = TcpStream::connect(to) else {
                continue;
            };
            for (from, to, way) in [(&near, &far, 1), (&far, &near, 2)] {
                let ends = (from.try_clone(), to.try_clone());
                let (Ok(from), Ok(to)) = ends else { continue };
                let random = Random(seed << 32 | number << 2 | way);
                let faults = Arc::clone(&faults);
                std::thread::spawn(move || pass(from, to, random, &faults));
            }
        }
    });
    address
}

/// Passes one direction on until it is cut, in the middle of a part.
fn pass(mut from: TcpStream, mut to: TcpStream, mut random: Random, faults: &Faults) {
    let _ = to.set_nodelay(true);
    let cut_at = random.next_cut();
    let mut part = vec![0; 64 << 10];
    while let Ok(count) = from.read(&mut part) {
        let is_cut = Instant::now() >= cut_at;
        if random.below(DELAYED) == 0 {
            faults.delays.fetch_add(1, Ordering::Relaxed);
            let delay = random.below(DELAY_US_MAX);
            std::thread::sleep(Duration::from_micros(delay));
        }
        let left = if is_cut { count / 2 } else { count };
        if to.write_all(&part[..left]).is_err() || count == 0 {
            break;
        }
        if is_cut {
            faults.cuts.fetch_add(1, Ordering::Relaxed);
            break;
        }
    }
    for end in [&from, &to] {
        let _ = end.shutdown(Shutdown::Both);
    }
}
