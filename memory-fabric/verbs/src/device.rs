//! RDMA devices: opening, querying and closing. `port` has their ports and addresses, and `route`
//! selects the device that reaches a peer.

mod port;
mod route;

pub use port::{Gid, GidEntry, GidKind, LinkLayer, Mtu, PortSummary};
pub use route::{DeviceChoice, Route};

use super::abi::{
    LINK_ETHERNET, LINK_INFINIBAND, ibv_context, ibv_device, ibv_device_attr, ibv_gid_entry,
    ibv_port_attr, ibv_port_state, ibv_transport_type,
};
use super::library::{Library, query_on_demand, verbs};
use super::memory::ProtectionDomain;
use super::queue::CompletionQueue;
use super::removal::Entry;
use super::resources::{Counts, DeviceUsage, Resources};
use super::settings::Settings;
use super::{RdmaError, check, failed, on_demand};
use fabric_host::lock;
use std::ffi::CStr;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

/// Limit of entries read from a port's address table: more than adapters have for a host with some
/// dozens of networks.
const GIDS_MAX: usize = 256;
/// Limit of partitions read from a port's table: as many as adapters have.
const PARTITIONS_MAX: u16 = 128;

/// Capabilities of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Limit of outstanding READs of a queue pair.
    pub reads_sent: u8,
    /// Limit of READs that it answers concurrently.
    pub reads_answered: u8,
    /// Size limit of a memory region, bytes.
    pub region_bytes: u64,
    ports: u8,
}

/// An open device. A process opens each device once, and all connections share it.
#[derive(Debug)]
pub struct Device {
    context: NonNull<ibv_context>,
    name: String,
    /// Its sysfs entry, which disappears when its removal starts.
    path: PathBuf,
    /// Its other sysfs entry, which disappears when all its objects have ended.
    entry: Entry,
    reliable: bool,
    limits: Limits,
    pages_on_demand: bool,
    resources: Arc<Resources>,
    /// Objects that all connections of one kind share while any exists.
    domain: Mutex<Weak<ProtectionDomain>>,
    silent: Mutex<Weak<CompletionQueue>>,
}

/// A device of this process and its usage, which can be read without calling verbs.
struct Known {
    /// Address of libibverbs' entry, which is unique to the device while it is open.
    entry: usize,
    device: Weak<Device>,
    resources: Arc<Resources>,
}

/// The open devices. No verb is called while this is locked, since SoftRoCE can hang in them.
static OPEN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// Returns this process's usage of each open device.
#[must_use]
pub fn usage() -> Vec<DeviceUsage> {
    let mut open = lock(&OPEN);
    open.retain(|known| known.device.strong_count() > 0);
    open.iter().map(|known| known.resources.usage()).collect()
}

