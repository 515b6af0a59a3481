//! Requests of devices to the machine.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use vmm_sys_util::eventfd::EventFd;

/// A request by the guest that ends the run of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// Power off (ACPI S5).
    Shutdown,
    /// Restart (reset register or keyboard controller).
    Reboot,
    /// The guest's kernel reported a panic.
    Panic,
}

const NOTHING: u8 = 0;
const SHUTDOWN: u8 = 1;
const REBOOT: u8 = 2;
const PANIC: u8 = 3;

#[derive(Debug)]
struct Inner {
    /// The first event reported. Written once, before `fd`; a reader woken by `fd` therefore sees
    /// it.
    first: AtomicU8,
    fd: EventFd,
}

/// The slot through which devices report a [`MachineEvent`] to the machine. The first event is
/// kept; later ones are ignored. Clones share the slot.
#[derive(Clone, Debug)]
pub struct MachineEvents {
    inner: Arc<Inner>,
}

impl MachineEvents {
    /// Creates an empty slot.
    ///
    /// # Errors
    ///
    /// Fails when the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            inner: Arc::new(Inner {
                first: AtomicU8::new(NOTHING),
                fd: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            }),
        })
    }

    /// Reports `event` and makes [`event_fd`](Self::event_fd) readable.
    pub fn signal(&self, event: MachineEvent) {
        let code = match event {
            MachineEvent::Shutdown => SHUTDOWN,
            MachineEvent::Reboot => REBOOT,
            MachineEvent::Panic => PANIC,
        };
        let first =
            self.inner
                .first
                .compare_exchange(NOTHING, code, Ordering::AcqRel, Ordering::Acquire);
        if first.is_ok() {
            // Cannot fail: the counter is zero, since only the first event is written.
            let _ = self.inner.fd.write(1);
        }
    }

    /// The reported event, if any. Reading does not clear it.
    pub fn get(&self) -> Option<MachineEvent> {
        match self.inner.first.load(Ordering::Acquire) {
            SHUTDOWN => Some(MachineEvent::Shutdown),
            REBOOT => Some(MachineEvent::Reboot),
            PANIC => Some(MachineEvent::Panic),
            _ => None,
        }
    }

    /// Becomes and stays readable when an event was reported.
    pub fn event_fd(&self) -> &EventFd {
        &self.inner.fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_event_wins() {
        let events = MachineEvents::new().unwrap();
        assert_eq!(events.get(), None);
        events.signal(MachineEvent::Reboot);
        events.signal(MachineEvent::Shutdown);
        assert_eq!(events.get(), Some(MachineEvent::Reboot));
        assert_eq!(events.event_fd().read().unwrap(), 1);
    }
}
