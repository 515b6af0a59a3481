//! The time stamp counter that a vCPU shows to the guest.

use std::io;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use crate::error::MachineError;

ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// What makes a vCPU's counter of the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// How fast it counts.
    pub khz: u32,
    /// What is added to the host's counter, at the guest's rate.
    pub offset: u64,
}

fn attribute(value: *mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: value.expose_provenance() as u64,
        flags: 0,
    }
}

impl Clock {
    /// The clock of a vCPU.
    pub fn of(vcpu: &VcpuFd) -> Result<Self, MachineError> {
        let khz = vcpu.get_tsc_khz().map_err(MachineError::kvm(
            "report the rate of the time stamp counter",
        ))?;
        let mut offset = 0;
        let attribute = attribute(&raw mut offset);
        // SAFETY: the descriptor is that of a vCPU. The kernel reads one `kvm_device_attr`, and
        // writes 8 bytes at the address in it, which is that of `offset`; both outlive the call.
        let result = unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) };
        checked(result, "report the offset of the time stamp counter")?;
        Ok(Self { khz, offset })
    }

    /// Gives a vCPU this clock.
    pub fn set(self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        let action = "set the rate of the time stamp counter";
        if vcpu.get_tsc_khz().map_err(MachineError::kvm(action))? != self.khz {
            vcpu.set_tsc_khz(self.khz)
                .map_err(MachineError::kvm(action))?;
        }
        let mut offset = self.offset;
        let attribute = attribute(&raw mut offset);
        // SAFETY: the descriptor is that of a vCPU. The kernel reads one `kvm_device_attr`, and 8
        // bytes at the address in it, which is that of `offset`; both outlive the call.
        let result = unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) };
        checked(result, "set the offset of the time stamp counter")
    }
}

fn checked(result: i32, action: &'static str) -> Result<(), MachineError> {
    if result == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    Err(MachineError::Kvm { action, source })
}
