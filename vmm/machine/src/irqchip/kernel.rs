//! Interrupt controllers in KVM.

use std::sync::Arc;

use devices::{EventFdTrigger, InterruptLine};
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_lapic_state, kvm_pit_config};
use kvm_ioctls::{Cap, VcpuFd, VmFd};

use crate::error::MachineError;

/// Offsets of local vector table entries (Intel SDM volume 3A, table 11-1).
const LAPIC_LVT_LINT0: usize = 0x350;
const LAPIC_LVT_LINT1: usize = 0x360;
/// Delivery modes in bits 10:8 of those entries.
const DELIVERY_MODE_MASK: u32 = 0x700;
const DELIVERY_MODE_EXTINT: u32 = 0x700;
const DELIVERY_MODE_NMI: u32 = 0x400;

/// Creates the controllers and the 8254 timer.
pub(super) fn create(vm: &VmFd) -> Result<(), MachineError> {
    for (capability, name) in [
        (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
        (Cap::Pit2, "KVM_CAP_PIT2"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
    ] {
        if !vm.check_extension(capability) {
            return Err(MachineError::KvmCapability { name });
        }
    }
    vm.create_irq_chip()
        .map_err(MachineError::kvm("create the interrupt controllers"))?;
    vm.create_pit2(kvm_pit_config {
        // The dummy speaker answers port 0x61, which kernels use to calibrate their clocks.
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    })
    .map_err(MachineError::kvm("create the timer"))
}

pub(super) fn has_tsc_deadline(vm: &VmFd) -> bool {
    vm.check_extension(Cap::TscDeadlineTimer)
}

pub(super) fn connect(vm: &VmFd, line: &EventFdTrigger, irq: u32) -> Result<(), MachineError> {
    vm.register_irqfd(line.event_fd(), irq)
        .map_err(MachineError::kvm("connect an interrupt"))
}

pub(super) fn line(vm: &Arc<VmFd>, irq: u32) -> Arc<dyn InterruptLine> {
    Arc::new(KernelLine {
        vm: Arc::clone(vm),
        irq,
    })
}

pub(super) fn set_up_cpu(vcpu: &VcpuFd) -> Result<(), MachineError> {
    let mut lapic = vcpu
        .get_lapic()
        .map_err(MachineError::kvm("read the local interrupt controller"))?;
    set_delivery_mode(&mut lapic, LAPIC_LVT_LINT0, DELIVERY_MODE_EXTINT);
    set_delivery_mode(&mut lapic, LAPIC_LVT_LINT1, DELIVERY_MODE_NMI);
    vcpu.set_lapic(&lapic)
        .map_err(MachineError::kvm("set the local interrupt controller"))
}

/// An input of KVM's controllers.
#[derive(Debug)]
struct KernelLine {
    vm: Arc<VmFd>,
    irq: u32,
}

impl InterruptLine for KernelLine {
    fn set(&self, raised: bool) {
        if let Err(error) = self.vm.set_irq_line(self.irq, raised) {
            let error = std::io::Error::from(error);
            tracing::warn!(%error, irq = self.irq, "an interrupt does not reach the guest");
        }
    }
}

/// Replaces the delivery mode of the 32-bit register at `offset`.
fn set_delivery_mode(lapic: &mut kvm_lapic_state, offset: usize, mode: u32) {
    let register = &mut lapic.regs[offset..offset + 4];
    let mut bytes = [0; 4];
    for (byte, value) in bytes.iter_mut().zip(register.iter()) {
        *byte = value.cast_unsigned();
    }
    let value = (u32::from_le_bytes(bytes) & !DELIVERY_MODE_MASK) | mode;
    for (byte, value) in register.iter_mut().zip(value.to_le_bytes()) {
        *byte = value.cast_signed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delivery_mode_replaces_only_its_bits() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[LAPIC_LVT_LINT0..LAPIC_LVT_LINT0 + 4].copy_from_slice(&[-1, -1, -1, -1]);
        set_delivery_mode(&mut lapic, LAPIC_LVT_LINT0, DELIVERY_MODE_NMI);
        let register: Vec<u8> = lapic.regs[LAPIC_LVT_LINT0..LAPIC_LVT_LINT0 + 4]
            .iter()
            .map(|byte| byte.cast_unsigned())
            .collect();
        assert_eq!(register, [0xff, 0xfc, 0xff, 0xff]);
    }
}
