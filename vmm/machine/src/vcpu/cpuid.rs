//! The guest's CPUID: what KVM supports, with the topology of this machine, which has one core per
//! vCPU and one thread per core.
//!
//! Leaves: Intel SDM volume 2A, CPUID; AMD APM volume 3, appendix E; for the hypervisor's
//! leaves Linux, Documentation/virt/kvm/x86/cpuid.rst, which KVM fills itself.

use super::packages::Packages;
use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Leaf 1, ECX: the local APIC timer has a TSC deadline mode.
const ECX_TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1, ECX: runs under a hypervisor.
const ECX_HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, ECX: VMX. It is hidden, as is SVM: for nested guests KVM keeps guest pages pinned, and
/// writes to them after the pager has unmapped them.
const ECX_VMX: u32 = 1 << 5;
/// Leaf 0x8000_0001, ECX: SVM.
const ECX_SVM: u32 = 1 << 2;
/// Leaf 0x8000_0001, ECX: performance counters of the core, the northbridge and the last-level cache.
const ECX_COUNTERS: u32 = 1 << 23 | 1 << 24 | 1 << 28;
/// Leaf 0x4000_0001, EAX: asynchronous page faults, also in user mode of nested guests, and by
/// interrupt: KVM_FEATURE_ASYNC_PF, _ASYNC_PF_VMEXIT, _ASYNC_PF_INT.
const EAX_ASYNC_PAGE_FAULT: u32 = 1 << 4 | 1 << 10 | 1 << 14;
/// Leaf 1, EDX: the package has more than one logical processor.
const EDX_HTT: u32 = 1 << 28;
/// Leaf 1, EBX: size of the flushed cache line, the only field that is not replaced.
const EBX_CLFLUSH: u32 = 0x0000_ff00;
/// Leaf 6, EAX: the local APIC timer runs in every sleep state.
const EAX_ARAT: u32 = 1 << 2;
/// Leaf 0x8000_0001, ECX: the logical processors of a package are cores, not threads (AMD).
const ECX_CMP_LEGACY: u32 = 1 << 1;

/// Fields of the cache leaves (4 and 0x8000_001d), EAX.
const CACHE_LEVEL_SHIFT: u32 = 5;
const CACHE_SHARING_SHIFT: u32 = 14;
const CACHE_SHARING_MASK: u32 = 0xfff << CACHE_SHARING_SHIFT;
const CACHE_CORES_SHIFT: u32 = 26;
const CACHE_CORES_MASK: u32 = 0x3f << CACHE_CORES_SHIFT;

/// Leaf 0xb, ECX bits 15:8: type of a level.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Leaf 1, ECX: XSAVE, and what needs it: OSXSAVE, FMA, AVX, F16C.
const ECX_XSAVE: u32 = 1 << 26 | 1 << 27 | 1 << 12 | 1 << 28 | 1 << 29;
/// Leaf 7, EBX: AVX2, MPX and AVX-512.
const EBX_7_XSAVE: u32 = 1 << 5
    | 1 << 14
    | 1 << 16
    | 1 << 17
    | 1 << 21
    | 1 << 26
    | 1 << 27
    | 1 << 28
    | 1 << 30
    | 1 << 31;
/// Leaf 7, ECX: protection keys, AVX-512 and wide AES.
const ECX_7_XSAVE: u32 =
    1 << 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 14;
/// Leaf 0x8000_0001, ECX: XOP and FMA4.
const ECX_EXTENDED_XSAVE: u32 = 1 << 11 | 1 << 16;

/// Hides XSAVE, and every feature whose state requires it.
///
/// KVM reports the size of the state that the guest has enabled (leaf 0xd), which it learns by
/// intercepting XSETBV. An emulator that does not forward this intercept makes the leaf wrong, and
/// Linux then prints long warnings at each start.
pub(crate) fn hide_xsave(entries: &mut Vec<kvm_cpuid_entry2>) {
    entries.retain(|entry| entry.function != 0xd);
    for entry in entries {
        match (entry.function, entry.index) {
            (0x1, _) => set(&mut entry.ecx, ECX_XSAVE, false),
            (0x7, 0) => {
                set(&mut entry.ebx, EBX_7_XSAVE, false);
                set(&mut entry.ecx, ECX_7_XSAVE, false);
                // AVX-512 and AMX, without the mitigation bits of the upper half.
                set(&mut entry.edx, 0x01c0_010c, false);
            }
            (0x7, _) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            (0x8000_0001, _) => set(&mut entry.ecx, ECX_EXTENDED_XSAVE, false),
            _ => {}
        }
    }
}

