//! Where the bytes of requests are while adapters work on them: registered once, in slabs that
//! connections share.

use super::RdmaError;
use super::memory::{Access, MemoryRegion, Paging, ProtectionDomain};
use super::room::Room;
use fabric_host::{Mapping, PAGE_SIZE, lock};
use std::sync::{Arc, Mutex, Weak};

/// Pages of a slab: what connections for faults (64), for prefetching (512) and for write-backs (64,
/// and one for flushes) of one donor take together, so that each donor costs one region. 2.5 MiB.
const SLAB_PAGES: usize = 641;

/// The slabs of a domain that are in use. Each is given back to the system with the last of its
/// buffers.
#[derive(Debug, Default)]
pub(crate) struct StagingPool {
    slabs: Mutex<Vec<Weak<Slab>>>,
}

#[derive(Debug)]
struct Slab {
    // Before the memory, which it keeps pinned.
    region: MemoryRegion,
    memory: Mapping,
    room: Mutex<Room>,
}

/// A buffer for requests of one connection.
#[derive(Debug)]
pub struct Staging {
    slab: Arc<Slab>,
    /// Its place in the slab.
    first: usize,
    pages: usize,
}

impl Staging {
    /// A buffer of so many pages, of a slab that is there if one has room.
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

    /// The key for requests of this end.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        self.slab.region.local_key()
    }

    /// The address of some of its pages, for requests.
    pub fn address(&self, page: usize, count: usize) -> u64 {
        self.at(page, count).addr() as u64
    }

    /// A page to be filled before it is sent.
    ///
    /// # Safety
    ///
    /// No request that uses the page may be outstanding.
    pub unsafe fn page_mut(&mut self, page: usize) -> &mut [u8; PAGE_SIZE] {
        // SAFETY: the place is a page of the slab that belongs to this buffer alone, and no
        // request uses it, as promised.
        unsafe { &mut *self.at(page, 1).cast() }
    }

    /// The bytes of some pages.
    ///
    /// # Safety
    ///
    /// No request that writes to them may be outstanding, nor be made while the result lives.
    pub unsafe fn bytes(&self, page: usize, count: usize) -> &[u8] {
        // SAFETY: the range is this buffer's alone, and nobody writes to it, as promised.
        unsafe { std::slice::from_raw_parts(self.at(page, count), count * PAGE_SIZE) }
    }

    fn at(&self, page: usize, count: usize) -> *mut u8 {
        assert!(page + count <= self.pages, "a range of this buffer");
        let first = self.first + page;
        self.slab.memory.at(first * PAGE_SIZE, count * PAGE_SIZE)
    }
}

impl Drop for Staging {
    /// Its owner has ended the queue pair before, so that no adapter uses it any more. Where
    /// that failed, nobody may have these pages again.
    fn drop(&mut self) {
        if self.slab.region.domain().is_trusted() {
            lock(&self.slab.room).give_back(self.first, self.pages);
        }
    }
}

impl Slab {
    fn new(domain: &Arc<ProtectionDomain>, pages: usize) -> Result<Self, RdmaError> {
        let bytes = pages * PAGE_SIZE;
        let memory =
            Mapping::anonymous(bytes).map_err(|error| RdmaError::System("map memory", error))?;
        // SAFETY: the mapping lives as long as the region, and longer; nobody advises it away.
        // What is in it is read through `Staging::bytes` alone.
        let region = unsafe {
            MemoryRegion::register(
                domain,
                memory.as_ptr(),
                bytes,
                Access::Local,
                Paging::Pinned,
            )?
        };
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
