//! Batches of requests that are posted with one doorbell.

/// A range of local memory, registered under `key`.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Address of its first byte.
    pub address: u64,
    /// Its size.
    pub bytes: u32,
    /// The key of its [region](crate::memory::MemoryRegion).
    pub key: u32,
}

/// The direction of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Verb {
    /// From the peer, with a completion.
    Read,
    /// To the peer, with a completion only if it fails.
    Write,
    /// To the peer, with a completion here, and with one there that has the value.
    Notify(u32),
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub id: u64,
    pub verb: Verb,
    /// Address in the peer's memory.
    pub remote: u64,
    pub place: Place,
}

/// READs and WRITEs to be posted, each with one range of memory. No allocation after creation.
#[derive(Debug)]
pub struct Batch {
    requests: Vec<Request>,
    /// The key of the peer's memory.
    key: u32,
}

impl Batch {
    /// Creates a batch for this many requests, which access the peer's memory with `key`.
    #[must_use]
    pub fn new(entries: usize, key: u32) -> Self {
        Self {
            requests: Vec::with_capacity(entries),
            key,
        }
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Returns whether it has no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a READ from `remote` into `place`, with a completion.
    pub fn read(&mut self, id: u64, remote: u64, place: Place) {
        self.add(id, Verb::Read, remote, place);
    }

    /// Adds a WRITE from `place` to `remote`. It has a completion only if it fails.
    pub fn write(&mut self, id: u64, remote: u64, place: Place) {
        self.add(id, Verb::Write, remote, place);
    }

    /// Adds a WRITE from `place` to `remote`, with a completion. It also completes a receive request
    /// of the peer, with `value`, once the bytes of this and of earlier WRITEs are in its memory.
    pub fn write_notifying(&mut self, id: u64, remote: u64, place: Place, value: u32) {
        self.add(id, Verb::Notify(value), remote, place);
    }

    fn add(&mut self, id: u64, verb: Verb, remote: u64, place: Place) {
        assert!(
            self.requests.len() < self.requests.capacity(),
            "a batch has room for all requests of its queue pair"
        );
        self.requests.push(Request {
            id,
            verb,
            remote,
            place,
        });
    }

    /// Returns whether it has no READ.
    pub(crate) fn only_writes(&self) -> bool {
        let mut requests = self.requests.iter();
        requests.all(|request| request.verb != Verb::Read)
    }

    /// Returns the key of the peer's memory.
    pub(crate) fn key(&self) -> u32 {
        self.key
    }

    /// Takes all requests.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = Request> {
        self.requests.drain(..)
    }
}
