//! The guest's virtio devices, and what of this host they use.

use std::sync::Arc;

use devices::virtio::{Balloon, Block, Disk, VirtioDevice};
use memory_fabric::fabric::Fabric;
use ssi_hv::config::{RunConfig, Switch};

use super::Failure;
use super::free_memory::FreeMemory;

/// What the devices use: opened before anything is started, so that what is wrong with it is
/// told before a donor is asked.
#[derive(Debug)]
pub struct HostDevices {
    disks: Vec<Disk>,
}

impl HostDevices {
    /// Opens all that a configuration names.
    pub fn open(config: &RunConfig) -> Result<Self, Failure> {
        let disks = config
            .disks
            .iter()
            .map(|disk| Disk::open(&disk.path, disk.read_only));
        Ok(Self {
            disks: disks.collect::<Result<_, _>>()?,
        })
    }

    /// The devices, in the order in which the guest finds them.
    pub fn for_guest(self, config: &RunConfig, fabric: &Fabric) -> Vec<Arc<dyn VirtioDevice>> {
        let mut devices: Vec<Arc<dyn VirtioDevice>> = Vec::new();
        if config.balloon == Switch::On {
            let free_memory = FreeMemory(fabric.discarder());
            devices.push(Arc::new(Balloon::new(Arc::new(free_memory))));
        }
        for (number, disk) in self.disks.into_iter().enumerate() {
            devices.push(Arc::new(Block::new(number, disk)));
        }
        devices
    }
}
