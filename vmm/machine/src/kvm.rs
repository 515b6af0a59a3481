//! Creates virtual machines in KVM, and wraps the parts of KVM's interface to vCPUs for which
//! kvm-ioctls has no safe calls. vCPUs and interrupt controllers are built on this module, which
//! therefore uses neither.

use std::io;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use kvm_bindings::{
    KVM_API_VERSION, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET,
    KVMIO, Msrs, kvm_device_attr, kvm_interrupt, kvm_msr_entry, kvm_run,
    kvm_userspace_memory_region, kvm_x86_mce,
};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};

use crate::error::MachineError;
use crate::layout;

/// When KVM takes longer than this to register the guest's memory, a warning gives the reason. The
/// time grows with the memory: KVM prepares tables for all of it.
const MAP_TIME_USUAL: Duration = Duration::from_secs(1);

/// Opens KVM and checks its version and the capabilities that every machine needs.
pub(crate) fn open_kvm() -> Result<Kvm, MachineError> {
    let kvm = Kvm::new().map_err(MachineError::open_kvm)?;
    let found = kvm.get_api_version();
    if u32::try_from(found) != Ok(KVM_API_VERSION) {
        return Err(MachineError::KvmVersion { found });
    }
    for (capability, name) in [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    ] {
        if !kvm.check_extension(capability) {
            return Err(MachineError::KvmCapability { name });
        }
    }
    Ok(kvm)
}

/// Creates a virtual machine without memory and CPUs.
pub(crate) fn create_vm(kvm: &Kvm) -> Result<VmFd, MachineError> {
    let vm = loop {
        match kvm.create_vm() {
            // A signal interrupted KVM while it waited for a lock.
            Err(error) if error.errno() == libc::EINTR => {}
            result => break result.map_err(MachineError::kvm("create a virtual machine"))?,
        }
    };
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP_START)
        .map_err(MachineError::kvm("place its identity map"))?;
    vm.set_tss_address(layout::KVM_TSS_START)
        .map_err(MachineError::kvm("place its task state"))?;
    Ok(vm)
}

/// Maps each region of `memory` into the VM, in a slot of its own.
pub(crate) fn map_memory(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), MachineError> {
    let started = Instant::now();
    for (slot, region) in (0..).zip(memory.iter()) {
        let host_address = region.as_ptr();
        let mapping = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: host_address.expose_provenance() as u64,
        };
        // SAFETY: the range is that of a live mapping, of which `memory` owns `memory_size`
        // bytes. It stays mapped while the VM can run: `Shared` holds both the memory and the
        // VM, closes the VM first, and is held by every vCPU thread. Slots are distinct, and
        // the guest addresses were checked not to overlap.
        unsafe { vm.set_user_memory_region(mapping) }.map_err(|error| MachineError::MapMemory {
            address: region.start_addr().0,
            bytes: region.len(),
            source: error.into(),
        })?;
    }
    let time = started.elapsed();
    if time > MAP_TIME_USUAL {
        tracing::warn!(
            "KVM took {:.1} s to register the guest's memory; the time grows with --memory",
            time.as_secs_f64()
        );
    }
    tracing::debug!(?time, "KVM has registered the guest's memory");
    Ok(())
}

ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, kvm_interrupt);
ioctl_ior_nr!(KVM_X86_GET_MCE_CAP_SUPPORTED, KVMIO, 0x9d, u64);
ioctl_iow_nr!(KVM_X86_SETUP_MCE, KVMIO, 0x9c, u64);
ioctl_iow_nr!(KVM_X86_SET_MCE, KVMIO, 0x9e, kvm_x86_mce);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// Queues an external interrupt, which the vCPU takes when it enters the guest.
pub(crate) fn interrupt(vcpu: &VcpuFd, vector: u8) -> io::Result<()> {
    let interrupt = kvm_interrupt { irq: vector.into() };
    // SAFETY: the descriptor is that of a vCPU, and the kernel reads one `kvm_interrupt`, which
    // lives through the call.
    match unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT(), &interrupt) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns which machine checks KVM delivers: the value of MCG_CAP with everything.
