//! Protection domains, and registered memory.

use super::abi::{ibv_access_flags, ibv_mr, ibv_pd};
use super::device::Device;
use super::library::verbs;
use super::removal::{check_end, is_refused};
use super::resources::{self, Share};
use super::staging::StagingPool;
use super::{RdmaError, check, failed};
use fabric_host::Mapping;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Access rights to registered memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// Requests of this end receive into it and send from it; the peer has no access.
    Local,
    /// The peer may read.
    RemoteRead,
    /// The peer may read and write.
    RemoteWrite,
}

impl Access {
    /// Returns the rights of queue pairs.
    pub(crate) fn rights(self) -> ibv_access_flags {
        match self {
            Self::Local => ibv_access_flags(0),
            Self::RemoteRead => ibv_access_flags::IBV_ACCESS_REMOTE_READ,
            Self::RemoteWrite => {
                ibv_access_flags::IBV_ACCESS_REMOTE_READ | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
            }
        }
    }

    /// Returns the flags for registration. They include local writes, without which some kernels
    /// pin the zero page for pages that were never written.
    fn flags(self) -> ibv_access_flags {
        self.rights() | ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
    }
}

/// Isolates the memory of one VM: queue pairs access memory of their own domain only, even if a
/// peer guesses the key of another.
#[derive(Debug)]
pub struct ProtectionDomain {
    domain: NonNull<ibv_pd>,
    device: Arc<Device>,
    staging: StagingPool,
    /// Whether destroying a queue pair failed, so that it may still write to memory.
    has_undestroyed_pair: AtomicBool,
    /// The same, as is so for a device that is being removed.
    has_refused_pair: AtomicBool,
    _share: Share,
}

// SAFETY: a domain is not bound to a thread, and libibverbs locks what calls share.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// Creates a domain.
    ///
    /// # Errors
    ///
    /// Fails when the device has none left, or the verb fails.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        let share = device.resources().protection_domains.take()?;
        // SAFETY: the device is open.
        let domain = NonNull::new(unsafe { (verbs().ibv_alloc_pd)(device.as_ptr()) });
        let domain =
            domain.ok_or_else(|| failed("ibv_alloc_pd", device.name(), io::Error::last_os_error()));
        Ok(Arc::new(Self {
            domain: domain?,
            device: Arc::clone(device),
            staging: StagingPool::default(),
            has_undestroyed_pair: AtomicBool::new(false),
            has_refused_pair: AtomicBool::new(false),
            _share: share,
        }))
    }

    /// Returns the domain of connections whose peers have no access to local memory; each device
    /// has one.
    pub fn own(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.own_domain()
    }

    pub(crate) fn staging(&self) -> &StagingPool {
        &self.staging
    }

    /// Records that destroying a queue pair failed with this error: memory that it may still write to
    /// is not reused.
    pub(crate) fn keep_memory_unused(&self, error: &RdmaError) {
        let pairs = if is_refused(error) {
            &self.has_refused_pair
        } else {
            &self.has_undestroyed_pair
        };
        // Relaxed, as below: the thread that destroys a queue pair releases its buffer afterwards.
        pairs.store(true, Ordering::Relaxed);
    }

    /// Returns whether all queue pairs that are gone were destroyed.
    pub(crate) fn may_reuse_memory(&self) -> bool {
        let failed = [&self.has_undestroyed_pair, &self.has_refused_pair];
        failed.iter().all(|failed| !failed.load(Ordering::Relaxed))
    }

    /// Returns whether the adapter may access the domain's memory for a queue pair that could not be
    /// destroyed: while its device is being removed, and for ever after another failure. Reads files.
    #[must_use]
    pub fn may_be_accessed(&self) -> bool {
        self.has_undestroyed_pair.load(Ordering::Relaxed)
            || (self.has_refused_pair.load(Ordering::Relaxed) && !self.device.entry().is_removed())
    }

    /// Returns its device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_pd {
        self.domain.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: objects in the domain keep it alive, so none is left.
        let result = unsafe { (verbs().ibv_dealloc_pd)(self.as_ptr()) };
        if let Err(error) = check("ibv_dealloc_pd", self.device.name(), result) {
            tracing::warn!("{error}");
        }
    }
}

/// How long the kernel may take to unpin all memory that processes have registered with a device that
/// is removed.
const REMOVAL_TIME_MAX: Duration = Duration::from_secs(60);

/// Adapters map the largest pages by which address and base agree; larger ones than these are rare.
const BASE_ALIGNMENT: u64 = 2 << 20;

/// Above all bases: a base and the size of any mapping add up to no overflow.
const BASE_END: u64 = 1 << 62;

/// Returns an address for peers that says nothing about where the memory is in this process, except
/// within a huge page.
const fn hidden_base(start: u64, random: u64) -> u64 {
    (random % BASE_END) / BASE_ALIGNMENT * BASE_ALIGNMENT + start % BASE_ALIGNMENT
}

/// Whether pages of registered memory are pinned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Paging {
    /// All pages are allocated and pinned.
    Pinned,
    /// The adapter maps pages on demand, and follows changes of the kernel's page tables.
    OnDemand,
}

/// Memory that is registered with an adapter until this is dropped.
#[derive(Debug)]
pub struct MemoryRegion {
    region: NonNull<ibv_mr>,
    paging: Paging,
    /// The address of its first byte in requests.
    base: u64,
    domain: Arc<ProtectionDomain>,
    memory: Arc<Mapping>,
    has_ended: bool,
    _shares: [Share; 2],
}

