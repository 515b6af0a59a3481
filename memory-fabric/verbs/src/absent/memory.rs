//! Memory that adapters may reach, of which there is none.

use super::device::Device;
use crate::RdmaError;
use std::convert::Infallible;
use std::sync::Arc;

/// What may be done to registered memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// The other end can reach nothing by itself.
    Local,
    /// The other end reads.
    RemoteRead,
    /// The other end reads and writes.
    RemoteWrite,
}

/// Whether pages of registered memory have to stay where they are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Paging {
    /// All are made, and stay.
    Pinned,
    /// The adapter takes them when it needs them.
    OnDemand,
}

/// Keeps what belongs to one VM apart.
#[derive(Debug)]
pub struct ProtectionDomain(Infallible);

impl ProtectionDomain {
    /// A domain of its own.
    ///
    /// # Errors
    ///
    /// None: there is no device.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.absurd()
    }

    /// The domain of connections whose other ends can reach nothing here.
    ///
    /// # Errors
    ///
    /// None: there is no device.
    pub fn own(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.absurd()
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        match self.0 {}
    }

    /// Any value: there is no call of this.
    pub(super) fn absurd<T>(&self) -> T {
        match self.0 {}
    }
}

/// Memory that an adapter may reach by a key.
#[derive(Debug)]
pub struct MemoryRegion(Infallible);

impl MemoryRegion {
    /// Registers memory.
    ///
    /// # Errors
    ///
    /// None: there is no domain.
    ///
    /// # Safety
    ///
    /// Nothing is asked of the caller: there is no domain.
    pub unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        _: *mut u8,
        _: usize,
        _: Access,
        _: Paging,
    ) -> Result<Self, RdmaError> {
        domain.absurd()
    }

    /// The domain that it belongs to.
    #[must_use]
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        match self.0 {}
    }

    /// Whether its pages have to stay where they are.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        match self.0 {}
    }

    /// The key for requests of the other end.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        match self.0 {}
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        match self.0 {}
    }
}
