//! The registers of a vCPU after INIT and after a start-up message.
//!
//! Intel SDM volume 3A, table 10-1 (state after INIT), and section 9.4.4 (start-up).

use kvm_bindings::{
    KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW, kvm_debugregs, kvm_dtable,
    kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events,
};
use kvm_ioctls::VcpuFd;

use crate::error::MachineError;

/// CR0: the extension type, which is always set; INIT keeps cache disable and not write-through.
const CR0_ET: u64 = 1 << 4;
const CR0_CD_NW: u64 = 3 << 29;
/// RFLAGS: the reserved bit that is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;
const DR6_RESET: u64 = 0xffff_0ff0;
const DR7_RESET: u64 = 0x400;
/// Segment types: data, code, local descriptor table, busy task state.
const DATA: u8 = 3;
const CODE: u8 = 0xb;
const LDT: u8 = 2;
const TSS: u8 = 0xb;

fn segment(type_: u8, is_code_or_data: bool) -> kvm_segment {
    kvm_segment {
        limit: 0xffff,
        type_,
        present: 1,
        s: u8::from(is_code_or_data),
        ..Default::default()
    }
}

/// Returns the segment and control registers after INIT. `apic_base` is kept: INIT does not change
/// the mode of a local APIC.
fn after_init(old: &kvm_sregs) -> kvm_sregs {
    let data = segment(DATA, true);
    let table = kvm_dtable {
        limit: 0xffff,
        ..Default::default()
    };
    kvm_sregs {
        cs: kvm_segment {
            selector: 0xf000,
            base: 0xffff_0000,
            ..segment(CODE, true)
        },
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        ldt: segment(LDT, false),
        tr: segment(TSS, false),
        gdt: table,
        idt: table,
        cr0: CR0_ET | old.cr0 & CR0_CD_NW,
        apic_base: old.apic_base,
        ..Default::default()
    }
}

/// Resets the registers as INIT does. `signature` is EAX of CPUID leaf 1. The vCPU's last exit must
/// be complete.
pub(crate) fn init(vcpu: &VcpuFd, signature: u32) -> Result<(), MachineError> {
    let old = vcpu
        .get_sregs()
        .map_err(MachineError::kvm("read the segment registers"))?;
    vcpu.set_sregs(&after_init(&old))
        .map_err(MachineError::kvm("reset the segment registers"))?;
    vcpu.set_regs(&kvm_regs {
        rip: 0xfff0,
        rdx: signature.into(),
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    })
    .map_err(MachineError::kvm("reset the registers"))?;
    // Drops queued interrupts and exceptions, which the calls above keep.
    vcpu.set_vcpu_events(&kvm_vcpu_events {
        flags: KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW,
        ..Default::default()
    })
    .map_err(MachineError::kvm("drop the events of a vCPU"))?;
    vcpu.set_debug_regs(&kvm_debugregs {
        dr6: DR6_RESET,
        dr7: DR7_RESET,
        ..Default::default()
    })
    .map_err(MachineError::kvm("reset the debug registers"))
}

/// Sets a vCPU that waits after INIT to the start of page `page`.
pub(super) fn start_up(vcpu: &VcpuFd, page: u8) -> Result<(), MachineError> {
    let mut sregs = vcpu
        .get_sregs()
        .map_err(MachineError::kvm("read the segment registers"))?;
    sregs.cs.selector = u16::from(page) << 8;
    sregs.cs.base = u64::from(page) << 12;
    vcpu.set_sregs(&sregs)
        .map_err(MachineError::kvm("set the segment registers"))?;
    let mut regs = vcpu
        .get_regs()
        .map_err(MachineError::kvm("read the registers"))?;
    regs.rip = 0;
    vcpu.set_regs(&regs)
        .map_err(MachineError::kvm("set the registers"))
}

/// Sets a new vCPU's local APIC address and mode, and whether it is the boot processor.
pub(super) fn set_apic_base(vcpu: &VcpuFd, apic_base: u64) -> Result<(), MachineError> {
    let mut sregs = vcpu
        .get_sregs()
        .map_err(MachineError::kvm("read the segment registers"))?;
    sregs.apic_base = apic_base;
    vcpu.set_sregs(&sregs)
        .map_err(MachineError::kvm("set the segment registers"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_keeps_the_local_apic_and_the_caches() {
        let old = kvm_sregs {
            cr0: 0xe005_0033,
            cr3: 0x1000,
            cr4: 0x20,
            efer: 0x500,
            cr8: 4,
            apic_base: 0xfee0_0c00,
            ..Default::default()
        };
        let new = after_init(&old);
        assert_eq!(new.cr0, 0x6000_0010);
        assert_eq!(new.apic_base, old.apic_base);
        assert_eq!((new.cr3, new.cr4, new.efer, new.cr8), (0, 0, 0, 0));
        assert_eq!((new.cs.selector, new.cs.base), (0xf000, 0xffff_0000));
    }
}
