//! The ioctl that gives an interrupt to a vCPU.

use std::io;

use kvm_bindings::{KVMIO, kvm_interrupt};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, kvm_interrupt);

/// Queues an external interrupt, which the vCPU takes when it enters the guest.
pub(super) fn interrupt(vcpu: &VcpuFd, vector: u8) -> io::Result<()> {
    let interrupt = kvm_interrupt { irq: vector.into() };
    // SAFETY: the descriptor is that of a vCPU, and the kernel reads one `kvm_interrupt`, which
    // lives through the call.
    match unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT(), &interrupt) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
