//! A virtual machine that exists for as long as the host does, and never runs.
//!
//! With the first machine and the first local APIC that is switched off, and again with the
//! last, Linux patches its own code (static keys: the scheduler's hook for vCPU threads, the
//! APIC's slow path). An emulator that translates such code while another CPU is patching it
//! may keep what it read (QEMU before 8.1: pages are locked after they were translated, not
//! before). The host then stops at a breakpoint that is no longer there, or, worse, goes on
//! without the scheduler's hook and mixes up the states of its guests. While this machine
//! exists nothing is the first nor the last, so guests come and go without a patch.

use kvm_ioctls::{Kvm, VcpuFd, VmFd};

/// Keeps the machine.
#[derive(Debug)]
pub struct Machine {
    _vcpu: VcpuFd,
    _vm: VmFd,
}

impl Machine {
    /// Makes it: one vCPU whose local APIC stays as reset leaves it, switched off.
    ///
    /// # Errors
    /// Fails where KVM does.
    pub fn new() -> Result<Self, kvm_ioctls::Error> {
        let vm = Kvm::new()?.create_vm()?;
        vm.create_irq_chip()?;
        let vcpu = vm.create_vcpu(0)?;
        Ok(Self {
            _vcpu: vcpu,
            _vm: vm,
        })
    }
}
