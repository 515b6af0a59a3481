//! What machine to build.

use std::path::PathBuf;
use std::sync::Arc;

use devices::virtio::VirtioDevice;

use crate::acpi::numa::NumaNode;
use crate::boot::initrd::Initrd;

/// Where the interrupt controllers of a machine are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Irqchip {
    /// In KVM.
    #[default]
    Kernel,
    /// In this process.
    User,
}

/// What machine to build.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// A kernel for x86-64: an ELF file (`vmlinux`) or a bzImage (`vmlinuz`).
    pub kernel: PathBuf,
    /// The archive of the first root file system, if any.
    pub initrd: Option<Initrd>,
    /// The whole command line of the kernel; see [`command_line`](crate::command_line).
    pub cmdline: String,
    /// Number of vCPUs, 1 to [`VCPUS_MAX`](crate::VCPUS_MAX).
    pub cpus: u8,
    /// CPUs of the host, one per vCPU in order: its thread is pinned there. vCPUs beyond the end of
    /// the list are not pinned.
    pub pinning: Vec<u32>,
    /// Where its interrupt controllers are.
    pub irqchip: Irqchip,
    /// How much memory may be added while it runs: that is the last region of its memory, from
    /// [`hotplug_start`](crate::hotplug_start) on, and no part of the memory map that the guest boots with.
    pub hotplug_bytes: u64,
    /// Its virtio devices; addresses and interrupts are assigned in this order.
    pub devices: Vec<Arc<dyn VirtioDevice>>,
    /// The NUMA nodes that the guest sees, the one with the CPUs first; none for a guest that sees
    /// one kind of memory.
    pub numa: Vec<NumaNode>,
}
