//! RDMA devices, their ports and addresses, and which of them leads to a peer.

use super::library::{Library, verbs};
use super::{RdmaError, check, failed, on_demand};
use rdma_sys::{
    ibv_context, ibv_device, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_gid_global_t,
    ibv_port_attr, ibv_port_state, ibv_transport_type,
};
use serde::{Deserialize, Serialize};
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

/// Entries of a port's table of addresses that are looked at: more than adapters have for the
/// addresses of a host with some dozens of networks.
const GIDS_MAX: usize = 256;

/// `IBV_LINK_LAYER_INFINIBAND` and `IBV_LINK_LAYER_ETHERNET` of `infiniband/verbs.h`.
const LINK_INFINIBAND: u8 = 1;
const LINK_ETHERNET: u8 = 2;

/// A kind of network.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum LinkLayer {
    /// InfiniBand: ports have local identifiers.
    InfiniBand,
    /// RDMA over converged Ethernet: ports have IP addresses.
    Ethernet,
}

/// A 128-bit address of a port.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The address of a RoCE port with this IP address.
    #[must_use]
    pub fn from_ip(address: IpAddr) -> Self {
        Self(match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        })
    }

    /// The IP address that it stands for, on Ethernet.
    #[must_use]
    pub fn to_ip(self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self.0)).to_canonical()
    }
}

/// What an address is good for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// Version 1 of RoCE: one Ethernet, no routers.
    RoceV1,
    /// Version 2: over UDP, through routers.
    RoceV2,
}

/// The largest payload of a packet: a power of two.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Mtu(u16);

impl Mtu {
    /// Of 256, 512, 1024, 2048 or 4096 bytes.
    #[must_use]
    pub fn from_bytes(bytes: u16) -> Option<Self> {
        (bytes.is_power_of_two() && (256..=4096).contains(&bytes)).then_some(Self(bytes))
    }

    /// By its number in verbs (`enum ibv_mtu`: 1 is 256 bytes, 5 is 4096).
    fn from_verbs(number: u32) -> Option<Self> {
        (1..=5).contains(&number).then(|| Self(128 << number))
    }

    /// Its number in verbs.
    pub(super) fn to_verbs(self) -> u32 {
        self.0.trailing_zeros() - 7
    }

    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> u16 {
        self.0
    }
}

/// An address in a port's table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GidEntry {
    /// Its place there.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// Its kind.
    pub kind: GidKind,
}

/// A port as it was seen.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortSummary {
    /// The device.
    pub device: String,
    /// Its number there, from 1.
    pub port: u8,
    /// Whether packets can be sent.
    pub active: bool,
    /// Whether it makes reliable connections without a connection manager: iWARP does not.
    pub usable: bool,
    /// Its network.
    pub link: LinkLayer,
    /// Its local identifier.
    pub lid: u16,
    /// The largest payload of a packet.
    pub mtu: Mtu,
    /// Its addresses.
    pub gids: Vec<GidEntry>,
}

impl fmt::Display for PortSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.usable, self.active) {
            (false, _) => "no reliable connections without a manager",
            (true, false) => "down",
            (true, true) => "active",
        };
        write!(f, "{} port {} {state}", self.device, self.port)?;
        let v2 = self.gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
        for entry in v2 {
            write!(f, " {}", entry.gid.to_ip())?;
        }
        Ok(())
    }
}

/// Which device is to be used.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum DeviceChoice {
    /// The one that has the address by which the peer is reached.
    #[default]
    Automatic,
    /// The one of this name.
    Named(String),
    /// None.
    None,
}

impl DeviceChoice {
    /// Finds out whether a device that is named is there.
    ///
    /// # Errors
    ///
    /// When it is not, or none is.
    pub fn check(&self) -> Result<(), RdmaError> {
        let Self::Named(name) = self else {
            return Ok(());
        };
        let devices = Device::open_all()?;
        if devices.iter().any(|device| device.name() == name) {
            return Ok(());
        }
        if devices.is_empty() {
            return Err(RdmaError::NoDevice);
        }
        let there: Vec<_> = devices.iter().map(|device| device.name()).collect();
        Err(RdmaError::UnknownDevice {
            wanted: name.clone(),
            there: there.join(", "),
        })
    }
}

/// The port and the address to use.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Route {
    /// The device.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// The place of `gid` in the port's table.
    pub gid_index: u8,
    /// The address.
    pub gid: Gid,
    /// The network.
    pub link: LinkLayer,
    /// The port's local identifier.
    pub lid: u16,
    /// The largest payload of a packet.
    pub mtu: Mtu,
}

impl Route {
    /// Chooses among `ports` for a peer that is reached from the address `local`.
    ///
    /// An Ethernet port has to have that address, of version 2 of RoCE if there is one. The
    /// address of a peer on InfiniBand may belong to another network; any active port is taken.
    /// A port of the device that was named is taken with its first address even so.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn choose(
        ports: &[PortSummary],
        choice: &DeviceChoice,
        local: IpAddr,
    ) -> Result<Self, RdmaError> {
        let named = match choice {
            DeviceChoice::None => return Err(RdmaError::NoDevice),
            DeviceChoice::Automatic => None,
            DeviceChoice::Named(name) => Some(name),
        };
        if ports.is_empty() {
            return Err(RdmaError::NoDevice);
        }
        let candidates: Vec<&PortSummary> = ports
            .iter()
            .filter(|port| named.is_none_or(|name| *name == port.device))
            .collect();
        if candidates.is_empty() {
            let mut there: Vec<_> = ports.iter().map(|port| port.device.as_str()).collect();
            there.dedup();
            return Err(RdmaError::UnknownDevice {
                wanted: named.cloned().unwrap_or_default(),
                there: there.join(", "),
            });
        }
        let usable = || candidates.iter().filter(|port| port.active && port.usable);
        let wanted = Gid::from_ip(local.to_canonical());
        let ethernet = |kind, any: bool| {
            usable()
                .filter(|port| port.link == LinkLayer::Ethernet)
                .find_map(|port| {
                    let mut gids = port.gids.iter();
                    let entry = gids.find(|gid| gid.kind == kind && (any || gid.gid == wanted))?;
                    Some(Self::over(port, entry))
                })
        };
        let infiniband = || {
            let mut ports = usable().filter(|port| port.link == LinkLayer::InfiniBand);
            ports.find_map(|port| Some(Self::over(port, port.gids.first()?)))
        };
        ethernet(GidKind::RoceV2, false)
            .or_else(|| ethernet(GidKind::RoceV1, false))
            .or_else(infiniband)
            .or_else(|| named.and_then(|_| ethernet(GidKind::RoceV2, true)))
            .ok_or_else(|| {
                let seen: Vec<_> = candidates.iter().map(ToString::to_string).collect();
                RdmaError::NoRoute {
                    address: local,
                    seen: seen.join("; "),
                }
            })
    }

    fn over(port: &PortSummary, entry: &GidEntry) -> Self {
        Self {
            device: port.device.clone(),
            port: port.port,
            gid_index: entry.index,
            gid: entry.gid,
            link: port.link,
            lid: port.lid,
            mtu: port.mtu,
        }
    }
}

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
    pages_on_demand: bool,
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
            // SAFETY: the context is open.
            pages_on_demand: unsafe { on_demand::is_offered(context.as_ptr()) },
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

    /// Whether memory can be registered without being pinned.
    pub(crate) fn pages_on_demand(&self) -> bool {
        self.pages_on_demand
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
