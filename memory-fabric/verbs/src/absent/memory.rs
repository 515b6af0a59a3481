//! Registered memory, which does not exist in this build.

use super::device::Device;
use crate::RdmaError;
use std::convert::Infallible;
use std::sync::Arc;

/// Access rights to registered memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// The peer has no access.
    Local,
    /// The peer may read.
    RemoteRead,
    /// The peer may read and write.
    RemoteWrite,
}

/// Whether pages of registered memory are pinned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Paging {
    /// All pages are allocated and pinned.
    Pinned,
    /// The adapter pages on demand.
    OnDemand,
}

/// Isolates the memory of one VM.
#[derive(Debug)]
pub struct ProtectionDomain(Infallible);

impl ProtectionDomain {
    /// Creates a domain.
    ///
    /// # Errors
    ///
    /// None: there is no device.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.absurd()
    }

    /// Returns the shared domain of connections whose peers have no access.
    ///
    /// # Errors
    ///
    /// None: there is no device.
    pub fn own(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.absurd()
    }

    /// Returns its device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        match self.0 {}
    }

    /// Returns whether the adapter may access its memory.
    #[must_use]
    pub fn may_be_accessed(&self) -> bool {
        match self.0 {}
    }

    /// Returns any type: no value of this type exists.
    pub(super) fn absurd<T>(&self) -> T {
        match self.0 {}
    }
}

/// Memory that is registered with an adapter.
#[derive(Debug)]
pub struct MemoryRegion(Infallible);

impl MemoryRegion {
    /// Registers memory.
    ///
    /// # Errors
    ///
    /// None: there is no domain.
    pub fn register(
        domain: &Arc<ProtectionDomain>,
        _: &Arc<fabric_host::Mapping>,
        _: Access,
        _: Paging,
    ) -> Result<Self, RdmaError> {
        domain.absurd()
    }

    /// Registers memory at a random address for peers.
    ///
    /// # Errors
    ///
    /// None: there is no domain.
    pub fn register_hidden(
        domain: &Arc<ProtectionDomain>,
        _: &Arc<fabric_host::Mapping>,
        _: Access,
        _: Paging,
    ) -> Result<Self, RdmaError> {
        domain.absurd()
    }

    /// Returns the address of its first byte in requests.
    #[must_use]
    pub fn base(&self) -> u64 {
        match self.0 {}
    }

    /// Returns its domain.
    #[must_use]
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        match self.0 {}
    }

    /// Returns whether its pages are pinned.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        match self.0 {}
    }

    /// Returns the key for local requests.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        match self.0 {}
    }

    /// Returns the key for requests of the peer.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        match self.0 {}
    }

    /// Ends the registration.
    #[must_use]
    pub fn end(self) -> bool {
        match self.0 {}
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        match self.0 {}
    }
}
