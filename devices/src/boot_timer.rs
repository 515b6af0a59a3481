//! What the guest reports of its boot, and when; and what is seen of it without a report.

use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::bus::{BusDevice, write_bytes};

/// The port to which the guest writes [`BOOT_TIMER_INIT_REACHED`] and [`BOOT_TIMER_READY`].
pub const BOOT_TIMER_PORT: u64 = 0x5f4;
/// The byte that reports that the guest's init runs.
pub const BOOT_TIMER_INIT_REACHED: u8 = 0x7b;
/// The byte that reports that the guest has booted, and begins with what it is for.
pub const BOOT_TIMER_READY: u8 = 0x7c;

/// What happens while a guest boots.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BootEvent {
    /// Its init runs: it reports that, or was seen to run a program.
    Init,
    /// It has booted, as it reports.
    Ready,
}

impl BootEvent {
    /// The byte that reports it.
    #[must_use]
    pub const fn byte(self) -> u8 {
        match self {
            Self::Init => BOOT_TIMER_INIT_REACHED,
            Self::Ready => BOOT_TIMER_READY,
        }
    }
}

/// Measures the time from [`start`](Self::start) to the guest's first report of each [`BootEvent`].
/// Later writes and other values are ignored; reads return 0xff.
#[derive(Default)]
pub struct BootTimer {
    start: OnceLock<Instant>,
    to_init: OnceLock<Duration>,
    to_ready: OnceLock<Duration>,
    init_known: OnceLock<()>,
    ready_known: OnceLock<()>,
    on_event: OnceLock<Box<dyn Fn(BootEvent) + Send + Sync>>,
}

impl fmt::Debug for BootTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BootTimer")
            .field("start", &self.start)
            .field("to_init", &self.to_init)
            .field("to_ready", &self.to_ready)
            .field("init_known", &self.init_known)
            .finish_non_exhaustive()
    }
}

impl BootTimer {
    /// Creates a timer that is not running.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets what to do when an event happens for the first time. It is called on the thread of the
    /// vCPU that reports it or was seen, and must not wait. Only the first call has an effect.
    pub fn on_event(&self, call: impl Fn(BootEvent) + Send + Sync + 'static) {
        let _ = self.on_event.set(Box::new(call));
    }

    /// Starts the timer, when the first vCPU is about to run. Only the first call has an effect.
    pub fn start(&self) {
        self.start.get_or_init(Instant::now);
    }

    /// The time from the start to the guest's init, or None before the guest has reported it.
    pub fn to_init(&self) -> Option<Duration> {
        self.time_to(BootEvent::Init)
    }

    /// The time from the start to an event, or None before the guest has reported it.
    pub fn time_to(&self, event: BootEvent) -> Option<Duration> {
        self.time_of(event).get().copied()
    }

    /// Returns whether an event has happened, reported or not.
    pub fn has_happened(&self, event: BootEvent) -> bool {
        self.known(event).get().is_some()
    }

    /// A vCPU was seen in user mode. A guest that reports nothing is known by that to run its init.
    pub fn program_seen(&self) {
        self.happened(BootEvent::Init);
    }

    fn known(&self, event: BootEvent) -> &OnceLock<()> {
        match event {
            BootEvent::Init => &self.init_known,
            BootEvent::Ready => &self.ready_known,
        }
    }

    fn happened(&self, event: BootEvent) {
        if self.known(event).set(()).is_ok()
            && let Some(call) = self.on_event.get()
        {
            call(event);
        }
    }

    fn time_of(&self, event: BootEvent) -> &OnceLock<Duration> {
        match event {
            BootEvent::Init => &self.to_init,
            BootEvent::Ready => &self.to_ready,
        }
    }

    fn reported(&self, event: BootEvent) {
        let Some(start) = self.start.get() else {
            return;
        };
        let time = start.elapsed();
        if self.time_of(event).set(time).is_ok() {
            tracing::debug!(?event, ?time, "the guest reports its boot");
            self.happened(event);
        }
    }
}

impl BusDevice for BootTimer {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        write_bytes(offset, data, |at, byte| match (at, byte) {
            (0, BOOT_TIMER_INIT_REACHED) => self.reported(BootEvent::Init),
            (0, BOOT_TIMER_READY) => self.reported(BootEvent::Ready),
            _ => {}
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_report_counts() {
        let timer = BootTimer::new();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let called = Arc::clone(&calls);
        timer.on_event(move |event| called.lock().unwrap().push(event));
        let events = || calls.lock().unwrap().clone();
        timer.write(0, &[BOOT_TIMER_INIT_REACHED]);
        assert_eq!(timer.to_init(), None, "the timer was not started");
        timer.start();
        timer.write(0, &[0x7a]);
        assert_eq!(timer.to_init(), None);
        assert_eq!(events(), []);
        timer.write(0, &[BOOT_TIMER_INIT_REACHED]);
        let first = timer.to_init();
        assert!(first.is_some());
        timer.write(0, &[BOOT_TIMER_INIT_REACHED]);
        assert_eq!(timer.to_init(), first);
        assert_eq!(timer.time_to(BootEvent::Ready), None);
        timer.write(0, &[BOOT_TIMER_READY]);
        let ready = timer.time_to(BootEvent::Ready);
        assert!(ready >= first, "{ready:?}");
        timer.write(1, &[BOOT_TIMER_READY]);
        timer.write(0, &[BOOT_TIMER_READY]);
        assert_eq!(timer.time_to(BootEvent::Ready), ready);
        assert_eq!(events(), [BootEvent::Init, BootEvent::Ready]);
    }

    #[test]
    fn a_program_that_is_seen_is_no_report_and_an_event_happens_once() {
        let timer = BootTimer::new();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let called = Arc::clone(&calls);
        timer.on_event(move |event| called.lock().unwrap().push(event));
        timer.start();
        assert!(!timer.has_happened(BootEvent::Init));
        timer.program_seen();
        assert!(timer.has_happened(BootEvent::Init) && !timer.has_happened(BootEvent::Ready));
        assert_eq!(timer.to_init(), None);
        timer.write(0, &[BOOT_TIMER_INIT_REACHED]);
        assert!(timer.to_init().is_some());
        timer.program_seen();
        assert_eq!(*calls.lock().unwrap(), [BootEvent::Init]);
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
