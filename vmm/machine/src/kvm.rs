//! The calls by which a machine is made of KVM.

use std::time::{Duration, Instant};

use kvm_bindings::{CpuId, KVM_API_VERSION, kvm_cpuid_entry2, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::MachineError;
use crate::irqchip::InterruptController;
use crate::layout;
use crate::vcpu::Vcpu;
use crate::vcpu::regs;

/// When KVM takes longer than this to register the guest's memory, a warning gives the reason. The
/// time grows with the memory: KVM prepares tables for all of it.
const MAP_TIME_USUAL: Duration = Duration::from_secs(1);

/// Opens KVM, and checks that it has what every machine needs.
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
            // A signal came while KVM waited for its locks.
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

/// Maps each region of `memory` into the VM, one slot a region.
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
            "KVM took {:.1} s to take the guest's memory, a time that grows with --memory",
            time.as_secs_f64()
        );
    }
    tracing::debug!(?time, "KVM has the guest's memory");
    Ok(())
}

/// Creates the vCPU with number `id`, in the state in which firmware leaves a CPU.
pub(crate) fn create_vcpu(
    vm: &VmFd,
    interrupts: &InterruptController,
    id: u8,
    cpuid: &[kvm_cpuid_entry2],
) -> Result<Vcpu, MachineError> {
    let fd = vm
        .create_vcpu(u64::from(id))
        .map_err(MachineError::kvm("create a vCPU"))?;
    let cpuid = CpuId::from_entries(cpuid).map_err(|error| MachineError::Kvm {
        action: "take so many CPU features",
        source: std::io::Error::other(format!("{error:?}")),
    })?;
    fd.set_cpuid2(&cpuid)
        .map_err(MachineError::kvm("set the CPU features"))?;
    regs::set_firmware_state(&fd)?;
    let local = interrupts.set_up_cpu(&fd, id, cpuid.as_slice())?;
    Ok(Vcpu {
        index: usize::from(id),
        pinned_to: None,
        fd,
        local,
    })
}
