//! Completion queues, which do not exist in this build.

use super::device::Device;
use crate::RdmaError;
use std::convert::Infallible;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

/// The completion of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Done {
    /// Id of the request.
    pub id: u64,
    /// Status code.
    pub status: u32,
    /// Vendor-specific error code.
    pub vendor: u32,
    /// The value of a WRITE of the peer that notified.
    pub notified: Option<u32>,
}

impl Done {
    /// Returns whether the request succeeded.
    #[must_use]
    pub fn is_success(self) -> bool {
        false
    }

    /// Returns a description of the status.
    #[must_use]
    pub fn status_text(self) -> String {
        self.status.to_string()
    }
}

/// A buffer of completions, which stays empty.
#[derive(Debug, Default)]
pub struct Taken;

impl Taken {
    /// Creates an empty buffer.
    #[must_use]
    pub fn new() -> Self {
        Self
    }

    /// Returns true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        true
    }
}

impl Iterator for Taken {
    type Item = Done;

    fn next(&mut self) -> Option<Done> {
        None
    }
}

/// A queue of completions.
#[derive(Debug)]
pub struct CompletionQueue(Infallible);

impl CompletionQueue {
    /// Creates a queue with an event descriptor.
    ///
    /// # Errors
    ///
    /// None: there is no device.
    pub fn with_events(device: &Arc<Device>, _: usize) -> Result<Arc<Self>, RdmaError> {
        device.absurd()
    }

    /// Returns the queue of ends that only answer.
    ///
    /// # Errors
    ///
    /// None: there is no device.
    pub fn silent(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.absurd()
    }

    /// Polls for completions.
    ///
    /// # Errors
    ///
    /// None: there is no queue.
    pub fn poll(&self, _: &mut Taken) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Returns the event descriptor.
    #[must_use]
    pub fn event_fd(&self) -> Option<RawFd> {
        match self.0 {}
    }

    /// Returns the same descriptor.
    #[must_use]
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        match self.0 {}
    }

    /// Requests an event for the next completion.
    ///
    /// # Errors
    ///
    /// None: there is no queue.
    pub fn arm(&self) -> Result<(), RdmaError> {
        match self.0 {}
    }
}
