//! The number of userfaultfd's descriptor.

use rustix::fd::{AsFd, OwnedFd};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};

/// Higher numbers are not asked for: the kernel's table of descriptors grows with the highest one,
/// and this many take 128 KiB.
const NUMBERS_MAX: u64 = 16_384;

/// Numbers above the chosen one, for processes that use all lower ones.
const ABOVE: u64 = 64;

/// Returns a duplicate of `descriptor` with a number higher than those that are in use, or `None`
/// where there is none.
///
/// The kernel closes the descriptors of a process that has ended from the highest number down.
/// Closing KVM's waits for its kernel threads, and these may wait for a page (`kvm_destroy_vm`,
/// virt/kvm/async_pf.c). Closing userfaultfd lets them continue, so it must come first: otherwise
/// the process may never be gone.
pub(super) fn high(descriptor: impl AsFd) -> Option<OwnedFd> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(NUMBERS_MAX);
    let number = limit.min(NUMBERS_MAX).saturating_sub(ABOVE);
    fcntl_dupfd_cloexec(descriptor, i32::try_from(number).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{FdFlags, fcntl_getfd};
    use std::os::fd::AsRawFd;

    #[test]
    fn the_number_is_above_those_of_files_that_are_opened_later() {
        let file = std::fs::File::open("/dev/null").expect("a file");
        let high = high(&file).expect("a number is free");
        assert!(fcntl_getfd(&high).expect("open").contains(FdFlags::CLOEXEC));
        let later: Vec<_> = (0..100).map(|_| std::fs::File::open("/dev/null")).collect();
        for file in later {
            assert!(file.expect("a file").as_raw_fd() < high.as_raw_fd());
        }
    }
}
