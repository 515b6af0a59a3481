//! Whether a vCPU that halts leaves the guest.
//!
//! Usually HLT exits, and KVM lets the thread sleep. KVM then also resolves the page faults of such a
//! guest in a kernel thread while the vCPU waits, and that thread requests write access: a page that
//! was only read counts as written. Without these exits KVM does not (`kvm_can_do_async_pf`,
//! arch/x86/kvm/x86.c).

use kvm_bindings::{KVM_CAP_X86_DISABLE_EXITS, KVM_X86_DISABLE_EXITS_HLT, kvm_enable_cap};
use kvm_ioctls::{Kvm, VmFd};

use crate::config::Irqchip;
use crate::error::MachineError;

/// Why KVM offers no exits that can be disabled, for users.
const NOT_OFFERED: &str = "this KVM does not let halted vCPUs stay in the guest \
    (KVM_CAP_X86_DISABLE_EXITS without HLT): on an AMD processor with SMT the module parameter \
    kvm.mitigate_smt_rsb=1 prevents it";

/// Returns whether KVM can let halted vCPUs stay in the guest.
#[must_use]
pub fn can_be_disabled(kvm: &Kvm) -> bool {
    is_offered(kvm.check_extension_raw(KVM_CAP_X86_DISABLE_EXITS.into()))
}

/// Lets halted vCPUs of a machine without vCPUs stay in the guest.
pub(crate) fn disable(vm: &VmFd, irqchip: Irqchip) -> Result<(), MachineError> {
    let reason = match irqchip {
        // Only a local APIC of KVM wakes a vCPU that is halted in the guest.
        Irqchip::User => {
            "interrupt controllers in user space wake no vCPU that is halted in the guest"
        }
        Irqchip::Kernel
            if !is_offered(vm.check_extension_raw(KVM_CAP_X86_DISABLE_EXITS.into())) =>
        {
            NOT_OFFERED
        }
        Irqchip::Kernel => {
            let capability = kvm_enable_cap {
                cap: KVM_CAP_X86_DISABLE_EXITS,
                args: [KVM_X86_DISABLE_EXITS_HLT.into(), 0, 0, 0],
                ..Default::default()
            };
            return vm
                .enable_cap(&capability)
                .map_err(MachineError::kvm("let halted vCPUs stay in the guest"));
        }
    };
    Err(MachineError::DedicatedCpus {
        reason: reason.to_owned(),
    })
}

/// Returns whether HLT is among the exits that KVM can disable; the answer is negative for an error.
fn is_offered(exits: i32) -> bool {
    u32::try_from(exits).is_ok_and(|exits| exits & KVM_X86_DISABLE_EXITS_HLT != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_of_hlt_are_offered_by_their_bit_alone() {
        assert!(is_offered(0b0010));
        assert!(is_offered(0b1111));
        assert!(!is_offered(0b1101));
        assert!(!is_offered(0));
        assert!(!is_offered(-1));
    }
}
