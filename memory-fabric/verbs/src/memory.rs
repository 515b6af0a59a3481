//! Protection domains, and memory that adapters may reach.

use super::abi::{ibv_access_flags, ibv_mr, ibv_pd};
use super::device::Device;
use super::library::verbs;
use super::resources::{self, Share};
use super::staging::StagingPool;
use super::{RdmaError, check, failed};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What may be done to registered memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// Answers of the other end are put here, and pages for it are sent from here; it can reach
    /// nothing by itself.
    Local,
    /// The other end reads.
    RemoteRead,
    /// The other end reads and writes.
    RemoteWrite,
}

impl Access {
    /// What queue pairs let the other end do.
    pub(crate) fn rights(self) -> ibv_access_flags {
        match self {
            Self::Local => ibv_access_flags(0),
            Self::RemoteRead => ibv_access_flags::IBV_ACCESS_REMOTE_READ,
            Self::RemoteWrite => {
                ibv_access_flags::IBV_ACCESS_REMOTE_READ | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
            }
        }
    }

    /// What memory is registered for: also for writing by this end, without which some kernels
    /// pin the page of zeros in place of one that was never written.
    fn flags(self) -> ibv_access_flags {
        self.rights() | ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
    }
}

/// Keeps what belongs to one VM apart: queue pairs reach memory of their own domain only, also
/// when the other end guesses another's key.
#[derive(Debug)]
pub struct ProtectionDomain {
    domain: NonNull<ibv_pd>,
    device: Arc<Device>,
    staging: StagingPool,
    /// Whether a queue pair could not be ended, so that it may still write somewhere.
    distrusted: AtomicBool,
    _share: Share,
}

// SAFETY: a domain is not bound to a thread, and libibverbs locks what calls share.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// A domain of its own.
    ///
    /// # Errors
    ///
    /// When the device has none left, or the verb fails.
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
            distrusted: AtomicBool::new(false),
            _share: share,
        }))
    }

    /// The domain of connections whose other ends can reach nothing here; there is one for each
    /// device.
    pub fn own(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.own_domain()
    }

    pub(crate) fn staging(&self) -> &StagingPool {
        &self.staging
    }

    /// A queue pair could not be ended: what it may still write to is used for nothing else.
    pub(crate) fn distrust(&self) {
        // Relaxed, as below: the thread that ends a queue pair gives back its buffer afterwards.
        self.distrusted.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_trusted(&self) -> bool {
        !self.distrusted.load(Ordering::Relaxed)
    }

    /// Its device.
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
        // SAFETY: what was made in the domain keeps it alive, so there is nothing of it left.
        let result = unsafe { (verbs().ibv_dealloc_pd)(self.as_ptr()) };
        if let Err(error) = check("ibv_dealloc_pd", self.device.name(), result) {
            tracing::warn!("{error}");
        }
    }
}

/// Whether pages of registered memory have to stay where they are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Paging {
    /// All are made, and stay.
    Pinned,
    /// The adapter takes them when it needs them, and follows what the kernel does with them.
    OnDemand,
}

/// Memory that an adapter may reach by a key, until this is dropped.
#[derive(Debug)]
pub struct MemoryRegion {
    region: NonNull<ibv_mr>,
    paging: Paging,
    domain: Arc<ProtectionDomain>,
    _shares: [Share; 2],
}

// SAFETY: a region is a handle; who touches the memory, and when, is for its users to say.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above; the handle itself is only read.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers `bytes` bytes from `start` on. If they are pinned, that takes a time that grows
    /// with them, since all are made.
    ///
    /// # Safety
    ///
    /// The memory must stay mapped for as long as the region lives; and be the same pages if they
    /// are pinned: the adapter goes by these, whatever is mapped at their addresses later. With
    /// [`Access::Local`] nobody may rely on what is in it while a request that targets it is
    /// outstanding.
    pub unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        start: *mut u8,
        bytes: usize,
        access: Access,
        paging: Paging,
    ) -> Result<Self, RdmaError> {
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
        let flags = libc::c_int::try_from(flags.0).expect("small flags");
        // SAFETY: the domain is there, and the memory is, as the caller promises.
        let region = unsafe { (verbs().ibv_reg_mr)(domain.as_ptr(), start.cast(), bytes, flags) };
        let region = NonNull::new(region).ok_or_else(|| RdmaError::Register {
            bytes,
            device: domain.device.name().to_owned(),
            source: io::Error::last_os_error(),
        });
        Ok(Self {
            region: region?,
            paging,
            domain: Arc::clone(domain),
            _shares: [of_device, pinned],
        })
    }

    /// The domain that it belongs to.
    #[must_use]
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Whether its pages have to stay where they are.
    pub fn is_pinned(&self) -> bool {
        self.paging == Paging::Pinned
    }

    /// The key for requests of this end.
    pub fn local_key(&self) -> u32 {
        // SAFETY: the handle is valid, and the library does not change it.
        unsafe { self.region.as_ref().lkey }
    }

    /// The key for requests of the other end.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.region.as_ref().rkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is ours; requests that still use it fail from now on.
        let result = unsafe { (verbs().ibv_dereg_mr)(self.region.as_ptr()) };
        if let Err(error) = check("ibv_dereg_mr", self.domain.device.name(), result) {
            // The pages stay pinned, so nobody else gets them before the process ends.
            tracing::warn!("{error}");
        }
    }
}
