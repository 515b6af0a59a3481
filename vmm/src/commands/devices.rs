//! The guest's virtio devices, and what of this host they use.

use std::sync::Arc;

use anyhow::Context as _;
use devices::virtio::{
    Balloon, Block, Disk, Entropy, MacAddress, Net, Tap, VirtioDevice, Vsock, VsockSocket,
};
use memory_fabric::fabric::Fabric;
use ssi_hv::config::{RunConfig, Switch};

use super::Failure;
use super::free_memory::FreeMemory;

/// What tells this host from others (machine-id(5)), where it is there.
const MACHINE_ID_PATH: &str = "/etc/machine-id";

/// What the devices use: opened before anything is started, so that what is wrong with it is
/// told before a donor is asked.
#[derive(Debug)]
pub struct HostDevices {
    disks: Vec<Disk>,
    nets: Vec<(Tap, MacAddress)>,
    vsock: Option<Vsock>,
    /// Goes at the end of the run.
    _socket: Option<VsockSocket>,
    entropy: Option<Entropy>,
    balloon: Option<Arc<Balloon>>,
}

impl HostDevices {
    /// Opens all that a configuration names.
    pub fn open(config: &RunConfig) -> Result<Self, Failure> {
        let disks = config
            .disks
            .iter()
            .map(|disk| Disk::open(&disk.path, disk.read_only));
        let disks = disks.collect::<Result<_, _>>()?;
        let mut nets = Vec::new();
        for net in &config.nets {
            let tap = Tap::open(&net.tap)?;
            let mac = net.mac.unwrap_or_else(|| derived_address(tap.name()));
            tracing::info!("network card on the tap {} with address {mac}", tap.name());
            nets.push((tap, mac));
        }
        let vsock = match &config.vsock {
            Some(vsock) => {
                let socket = VsockSocket::listen(&vsock.path)?;
                Some((Vsock::new(vsock.cid, &socket)?, socket))
            }
            None => None,
        };
        let (vsock, socket) = vsock.unzip();
        let entropy = match config.rng {
            Switch::On => Some(Entropy::new().context(
                "cannot open /dev/urandom; mount devtmpfs on /dev, or leave the device away with --rng off",
            )?),
            Switch::Off => None,
        };
        Ok(Self {
            disks,
            nets,
            vsock,
            _socket: socket,
            entropy,
            balloon: None,
        })
    }

    /// The devices, in the order in which the guest finds them. Gives them once; what is left here
    /// is kept until the run has ended.
    pub fn for_guest(&mut self, config: &RunConfig, fabric: &Fabric) -> Vec<Arc<dyn VirtioDevice>> {
        let mut devices: Vec<Arc<dyn VirtioDevice>> = Vec::new();
        if config.balloon == Switch::On {
            let free_memory = FreeMemory(fabric.discarder());
            let balloon = Arc::new(Balloon::new(Arc::new(free_memory)));
            self.balloon = Some(Arc::clone(&balloon));
            devices.push(balloon);
        }
        if let Some(entropy) = self.entropy.take() {
            devices.push(Arc::new(entropy));
        }
        for (number, disk) in self.disks.drain(..).enumerate() {
            devices.push(Arc::new(Block::new(number, disk)));
        }
        for (number, (tap, mac)) in self.nets.drain(..).enumerate() {
            devices.push(Arc::new(Net::new(number, tap, mac)));
        }
        if let Some(vsock) = self.vsock.take() {
            devices.push(Arc::new(vsock));
        }
        devices
    }
}

impl HostDevices {
    /// The guest's balloon, if it has been given one.
    pub fn balloon(&self) -> Option<Arc<Balloon>> {
        self.balloon.clone()
    }
}

/// The address of a card for which none was given: the same at each start, since guests keep
/// settings by it, and others on other hosts and taps.
fn derived_address(tap: &str) -> MacAddress {
    let host = std::fs::read(MACHINE_ID_PATH).unwrap_or_default();
    MacAddress::derived_from(&[&host, tap.as_bytes()])
}