// SAFETY: a context is not bound to a thread, and libibverbs locks what calls share.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens every device of this host.
    pub fn open_all() -> Result<Vec<Arc<Self>>, RdmaError> {
        let list = DeviceList::new()?;
        // A device that cannot be opened, for lack of permission or because it is being removed,
        // must not hide the others. If there is no other, its error is more informative than an
        // empty list.
        let (mut devices, mut error) = (Vec::new(), None);
        for device in list.devices() {
            match Self::shared(device) {
                Ok(opened) => devices.push(opened),
                Err(refused) => error = Some(refused),
            }
        }
        match error {
            Some(error) if devices.is_empty() => Err(error),
            _ => Ok(devices),
        }
    }

    /// Opens the device that reaches a peer from the address `local`.
    pub fn for_peer(settings: &Settings, local: IpAddr) -> Result<(Arc<Self>, Route), RdmaError> {
        if settings.device == DeviceChoice::None {
            return Err(RdmaError::NoDevice);
        }
        let devices = Self::open_all()?;
        let ports = of_those_that_answer(devices.iter().map(|device| device.ports()))?;
        let mut route = Route::choose(&ports, settings, local)?;
        let device = devices.into_iter().find(|found| found.name == route.device);
        let device = device.ok_or(RdmaError::NoDevice)?;
        if let Some(partition) = settings.partition {
            route.partition_index = device.partition_index(route.port, partition)?;
        }
        Ok((device, route))
    }

    /// Returns the device, which is opened if necessary.
    fn shared(device: NonNull<ibv_device>) -> Result<Arc<Self>, RdmaError> {
        // Dropping a reference may close the device if it is the last one: not while the lock is
        // held.
        let there: Vec<_> = lock(&OPEN)
            .iter()
            .map(|known| known.device.clone())
            .collect();
        let mut there = there.iter().filter_map(Weak::upgrade);
        if let Some(opened) = there.find(|opened| opened.is(device)) {
            return Ok(opened);
        }
        let opened = Arc::new(Self::open(device)?);
        let entry = device.as_ptr().addr();
        let mut open = lock(&OPEN);
        open.retain(|known| known.device.strong_count() > 0);
        // Another thread may have opened it in the meantime.
        let mut same = open.iter().filter(|known| known.entry == entry);
        if let Some(theirs) = same.find_map(|known| known.device.upgrade()) {
            return Ok(theirs);
        }
        open.push(Known {
            entry,
            device: Arc::downgrade(&opened),
            resources: Arc::clone(&opened.resources),
        });
        drop(open);
        Ok(opened)
    }

    /// Returns whether this is that device, and not an earlier one of the same name. libibverbs has
    /// one entry for the lifetime of a device, and keeps the entry while the device is open.
    fn is(&self, device: NonNull<ibv_device>) -> bool {
        // SAFETY: the context is open, and its device does not change.
        let ours = unsafe { self.context.as_ref().device };
        ours == device.as_ptr() && !self.is_gone()
    }

    fn open(device: NonNull<ibv_device>) -> Result<Self, RdmaError> {
        // SAFETY: the device is in a list that is not freed before this returns, and its names are
        // zero-terminated arrays.
        let (name, path, entry, transport) = unsafe {
            let device = device.as_ref();
            let text =
                |start: *const libc::c_char| CStr::from_ptr(start).to_string_lossy().into_owned();
            let name = text(device.name.as_ptr());
            let path = text(device.dev_path.as_ptr());
            let entry = text(device.ibdev_path.as_ptr());
            (name, path, entry, device.transport_type)
        };
        // SAFETY: as above.
        let context = NonNull::new(unsafe { (verbs().ibv_open_device)(device.as_ptr()) });
        let context =
            context.ok_or_else(|| failed("ibv_open_device", &name, io::Error::last_os_error()))?;
        let mut opened = Self {
            context,
            resources: Arc::new(Resources::new(&name, Counts::default())),
            name,
            path: path.into(),
            entry: Entry::at(entry.into()),
            reliable: transport == ibv_transport_type::IBV_TRANSPORT_IB,
            limits: Limits::default(),
            // SAFETY: the context is open.
            pages_on_demand: unsafe { query_on_demand(context.as_ptr()) }
                .is_some_and(|offered| on_demand::suits(&offered)),
            domain: Mutex::default(),
            silent: Mutex::default(),
        };
        // SAFETY: a structure of numbers, for which zero is a valid value.
        let mut attributes: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the structure is ours.
        let result = unsafe { (verbs().ibv_query_device)(opened.as_ptr(), &raw mut attributes) };
        check("ibv_query_device", &opened.name, result)?;
        let limit = |number: libc::c_int| u8::try_from(number.clamp(0, 128)).unwrap_or(0);
        opened.limits = Limits {
            reads_sent: limit(attributes.max_qp_init_rd_atom),
            reads_answered: limit(attributes.max_qp_rd_atom),
            region_bytes: attributes.max_mr_size,
            ports: attributes.phys_port_cnt,
        };
        let counts = Counts {
            queue_pairs: attributes.max_qp,
            completion_queues: attributes.max_cq,
            memory_regions: attributes.max_mr,
            protection_domains: attributes.max_pd,
        };
        opened.resources = Arc::new(Resources::new(&opened.name, counts));
        Ok(opened)
    }

    /// Returns its name, as in the output of `ibv_devices`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its capabilities.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns this process's usage of it.
    pub(crate) fn resources(&self) -> &Resources {
        &self.resources
    }

    /// Returns the domain of connections whose peers have no access to local memory: they need no
    /// isolation from each other, so they share one.
    pub(crate) fn own_domain(self: &Arc<Self>) -> Result<Arc<ProtectionDomain>, RdmaError> {
        let mut domain = lock(&self.domain);
        if let Some(there) = domain.upgrade().filter(|there| there.may_reuse_memory()) {
            return Ok(there);
        }
        let made = ProtectionDomain::new(self)?;
        *domain = Arc::downgrade(&made);
        Ok(made)
    }

    /// Returns the queue of ends that only answer: they have no completions, so they share one.
    pub(crate) fn silent_queue(self: &Arc<Self>) -> Result<Arc<CompletionQueue>, RdmaError> {
        let mut queue = lock(&self.silent);
        if let Some(there) = queue.upgrade() {
            return Ok(there);
        }
        let made = CompletionQueue::for_answers(self)?;
        *queue = Arc::downgrade(&made);
        Ok(made)
    }

    /// Returns whether memory can be registered without being pinned.
    pub fn pages_on_demand(&self) -> bool {
        self.pages_on_demand
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    /// Returns whether the device was removed, or its removal waits for its users. Drivers that
    /// cannot revoke a device, such as `rdma_rxe` of Linux 6.1, wait until its users have closed
    /// it, and do not notify them; but they have already removed its entry in sysfs.
    pub fn is_gone(&self) -> bool {
        !self.path.exists()
    }

    pub(crate) fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Returns the current state of its ports.
    pub fn ports(&self) -> Result<Vec<PortSummary>, RdmaError> {
        (1..=self.limits.ports)
            .filter_map(|port| self.port(port).transpose())
            .collect()
    }

    /// Returns `None` for a port of an unknown kind.
    fn port(&self, port: u8) -> Result<Option<PortSummary>, RdmaError> {
        // SAFETY: a structure of numbers, for which zero is a valid value.
        let mut attributes: ibv_port_attr = unsafe { std::mem::zeroed() };
        // The library fills the part of the structure that older programs have; the rest stays
        // zero.
        let known = (&raw mut attributes).cast();
        // SAFETY: the context is open, and the structure is ours.
        let result = unsafe { (verbs().ibv_query_port)(self.as_ptr(), port, known) };
        check("ibv_query_port", &self.name, result)?;
        let link = match attributes.link_layer {
            LINK_INFINIBAND => LinkLayer::InfiniBand,
            LINK_ETHERNET => LinkLayer::Ethernet,
            _ => return Ok(None),
        };
        let Some(mtu) = Mtu::from_verbs(attributes.active_mtu) else {
            return Ok(None);
        };
        Ok(Some(PortSummary {
            device: self.name.clone(),
            port,
            active: attributes.state == ibv_port_state::IBV_PORT_ACTIVE,
            usable: self.reliable,
            link,
            lid: attributes.lid,
            mtu,
            gids: self.gids(port)?,
        }))
    }

    /// Returns the index of a partition in the table of a port.
    fn partition_index(&self, port: u8, wanted: u16) -> Result<u16, RdmaError> {
        let mut there = Vec::new();
        for index in 0..PARTITIONS_MAX {
            let mut key = 0;
            // SAFETY: the context is open, and the number is ours.
            let result = unsafe {
                (verbs().ibv_query_pkey)(self.as_ptr(), port, index.into(), &raw mut key)
            };
            // The table ends there.
            if result != 0 {
                break;
            }
            // Network byte order; entries that are not in use are 0.
            let key = u16::from_be(key);
            if key == wanted {
                return Ok(index);
            }
            if key != 0 {
                there.push(format!("{key:#06x}"));
            }
        }
        Err(RdmaError::Setting {
            given: format!("partition={wanted:#06x}"),
            limit: format!("{} port {port} has: {}", self.name, there.join(", ")),
        })
    }

    fn gids(&self, port: u8) -> Result<Vec<GidEntry>, RdmaError> {
        let mut table = Vec::new();
        table.resize_with(GIDS_MAX, || {
            // SAFETY: a structure of numbers, for which zero is a valid value.
            unsafe { std::mem::zeroed::<ibv_gid_entry>() }
        });
        // SAFETY: the context is open, and the table has the given number of entries.
        let count = unsafe {
            (verbs()._ibv_query_gid_table)(
                self.as_ptr(),
                table.as_mut_ptr(),
                table.len(),
                0,
                size_of::<ibv_gid_entry>(),
            )
        };
        let count = usize::try_from(count).map_err(|_| {
            // The negative error number, which fits.
            let number = i32::try_from(-count).unwrap_or(libc::EIO);
            failed(
                "ibv_query_gid_table",
                &self.name,
                io::Error::from_raw_os_error(number),
            )
        })?;
        let of_port = table[..count.min(GIDS_MAX)]
            .iter()
            .filter(|entry| entry.port_num == u32::from(port));
        Ok(of_port
            .filter_map(|entry| {
                Some(GidEntry {
                    // Verbs themselves use 8 bits for it.
                    index: u8::try_from(entry.gid_index).ok()?,
                    // SAFETY: every bit pattern is a valid array of bytes.
                    gid: Gid(unsafe { entry.gid.raw }),
                    kind: match entry.gid_type {
                        super::abi::IBV_GID_TYPE_IB => GidKind::InfiniBand,
                        super::abi::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
                        super::abi::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
                        _ => return None,
                    },
                })
            })
            .collect())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: no user of the context is left, since each keeps this alive.
        let result = unsafe { (verbs().ibv_close_device)(self.as_ptr()) };
        if let Err(error) = check("ibv_close_device", &self.name, result) {
            tracing::warn!("{error}");
        }
    }
}

