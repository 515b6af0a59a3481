//! Buffers of connections, which do not exist in this build.

use super::memory::ProtectionDomain;
use crate::RdmaError;
use fabric_host::PAGE_SIZE;
use std::convert::Infallible;
use std::sync::Arc;

/// A buffer for requests of one connection.
#[derive(Debug)]
pub struct Staging(Infallible);

impl Staging {
    /// Allocates a buffer of this many pages.
    ///
    /// # Errors
    ///
    /// None: there is no domain.
    pub fn new(domain: &Arc<ProtectionDomain>, _: usize) -> Result<Self, RdmaError> {
        domain.absurd()
    }

    /// Returns the key for local requests.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        match self.0 {}
    }

    /// Returns the address of some of its pages, for requests.
    #[must_use]
    pub fn address(&self, _: usize, _: usize) -> u64 {
        match self.0 {}
    }

    /// Returns a page to fill before it is sent.
    pub fn page_mut(&mut self, _: usize) -> &mut [u8; PAGE_SIZE] {
        match self.0 {}
    }

    /// Returns the bytes of some pages.
    #[must_use]
    pub fn bytes(&self, _: usize, _: usize) -> &[u8] {
        match self.0 {}
    }
}