/// Leaf 0x4000_0001, EAX: features that need KVM's own local APICs: end of interrupt in memory,
/// waiting for a kick, IPIs by hypercall, control of the host's polling during HLT, and yielding to
/// a CPU (KVM_FEATURE_PV_EOI, _PV_UNHALT, _PV_SEND_IPI, _POLL_CONTROL, _PV_SCHED_YIELD).
const EAX_IN_KERNEL_APIC: u32 = 1 << 6 | 1 << 7 | 1 << 11 | 1 << 12 | 1 << 13;

/// Hides what KVM cannot provide when the local APICs are in user space.
///
/// Leaf 0x15 is hidden as well: it states a crystal frequency that kernels take for that of the
/// local APIC timer, but ours has another frequency.
pub(crate) fn hide_in_kernel_apic(entries: &mut Vec<kvm_cpuid_entry2>) {
    entries.retain(|entry| entry.function != 0x15);
    for entry in entries {
        if entry.function == 0x4000_0001 {
            entry.eax &= !EAX_IN_KERNEL_APIC;
        }
    }
}

/// Leaf 0x4000_0001, EAX: a CPU that waits for a lock halts until it is kicked
/// (KVM_FEATURE_PV_UNHALT).
const EAX_UNHALT: u32 = 1 << 7;

/// Hides the kick of a halted CPU, which KVM does not deliver to a CPU that is halted in the guest
/// (Linux, Documentation/virt/kvm/api.rst, KVM_CAP_X86_DISABLE_EXITS).
pub(crate) fn hide_unhalt(entries: &mut [kvm_cpuid_entry2]) {
    for entry in entries {
        if entry.function == 0x4000_0001 {
            entry.eax &= !EAX_UNHALT;
        }
    }
}

/// Leaf 0x4000_0001, EAX: features that a guest shares with one KVM, in memory or by hypercall: the
/// clock in its old and new form and its stability flag, steal time, and flushing TLBs of preempted
/// vCPUs (KVM_FEATURE_CLOCKSOURCE, _CLOCKSOURCE2, _STEAL_TIME, _PV_TLB_FLUSH,
/// _CLOCKSOURCE_STABLE_BIT).
const EAX_ONE_KVM: u32 = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 24;
/// Leaf 7, EBX: the register IA32_TSC_ADJUST.
const EBX_7_TSC_ADJUST: u32 = 1 << 1;
/// Leaf 7, ECX and EDX: shadow stacks, and the tracking of indirect branches (CET).
const ECX_7_SHADOW_STACK: u32 = 1 << 7;
const EDX_7_BRANCH_TRACKING: u32 = 1 << 20;

/// Hides what the KVMs of several hosts cannot provide for one guest.
pub(crate) fn hide_one_kvm(entries: &mut [kvm_cpuid_entry2]) {
    for entry in entries {
        match (entry.function, entry.index) {
            (0x4000_0001, _) => entry.eax &= !EAX_ONE_KVM,
            (0x7, 0) => {
                set(&mut entry.ebx, EBX_7_TSC_ADJUST, false);
                // The shadow stack's pointer is no part of the state that moves.
                set(&mut entry.ecx, ECX_7_SHADOW_STACK, false);
                set(&mut entry.edx, EDX_7_BRANCH_TRACKING, false);
            }
            _ => {}
        }
    }
}

/// Hides what no guest is shown of the host's CPU: virtualization in it, and performance counters, which
/// would count the host's events as well. So are bits that a guest is shown whatever the host has.
pub(crate) fn hide_from_guests(entry: &mut kvm_cpuid_entry2) {
    match entry.function {
        0x1 => entry.ecx &= !(ECX_VMX | ECX_HYPERVISOR | ECX_TSC_DEADLINE),
        0x8000_0001 => entry.ecx &= !(ECX_SVM | ECX_COUNTERS),
        0xa | 0x8000_000a | 0x8000_0022 => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        _ => {}
    }
}

/// Leaf 0x8000_0007, EBX: an overflow of a machine check's registers can be recovered from, and so
/// can an uncorrected error that software contains (MCA overflow recovery, SUCCOR).
const EBX_RECOVERY: u32 = 1 << 0 | 1 << 1;

/// Shows a guest on AMD that it may continue after an uncorrected error of the memory.
pub(crate) fn show_recovery(entries: &mut Vec<kvm_cpuid_entry2>) {
    const LEAF: u32 = 0x8000_0007;
    match entries.iter_mut().find(|entry| entry.function == LEAF) {
        Some(entry) => entry.ebx |= EBX_RECOVERY,
        None => entries.push(kvm_cpuid_entry2 {
            function: LEAF,
            ebx: EBX_RECOVERY,
            ..Default::default()
        }),
    }
}

