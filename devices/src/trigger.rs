//! Interrupts: as event descriptors, and as lines with a level.

use std::fmt;
use std::io;
use std::sync::Arc;

use vm_superio::Trigger;
use vmm_sys_util::eventfd::EventFd;

/// A level-triggered interrupt line, which the monitor connects to an input of the interrupt
/// controller.
pub trait InterruptLine: Send + Sync + fmt::Debug {
    /// Raises or lowers the line.
    fn set(&self, raised: bool);
}

/// An edge-triggered interrupt line: each trigger adds one to an event descriptor, which the
/// monitor binds to an interrupt.
#[derive(Clone, Debug)]
pub struct EventFdTrigger {
    fd: Arc<EventFd>,
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
        })
    }

    /// The descriptor to bind to an interrupt.
    pub fn event_fd(&self) -> &EventFd {
        &self.fd
    }
}

impl Trigger for EventFdTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        match self.fd.write(1) {
            // The counter is full: an interrupt is pending, and another one changes nothing.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }
}
