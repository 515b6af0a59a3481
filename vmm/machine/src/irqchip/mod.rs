//! The interrupt controllers.
//!
//! Either all are in KVM: local APICs, I/O APIC, two 8259s and the timer 8254. Or local APICs and
//! I/O APIC are in user space, without a working 8259, and with an 8254 that interrupts nothing. The
//! rest of the machine uses only [`InterruptController`].

mod kernel;
pub(crate) mod user;

use std::sync::Arc;

use devices::{
    Bus, EventFdTrigger, I8254, I8254_LEN, I8254_PORT, I8259, I8259_FIRST_PORT, I8259_LEN,
    I8259_SECOND_PORT, InterruptLine, PM_TIMER_LEN, PM_TIMER_OFFSET, PmTimer, SPEAKER_PORT,
};
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{VcpuFd, VmFd};
use ssi_hv_irqchip::IOAPIC_LEN;

use crate::config::Irqchip;
use crate::error::MachineError;
use crate::layout;
use crate::lifecycle::control::Control;
use crate::nodes::Nodes;
use crate::vcpu::cpuid;
use user::cpu::UserCpu;
use user::{UserChip, UserLine};

/// The interrupt controllers of a machine.
#[derive(Clone, Debug)]
pub(crate) enum InterruptController {
    /// All of them in KVM.
    Kernel,
    /// Local APICs and I/O APIC in this process.
    User(Arc<UserChip>),
}

impl InterruptController {
    /// Creates the controllers of a machine whose vCPUs are kicked by `control`. KVM requires this
    /// before the first vCPU.
    pub fn new(
        irqchip: Irqchip,
        vm: &VmFd,
        control: &Control,
        nodes: Option<Arc<Nodes>>,
    ) -> Result<Self, MachineError> {
        match irqchip {
            Irqchip::Kernel if nodes.is_some() => Err(MachineError::Nodes {
                reason: "KVM's interrupt controllers do not reach other hosts".to_owned(),
            }),
            Irqchip::Kernel => {
                kernel::create(vm)?;
                Ok(Self::Kernel)
            }
            Irqchip::User => {
                user::prepare(vm)?;
                Ok(Self::User(Arc::new(UserChip::new(control.kicks(), nodes))))
            }
        }
    }

    /// Adds the devices that come with these controllers to the buses.
    pub fn add_devices(&self, ports: &mut Bus, mmio: &mut Bus) -> Result<(), MachineError> {
        let Self::User(chip) = self else {
            return Ok(());
        };
        mmio.insert(
            u64::from(layout::IOAPIC_START),
            IOAPIC_LEN,
            Arc::clone(chip) as _,
        )?;
        for port in [I8259_FIRST_PORT, I8259_SECOND_PORT] {
            ports.insert(port, I8259_LEN, Arc::new(I8259::default()))?;
        }
        let timer = Arc::new(I8254::new());
        ports.insert(SPEAKER_PORT, 1, timer.speaker())?;
        ports.insert(I8254_PORT, I8254_LEN, timer)?;
        let pm_timer = u64::from(layout::PM_PORT) + PM_TIMER_OFFSET;
        ports.insert(pm_timer, PM_TIMER_LEN, Arc::new(PmTimer::new()))?;
        Ok(())
    }

    /// Returns whether the local APIC timer has the TSC-deadline mode.
    pub fn has_tsc_deadline(&self, vm: &VmFd) -> bool {
        match self {
            Self::Kernel => kernel::has_tsc_deadline(vm),
            // KVM handles the register itself and loses writes to it.
            Self::User(_) => false,
        }
    }

    /// Removes CPUID features that KVM offers but cannot provide with these controllers.
    pub fn hide_features(&self, entries: &mut Vec<kvm_cpuid_entry2>) {
        if let Self::User(_) = self {
            cpuid::hide_in_kernel_apic(entries);
        }
    }

    /// Makes each trigger of `line` raise ISA interrupt `irq`.
    pub fn connect(&self, vm: &VmFd, line: &EventFdTrigger, irq: u32) -> Result<(), MachineError> {
        match self {
            Self::Kernel => kernel::connect(vm, line, irq),
            Self::User(chip) => {
                line.connect_to(user_line(chip, irq));
                Ok(())
            }
        }
    }

    /// Returns the line of ISA interrupt `irq`, for a device that sets its level.
    pub fn line(&self, vm: &Arc<VmFd>, irq: u32) -> Arc<dyn InterruptLine> {
        match self {
            Self::Kernel => kernel::line(vm, irq),
            Self::User(chip) => user_line(chip, irq),
        }
    }

    /// Sets up the local APIC of CPU `index` as firmware does: LINT0 takes the interrupts of the
    /// 8259s, LINT1 is the NMI. Returns the local APIC if it is in user space.
    pub fn set_up_cpu(
        &self,
        vcpu: &VcpuFd,
        index: u8,
        cpuid: &[kvm_cpuid_entry2],
    ) -> Result<Option<UserCpu>, MachineError> {
        match self {
            Self::Kernel => kernel::set_up_cpu(vcpu).map(|()| None),
            Self::User(chip) => {
                let signature = cpuid.iter().find(|entry| entry.function == 1);
                let signature = signature.map_or(0, |entry| entry.eax);
                UserCpu::new(index, Arc::clone(chip), vcpu, signature).map(Some)
            }
        }
    }
}

fn user_line(chip: &Arc<UserChip>, irq: u32) -> Arc<dyn InterruptLine> {
    Arc::new(UserLine {
        chip: Arc::clone(chip),
        // Inputs have the numbers of the ISA interrupts, as KVM wires them.
        pin: usize::try_from(irq).unwrap_or(usize::MAX),
    })
}
