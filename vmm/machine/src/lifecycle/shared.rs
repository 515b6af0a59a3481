//! What the threads of a running machine share.

use std::sync::Arc;

use devices::virtio::{MmioTransport, VirtioDevice};
use devices::{Bus, MachineEvents};
use kvm_ioctls::VmFd;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::control::Control;
use super::kick::VcpuThread;
use crate::memory_errors::MemoryErrors;

/// State that the vCPU threads share. Each holds a reference, so that the guest's memory and
/// devices exist as long as any vCPU may access them.
#[derive(Debug)]
pub(crate) struct Shared {
    pub ports: Bus,
    pub mmio: Bus,
    pub events: MachineEvents,
    pub control: Control,
    /// The virtio devices.
    pub transports: Vec<Arc<MmioTransport>>,
    pub _vm: Arc<VmFd>,
    /// Mapped into the VM, so it is declared after the VM: fields drop in order.
    pub memory: GuestMemoryMmap,
    /// The handling of lost memory, if the machine survives that.
    pub memory_errors: Option<MemoryErrors>,
}

impl Shared {
    /// Returns whether a guest-physical address is in the guest's memory.
    pub fn is_memory(&self, address: u64) -> bool {
        self.memory.address_in_range(GuestAddress(address))
    }

    /// Returns the threads of the vCPUs of this node that run.
    pub fn vcpu_threads(&self) -> Vec<VcpuThread> {
        let kicks = (0..).zip(self.control.kicks());
        kicks.filter_map(|(cpu, kick)| kick.thread(cpu)).collect()
    }

    /// Returns whether a device is in a system call.
    pub fn devices_at_work(&self) -> bool {
        self.at_work().is_some()
    }

    /// Returns the name of such a device. Its call may have returned meanwhile.
    pub fn name_at_work(&self) -> &str {
        self.at_work().map_or("a device", |device| device.name())
    }

    fn at_work(&self) -> Option<&dyn VirtioDevice> {
        let mut devices = self.transports.iter().map(|t| &**t.device());
        devices.find(|device| device.waits_for_host())
    }
}
