//! The power-management timer: a counter that a kernel measures other clocks by.
//!
//! ACPI specification 6.5, section 4.8.3.3.

use std::time::{Duration, Instant};

use crate::bus::BusDevice;

/// Offset of the timer from the PM1a event block.
pub const PM_TIMER_OFFSET: u64 = 8;
/// Number of its ports.
pub const PM_TIMER_LEN: u64 = 4;

/// Ticks a second.
const FREQUENCY: u128 = 3_579_545;

/// A counter of 32 bits that can only be read.
#[derive(Debug)]
pub struct PmTimer {
    started: Instant,
}

impl PmTimer {
    /// Creates a timer that starts at 0 now.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it starts when it is made")]
    pub fn new() -> Self {
        Self {
            started: Instant::now(),
        }
    }
}

/// The count after `time`, which wraps.
fn ticks(time: Duration) -> u32 {
    let ticks = time.as_nanos() * FREQUENCY / 1_000_000_000;
    u32::try_from(ticks & u128::from(u32::MAX)).unwrap_or(0)
}

impl BusDevice for PmTimer {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let count = ticks(self.started.elapsed()).to_le_bytes();
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let bytes = count.into_iter().skip(from);
        for (to, from) in data.iter_mut().zip(bytes) {
            *to = from;
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ticks_at_its_frequency_and_wraps() {
        assert_eq!(ticks(Duration::ZERO), 0);
        assert_eq!(ticks(Duration::from_secs(1)), 3_579_545);
        // 1200 seconds are 4,295,454,000 ticks.
        assert_eq!(ticks(Duration::from_secs(1200)), 486_704);
    }

    #[test]
    fn it_is_read_whole_or_in_parts() {
        let timer = PmTimer {
            started: Instant::now()
                .checked_sub(Duration::from_secs(1))
                .expect("the host runs longer"),
        };
        let mut whole = [0; 4];
        timer.read(0, &mut whole);
        assert!(u32::from_le_bytes(whole) >= 3_579_545);
        let mut part = [0];
        timer.read(2, &mut part);
        assert!(part[0] >= 0x36, "the third byte");
    }
}