// SAFETY: a region is a handle; its users synchronize accesses to the memory.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above; the handle itself is only read.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a mapping, which stays mapped for as long as the region lives. If it is pinned,
    /// the time grows with its size, since all pages are allocated.
    ///
    /// The owner must not unmap pages of a pinned mapping
    /// ([`Advice::DontNeed`](fabric_host::Advice)): the adapter continues to access the original
    /// pages, and the CPU would access new ones.
    ///
    /// # Errors
    ///
    /// Fails when the device has no region left or takes none of this size, or the verb fails.
    pub fn register(
        domain: &Arc<ProtectionDomain>,
        memory: &Arc<Mapping>,
        access: Access,
        paging: Paging,
    ) -> Result<Self, RdmaError> {
        let base = memory.as_ptr().addr() as u64;
        Self::register_at(base, domain, memory, access, paging)
    }

    /// Like [`Self::register`], with a random [`Self::base`], so that peers do not learn where this
    /// process has its memory. Requests of this end have to use that base as well.
    ///
    /// # Errors
    ///
    /// As [`Self::register`], and when the kernel has no random number.
    pub fn register_hidden(
        domain: &Arc<ProtectionDomain>,
        memory: &Arc<Mapping>,
        access: Access,
        paging: Paging,
    ) -> Result<Self, RdmaError> {
        let random = getrandom::u64()
            .map_err(|error| RdmaError::System("get a random number", error.into()))?;
        let base = hidden_base(memory.as_ptr().addr() as u64, random);
        Self::register_at(base, domain, memory, access, paging)
    }

    fn register_at(
        base: u64,
        domain: &Arc<ProtectionDomain>,
        memory: &Arc<Mapping>,
        access: Access,
        paging: Paging,
    ) -> Result<Self, RdmaError> {
        let (start, bytes) = (memory.as_ptr(), memory.bytes());
        let limit = domain.device.limits().region_bytes;
        if bytes as u64 > limit {
            return Err(RdmaError::RegionTooLarge {
                bytes,
                device: domain.device.name().to_owned(),
                limit,
            });
        }
        let of_device = domain.device.resources().memory_regions.take()?;
        let (flags, pinned_bytes) = match paging {
            Paging::Pinned => (access.flags(), bytes as u64),
            Paging::OnDemand => (access.flags() | ibv_access_flags::IBV_ACCESS_ON_DEMAND, 0),
        };
        let pinned = resources::pinned().count(pinned_bytes);
        let flags = flags.0;
        // SAFETY: the domain is valid, and the mapping outlives the region, which holds it. Nothing
        // relies on its bytes while the adapter writes: they are only accessed as atomics or copied
        // (see `Mapping`), except by `Staging`, whose users guarantee that no request does.
        let region = unsafe {
            (verbs().ibv_reg_mr_iova2)(domain.as_ptr(), start.cast(), bytes, base, flags)
        };
        let region = NonNull::new(region).ok_or_else(|| RdmaError::Register {
            bytes,
            device: domain.device.name().to_owned(),
            source: io::Error::last_os_error(),
        });
        Ok(Self {
            region: region?,
            has_ended: false,
            paging,
            base,
            domain: Arc::clone(domain),
            memory: Arc::clone(memory),
            _shares: [of_device, pinned],
        })
    }

    /// Returns its domain.
    #[must_use]
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Returns whether its pages are pinned.
    pub fn is_pinned(&self) -> bool {
        self.paging == Paging::Pinned
    }

    /// Returns the address of its first byte in requests.
    #[must_use]
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Returns the key for local requests.
    pub fn local_key(&self) -> u32 {
        // SAFETY: the handle is valid, and the library does not change it.
        unsafe { self.region.as_ref().lkey }
    }

    /// Returns the key for requests of the peer.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.region.as_ref().rkey }
    }
}

impl MemoryRegion {
    /// Ends the registration, which may take long, also if the device is being removed. Returns false
    /// if that fails: the adapter may access the memory until the process ends, and so long it stays
    /// mapped.
    #[must_use]
    pub fn end(mut self) -> bool {
        self.deregister(REMOVAL_TIME_MAX)
    }

    fn deregister(&mut self, limit: Duration) -> bool {
        self.has_ended = true;
        // SAFETY: the region is ours, and is passed once; requests that still use it fail from now on.
        let result = unsafe { (verbs().ibv_dereg_mr)(self.region.as_ptr()) };
        let device = &self.domain.device;
        let ended = check_end("ibv_dereg_mr", device.name(), device, result, limit);
        if let Err(error) = &ended {
            std::mem::forget(Arc::clone(&self.memory));
            tracing::warn!("{error}");
        }
        ended.is_ok()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        if !self.has_ended {
            self.deregister(Duration::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_base_shows_the_place_in_a_huge_page_alone_and_any_memory_fits_behind_it() {
        let start = 0x7f12_3456_7000;
        let base = hidden_base(start, 0x1234_5678_9abc_def0);
        assert_eq!(base % BASE_ALIGNMENT, start % BASE_ALIGNMENT);
        assert_eq!(
            base / BASE_ALIGNMENT,
            0x1234_5678_9abc_def0 / BASE_ALIGNMENT
        );
        // Another number, and another base; another place of the memory, and the same one.
        assert_ne!(hidden_base(start, 7 << 40), hidden_base(start, 8 << 40));
        assert_eq!(
            hidden_base(start + (1 << 30), 7 << 40),
            hidden_base(start, 7 << 40)
        );
        // As much as a process can map.
        let last = hidden_base(u64::MAX, u64::MAX);
        assert!(last.checked_add(1 << 57).is_some());
    }
}
