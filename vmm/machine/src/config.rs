//! The configuration of a machine.

use std::path::PathBuf;
use std::sync::Arc;

use devices::virtio::VirtioDevice;

use crate::acpi::numa::NumaNode;
use crate::boot::initrd::Initrd;

/// Implementation of a machine's interrupt controllers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Irqchip {
    /// KVM's controllers.
    #[default]
    Kernel,
    /// Controllers in this process.
    User,
}

/// The configuration of a machine.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// A kernel for x86-64: an ELF file (`vmlinux`) or a bzImage (`vmlinuz`).
    pub kernel: PathBuf,
    /// The initial RAM disk, if any.
    pub initrd: Option<Initrd>,
    /// The kernel's complete command line; see [`command_line`](crate::command_line).
    pub cmdline: String,
    /// Number of vCPUs, 1 to [`VCPUS_MAX`](crate::VCPUS_MAX).
    pub cpus: u8,
    /// Host CPUs to which the threads of vCPUs are pinned, one per vCPU in order. vCPUs beyond the
    /// end of the list are not pinned.
    pub pinning: Vec<u32>,
    /// No other work runs on these CPUs of the host, so a halted vCPU stays in the guest. Needs the
    /// interrupt controllers of KVM.
    pub dedicated_cpus: bool,
    /// Implementation of the interrupt controllers.
    pub irqchip: Irqchip,
    /// Bytes of memory that may be added while the machine runs: the last region of the guest
    /// memory, from [`hotplug_start`](crate::hotplug_start) on, which is not in the boot memory
    /// map.
    pub hotplug_bytes: u64,
    /// Lost pages of the guest's memory are poisoned, and the guest gets a machine check when it
    /// uses one.
    pub survives_lost_memory: bool,
    /// Virtio devices; addresses and interrupts are assigned in this order.
    pub devices: Vec<Arc<dyn VirtioDevice>>,
    /// The guest's NUMA nodes, the one with the CPUs first; empty without NUMA tables.
    pub numa: Vec<NumaNode>,
}
