//! The boot processor's state at the entry into the kernel: 64-bit mode, an identity map of the
//! first 4 GiB, flat segments, interrupts off.
//!
//! Linux, Documentation/arch/x86/boot.rst, section "64-bit boot protocol".

use kvm_bindings::{Msrs, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::MachineError;
use crate::layout::{
    BOOT_STACK_POINTER, GDT_START, IDT_START, PAGE_DIRECTORIES_START, PDPT_START, PML4_START,
    ZERO_PAGE_START,
};

/// Descriptors: null, null, code (selector 0x10), data (0x18), task state (0x20). The boot
/// protocol fixes the selectors of code and data.
const GDT: [u64; 6] = [
    0,
    0,
    descriptor(0xa09b, 0, 0xf_ffff),
    descriptor(0xc093, 0, 0xf_ffff),
    descriptor(0x808b, 0, 0xf_ffff),
    0,
];
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TASK_SELECTOR: u16 = 0x20;

// Control registers (Intel SDM volume 3A, section 2.5) and EFER (section 2.2.1).
const CR0_PE: u64 = 1 << 0;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// RFLAGS: the reserved bit that is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;

// Page table entries (Intel SDM volume 3A, section 4.5).
const PAGE_PRESENT: u64 = 1 << 0;
const PAGE_WRITABLE: u64 = 1 << 1;
const PAGE_LARGE: u64 = 1 << 7;
const LARGE_PAGE_BYTES: u64 = 2 << 20;
const TABLE_BYTES: u64 = 4096;
const MAPPED_GIB: u64 = 4;

const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs are enabled, and the default memory type is write-back.
const MTRR_ENABLE_WRITE_BACK: u64 = (1 << 11) | 6;

/// Encodes a segment descriptor (Intel SDM volume 3A, section 3.4.5) with the access byte in bits
/// 7:0 of `flags` and granularity, size, long mode and availability in bits 15:12.
const fn descriptor(flags: u64, base: u64, limit: u64) -> u64 {
    (limit & 0xffff)
        | ((base & 0xff_ffff) << 16)
        | ((flags & 0xff) << 40)
        | (((limit >> 16) & 0xf) << 48)
        | (((flags >> 12) & 0xf) << 52)
        | (((base >> 24) & 0xff) << 56)
}

/// Returns the cached form of the descriptor at `selector` in [`GDT`].
fn segment(selector: u16) -> kvm_segment {
    let entry = GDT[usize::from(selector / 8)];
    let field = |shift: u32, mask: u64| u32::try_from((entry >> shift) & mask).unwrap_or(0);
    let bits = |shift, mask| u8::try_from(field(shift, mask)).unwrap_or(0);
    let limit = field(0, 0xffff) | (field(48, 0xf) << 16);
    let granular = bits(55, 1);
    kvm_segment {
        base: u64::from(field(16, 0xff_ffff) | (field(56, 0xff) << 24)),
        limit: if granular == 1 {
            (limit << 12) | 0xfff
        } else {
            limit
        },
        selector,
        type_: bits(40, 0xf),
        present: bits(47, 1),
        dpl: bits(45, 3),
        db: bits(54, 1),
        s: bits(44, 1),
        l: bits(53, 1),
        g: granular,
        avl: bits(52, 1),
        unusable: 0,
        padding: 0,
    }
}

/// Writes descriptor tables and page tables for the entry into the kernel.
pub(crate) fn write_boot_tables(memory: &GuestMemoryMmap) -> Result<(), MachineError> {
    let write = |what, address: u64, words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory
            .write_slice(&bytes, GuestAddress(address))
            .map_err(|source| MachineError::WriteMemory { what, source })
    };
    write("descriptor tables", GDT_START, &GDT)?;
    write("descriptor tables", IDT_START, &[0])?;
    let table = PAGE_PRESENT | PAGE_WRITABLE;
    write("page tables", PML4_START, &[PDPT_START | table])?;
    let directories: Vec<u64> = (0..MAPPED_GIB)
        .map(|gib| (PAGE_DIRECTORIES_START + gib * TABLE_BYTES) | table)
        .collect();
    write("page tables", PDPT_START, &directories)?;
    let pages: Vec<u64> = (0..MAPPED_GIB * 512)
        .map(|page| (page * LARGE_PAGE_BYTES) | table | PAGE_LARGE)
        .collect();
    write("page tables", PAGE_DIRECTORIES_START, &pages)
}

