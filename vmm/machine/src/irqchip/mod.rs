//! The interrupt controllers.
//!
//! Today they are KVM's: local APIC, IOAPIC, two 8259s and the timer 8254. The machine reaches them
//! only through [`InterruptController`], so that controllers in user space, which interrupts
//! between hosts need, can take their place.

mod kernel;

use std::sync::Arc;

use devices::{EventFdTrigger, InterruptLine};
use kvm_ioctls::{VcpuFd, VmFd};

use crate::error::MachineError;

/// The interrupt controllers of a machine.
#[derive(Debug)]
pub(crate) enum InterruptController {
    /// All of them in KVM.
    Kernel,
}

impl InterruptController {
    /// Creates the controllers in KVM. Comes before the first vCPU.
    pub fn in_kernel(vm: &VmFd) -> Result<Self, MachineError> {
        kernel::create(vm)?;
        Ok(Self::Kernel)
    }

    /// Whether the timer of the local controllers can fire at a value of the TSC.
    pub fn has_tsc_deadline(&self, vm: &VmFd) -> bool {
        match self {
            Self::Kernel => kernel::has_tsc_deadline(vm),
        }
    }

    /// Makes every trigger of `line` raise ISA interrupt `irq`.
    pub fn connect(&self, vm: &VmFd, line: &EventFdTrigger, irq: u32) -> Result<(), MachineError> {
        match self {
            Self::Kernel => kernel::connect(vm, line, irq),
        }
    }

    /// The line of ISA interrupt `irq`, as one that has a level.
    pub fn line(&self, vm: &Arc<VmFd>, irq: u32) -> Arc<dyn InterruptLine> {
        match self {
            Self::Kernel => kernel::line(vm, irq),
        }
    }

    /// Sets the local controller of a CPU as firmware does: input 0 takes the interrupts of
    /// the 8259s, input 1 is the non-maskable interrupt.
    pub fn set_up_cpu(&self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        match self {
            Self::Kernel => kernel::set_up_cpu(vcpu),
        }
    }
}