pub(crate) fn machine_check_capabilities(kvm: &Kvm) -> io::Result<u64> {
    let mut capabilities = 0;
    // SAFETY: the descriptor is that of KVM, which writes a u64, which lives through the call.
    match unsafe { ioctl_with_mut_ref(kvm, KVM_X86_GET_MCE_CAP_SUPPORTED(), &mut capabilities) } {
        0 => Ok(capabilities),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets a vCPU's MCG_CAP.
pub(crate) fn set_up_machine_checks(vcpu: &VcpuFd, capabilities: u64) -> io::Result<()> {
    // SAFETY: the descriptor is that of a vCPU; the kernel reads a u64, which lives through the
    // call.
    match unsafe { ioctl_with_ref(vcpu, KVM_X86_SETUP_MCE(), &capabilities) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Queues a machine check, which the vCPU takes when it enters the guest.
pub(crate) fn machine_check(vcpu: &VcpuFd, error: &kvm_x86_mce) -> io::Result<()> {
    // SAFETY: the descriptor is that of a vCPU; the kernel reads one `kvm_x86_mce`, which lives
    // through the call.
    match unsafe { ioctl_with_ref(vcpu, KVM_X86_SET_MCE(), error) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets a model-specific register of a vCPU.
pub(crate) fn set_register(vcpu: &VcpuFd, index: u32, data: u64) -> io::Result<()> {
    let entry = kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let registers = Msrs::from_entries(&[entry]);
    let registers = registers.map_err(|error| io::Error::other(format!("{error:?}")))?;
    match vcpu.set_msrs(&registers) {
        Ok(1) => Ok(()),
        // KVM sets those before the first that it refuses.
        Ok(_) => Err(io::ErrorKind::Unsupported.into()),
        Err(error) => Err(error.into()),
    }
}

fn tsc_offset_attribute(value: *mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: value.expose_provenance() as u64,
        flags: 0,
    }
}

/// Returns the offset of a vCPU's time stamp counter from the host's.
pub(crate) fn tsc_offset(vcpu: &VcpuFd) -> io::Result<u64> {
    let mut offset = 0;
    let attribute = tsc_offset_attribute(&raw mut offset);
    // SAFETY: the descriptor is that of a vCPU. The kernel reads one `kvm_device_attr`, and writes
    // 8 bytes at the address in it, which is that of `offset`; both outlive the call.
    match unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) } {
        0 => Ok(offset),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the offset of a vCPU's time stamp counter from the host's.
pub(crate) fn set_tsc_offset(vcpu: &VcpuFd, mut offset: u64) -> io::Result<()> {
    let attribute = tsc_offset_attribute(&raw mut offset);
    // SAFETY: the descriptor is that of a vCPU. The kernel reads one `kvm_device_attr`, and 8 bytes
    // at the address in it, which is that of `offset`; both outlive the call.
    match unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Enters the guest until an exit. Returns the exit, and the fields of `kvm_run` that the exit does
/// not contain.
pub(crate) fn enter(
    vcpu: &mut VcpuFd,
) -> (Result<VcpuExit<'_>, kvm_ioctls::Error>, ExitFields<'_>) {
    let fields = ExitFields {
        run: vcpu.get_kvm_run(),
        vcpu: PhantomData,
    };
    (vcpu.run(), fields)
}

/// Fields of `kvm_run` after an exit of the guest. They borrow the vCPU, so that it cannot enter
/// the guest again meanwhile.
#[derive(Debug)]
pub(crate) struct ExitFields<'a> {
    run: *const kvm_run,
    vcpu: PhantomData<&'a mut VcpuFd>,
}

/// State of a vCPU that KVM reports at each exit, also at exits by a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AtExit {
    pub apic_base: u64,
    pub cr8: u64,
    pub interrupts_enabled: bool,
    pub ready_for_interrupt: bool,
}

impl ExitFields<'_> {
    /// Returns the state that KVM reports at each exit.
    pub fn at_exit(&self) -> AtExit {
        // SAFETY: `run` points to the mapped `kvm_run` of a vCPU that is borrowed, and so neither
        // closed nor in the guest: nothing writes it. Any value of these fields is valid. They are
        // outside the union, parts of which the exit borrows.
        unsafe {
            AtExit {
                apic_base: (&raw const (*self.run).apic_base).read(),
                cr8: (&raw const (*self.run).cr8).read(),
                interrupts_enabled: (&raw const (*self.run).if_flag).read() != 0,
                ready_for_interrupt: (&raw const (*self.run).ready_for_interrupt_injection).read()
                    != 0,
            }
        }
    }

    fn exited_by(&self, reason: u32) -> bool {
        // SAFETY: as in `at_exit`.
        let found = unsafe { (&raw const (*self.run).exit_reason).read() };
        found == reason
    }

    /// Returns the number of bytes of one item of the port access by which the vCPU exited. A
    /// string instruction exits once with several items for the same port.
    pub fn port_item_bytes(&self) -> usize {
        if !self.exited_by(KVM_EXIT_IO) {
            return 1;
        }
        // SAFETY: as in `at_exit`. KVM_EXIT_IO fills this member of the union, of which the exit
        // borrows nothing: its data are behind the structure.
        let size = unsafe { (&raw const (*self.run).__bindgen_anon_1.io.size).read() };
        usize::from(size.max(1))
    }

    /// Returns the number of the internal error by which the vCPU exited (linux/kvm.h,
    /// `KVM_INTERNAL_ERROR_*`).
    pub fn internal_error(&self) -> Option<u32> {
        if !self.exited_by(KVM_EXIT_INTERNAL_ERROR) {
            return None;
        }
        // SAFETY: as in `at_exit`. KVM_EXIT_INTERNAL_ERROR fills this member of the union, and the
        // exit borrows nothing.
        Some(unsafe { (&raw const (*self.run).__bindgen_anon_1.internal.suberror).read() })
    }
}
