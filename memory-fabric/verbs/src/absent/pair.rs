//! Queue pairs, of which there is none.

use super::batch::Batch;
use super::device::Route;
use super::memory::{Access, ProtectionDomain};
use super::queue::CompletionQueue;
use crate::RdmaError;
use crate::endpoint::Endpoint;
use std::convert::Infallible;
use std::sync::Arc;

/// How often a request is sent again to a peer that is not ready.
pub const NOT_READY_RETRIES: u8 = 6;
/// The same with a peer that makes pages when they are needed.
pub const NOT_READY_RETRIES_PAGING: u8 = 7;

/// The state of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct PairState(Infallible);

impl PairState {
    /// Whether a queue pair may go from here to there in one step.
    #[must_use]
    pub fn may_become(self, _: Self) -> bool {
        match self.0 {}
    }
}

/// One end of a reliable connection.
#[derive(Debug)]
pub struct QueuePair(Infallible);

impl QueuePair {
    /// A pair on the port of a route.
    ///
    /// # Errors
    ///
    /// None: there is no domain.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        _: &Arc<CompletionQueue>,
        _: &Route,
        _: usize,
        _: Access,
        _: &str,
    ) -> Result<Self, RdmaError> {
        domain.absurd()
    }

    /// What the other end has to know.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        match self.0 {}
    }

    /// Connects to the other end.
    ///
    /// # Errors
    ///
    /// None: there is no pair.
    pub fn connect(&mut self, _: &Endpoint, _: u8) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Ends the connection.
    ///
    /// # Errors
    ///
    /// None: there is no pair.
    pub fn fail(&mut self) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Posts a batch of requests.
    ///
    /// # Errors
    ///
    /// None: there is no pair.
    ///
    /// # Safety
    ///
    /// Nothing is asked of the caller: there is no pair.
    pub unsafe fn post(&mut self, _: &mut Batch) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Takes it away.
    #[must_use]
    pub fn end(self) -> bool {
        match self.0 {}
    }

    /// The device's name.
    #[must_use]
    pub fn device(&self) -> &str {
        match self.0 {}
    }

    /// Device, number and peer.
    #[must_use]
    pub fn on(&self) -> &str {
        match self.0 {}
    }
}
