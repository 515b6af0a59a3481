//! The time until the guest's init runs.

use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::bus::{BusDevice, write_bytes};

/// The port to which the guest's init writes [`BOOT_TIMER_INIT_REACHED`].
pub const BOOT_TIMER_PORT: u64 = 0x5f4;
/// The byte that reports that the guest's init runs.
pub const BOOT_TIMER_INIT_REACHED: u8 = 0x7b;

/// Measures the time from [`start`](Self::start) to the guest's first write of
/// [`BOOT_TIMER_INIT_REACHED`]. Later writes and other values are ignored; reads return 0xff.
#[derive(Default)]
pub struct BootTimer {
    start: OnceLock<Instant>,
    to_init: OnceLock<Duration>,
    on_init: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for BootTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BootTimer")
            .field("start", &self.start)
            .field("to_init", &self.to_init)
            .finish_non_exhaustive()
    }
}

impl BootTimer {
    /// Creates a timer that is not running.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets what to do, once, when the guest's init runs. It is called on the thread that carries out
    /// the guest's write, and must not wait. Only the first call has an effect.
    pub fn on_init(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_init.set(Box::new(call));
    }

    /// Starts the timer, when the first vCPU is about to run. Only the first call has an effect.
    pub fn start(&self) {
        self.start.get_or_init(Instant::now);
    }

    /// The time from the start to the guest's init, or None before the guest has reported it.
    pub fn to_init(&self) -> Option<Duration> {
        self.to_init.get().copied()
    }
}

impl BusDevice for BootTimer {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        write_bytes(offset, data, |at, byte| {
            if at == 0
                && byte == BOOT_TIMER_INIT_REACHED
                && let Some(start) = self.start.get()
            {
                let to_init = start.elapsed();
                if self.to_init.set(to_init).is_ok() {
                    tracing::debug!(?to_init, "the guest's init runs");
                    if let Some(call) = self.on_init.get() {
                        call();
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_report_counts() {
        let timer = BootTimer::new();
        let calls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&calls);
        timer.on_init(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        timer.write(0, &[BOOT_TIMER_INIT_REACHED]);
        assert_eq!(timer.to_init(), None, "the timer was not started");
        timer.start();
        timer.write(0, &[0x7a]);
        assert_eq!(timer.to_init(), None);
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        timer.write(0, &[BOOT_TIMER_INIT_REACHED]);
        let first = timer.to_init();
        assert!(first.is_some());
        timer.write(0, &[BOOT_TIMER_INIT_REACHED]);
        assert_eq!(timer.to_init(), first);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    proptest! {
        #[test]
        fn any_access_is_survived(offset: u64, data: Vec<u8>) {
            let timer = BootTimer::new();
            timer.start();
            timer.write(offset >> 1, &data);
            timer.read(offset >> 1, &mut data.clone());
        }
    }
}