/// Returns the CPUID entries of CPU `id` (also its APIC id), derived from what KVM supports.
pub(crate) fn for_cpu(
    supported: &[kvm_cpuid_entry2],
    id: u8,
    packages: Packages,
    tsc_deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    let cores = packages.cores_beside(id);
    let id = u32::from(id);
    let id_bits = u32::from(packages.id_bits);
    // Leaf 1 has 8 bits for this number; the topology leaves below have more.
    let ids = (1 << id_bits).min(0xff);
    let basic_max = supported
        .iter()
        .find(|entry| entry.function == 0)
        .map_or(0, |entry| entry.eax);

    let mut entries: Vec<_> = supported
        .iter()
        .copied()
        // Topology leaves are added below. 0x1f is an extension of 0xb and may be absent.
        .filter(|entry| !matches!(entry.function, 0xb | 0x1f))
        .collect();
    for entry in &mut entries {
        hide_from_guests(entry);
        match entry.function {
            0x1 => {
                entry.ebx = (entry.ebx & EBX_CLFLUSH) | (ids << 16) | (id << 24);
                entry.ecx |= ECX_HYPERVISOR;
                set(&mut entry.ecx, ECX_TSC_DEADLINE, tsc_deadline);
                set(&mut entry.edx, EDX_HTT, cores > 1);
            }
            0x4 if entry.eax & 0x1f != 0 => {
                share_cache(entry, cores);
                entry.eax &= !CACHE_CORES_MASK;
                entry.eax |= (cores - 1).min(0x3f) << CACHE_CORES_SHIFT;
            }
            0x6 => {
                entry.eax &= EAX_ARAT;
                (entry.ebx, entry.ecx, entry.edx) = (0, 0, 0);
            }
            // KVM's paravirtual features, except asynchronous page faults. Those pass a fault to a
            // kernel thread that cannot be interrupted while it waits for a remote page, so a
            // process whose donor is lost could not exit. They also cost two interrupts per fault,
            // more than a fetch over a fast network takes.
            0x4000_0001 => entry.eax &= !EAX_ASYNC_PAGE_FAULT,
            0x8000_0001 if is_amd(supported) => set(&mut entry.ecx, ECX_CMP_LEGACY, cores > 1),
            0x8000_0008 if is_amd(supported) => {
                entry.ecx = (entry.ecx & !0xf0ff) | (cores - 1) | (id_bits << 12);
            }
            0x8000_001d if entry.eax & 0x1f != 0 => share_cache(entry, cores),
            // One thread per core, one node.
            0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id, 0),
            _ => {}
        }
    }
    if basic_max >= 0xb {
        let level = |index, kind, shift, processors| kvm_cpuid_entry2 {
            function: 0xb,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: processors,
            ecx: index | (kind << 8),
            edx: id,
            ..Default::default()
        };
        entries.push(level(0, LEVEL_THREAD, 0, 1));
        entries.push(level(1, LEVEL_CORE, id_bits, cores));
        entries.push(level(2, 0, 0, 0));
    }
    entries
}

/// Sets or clears bits of a register.
fn set(register: &mut u32, bits: u32, on: bool) {
    if on {
        *register |= bits;
    } else {
        *register &= !bits;
    }
}

/// The last-level cache is shared by all cores, the others are private.
fn share_cache(entry: &mut kvm_cpuid_entry2, cores: u32) {
    let level = (entry.eax >> CACHE_LEVEL_SHIFT) & 0x7;
    let sharing = if level >= 3 { cores - 1 } else { 0 };
    entry.eax = (entry.eax & !CACHE_SHARING_MASK) | (sharing << CACHE_SHARING_SHIFT);
}

/// Returns whether the vendor is "AuthenticAMD" or "HygonGenuine", by EBX of leaf 0.
pub(super) fn is_amd(supported: &[kvm_cpuid_entry2]) -> bool {
    supported.iter().any(|entry| {
        let vendor = entry.ebx.to_le_bytes();
        entry.function == 0 && (&vendor == b"Auth" || &vendor == b"Hygo")
    })
}

