//! RDMA devices: opened, asked and closed. Their ports and addresses are in `port`, and which of
//! them leads to a peer in `route`.

mod port;
mod route;

pub use port::{Gid, GidEntry, GidKind, LinkLayer, Mtu, PortSummary};
pub use route::{DeviceChoice, Route};

use super::library::{Library, verbs};
use super::{RdmaError, check, failed};
use rdma_sys::{
    ibv_context, ibv_device, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_gid_global_t,
    ibv_port_attr, ibv_port_state, ibv_transport_type,
};
use std::ffi::CStr;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

/// Entries of a port's table of addresses that are looked at: more than adapters have for the
/// addresses of a host with some dozens of networks.
const GIDS_MAX: usize = 256;

/// `IBV_LINK_LAYER_INFINIBAND` and `IBV_LINK_LAYER_ETHERNET` of `infiniband/verbs.h`.
const LINK_INFINIBAND: u8 = 1;
const LINK_ETHERNET: u8 = 2;

/// What a device can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// READs that a queue pair may have outstanding.
    pub reads_sent: u8,
    /// READs that it answers at once.
    pub reads_answered: u8,
    ports: u8,
}

/// An open device.
#[derive(Debug)]
pub(crate) struct Device {
    context: NonNull<ibv_context>,
    name: String,
    /// What sysfs has of it, for as long as it is not being removed.
    path: PathBuf,
    reliable: bool,
    limits: Limits,
}

// SAFETY: a context is not bound to a thread, and libibverbs locks what calls share.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens every device of this host.
    pub(crate) fn open_all() -> Result<Vec<Arc<Self>>, RdmaError> {
        let list = DeviceList::new()?;
        // One that cannot be opened, for want of permission or since it is being removed, must
        // not hide the others; if there is no other, its error says more than none.
        let (mut devices, mut error) = (Vec::new(), None);
        for device in list.devices() {
            match Self::open(device) {
                Ok(opened) => devices.push(Arc::new(opened)),
                Err(refused) => error = Some(refused),
            }
        }
        match error {
            Some(error) if devices.is_empty() => Err(error),
            _ => Ok(devices),
        }
    }

    /// Opens the device that leads to a peer, which is reached from the address `local`.
    pub(crate) fn for_peer(
        choice: &DeviceChoice,
        local: IpAddr,
    ) -> Result<(Arc<Self>, Route), RdmaError> {
        if *choice == DeviceChoice::None {
            return Err(RdmaError::NoDevice);
        }
        let devices = Self::open_all()?;
        let mut ports = Vec::new();
        for device in &devices {
            ports.extend(device.ports()?);
        }
        let route = Route::choose(&ports, choice, local)?;
        let device = devices.into_iter().find(|found| found.name == route.device);
        Ok((device.ok_or(RdmaError::NoDevice)?, route))
    }

    fn open(device: NonNull<ibv_device>) -> Result<Self, RdmaError> {
        // SAFETY: the device is in a list that is not freed before this returns, and its names
        // are arrays with a terminating zero.
        let (name, path, transport) = unsafe {
            let device = device.as_ref();
            let text =
                |start: *const libc::c_char| CStr::from_ptr(start).to_string_lossy().into_owned();
            let name = text(device.name.as_ptr());
            (name, text(device.dev_path.as_ptr()), device.transport_type)
        };
        // SAFETY: as above.
        let context = NonNull::new(unsafe { (verbs().ibv_open_device)(device.as_ptr()) });
        let context =
            context.ok_or_else(|| failed("ibv_open_device", &name, io::Error::last_os_error()))?;
        let mut opened = Self {
            context,
            name,
            path: path.into(),
            reliable: transport == ibv_transport_type::IBV_TRANSPORT_IB,
            limits: Limits {
                reads_sent: 0,
                reads_answered: 0,
                ports: 0,
            },
        };
        // SAFETY: a structure of numbers, for which zero is a value.
        let mut attributes: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the structure is ours.
        let result = unsafe { (verbs().ibv_query_device)(opened.as_ptr(), &raw mut attributes) };
        check("ibv_query_device", &opened.name, result)?;
        let limit = |number: libc::c_int| u8::try_from(number.clamp(0, 128)).unwrap_or(0);
        opened.limits = Limits {
            reads_sent: limit(attributes.max_qp_init_rd_atom),
            reads_answered: limit(attributes.max_qp_rd_atom),
            ports: attributes.phys_port_cnt,
        };
        Ok(opened)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    /// Whether the device was removed, or waits for being let go of. Drivers that cannot take a
    /// device away from its users, such as `rdma_rxe` of Linux 6.1, wait until these have closed it,
    /// and tell nobody; what they have already taken away is its entry in sysfs.
    pub(crate) fn is_gone(&self) -> bool {
        !self.path.exists()
    }

    /// Its ports as they are now.
    pub(crate) fn ports(&self) -> Result<Vec<PortSummary>, RdmaError> {
        (1..=self.limits.ports)
            .filter_map(|port| self.port(port).transpose())
            .collect()
    }

    /// `None` when it is of a kind that is not known here.
    fn port(&self, port: u8) -> Result<Option<PortSummary>, RdmaError> {
        // SAFETY: a structure of numbers, for which zero is a value.
        let mut attributes: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the structure is ours.
        let result = unsafe { (verbs().ibv_query_port)(self.as_ptr(), port, &raw mut attributes) };
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

    fn gids(&self, port: u8) -> Result<Vec<GidEntry>, RdmaError> {
        let empty = ibv_gid_entry {
            gid: ibv_gid {
                global: ibv_gid_global_t {
                    subnet_prefix: 0,
                    interface_id: 0,
                },
            },
            gid_index: 0,
            port_num: 0,
            gid_type: 0,
            ndev_ifindex: 0,
        };
        let mut table = vec![empty; GIDS_MAX];
        // SAFETY: the context is open, and the table has as many entries as is said.
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
            // The error number, negative; it fits.
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
                    // Verbs themselves have 8 bits for it.
                    index: u8::try_from(entry.gid_index).ok()?,
                    // SAFETY: every bit pattern is a valid array of bytes.
                    gid: Gid(unsafe { entry.gid.raw }),
                    kind: match entry.gid_type {
                        rdma_sys::IBV_GID_TYPE_IB => GidKind::InfiniBand,
                        rdma_sys::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
                        rdma_sys::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
                        _ => return None,
                    },
                })
            })
            .collect())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: nobody uses the context any more: those who do keep this alive.
        let result = unsafe { (verbs().ibv_close_device)(self.as_ptr()) };
        if let Err(error) = check("ibv_close_device", &self.name, result) {
            tracing::warn!("{error}");
        }
    }
}

/// Every port of every device of this host.
///
/// # Errors
///
/// When the library is missing, or a device cannot be asked.
pub fn summaries() -> Result<Vec<PortSummary>, RdmaError> {
    let mut ports = Vec::new();
    for device in Device::open_all()? {
        ports.extend(device.ports()?);
    }
    Ok(ports)
}

/// The devices of this host, not open.
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
            // The kernel has no verbs.
            Some(libc::ENOSYS) => RdmaError::NoDevice,
            _ => failed("ibv_get_device_list", "this host", error),
        })
    }

    fn devices(&self) -> impl Iterator<Item = NonNull<ibv_device>> {
        (0..self.count).filter_map(|index| {
            // SAFETY: the list has so many entries.
            NonNull::new(unsafe { *self.first.as_ptr().add(index) })
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from the library; what was opened of it stays.
        unsafe { (verbs().ibv_free_device_list)(self.first.as_ptr()) };
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
