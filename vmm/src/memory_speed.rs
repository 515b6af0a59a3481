//! The speed of this host's own memory, which is reported to a guest for its local node.

use std::time::{Duration, Instant};

/// Exceeds the caches of most CPUs, and is quick to fill.
const LINES: usize = 1 << 19;
/// Words of a cache line.
const LINE_WORDS: usize = 16;
/// Dependent loads to time: some milliseconds.
const LOADS: u32 = 50_000;
/// Rounds of the copy; the fastest counts.
const ROUNDS: usize = 3;

/// Latency and bandwidth of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySpeed {
    /// Latency of a load that misses all caches.
    pub latency: Duration,
    /// Bytes that a copy reads, in MB/s.
    pub bandwidth_mb_s: u64,
}

/// Measures in some tens of milliseconds, with 32 MiB of memory.
pub fn measure() -> MemorySpeed {
    let mut words = vec![0_u32; LINES * LINE_WORDS];
    // A linear congruential generator of full period visits every line once, in an order that no
    // hardware prefetcher predicts: an odd increment, and a multiplier that is 1 modulo 4.
    for line in 0..LINES {
        let next = (line * 1_664_525 + 1_013_904_223) % LINES;
        words[line * LINE_WORDS] = u32::try_from(next).unwrap_or(0);
    }
    let start = Instant::now();
    let mut line = 0;
    for _ in 0..LOADS {
        line = words[line as usize * LINE_WORDS];
    }
    std::hint::black_box(line);
    let latency = start.elapsed() / LOADS;

    let (from, to) = words.split_at_mut(LINES * LINE_WORDS / 2);
    let copies = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        to.copy_from_slice(std::hint::black_box(from));
        std::hint::black_box(&to);
        start.elapsed()
    });
    let fastest = copies.min().unwrap_or_default();
    // Bytes in a microsecond are megabytes in a second.
    let bandwidth = size_of_val(from) as u128 * 1000 / fastest.as_nanos().max(1);
    MemorySpeed {
        // A coarse clock must not yield a latency of zero.
        latency: latency.max(Duration::from_nanos(1)),
        bandwidth_mb_s: u64::try_from(bandwidth).unwrap_or(u64::MAX).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_some_speed() {
        let speed = measure();
        assert!(speed.latency < Duration::from_millis(1), "{speed:?}");
        assert!(speed.bandwidth_mb_s > 0, "{speed:?}");
    }

    #[test]
    fn every_line_is_visited() {
        let mut seen = vec![false; LINES];
        let mut line = 0;
        for _ in 0..LINES {
            assert!(!std::mem::replace(&mut seen[line], true));
            line = (line * 1_664_525 + 1_013_904_223) % LINES;
        }
    }
}
