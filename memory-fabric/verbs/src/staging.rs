//! Buffers that adapters access for requests: registered once, in slabs that connections share.

use super::RdmaError;
use super::memory::{Access, MemoryRegion, Paging, ProtectionDomain};
use super::room::Room;
use fabric_host::{Mapping, PAGE_SIZE, lock};
use std::sync::{Arc, Mutex, Weak};

/// Pages of a slab: the sum for one donor's connections for faults (64), for prefetching (512) and
/// for write-backs (64, and one for flushes), so that each donor needs one region. 2.5 MiB.
const SLAB_PAGES: usize = 641;

/// The slabs of a domain that are in use. Each is unmapped with the last of its buffers.
#[derive(Debug, Default)]
pub(crate) struct StagingPool {
    slabs: Mutex<Vec<Weak<Slab>>>,
}

#[derive(Debug)]
struct Slab {
    region: MemoryRegion,
    memory: Arc<Mapping>,
    room: Mutex<Room>,
}

/// A buffer for requests of one connection.
#[derive(Debug)]
pub struct Staging {
    slab: Arc<Slab>,
    /// Its first page in the slab.
    first: usize,
    pages: usize,
}

impl Staging {
    /// Allocates a buffer of this many pages, in an existing slab if one has room.
    pub fn new(domain: &Arc<ProtectionDomain>, pages: usize) -> Result<Self, RdmaError> {
        let pool = domain.staging();
        let there = pool.live();
        let taken = there.into_iter().find_map(|slab| {
            let first = lock(&slab.room).take(pages)?;
            Some((slab, first))
        });
        let (slab, first) = match taken {
            Some(taken) => taken,
            None => {
                let slab = Arc::new(Slab::new(domain, pages.max(SLAB_PAGES))?);
                let first = lock(&slab.room).take(pages).expect("it was made for them");
                lock(&pool.slabs).push(Arc::downgrade(&slab));
                (slab, first)
            }
        };
        Ok(Self { slab, first, pages })
    }

    /// Returns the key for local requests.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        self.slab.region.local_key()
    }

    /// Returns the address of some of its pages, for requests.
    pub fn address(&self, page: usize, count: usize) -> u64 {
        self.at(page, count).addr() as u64
    }

    /// Returns a page to fill before it is sent.
    ///
    /// # Safety
    ///
    /// No request that uses the page may be outstanding.
    pub unsafe fn page_mut(&mut self, page: usize) -> &mut [u8; PAGE_SIZE] {
        // SAFETY: the address is a page of the slab that belongs to this buffer alone, and no
        // request uses it, as the caller guarantees.
        unsafe { &mut *self.at(page, 1).cast() }
    }

    /// Returns the bytes of some pages.
    ///
    /// # Safety
    ///
    /// No request that writes to them may be outstanding, or be posted while the result lives.
    pub unsafe fn bytes(&self, page: usize, count: usize) -> &[u8] {
        // SAFETY: the range is this buffer's alone, and nothing writes to it, as the caller
        // guarantees.
        unsafe { std::slice::from_raw_parts(self.at(page, count), count * PAGE_SIZE) }
    }

    fn at(&self, page: usize, count: usize) -> *mut u8 {
        assert!(page + count <= self.pages, "a range of this buffer");
        let first = self.first + page;
        self.slab.memory.at(first * PAGE_SIZE, count * PAGE_SIZE)
    }
}

impl Drop for Staging {
    /// The owner has destroyed the queue pair before, so no adapter accesses the buffer. If that
    /// failed, these pages must never be reused.
    fn drop(&mut self) {
        if self.slab.region.domain().may_reuse_memory() {
            lock(&self.slab.room).free(self.first, self.pages);
        }
    }
}

impl Slab {
    fn new(domain: &Arc<ProtectionDomain>, pages: usize) -> Result<Self, RdmaError> {
        let bytes = pages * PAGE_SIZE;
        let memory =
            Mapping::anonymous(bytes).map_err(|error| RdmaError::System("map memory", error))?;
        let memory = Arc::new(memory);
        let region = MemoryRegion::register(domain, &memory, Access::Local, Paging::Pinned)?;
        Ok(Self {
            region,
            memory,
            room: Mutex::new(Room::new(pages)),
        })
    }
}

impl StagingPool {
    fn live(&self) -> Vec<Arc<Slab>> {
        let mut slabs = lock(&self.slabs);
        slabs.retain(|slab| slab.strong_count() > 0);
        slabs.iter().filter_map(Weak::upgrade).collect()
    }
}
