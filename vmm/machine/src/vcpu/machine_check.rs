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
    pub fn of(kvm: &Kvm, supported: &[kvm_cpuid_entry2]) -> Result<Self, MachineError> {
        let found = kvm::machine_check_capabilities(kvm)
            .map_err(MachineError::host("read which machine checks KVM delivers"))?;
        Self::from_capabilities(found, cpuid::is_amd(supported))
    }

    fn from_capabilities(found: u64, is_amd: bool) -> Result<Self, MachineError> {
        let lacks = |what| MachineError::MachineCheck { what };
        if found & SER_P == 0 {
            return Err(lacks("machine checks that a guest survives (MCG_SER_P)"));
        }
        // On Intel, the kernel expects every CPU to get a machine check that is not local.
        if !is_amd && found & LMCE_P == 0 {
            return Err(lacks("machine checks for one CPU (MCG_LMCE_P)"));
        }
        let local = if is_amd { 0 } else { LMCE_P };
        Ok(Self {
            capabilities: found & CTL_P | SER_P | local | BANKS,
            is_amd,
        })
    }

    /// Prepares a vCPU that has not run yet.
    pub fn set_up(self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        kvm::set_up_machine_checks(vcpu, self.capabilities)
            .map_err(MachineError::host("set up the machine checks of a vCPU"))?;
        if self.is_amd {
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
    pub fn deliver(self, vcpu: &VcpuFd, address: u64) -> Result<(), MachineError> {
        kvm::machine_check(vcpu, &self.at(address))
            .map_err(MachineError::host("deliver a machine check to a vCPU"))
    }

    fn at(self, address: u64) -> kvm_x86_mce {
        let (of_vendor, local) = if self.is_amd {
            (POISON, 0)
        } else {
            (ACTION_REQUIRED, LMCE_S)
        };
        kvm_x86_mce {
            status: VALID | of_vendor,
            addr: address & !0xfff,
            misc: MISC,
            mcg_status: RIPV | EIPV | MCIP | local,
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
        for (found, is_amd, lacks) in [
            (all, false, None),
            (CTL_P | SER_P, true, None),
            (CTL_P | SER_P, false, Some("MCG_LMCE_P")),
            (CTL_P, true, Some("MCG_SER_P")),
        ] {
            let result = MachineCheck::from_capabilities(found, is_amd);
            let text = result.err().map(|error| error.to_string());
            match (text, lacks) {
                (Some(text), Some(lacks)) => assert!(text.contains(lacks), "{text}"),
                (text, lacks) => assert_eq!(text.as_deref(), lacks),
            }
        }
    }

    #[test]
    fn an_error_needs_action_by_the_cpu_that_made_it() {
        let intel = MachineCheck::from_capabilities(CTL_P | SER_P | LMCE_P, false);
        let amd = MachineCheck::from_capabilities(CTL_P | SER_P, true);
        let (intel, amd) = (intel.unwrap().at(0x1234_5678), amd.unwrap().at(0xfff));
        assert_eq!((intel.addr, amd.addr), (0x1234_5000, 0));
        assert_eq!(intel.status, 0xbd80_0000_0000_0134);
        assert_eq!(amd.status, 0xbc00_0800_0000_0000);
        assert_eq!((intel.mcg_status, amd.mcg_status), (0xf, 0x7));
        assert_eq!(intel.misc, 0x8c);
    }
}
