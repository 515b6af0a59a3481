//! Completion queues, of which there is none.

use super::device::Device;
use crate::RdmaError;
use std::convert::Infallible;
use std::os::fd::RawFd;
use std::sync::Arc;

/// What became of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Done {
    /// Its number.
    pub id: u64,
    /// Why it failed.
    pub status: u32,
    /// What the adapter adds to that.
    pub vendor: u32,
}

impl Done {
    /// Whether the request was carried out.
    #[must_use]
    pub fn is_success(self) -> bool {
        false
    }

    /// The status in words.
    #[must_use]
    pub fn status_text(self) -> String {
        self.status.to_string()
    }
}

/// Room for completions, which stays empty.
#[derive(Debug, Default)]
pub struct Taken;

impl Taken {
    /// Room, empty.
    #[must_use]
    pub fn new() -> Self {
        Self
    }

    /// Whether all were handed out.
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

/// Where requests of queue pairs complete.
#[derive(Debug)]
pub struct CompletionQueue(Infallible);

impl CompletionQueue {
    /// A queue which can be slept for.
    ///
    /// # Errors
    ///
    /// None: there is no device.
    pub fn with_events(device: &Arc<Device>, _: usize) -> Result<Arc<Self>, RdmaError> {
        device.absurd()
    }

    /// The queue of ends that only answer.
    ///
    /// # Errors
    ///
    /// None: there is no device.
    pub fn silent(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.absurd()
    }

    /// Takes completions that are there.
    ///
    /// # Errors
    ///
    /// None: there is no queue.
    pub fn poll(&self, _: &mut Taken) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// What is readable when something has completed.
    #[must_use]
    pub fn event_fd(&self) -> Option<RawFd> {
        match self.0 {}
    }

    /// Makes the next completion readable on the descriptor.
    ///
    /// # Errors
    ///
    /// None: there is no queue.
    pub fn arm(&self) -> Result<(), RdmaError> {
        match self.0 {}
    }
}
