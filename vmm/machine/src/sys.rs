//! Instructions and system calls for which there are no safe functions.

use std::io;

/// Bits of a set of CPUs: the largest NR_CPUS of Linux on x86-64. Sets of rustix have fewer.
pub const CPUS: usize = 8192;

/// A set of CPUs in the kernel's format: a bit for each CPU, in words.
pub type CpuSet = [u64; CPUS / u64::BITS as usize];

/// The signature of the hypervisor that this host runs under, if it reports one.
///
/// CPUID leaf 1, bit 31 of ECX, and leaf 0x4000_0000, EBX, ECX, EDX.
#[cfg(target_arch = "x86_64")]
#[allow(
    unused_unsafe,
    reason = "the intrinsic is safe in newer toolchains than the oldest supported"
)]
pub fn hypervisor_signature() -> Option<[u32; 3]> {
    use std::arch::x86_64::__cpuid;

    // SAFETY: every x86-64 processor has CPUID and leaf 1; the instruction touches no memory.
    let features = unsafe { __cpuid(1) };
    if features.ecx & (1 << 31) == 0 {
        return None;
    }
    // SAFETY: as above; the leaf exists because the hypervisor bit is set.
    let signature = unsafe { __cpuid(0x4000_0000) };
    Some([signature.ebx, signature.ecx, signature.edx])
}

/// Whether this host's processor is AMD's, or one of Hygon, which are made alike.
#[cfg(target_arch = "x86_64")]
#[allow(
    unused_unsafe,
    reason = "the intrinsic is safe in newer toolchains than the oldest supported"
)]
pub fn is_amd() -> bool {
    // SAFETY: every x86-64 processor has CPUID and leaf 0; the instruction touches no memory.
    let vendor = unsafe { std::arch::x86_64::__cpuid(0) };
    // "AuthenticAMD" and "HygonGenuine" begin so.
    [*b"Auth", *b"Hygo"].contains(&vendor.ebx.to_le_bytes())
}

/// This host's time stamp counter.
#[cfg(target_arch = "x86_64")]
#[allow(
    unused_unsafe,
    reason = "the intrinsic is safe in newer toolchains than the oldest supported"
)]
pub fn time_stamp() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC; the instruction touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// The CPUs on which the calling thread may run.
pub fn affinity() -> io::Result<CpuSet> {
    let mut set: CpuSet = [0; CPUS / u64::BITS as usize];
    // SAFETY: the kernel writes at most `size_of::<CpuSet>()` bytes to the set, which lives through
    // the call; 0 is the calling thread. Any bytes are a valid set.
    match unsafe { libc::sched_getaffinity(0, size_of::<CpuSet>(), (&raw mut set).cast()) } {
        0 => Ok(set),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Limits the calling thread to these CPUs.
pub fn set_affinity(set: &CpuSet) -> io::Result<()> {
    let bytes = size_of::<CpuSet>();
    // SAFETY: the kernel reads so many bytes of the set, which lives through the call; 0 is the
    // calling thread.
    match unsafe { libc::sched_setaffinity(0, bytes, std::ptr::from_ref(set).cast()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
