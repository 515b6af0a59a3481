//! The time stamp counter of a vCPU.

use kvm_ioctls::{Cap, Kvm, VcpuFd};

use crate::error::MachineError;
use crate::kvm::{create_vm, open_kvm, set_tsc_offset, tsc_offset};

/// Returns the rate, in kHz, that KVM gives the time stamp counters of this host's VMs: the host's
/// own. KVM reports it for a vCPU, so one is made and dropped.
///
/// # Errors
///
/// When KVM cannot be used.
pub fn tsc_khz() -> Result<u32, MachineError> {
    Clock::of_new(&open_kvm()?).map(|clock| clock.khz)
}

/// Whether KVM can give a vCPU's counter another rate than the host's.
pub(crate) fn can_scale(kvm: &Kvm) -> bool {
    kvm.check_extension(Cap::TscControl)
}

/// Rate and offset of a vCPU's counter relative to the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Frequency in kHz.
    pub khz: u32,
    /// Offset added to the host's counter, at the guest's rate.
    pub offset: u64,
}

impl Clock {
    /// The clock that KVM gives a new vCPU, whose counter begins at 0 now.
    pub fn of_new(kvm: &Kvm) -> Result<Self, MachineError> {
        let vm = create_vm(kvm)?;
        let vcpu = vm.create_vcpu(0);
        let vcpu = vcpu.map_err(MachineError::kvm("create a vCPU"))?;
        Self::of(&vcpu)
    }

    /// Reads the clock of a vCPU.
    pub fn of(vcpu: &VcpuFd) -> Result<Self, MachineError> {
        let khz = vcpu.get_tsc_khz().map_err(MachineError::kvm(
            "report the rate of the time stamp counter",
        ))?;
        let action = "report the offset of the time stamp counter";
        let offset = tsc_offset(vcpu).map_err(|source| MachineError::Kvm { action, source })?;
        Ok(Self { khz, offset })
    }

    /// This clock with `ticks` more.
    pub fn moved_by(self, ticks: u64) -> Self {
        Self {
            offset: self.offset.wrapping_add(ticks),
            ..self
        }
    }

    /// Sets the clock of a vCPU, but its rate only if KVM `scales` it: without that the counter has the
    /// rate of the host, which may be said to be slightly different.
    pub fn set(self, vcpu: &VcpuFd, scales: bool) -> Result<(), MachineError> {
        let action = "set the rate of the time stamp counter";
        if scales && vcpu.get_tsc_khz().map_err(MachineError::kvm(action))? != self.khz {
            vcpu.set_tsc_khz(self.khz)
                .map_err(MachineError::kvm(action))?;
        }
        set_offset(vcpu, self.offset)
    }
}

/// Adds ticks to the counter of a vCPU that is not in the guest.
pub(crate) fn add_ticks(vcpu: &VcpuFd, ticks: u64) -> Result<(), MachineError> {
    set_offset(vcpu, Clock::of(vcpu)?.offset.wrapping_add(ticks))
}

fn set_offset(vcpu: &VcpuFd, offset: u64) -> Result<(), MachineError> {
    let action = "set the offset of the time stamp counter";
    set_tsc_offset(vcpu, offset).map_err(|source| MachineError::Kvm { action, source })
}