/// Returns every port of every device of this host.
///
/// # Errors
///
/// Fails when the library is missing, or a device cannot be queried.
pub fn summaries() -> Result<Vec<PortSummary>, RdmaError> {
    let devices = Device::open_all()?;
    of_those_that_answer(devices.iter().map(|device| device.ports()))
}

/// Returns the ports of all devices. One that is being reset or removed must not hide the others.
fn of_those_that_answer(
    devices: impl Iterator<Item = Result<Vec<PortSummary>, RdmaError>>,
) -> Result<Vec<PortSummary>, RdmaError> {
    let (mut ports, mut error) = (Vec::new(), None);
    for device in devices {
        match device {
            Ok(of_device) => ports.extend(of_device),
            Err(silent) => error = Some(silent),
        }
    }
    match error {
        Some(error) if ports.is_empty() => Err(error),
        _ => Ok(ports),
    }
}

/// The devices of this host, without opening them.
struct DeviceList {
    first: NonNull<*mut ibv_device>,
    count: usize,
}

impl DeviceList {
    fn new() -> Result<Self, RdmaError> {
        let library = Library::load()?;
        let mut count = 0;
        // SAFETY: the number is ours.
        let first = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        if let Some(first) = NonNull::new(first) {
            let count = usize::try_from(count).unwrap_or(0);
            return Ok(Self { first, count });
        }
        let error = io::Error::last_os_error();
        Err(match error.raw_os_error() {
            // The kernel has no RDMA support.
            Some(libc::ENOSYS) => RdmaError::NoDevice,
            _ => failed("ibv_get_device_list", "this host", error),
        })
    }

    fn devices(&self) -> impl Iterator<Item = NonNull<ibv_device>> {
        (0..self.count).filter_map(|index| {
            // SAFETY: the list has `count` entries.
            NonNull::new(unsafe { *self.first.as_ptr().add(index) })
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from the library; devices that were opened from it stay valid.
        unsafe { (verbs().ibv_free_device_list)(self.first.as_ptr()) };
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