/// Returns the width of a guest's physical addresses: that of the host's CPU.
pub(crate) fn physical_address_bits(supported: &[kvm_cpuid_entry2]) -> Option<u32> {
    let entry = supported.iter().find(|e| e.function == 0x8000_0008)?;
    Some(entry.eax & 0xff).filter(|bits| *bits > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, eax: u32, ebx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            eax,
            ebx,
            ..Default::default()
        }
    }

    fn supported(vendor: &[u8; 4]) -> Vec<kvm_cpuid_entry2> {
        vec![
            entry(0, 0xd, u32::from_le_bytes(*vendor)),
            entry(1, 0, 0xffff_ffff),
            entry(4, 0x0000_0061, 0),
            entry(0xb, 0xdead, 0xbeef),
            entry(0x1f, 0xdead, 0xbeef),
            entry(0x8000_0001, 0, 0),
            entry(0x8000_0008, 0, 0),
            entry(0x8000_001d, 0x0000_0161, 0),
            entry(0x8000_001e, 99, 99),
        ]
    }

    fn leaf(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *entries
            .iter()
            .find(|e| e.function == function && e.index == index)
            .unwrap()
    }

    #[test]
    fn every_cpu_has_its_own_apic_id_in_each_topology_leaf() {
        for id in 0..5 {
            let entries = for_cpu(&supported(b"Auth"), id, Packages::one(5), true);
            let id = u32::from(id);
            assert_eq!(leaf(&entries, 1, 0).ebx >> 24, id);
            assert_eq!((leaf(&entries, 1, 0).ebx >> 16) & 0xff, 8);
            assert_eq!(leaf(&entries, 0xb, 0).edx, id);
            assert_eq!(leaf(&entries, 0xb, 1).edx, id);
            assert_eq!(leaf(&entries, 0xb, 1).eax, 3, "bits for 5 cores");
            assert_eq!(leaf(&entries, 0xb, 1).ebx, 5);
            assert_eq!(leaf(&entries, 0x8000_001e, 0).eax, id);
            assert_eq!(leaf(&entries, 0x8000_0008, 0).ecx, 4 | (3 << 12));
            assert!(!entries.iter().any(|e| e.function == 0x1f));
        }
    }

    #[test]
    fn the_largest_machine_has_its_topology_in_each_leaf() {
        for (id, cpus, ids, bits) in [(71, 72, 128, 7), (127, 128, 128, 7), (253, 254, 255, 8)] {
            let entries = for_cpu(&supported(b"Auth"), id, Packages::one(cpus), true);
            let (id, cpus) = (u32::from(id), u32::from(cpus));
            assert_eq!(leaf(&entries, 1, 0).ebx >> 24, id);
            assert_eq!((leaf(&entries, 1, 0).ebx >> 16) & 0xff, ids);
            assert_eq!(leaf(&entries, 0xb, 1).edx, id);
            assert_eq!(leaf(&entries, 0xb, 1).eax, bits);
            assert_eq!(leaf(&entries, 0xb, 1).ebx, cpus);
            assert_eq!(leaf(&entries, 0x8000_001e, 0).ebx, id);
            assert_eq!(
                leaf(&entries, 0x8000_0008, 0).ecx,
                (cpus - 1) | (bits << 12)
            );
        }
    }

    #[test]
    fn the_hypervisor_bit_is_set_and_the_timer_mode_is_as_asked() {
        for deadline in [false, true] {
            let one = leaf(
                &for_cpu(&supported(b"Genu"), 0, Packages::one(1), deadline),
                1,
                0,
            );
            assert_ne!(one.ecx & ECX_HYPERVISOR, 0);
            assert_eq!(one.ecx & ECX_TSC_DEADLINE != 0, deadline);
            assert_eq!(one.edx & EDX_HTT, 0);
        }
    }

    #[test]
    fn of_kvms_features_only_the_kick_of_a_halted_cpu_is_hidden() {
        let mut entries = [entry(0x4000_0001, u32::MAX, 0), entry(1, u32::MAX, 0)];
        hide_unhalt(&mut entries);
        assert_eq!(entries[0].eax, !(1 << 7));
        assert_eq!(entries[1].eax, u32::MAX);
    }

    #[test]
    fn what_needs_an_apic_in_the_kernel_is_hidden_and_the_clock_is_not() {
        let mut entries = vec![entry(0x4000_0001, u32::MAX, 0), entry(0x15, 1, 2)];
        hide_in_kernel_apic(&mut entries);
        let [features] = entries[..] else {
            panic!("{entries:?}")
        };
        // KVM_FEATURE_CLOCKSOURCE, _CLOCKSOURCE2, _STEAL_TIME, _CLOCKSOURCE_STABLE_BIT.
        let clocks = 1 | 1 << 3 | 1 << 5 | 1 << 24;
        assert_eq!(features.eax & clocks, clocks);
        for hidden in [6, 7, 11, 12, 13] {
            assert_eq!(features.eax >> hidden & 1, 0, "{hidden}");
        }
    }

    #[test]
    fn caches_are_shared_by_their_level() {
        let entries = for_cpu(&supported(b"Genu"), 0, Packages::one(64), true);
        let sharing = |eax: u32| (eax & CACHE_SHARING_MASK) >> CACHE_SHARING_SHIFT;
        assert_eq!(sharing(leaf(&entries, 4, 0).eax), 63, "level 3");
        assert_eq!(leaf(&entries, 4, 0).eax >> CACHE_CORES_SHIFT, 63);
        assert_eq!(leaf(&entries, 0x8000_0008, 0).ecx, 0, "not of Intel");
    }
}
