//! Features of the kernel's userfaultfd.

use super::{builder, into_io};
use std::io;
use userfaultfd::FeatureFlags;

/// `UFFDIO_API` features, `include/uapi/linux/userfaultfd.h`.
pub(super) mod bits {
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// Linux 4.14, long before the others.
    pub const THREAD_ID: u64 = 1 << 8;
    pub const MINOR_SHMEM: u64 = 1 << 10;
    pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
}

/// The required features, each with the kernel version that introduced it.
pub const REQUIRED_FEATURES: [(u64, &str); 4] = [
    (bits::PAGEFAULT_FLAG_WP, "write protection (5.7)"),
    (
        bits::MISSING_SHMEM,
        "missing faults on shared memory (4.11)",
    ),
    (bits::MINOR_SHMEM, "minor faults on shared memory (5.14)"),
    (
        bits::WP_HUGETLBFS_SHMEM,
        "write protection of shared memory (5.19)",
    ),
];

/// Returns the features of the kernel's userfaultfd, without creating one for guest memory.
///
/// # Errors
///
/// Fails when the descriptor cannot be created: no permission, or no userfaultfd.
pub fn probe_features() -> io::Result<u64> {
    let uffd = builder().create().map_err(into_io)?;
    drop(uffd);
    // A descriptor allows one handshake, whose answer the crate does not expose. Each feature is
    // therefore requested on a new descriptor: the kernel rejects those that it lacks.
    let mut features = 0;
    for bit in 0..u64::BITS {
        let wanted = FeatureFlags::from_bits_retain(1 << bit);
        if builder().require_features(wanted).create().is_ok() {
            features |= 1 << bit;
        }
    }
    Ok(features)
}

pub(super) fn missing() -> String {
    let have = probe_features().unwrap_or(0);
    let lacks: Vec<_> = REQUIRED_FEATURES
        .iter()
        .filter(|(bit, _)| have & bit == 0)
        .map(|&(_, name)| name)
        .collect();
    lacks.join(", ")
}
