//! Machine checks: what a guest gets when it uses memory that is lost.
//!
//! Intel SDM volume 3B, sections 16.3 (registers), 16.9.3 (uncorrected errors that need action);
//! AMD APM volume 2, chapter 9. The guest's kernel unmaps the page, and ends the processes that
//! use it if it is theirs.

use kvm_bindings::{kvm_cpuid_entry2, kvm_x86_mce};
use kvm_ioctls::{Kvm, VcpuFd};

use super::cpuid;
use crate::error::MachineError;
use crate::kvm;

/// MCG_CAP: the number of banks, the register MCG_CTL, recovery by software, local delivery.
const BANKS: u64 = 10;
const CTL_P: u64 = 1 << 8;
const SER_P: u64 = 1 << 24;
const LMCE_P: u64 = 1 << 27;

/// MCG_STATUS: execution can restart at the instruction, which is the one that failed; a machine
/// check is in progress; and it is on this CPU only.
const RIPV: u64 = 1 << 0;
const EIPV: u64 = 1 << 1;
const MCIP: u64 = 1 << 2;
const LMCE_S: u64 = 1 << 3;

/// MCi_STATUS: valid, uncorrected, enabled, with MISC and ADDR.
const VALID: u64 = 1 << 63 | 1 << 61 | 1 << 60 | 1 << 59 | 1 << 58;
/// On Intel: signalled, action required; a data load (0x134).
const ACTION_REQUIRED: u64 = 1 << 56 | 1 << 55 | 0x134;
/// On AMD: the data were known to be bad (poison).
const POISON: u64 = 1 << 43;

/// MCi_MISC: a physical address, of which the lowest 12 bits are not valid.
const MISC: u64 = 2 << 6 | 12;

/// A bank that no processor's driver treats specially.
const BANK: u8 = 9;

/// IA32_FEATURE_CONTROL, and in it: locked, local machine checks.
const FEATURE_CONTROL: u32 = 0x3a;
const LOCKED: u64 = 1 << 0;
const LMCE_ON: u64 = 1 << 20;

/// Where a vCPU stopped that used lost memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// Before the instruction, which could be executed again.
    Before,
    /// In the instruction, which ends with arbitrary data.
    Inside,
}

/// The machine checks of a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MachineCheck {
    capabilities: u64,
    is_amd: bool,
}

impl MachineCheck {
    /// Returns what this host's KVM can deliver.
    ///
    /// # Errors
    ///
    /// When a guest could not recover from it.
    pub fn of(kvm: &Kvm, supported: &[kvm_cpuid_entry2], cpus: u8) -> Result<Self, MachineError> {
        let found = kvm::machine_check_capabilities(kvm)
            .map_err(MachineError::host("read which machine checks KVM delivers"))?;
        Self::from_capabilities(found, cpuid::is_amd(supported), cpus)
    }

    fn from_capabilities(found: u64, is_amd: bool, cpus: u8) -> Result<Self, MachineError> {
        let lacks = |what| MachineError::MachineCheck { what };
        if found & SER_P == 0 {
            return Err(lacks("machine checks that a guest survives (MCG_SER_P)"));
        }
        // On Intel, the kernel expects every CPU to get a machine check that is not local.
        let local = if is_amd { 0 } else { found & LMCE_P };
        if !is_amd && local == 0 && cpus > 1 {
            return Err(lacks("machine checks for one of several CPUs (MCG_LMCE_P)"));
        }
        Ok(Self {
            capabilities: found & CTL_P | SER_P | local | BANKS,
            is_amd,
        })
    }

    /// Prepares a vCPU that has not run yet.
    pub fn set_up(self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        kvm::set_up_machine_checks(vcpu, self.capabilities)
            .map_err(MachineError::host("set up the machine checks of a vCPU"))?;
        if self.capabilities & LMCE_P == 0 {
            return Ok(());
        }
        // As firmware does: kernels use local machine checks only then.
        kvm::set_register(vcpu, FEATURE_CONTROL, LOCKED | LMCE_ON).map_err(MachineError::host(
            "let a vCPU have machine checks of its own",
        ))
    }

    /// Shows the guest that it may continue after such an error.
    pub fn show(self, entries: &mut Vec<kvm_cpuid_entry2>) {
        if self.is_amd {
            cpuid::show_recovery(entries);
        }
    }

    /// Delivers the error at a guest-physical address to a vCPU.
    pub fn deliver(
        self,
        vcpu: &VcpuFd,
        address: u64,
        stopped: Stopped,
    ) -> Result<(), MachineError> {
        kvm::machine_check(vcpu, &self.at(address, stopped))
            .map_err(MachineError::host("deliver a machine check to a vCPU"))
    }

    fn at(self, address: u64, stopped: Stopped) -> kvm_x86_mce {
        let restart = match stopped {
            Stopped::Before => RIPV,
            Stopped::Inside => 0,
        };
        let of_vendor = if self.is_amd { POISON } else { ACTION_REQUIRED };
        let local = match self.capabilities & LMCE_P {
            0 => 0,
            _ => LMCE_S,
        };
        kvm_x86_mce {
            status: VALID | of_vendor,
            addr: address & !0xfff,
            misc: MISC,
            mcg_status: restart | EIPV | MCIP | local,
            bank: BANK,
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_could_not_survive_is_refused() {
        let all = CTL_P | SER_P | LMCE_P;
        for (found, is_amd, cpus, lacks) in [
            (all, false, 2, None),
            (CTL_P | SER_P, true, 2, None),
            (CTL_P | SER_P, false, 2, Some("MCG_LMCE_P")),
            (CTL_P | SER_P, false, 1, None),
            (CTL_P, true, 1, Some("MCG_SER_P")),
        ] {
            let result = MachineCheck::from_capabilities(found, is_amd, cpus);
            let text = result.err().map(|error| error.to_string());
            match (text, lacks) {
                (Some(text), Some(lacks)) => assert!(text.contains(lacks), "{text}"),
                (text, lacks) => assert_eq!(text.as_deref(), lacks),
            }
        }
    }

    #[test]
    fn an_error_needs_action_by_the_cpu_that_made_it() {
        let intel = MachineCheck::from_capabilities(CTL_P | SER_P | LMCE_P, false, 2);
        let amd = MachineCheck::from_capabilities(CTL_P | SER_P, true, 2);
        let (intel, amd) = (intel.unwrap(), amd.unwrap());
        assert_eq!(amd.at(0, Stopped::Inside).mcg_status, 0x6);
        let intel = intel.at(0x1234_5678, Stopped::Before);
        let amd = amd.at(0xfff, Stopped::Before);
        assert_eq!((intel.addr, amd.addr), (0x1234_5000, 0));
        assert_eq!(intel.status, 0xbd80_0000_0000_0134);
        assert_eq!(amd.status, 0xbc00_0800_0000_0000);
        assert_eq!((intel.mcg_status, amd.mcg_status), (0xf, 0x7));
        assert_eq!(intel.misc, 0x8c);
    }
}
