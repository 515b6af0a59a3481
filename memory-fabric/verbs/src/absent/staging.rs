//! Buffers of connections, of which there is none.

use super::memory::ProtectionDomain;
use crate::RdmaError;
use fabric_host::PAGE_SIZE;
use std::convert::Infallible;
use std::sync::Arc;

/// A buffer for requests of one connection.
#[derive(Debug)]
pub struct Staging(Infallible);

impl Staging {
    /// A buffer of so many pages.
    ///
    /// # Errors
    ///
    /// None: there is no domain.
    pub fn new(domain: &Arc<ProtectionDomain>, _: usize) -> Result<Self, RdmaError> {
        domain.absurd()
    }

    /// The key for requests of this end.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        match self.0 {}
    }

    /// The address of some of its pages, for requests.
    #[must_use]
    pub fn address(&self, _: usize, _: usize) -> u64 {
        match self.0 {}
    }

    /// A page to be filled before it is sent.
    ///
    /// # Safety
    ///
    /// Nothing is asked of the caller: there is no buffer.
    pub unsafe fn page_mut(&mut self, _: usize) -> &mut [u8; PAGE_SIZE] {
        match self.0 {}
    }

    /// The bytes of some pages.
    ///
    /// # Safety
    ///
    /// Nothing is asked of the caller: there is no buffer.
    #[must_use]
    pub unsafe fn bytes(&self, _: usize, _: usize) -> &[u8] {
        match self.0 {}
    }
}
