//! Errors that prevent a machine from being built or from running.

use std::io;
use std::path::PathBuf;

use devices::BusError;
use ssi_hv_nodes::{LinkError, NodeNumber};
use thiserror::Error;

use crate::boot::kernel_error::KernelError;
use crate::layout::{DEVICE_HOLE_START, MEMORY_BYTES_MIN, PAGE_BYTES};
use crate::limits::{KVM_PATH, VCPUS_MAX};
use crate::vcpu::state_error::StateError;

/// Why a machine cannot be built, or had to stop because of an error of the host. A crash of the
/// guest is not an error but an [`Outcome`](crate::Outcome).
#[derive(Debug, Error)]
pub enum MachineError {
    /// The KVM device does not exist.
    #[error(
        "{KVM_PATH} is not there: load the kvm_intel or kvm_amd module, and switch on \
         virtualisation in the firmware"
    )]
    KvmMissing,
    /// The user may not open the KVM device.
    #[error(
        "permission denied on {KVM_PATH}: add the user to the group kvm (`sudo usermod -aG kvm \
         $USER`, then log in again), or run as root"
    )]
    KvmPermission,
    /// The KVM device cannot be opened for another reason.
    #[error("cannot open {KVM_PATH}")]
    KvmOpen(#[source] io::Error),
    /// KVM reports another version of its interface than 12, the only one since Linux 2.6.22.
    #[error("kvm has API version {found}, 12 is needed: use a Linux kernel of 2.6.22 or newer")]
    KvmVersion {
        /// The version that KVM reports.
        found: i32,
    },
    /// KVM lacks a required capability.
    #[error("kvm on this host lacks {name}: use a newer Linux kernel")]
    KvmCapability {
        /// Name of the capability in linux/kvm.h.
        name: &'static str,
    },
    /// A call to KVM failed.
    #[error("kvm cannot {action}")]
    Kvm {
        /// The requested action.
        action: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A guest could not survive the loss of memory.
    #[error(
        "kvm on this host lacks {what}, which a guest needs to survive the loss of memory; use \
         --on-lost-memory end, or a newer Linux kernel"
    )]
    MachineCheck {
        /// What it lacks.
        what: &'static str,
    },
    /// A device was in the middle of an access to a page when the page was lost, or its rings are.
    #[error(
        "a device used a page that was lost with a donor, in the middle of a request or in its rings"
    )]
    LostPageUsed,
    /// The guest used lost memory, and its kernel has not enabled machine checks.
    #[error(
        "the guest used memory at {page:#x} that was lost with a donor, and its kernel does not handle \
         machine checks (CONFIG_X86_MCE, which Debian's cloud kernels lack); boot a kernel that does, or use --replicas 2"
    )]
    NoMachineChecks {
        /// Guest-physical address of the page.
        page: u64,
    },
    /// KVM refused a range of guest memory.
    #[error("kvm cannot map the {bytes} bytes of guest memory at {address:#x}")]
    MapMemory {
        /// Guest-physical address of the range.
        address: u64,
        /// Length of the range.
        bytes: u64,
        /// KVM's error.
        #[source]
        source: io::Error,
    },
    /// No CPUs were requested.
    #[error("no vCPUs: 0 asked, at least 1 is needed; raise --cpus")]
    NoCpus,
    /// More CPUs were requested than a machine or the host can have.
    #[error("too many vCPUs: {asked} asked, {limit} is the limit; lower --cpus")]
    TooManyCpus {
        /// The requested number.
        asked: u32,
        /// The lower of the monitor's limit and the host's.
        limit: u32,
    },
    /// More virtio devices were requested than there are slots.
    #[error(
        "too many virtio devices: {asked} asked, {limit} is the limit, for each has an interrupt of \
         its own; remove a device"
    )]
    TooManyDevices {
        /// The requested number.
        asked: usize,
        /// The number of slots.
        limit: usize,
    },
    /// The memory is not a whole number of pages.
    #[error("guest memory of {bytes} bytes is not a multiple of the page size, {PAGE_BYTES} bytes")]
    MemoryNotPages {
        /// Bytes of all regions.
        bytes: u64,
    },
    /// The memory cannot hold the boot structures.
    #[error(
        "guest memory of {bytes} bytes is too small: {MEMORY_BYTES_MIN} bytes is the least; raise \
         --memory"
    )]
    MemoryTooSmall {
        /// Bytes of all regions.
        bytes: u64,
    },
    /// The host's CPU has too few address bits for the memory.
    #[error(
        "guest memory of {bytes} bytes is too large: this host's CPU has {bits} bits of physical \
         address, {limit} bytes is the most; lower --memory"
    )]
    MemoryTooLarge {
        /// Bytes of all regions.
        bytes: u64,
        /// Bits of a physical address.
        bits: u32,
        /// The limit in bytes.
        limit: u64,
    },
    /// The host's CPU has too few address bits for memory that may be added.
    #[error(
        "memory that may be added ends at {end:#x}: this host's CPU has {bits} bits of physical \
         address; lower --hotplug-memory"
    )]
    HotplugTooFar {
        /// The end of that memory.
        end: u64,
        /// Bits of a physical address.
        bits: u32,
    },
    /// The regions differ from those of `guest_memory_ranges`.
    #[error(
        "the regions of the {bytes} bytes of guest memory are wrong: one from 0 up to at most \
         {DEVICE_HOLE_START:#x} and one from 4 GiB with the rest are needed"
    )]
    MemoryRegions {
        /// Bytes of all regions.
        bytes: u64,
    },
    /// The kernel image cannot be loaded.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The initrd cannot be read.
    #[error("cannot read the initrd {}", path.display())]
    InitrdRead {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The initrd is empty.
    #[error("initrd {} is empty: give a cpio archive, or omit --initrd", path.display())]
    InitrdEmpty {
        /// The file.
        path: PathBuf,
    },
    /// The initrd does not fit between the kernel and the end of memory below the hole.
    #[error(
        "initrd {} is {bytes} bytes, larger than the {room} bytes of guest memory left below \
         3 GiB after the kernel; raise --memory",
        path.display()
    )]
    InitrdTooLarge {
        /// The file.
        path: PathBuf,
        /// Size of the file.
        bytes: u64,
        /// Available bytes.
        room: u64,
    },
    /// The command line exceeds the kernel's limit.
    #[error(
        "the kernel command line has {bytes} bytes, {limit} is the limit of this kernel; shorten \
         --cmdline"
    )]
    CmdlineTooLong {
        /// Its length, without the terminating zero.
        bytes: u64,
        /// The kernel's limit.
        limit: u64,
    },
    /// The command line contains a byte that is not printable ASCII.
    #[error(
        "the kernel command line has the byte {byte:#04x} at position {position}: only printable \
         ASCII can be given"
    )]
    CmdlineByte {
        /// The first such byte.
        byte: u8,
        /// Its position, from 0.
        position: usize,
    },
    /// The ACPI tables do not fit in their area.
    #[error("the ACPI tables have {bytes} bytes, there is room for {limit}; lower --cpus")]
    AcpiTooLarge {
        /// Bytes of all tables.
        bytes: u64,
        /// Available bytes.
        limit: u64,
    },
    /// A boot structure cannot be written into guest memory.
    #[error("cannot write the {what} into guest memory")]
    WriteMemory {
        /// Name of the structure.
        what: &'static str,
        /// The cause.
        #[source]
        source: vm_memory::GuestMemoryError,
    },
    /// Two devices claim the same address.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// A descriptor, a thread or a signal handler cannot be created.
    #[error("cannot {action}")]
    Host {
        /// The requested action.
        action: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The event loop of the devices failed.
    #[error("the device loop failed")]
    EventLoop(#[source] event_manager::Error),
    /// The host could not run a vCPU: guest memory that cannot be accessed, or a bug in KVM.
    #[error("kvm cannot go on with vCPU {vcpu} at rip {rip:#x}")]
    VcpuRun {
        /// Index of the vCPU.
        vcpu: usize,
        /// Its instruction pointer, or 0 when it cannot be read.
        rip: u64,
        /// KVM's error.
        #[source]
        source: io::Error,
    },
    /// The thread of a vCPU cannot be pinned.
    #[error(
        "the thread of vCPU {vcpu} cannot be pinned to CPU {cpu} of this host; name CPUs in \
         --cpu-pinning that are there and allowed"
    )]
    Pinning {
        /// Index of the vCPU.
        vcpu: usize,
        /// The CPU of the host.
        cpu: u32,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// A halted vCPU cannot stay in the guest.
    #[error("--dedicated-cpus cannot be used: {reason}; omit it")]
    DedicatedCpus {
        /// What prevents it.
        reason: String,
    },
    /// The connection to another node has ended.
    #[error(transparent)]
    NodeLost(#[from] LinkError),
    /// Another node of the machine has failed.
    #[error("node {node} cannot go on: {reason}")]
    NodeFailed {
        /// The node.
        node: NodeNumber,
        /// The reason that the node gave.
        reason: String,
    },
    /// Another node of the machine has lost a third one.
    #[error("{reason}, as node {by} reports")]
    PeerLost {
        /// The node that is lost.
        node: NodeNumber,
        /// The node that has lost it.
        by: NodeNumber,
        /// How it was lost.
        reason: String,
    },
    /// The configurations of the machine's nodes contradict each other.
    #[error("the nodes of the machine are wrong: {reason}")]
    Nodes {
        /// The contradiction.
        reason: String,
    },
    /// A vCPU cannot continue on this node.
    #[error("the state in which vCPU {cpu} came from another node cannot be used")]
    VcpuState {
        /// The vCPU.
        cpu: u8,
        /// The reason.
        #[source]
        source: StateError,
    },
    /// The protocol of the nodes' shared memory has failed.
    #[error("the memory of the guest is lost: {reason}")]
    SharedMemory {
        /// The node that is lost or broke the protocol, if it is that.
        node: Option<NodeNumber>,
        /// The failure.
        reason: String,
    },
    /// Guest memory is lost with a donor of another node.
    #[error("{reason}")]
    DonorLost {
        /// The donor, and why.
        reason: String,
    },
    /// The thread of a virtio device panicked: a bug in the monitor.
    #[error("the thread of the virtio device {device} panicked; this is a bug in ssi-hv")]
    DevicePanicked {
        /// Name of the device.
        device: String,
    },
    /// The thread of a vCPU panicked: a bug in the monitor.
    #[error("the thread of vCPU {vcpu} panicked; this is a bug in ssi-hv")]
    VcpuPanicked {
        /// Index of the vCPU.
        vcpu: usize,
    },
}

impl MachineError {
    /// Returns the other node of the machine that is the cause, if one is.
    #[must_use]
    pub fn node(&self) -> Option<NodeNumber> {
        match self {
            Self::NodeLost(error) => Some(error.peer()),
            Self::NodeFailed { node, .. } | Self::PeerLost { node, .. } => Some(*node),
            Self::SharedMemory { node, .. } => *node,
            _ => None,
        }
    }

    /// Returns a function that converts the error of a KVM call.
    pub(crate) fn kvm(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Kvm {
            action,
            source: error.into(),
        }
    }

    /// Returns a function that converts the error of a system call.
    pub(crate) fn host(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Host { action, source }
    }

    /// Converts the error of opening the KVM device.
    pub(crate) fn open_kvm(error: kvm_ioctls::Error) -> Self {
        match error.errno() {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => Self::KvmMissing,
            libc::EACCES | libc::EPERM => Self::KvmPermission,
            _ => Self::KvmOpen(error.into()),
        }
    }

    /// Checks a number of CPUs against the monitor's limit and the host's.
    pub(crate) fn check_cpus(asked: u32, host_limit: u32) -> Result<(), Self> {
        let limit = u32::from(VCPUS_MAX).min(host_limit);
        match asked {
            0 => Err(Self::NoCpus),
            _ if asked > limit => Err(Self::TooManyCpus { asked, limit }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_cpus_is_in_the_error() {
        let text = MachineError::check_cpus(300, 1024).unwrap_err().to_string();
        assert!(text.contains("300 asked, 254 is the limit"), "{text}");
        let text = MachineError::check_cpus(9, 8).unwrap_err().to_string();
        assert!(text.contains("9 asked, 8 is the limit"), "{text}");
        assert!(MachineError::check_cpus(0, 8).is_err());
        assert!(MachineError::check_cpus(254, 1024).is_ok());
    }

    #[test]
    fn a_missing_device_and_a_missing_permission_are_told_apart() {
        let of = |errno| MachineError::open_kvm(kvm_ioctls::Error::new(errno));
        assert!(matches!(of(libc::ENOENT), MachineError::KvmMissing));
        assert!(matches!(of(libc::EACCES), MachineError::KvmPermission));
        assert!(matches!(of(libc::EMFILE), MachineError::KvmOpen(_)));
    }
}
