//! The hypervisor that this host runs under, as its CPU reports it.

/// The signature of QEMU's emulator (TCG).
const TCG_VENDOR: [u8; 12] = *b"TCGTCGTCGTCG";

/// Returns whether QEMU's emulator executes this host's instructions. A virtualization extension on
/// such a host is itself emulated.
pub fn is_emulated() -> bool {
    is_emulator(hypervisor_vendor())
}

fn is_emulator(vendor: Option<[u8; 12]>) -> bool {
    vendor == Some(TCG_VENDOR)
}

/// Returns the signature of the hypervisor that this host runs under, if it reports one.
///
/// CPUID leaf 1, bit 31 of ECX, and leaf 0x4000_0000, EBX, ECX, EDX.
#[cfg(target_arch = "x86_64")]
#[allow(
    unused_unsafe,
    reason = "the intrinsic is safe in newer toolchains than the oldest supported"
)]
fn hypervisor_vendor() -> Option<[u8; 12]> {
    use std::arch::x86_64::__cpuid;

    // SAFETY: every x86-64 processor has CPUID and leaf 1; the instruction touches no memory.
    let features = unsafe { __cpuid(1) };
    if features.ecx & (1 << 31) == 0 {
        return None;
    }
    // SAFETY: as above; the leaf exists because the hypervisor bit is set.
    let signature = unsafe { __cpuid(0x4000_0000) };
    let mut vendor = [0; 12];
    let registers = [signature.ebx, signature.ecx, signature.edx];
    for (piece, register) in vendor.chunks_exact_mut(4).zip(registers) {
        piece.copy_from_slice(&register.to_le_bytes());
    }
    Some(vendor)
}

/// This host's time stamp counter.
#[cfg(target_arch = "x86_64")]
#[allow(
    unused_unsafe,
    reason = "the intrinsic is safe in newer toolchains than the oldest supported"
)]
pub(crate) fn time_stamp() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC; the instruction touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_qemus_emulator_counts_as_emulated() {
        assert!(is_emulator(Some(TCG_VENDOR)));
        assert!(!is_emulator(Some(*b"KVMKVMKVM\0\0\0")));
        assert!(!is_emulator(None));
    }
}
