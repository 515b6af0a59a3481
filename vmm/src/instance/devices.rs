//! The guest's virtio devices, and the host resources that they use.

use std::path::Path;
use std::sync::Arc;

use devices::virtio::{
    Balloon, Block, Console, Disk, Entropy, HostSocket, HostSocketError, MacAddress, Net,
    RateLimiter, Tap, VirtioDevice, Vsock,
};
use memory_fabric::compute::Discards;
use memory_fabric::fabric::Fabric;

use super::free_memory::FreeMemory;
use super::hotplug::{HotplugMemory, SharedRegion};
use super::run_error::RunError;
use crate::config::RunConfig;
use crate::config::rate::RateArg;
use crate::control_socket::changes::Changes;
use crate::control_socket::files::remove_with_ours;
use crate::failure::Failure;
use crate::machine::hotplug_start;

/// Identifies this host (machine-id(5)), if it exists.
const MACHINE_ID_PATH: &str = "/etc/machine-id";

/// The devices that use host resources. They are opened before anything is started, so that an
/// error is reported before a donor is contacted, and kept over restarts of the guest.
#[derive(Debug)]
pub struct HostDevices {
    devices: Vec<Arc<dyn VirtioDevice>>,
    /// Those of the devices that have limits.
    limiters: Vec<Arc<RateLimiter>>,
    /// Removed at the end of the run.
    _sockets: Vec<HostSocket>,
}

/// The devices of one boot of the guest.
#[derive(Debug)]
pub struct GuestDevices {
    /// All of them, in order.
    pub devices: Vec<Arc<dyn VirtioDevice>>,
    /// The balloon, which is also in `devices`.
    pub balloon: Option<Arc<Balloon>>,
    /// The memory device, which is also in `devices`.
    pub hotplug: Option<HotplugMemory>,
}

impl HostDevices {
    /// Opens all devices of a configuration.
    pub fn open(config: &RunConfig) -> Result<Self, Failure> {
        let mut devices: Vec<Arc<dyn VirtioDevice>> = Vec::new();
        if config.rng {
            devices.push(Arc::new(Entropy::new().map_err(RunError::host(
                "open /dev/urandom; mount devtmpfs on /dev, or omit the device with --rng off",
            ))?));
        }
        let mut limiters = Vec::new();
        for (number, given) in config.disks.iter().enumerate() {
            let disk = Disk::open(&given.path, given.read_only)?;
            if !given.raw {
                disk.check_is_raw()?;
            }
            let mut disk = Block::new(number, disk);
            if let Some(limiter) = limiter(&disk, given.rate, 1)? {
                limiters.push(Arc::clone(&limiter));
                disk = disk.limited(limiter);
            }
            devices.push(Arc::new(disk));
        }
        for (number, net) in config.nets.iter().enumerate() {
            let tap = Tap::open(&net.tap)?;
            let mac = net.mac.unwrap_or_else(|| derived_address(tap.name()));
            tracing::info!("network card on the tap {} with address {mac}", tap.name());
            let mut card = Net::new(number, tap, mac);
            if let Some(limiter) = limiter(&card, net.rate, 2)? {
                limiters.push(Arc::clone(&limiter));
                card = card.limited(limiter);
            }
            devices.push(Arc::new(card));
        }
        let mut sockets = Vec::new();
        if let Some(vsock) = &config.vsock {
            let socket = listen("vsock", &vsock.path)?;
            devices.push(Arc::new(Vsock::new(vsock.cid, &socket)?));
            sockets.push(socket);
        }
        if let Some(path) = &config.hvc {
            let socket = listen("console", path)?;
            devices.push(Arc::new(Console::new(&socket)?));
            sockets.push(socket);
        }
        Ok(Self {
            devices,
            limiters,
            _sockets: sockets,
        })
    }

    /// Returns the limiters of the devices that have limits.
    pub fn limiters(&self) -> &[Arc<RateLimiter>] {
        &self.limiters
    }

    /// Returns the devices of a guest that starts, in their order on the bus. No earlier guest uses
    /// them any more, and their state is reset. `node` is the NUMA node to which memory may be
    /// added, if the guest sees nodes; changes of added memory are reported to `hotplug_changes`.
    /// `shared` drops pages where other nodes share the guest's memory.
    pub fn for_guest(
        &self,
        config: &RunConfig,
        fabric: &Fabric,
        shared: Option<&Arc<Discards>>,
        node: Option<u16>,
        hotplug_changes: &Changes,
    ) -> GuestDevices {
        let mut devices: Vec<Arc<dyn VirtioDevice>> = Vec::new();
        let mut balloon = None;
        if config.balloon {
            let free_memory = match shared {
                None => FreeMemory::Paged(fabric.discarder()),
                Some(discards) => FreeMemory::Shared {
                    discards: Arc::clone(discards),
                    stats: Arc::clone(fabric.stats()),
                },
            };
            let device = Arc::new(Balloon::new(Arc::new(free_memory)));
            devices.push(Arc::clone(&device) as Arc<dyn VirtioDevice>);
            balloon = Some(device);
        }
        let region = shared.zip(config.hotplug_memory).map(|(discards, size)| {
            let start = hotplug_start(config.memory.bytes());
            SharedRegion::new(start, size.bytes(), Arc::clone(discards))
        });
        let hotplug = HotplugMemory::new(fabric, region, node, hotplug_changes);
        if let Some(hotplug) = &hotplug {
            devices.push(Arc::clone(&hotplug.device) as _);
        }
        for device in &self.devices {
            device.reset();
            devices.push(Arc::clone(device));
        }
        GuestDevices {
            devices,
            balloon,
            hotplug,
        }
    }
}

/// Returns the limiter of a device with this many directions, if it has limits.
fn limiter(
    device: &dyn VirtioDevice,
    rate: RateArg,
    directions: usize,
) -> Result<Option<Arc<RateLimiter>>, Failure> {
    let limits = rate.limits();
    if limits.is_empty() {
        return Ok(None);
    }
    let limiter = RateLimiter::new(device.name(), limits, directions);
    let limiter = limiter.map_err(RunError::host(
        "make a timer for the limits of a device; raise the limit of open files (ulimit -n)",
    ))?;
    Ok(Some(Arc::new(limiter)))
}

/// Listens for host programs; the socket is removed however this process ends, unless it is killed.
fn listen(what: &'static str, path: &Path) -> Result<HostSocket, HostSocketError> {
    let socket = HostSocket::listen(what, path)?;
    remove_with_ours(path.to_owned());
    Ok(socket)
}

/// Returns the default address of a network card: the same at each start, since guests associate
/// settings with it, and different for other hosts and taps.
fn derived_address(tap: &str) -> MacAddress {
    let host = std::fs::read(MACHINE_ID_PATH).unwrap_or_default();
    MacAddress::derived_from(&[&host, tap.as_bytes()])
}
