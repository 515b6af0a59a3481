//! Requests that nothing takes.

/// A place in memory of this end, registered under `key`.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Of its first byte.
    pub address: u64,
    /// Its size.
    pub bytes: u32,
    /// The key of its region.
    pub key: u32,
}

/// Requests that wait for being posted: none, since there is no queue pair.
#[derive(Debug)]
pub struct Batch;

impl Batch {
    /// No room.
    #[must_use]
    pub fn new(_: usize, _: u32) -> Self {
        Self
    }

    /// How many requests it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        0
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        true
    }

    /// Would add a READ.
    pub fn read(&mut self, _: u64, _: u64, _: Place) {}

    /// Would add a WRITE.
    pub fn write(&mut self, _: u64, _: u64, _: Place) {}
}
