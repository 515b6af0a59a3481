//! The time stamp counter of a vCPU.

use kvm_ioctls::VcpuFd;

use crate::error::MachineError;
use crate::kvm::{set_tsc_offset, tsc_offset};

/// Rate and offset of a vCPU's counter relative to the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Frequency in kHz.
    pub khz: u32,
    /// Offset added to the host's counter, at the guest's rate.
    pub offset: u64,
}

impl Clock {
    /// Reads the clock of a vCPU.
    pub fn of(vcpu: &VcpuFd) -> Result<Self, MachineError> {
        let khz = vcpu.get_tsc_khz().map_err(MachineError::kvm(
            "report the rate of the time stamp counter",
        ))?;
        let action = "report the offset of the time stamp counter";
        let offset = tsc_offset(vcpu).map_err(|source| MachineError::Kvm { action, source })?;
        Ok(Self { khz, offset })
    }

    /// Sets the clock of a vCPU.
    pub fn set(self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        let action = "set the rate of the time stamp counter";
        if vcpu.get_tsc_khz().map_err(MachineError::kvm(action))? != self.khz {
            vcpu.set_tsc_khz(self.khz)
                .map_err(MachineError::kvm(action))?;
        }
        let action = "set the offset of the time stamp counter";
        set_tsc_offset(vcpu, self.offset).map_err(|source| MachineError::Kvm { action, source })
    }
}
