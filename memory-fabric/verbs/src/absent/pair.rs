//! Queue pairs, which do not exist in this build.

use super::batch::Batch;
use super::device::{Mtu, Route};
use super::memory::{Access, ProtectionDomain};
use super::queue::CompletionQueue;
use crate::RdmaError;
use crate::endpoint::Endpoint;
use crate::settings::Retries;
use std::convert::Infallible;
use std::sync::Arc;

/// The state of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct PairState(Infallible);

impl PairState {
    /// Returns whether a transition between two states is valid.
    #[must_use]
    pub fn may_become(self, _: Self) -> bool {
        match self.0 {}
    }
}

/// How many requests a queue pair takes.
#[derive(Clone, Copy, Debug)]
pub struct Depths {
    /// READs and WRITEs.
    pub requests: usize,
    /// Receive requests.
    pub receives: usize,
    /// WRITEs of up to so many bytes carry them.
    pub inline_bytes: u16,
}

/// One end of a reliable connection.
#[derive(Debug)]
pub struct QueuePair(Infallible);

impl QueuePair {
    /// Creates a queue pair on the port of a route.
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

    /// Creates a queue pair that is also notified.
    ///
    /// # Errors
    ///
    /// None: there is no domain.
    pub fn with_depths(
        domain: &Arc<ProtectionDomain>,
        _: &Arc<CompletionQueue>,
        _: &Route,
        _: Depths,
        _: Access,
        _: &str,
    ) -> Result<Self, RdmaError> {
        domain.absurd()
    }

    /// Returns the port and the address of this end.
    #[must_use]
    pub fn route(&self) -> &Route {
        match self.0 {}
    }

    /// Returns the peer, and the largest payload of a packet to it.
    #[must_use]
    pub fn connected(&self) -> Option<(Endpoint, Mtu)> {
        match self.0 {}
    }

    /// Returns this end's parameters for the peer.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        match self.0 {}
    }

    /// Connects to the peer.
    ///
    /// # Errors
    ///
    /// None: there is no queue pair.
    pub fn connect(&mut self, _: &Endpoint, _: Retries) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Ends the connection.
    ///
    /// # Errors
    ///
    /// None: there is no queue pair.
    pub fn fail(&mut self) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Posts a batch of requests.
    ///
    /// # Errors
    ///
    /// None: there is no queue pair.
    pub fn post(&mut self, _: &mut Batch) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Posts a batch of WRITEs.
    ///
    /// # Errors
    ///
    /// None: there is no queue pair.
    pub fn post_writes(&mut self, _: &mut Batch) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Posts receive requests.
    ///
    /// # Errors
    ///
    /// None: there is no queue pair.
    pub fn post_receives(&mut self, _: usize) -> Result<(), RdmaError> {
        match self.0 {}
    }

    /// Destroys the queue pair.
    #[must_use]
    pub fn end(self) -> Option<Arc<ProtectionDomain>> {
        match self.0 {}
    }

    /// Returns the device's name.
    #[must_use]
    pub fn device(&self) -> &str {
        match self.0 {}
    }

    /// Returns device, number and peer.
    #[must_use]
    pub fn on(&self) -> &str {
        match self.0 {}
    }
}
