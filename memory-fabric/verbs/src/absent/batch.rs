//! Batches of requests, which are never posted.

/// A range of local memory, registered under `key`.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Address of its first byte.
    pub address: u64,
    /// Its size.
    pub bytes: u32,
    /// The key of its region.
    pub key: u32,
}

/// A batch of requests: always empty, since there is no queue pair.
#[derive(Debug)]
pub struct Batch;

impl Batch {
    /// Creates an empty batch.
    #[must_use]
    pub fn new(_: usize, _: u32) -> Self {
        Self
    }

    /// Returns 0.
    #[must_use]
    pub fn len(&self) -> usize {
        0
    }

    /// Returns true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        true
    }

    /// Ignores a READ.
    pub fn read(&mut self, _: u64, _: u64, _: Place) {}

    /// Ignores a WRITE.
    pub fn write(&mut self, _: u64, _: u64, _: Place) {}

    /// Ignores a WRITE.
    pub fn write_notifying(&mut self, _: u64, _: u64, _: Place, _: u32) {}
}
