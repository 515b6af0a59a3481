//! Interrupts: as event descriptors, and as lines with a level.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use vm_superio::Trigger;
use vmm_sys_util::eventfd::EventFd;

use crate::lock;

/// A level-triggered interrupt line, which the monitor connects to an input of the interrupt
/// controller.
pub trait InterruptLine: Send + Sync + fmt::Debug {
    /// Raises or lowers the line.
    fn set(&self, raised: bool);
}

/// An edge-triggered interrupt line: each trigger adds one to an event descriptor, which the
/// monitor binds to an interrupt, or pulses the line that the monitor has given.
#[derive(Clone, Debug)]
pub struct EventFdTrigger {
    fd: Arc<EventFd>,
    /// Locked for a whole pulse. A thread that raises the line before another one has lowered it
    /// makes no edge, and the guest may have handled that of the other already.
    line: Arc<OnceLock<Mutex<Arc<dyn InterruptLine>>>>,
}

impl EventFdTrigger {
    /// Creates a line without a listener.
    ///
    /// # Errors
    ///
    /// Fails when the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            fd: Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?),
            line: Arc::default(),
        })
    }

    /// Makes each trigger from now on a pulse of `line`, by the thread that triggers. Has an effect
    /// once.
    pub fn connect_to(&self, line: Arc<dyn InterruptLine>) {
        let _ = self.line.set(Mutex::new(line));
    }

    /// The descriptor to bind to an interrupt.
    pub fn event_fd(&self) -> &EventFd {
        &self.fd
    }
}

impl Trigger for EventFdTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        if let Some(line) = self.line.get() {
            let line = lock(line);
            line.set(true);
            line.set(false);
            return Ok(());
        }
        match self.fd.write(1) {
            // The counter is full: an interrupt is pending, and another one changes nothing.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[derive(Debug, Default)]
    struct Line(Mutex<Vec<bool>>);

    impl InterruptLine for Line {
        fn set(&self, raised: bool) {
            self.0.lock().unwrap().push(raised);
        }
    }

    #[test]
    fn a_trigger_pulses_the_line_that_any_clone_was_connected_to() {
        let trigger = EventFdTrigger::new().unwrap();
        let clone = trigger.clone();
        trigger.trigger().unwrap();
        assert_eq!(trigger.event_fd().read().unwrap(), 1);
        let line = Arc::new(Line::default());
        trigger.connect_to(Arc::clone(&line) as _);
        clone.trigger().unwrap();
        assert_eq!(*line.0.lock().unwrap(), [true, false]);
        let error = trigger.event_fd().read().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    /// Counts its edges.
    #[derive(Debug, Default)]
    struct Edges(Mutex<(bool, usize)>);

    impl InterruptLine for Edges {
        fn set(&self, raised: bool) {
            let mut line = self.0.lock().unwrap();
            line.1 += usize::from(raised && !line.0);
            line.0 = raised;
            drop(line);
            // Whoever is interrupted runs before this thread goes on.
            thread::yield_now();
        }
    }

    #[test]
    fn each_trigger_of_threads_at_once_makes_an_edge() {
        const EACH: usize = 2000;
        let trigger = EventFdTrigger::new().unwrap();
        let line = Arc::new(Edges::default());
        trigger.connect_to(Arc::clone(&line) as _);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..EACH).for_each(|_| trigger.trigger().unwrap()));
            }
        });
        assert_eq!(*line.0.lock().unwrap(), (false, 4 * EACH));
    }
}