/// Sets the boot processor's instruction pointer to `entry`, with the zero page in RSI.
pub(crate) fn set_boot_registers(vcpu: &VcpuFd, entry: GuestAddress) -> Result<(), MachineError> {
    let mut sregs = vcpu
        .get_sregs()
        .map_err(MachineError::kvm("read the segment registers"))?;
    enter_long_mode(&mut sregs);
    vcpu.set_sregs(&sregs)
        .map_err(MachineError::kvm("set the segment registers"))?;
    let regs = kvm_regs {
        rip: entry.0,
        rsi: ZERO_PAGE_START,
        rsp: BOOT_STACK_POINTER,
        rbp: BOOT_STACK_POINTER,
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    };
    vcpu.set_regs(&regs)
        .map_err(MachineError::kvm("set the registers"))
}

fn enter_long_mode(sregs: &mut kvm_sregs) {
    let data = segment(DATA_SELECTOR);
    sregs.cs = segment(CODE_SELECTOR);
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.tr = segment(TASK_SELECTOR);
    sregs.gdt.base = GDT_START;
    sregs.gdt.limit = u16::try_from(size_of_val(&GDT) - 1).unwrap_or(u16::MAX);
    sregs.idt.base = IDT_START;
    sregs.idt.limit = 7;
    sregs.cr0 |= CR0_PE | CR0_PG;
    sregs.cr3 = PML4_START;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME | EFER_LMA;
}

/// Sets the floating-point state and the model-specific registers as firmware does on every CPU.
pub(crate) fn set_firmware_state(vcpu: &VcpuFd) -> Result<(), MachineError> {
    // Intel SDM volume 1, tables 8-3 and 10-2: all exceptions masked, round to nearest.
    let fpu = kvm_fpu {
        fcw: 0x37f,
        mxcsr: 0x1f80,
        ..Default::default()
    };
    vcpu.set_fpu(&fpu)
        .map_err(MachineError::kvm("set the floating-point state"))?;
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    for entry in [
        entry(MSR_IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MSR_MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK),
    ] {
        let msrs = Msrs::from_entries(&[entry]);
        let set = msrs.ok().and_then(|msrs| vcpu.set_msrs(&msrs).ok());
        if set != Some(1) {
            // Optional: these registers only affect performance, and not every KVM has them.
            tracing::debug!(msr = entry.index, "kvm rejects this MSR");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_segments_are_flat_and_the_code_is_64_bit() {
        let code = segment(CODE_SELECTOR);
        assert_eq!((code.base, code.limit), (0, u32::MAX));
        assert_eq!((code.type_, code.s, code.present), (0xb, 1, 1));
        assert_eq!((code.l, code.db, code.g), (1, 0, 1));
        let data = segment(DATA_SELECTOR);
        assert_eq!((data.type_, data.s, data.present), (0x3, 1, 1));
        assert_eq!((data.l, data.db, data.g), (0, 1, 1));
        let task = segment(TASK_SELECTOR);
        assert_eq!((task.type_, task.s, task.present), (0xb, 0, 1));
    }

    #[test]
    fn the_page_tables_map_each_address_below_4_gib_to_itself() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        write_boot_tables(&memory).unwrap();
        let read = |table: u64, index: u64| -> u64 {
            let entry: u64 = memory.read_obj(GuestAddress(table + index * 8)).unwrap();
            assert_eq!(entry & 3, 3);
            entry
        };
        for address in [
            0,
            0x9000,
            0x10_0000,
            0x7fff_ffff,
            0xc000_0000,
            0xffff_ffff_u64,
        ] {
            let pdpt = read(PML4_START, 0) & !0xfff;
            let directory = read(pdpt, address >> 30) & !0xfff;
            let page = read(directory, (address >> 21) & 511);
            assert_ne!(page & PAGE_LARGE, 0);
            assert_eq!(page & !0xfff, address & !(LARGE_PAGE_BYTES - 1));
        }
    }
}
