//! userfaultfd: permission for kernel faults, and features.

use std::io;

use super::kernel::{by_apt, newer_kernel, with_remedy};
use super::{Finding, Host};

/// Features of the kernel's userfaultfd: the bits `UFFD_FEATURE_*` of `linux/userfaultfd.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UffdFeatures(u64);

impl UffdFeatures {
    /// Write-protect faults of anonymous memory.
    pub const PAGEFAULT_FLAG_WP: Self = Self(1 << 0);
    /// Missing faults of shared memory.
    pub const MISSING_SHMEM: Self = Self(1 << 5);
    /// Minor faults of shared memory.
    pub const MINOR_SHMEM: Self = Self(1 << 10);
    /// Write-protect faults of shared memory.
    pub const WP_HUGETLBFS_SHMEM: Self = Self(1 << 12);

    /// The required features, with their names in the kernel's header.
    const NEEDED: [(Self, &'static str); 4] = [
        (Self::MISSING_SHMEM, "MISSING_SHMEM"),
        (Self::MINOR_SHMEM, "MINOR_SHMEM"),
        (Self::PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
        (Self::WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM"),
    ];

    /// Converts the kernel's bits.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns whether it has every feature of `other`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    fn missing(self) -> Vec<&'static str> {
        Self::NEEDED
            .into_iter()
            .filter(|(feature, _)| !self.contains(*feature))
            .map(|(_, name)| name)
            .collect()
    }
}

/// Opens a userfaultfd that handles kernel faults, such as KVM's, and queries its features: through
/// `/dev/userfaultfd` where it exists, otherwise through the system call.
///
/// # Errors
///
/// Fails when this process has no permission, or the kernel has no userfaultfd.
pub fn userfaultfd_probe() -> io::Result<UffdFeatures> {
    memory_fabric::userfaultfd_features().map(UffdFeatures)
}

/// The facts about userfaultfd.
#[derive(Debug)]
pub(super) struct Facts {
    features: io::Result<UffdFeatures>,
    /// Whether `/dev/userfaultfd` exists.
    device: bool,
    /// The command that installs a kernel with more features, if known.
    newer_kernel: Option<&'static str>,
    /// The command that installs the kernel of the distribution, if known.
    kernel: Option<&'static str>,
}

/// Queries the kernel.
pub(super) fn gather(host: &Host) -> Facts {
    Facts {
        features: userfaultfd_probe(),
        device: host.exists("/dev/userfaultfd"),
        newer_kernel: newer_kernel(host),
        kernel: by_apt(host, "sudo apt install linux-image-amd64 && sudo reboot"),
    }
}

/// Evaluates the facts.
pub(super) fn judge(facts: &Facts) -> Finding {
    const CHECK: &str = "userfaultfd";
    let error = match &facts.features {
        Ok(features) => {
            let missing = features.missing();
            let way = if facts.device {
                "/dev/userfaultfd"
            } else {
                "system call"
            };
            return if missing.is_empty() {
                Finding::ok(CHECK, format!("{way}: minor faults, write protection"))
            } else {
                let names = missing.join(", ");
                let detail = format!("the kernel lacks {names}; 5.19 and newer have it");
                with_remedy(Finding::missing(CHECK, detail), facts.newer_kernel)
            };
        }
        Err(error) => error,
    };
    match (error.raw_os_error(), facts.device) {
        (Some(libc::EPERM | libc::EACCES), true) => {
            Finding::missing(CHECK, "/dev/userfaultfd: permission denied")
                .remedy("sudo chgrp kvm /dev/userfaultfd && sudo chmod 660 /dev/userfaultfd")
        }
        (Some(libc::EPERM | libc::EACCES), false) => Finding::missing(
            CHECK,
            "KVM's faults need CAP_SYS_PTRACE, or leave for everyone",
        )
        .remedy("sudo sysctl -w vm.unprivileged_userfaultfd=1"),
        (Some(libc::ENOSYS), _) => {
            let detail = "the kernel was built without CONFIG_USERFAULTFD, or a sandbox hides it";
            with_remedy(Finding::missing(CHECK, detail), facts.kernel)
        }
        _ => Finding::missing(CHECK, format!("cannot be opened: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    const ALL: u64 = 1 | 1 << 5 | 1 << 10 | 1 << 12;

    fn with(features: u64) -> Finding {
        judge(&Facts {
            features: Ok(UffdFeatures::from_bits(features)),
            device: true,
            newer_kernel: None,
            kernel: None,
        })
    }

    fn refused(errno: i32, device: bool) -> Finding {
        judge(&Facts {
            features: Err(io::Error::from_raw_os_error(errno)),
            device,
            newer_kernel: None,
            kernel: None,
        })
    }

    #[test]
    fn a_kernel_with_every_feature_is_ok() {
        assert_eq!(with(ALL).status, Status::Ok);
        assert_eq!(with(u64::MAX).status, Status::Ok);
    }

    #[test]
    fn each_missing_feature_is_named() {
        for (feature, name) in UffdFeatures::NEEDED {
            let finding = with(ALL & !feature.0);
            assert_eq!(finding.status, Status::Missing);
            assert!(finding.detail.contains(name), "{finding:?}");
        }
    }

    #[test]
    fn a_refusal_gets_the_remedy_for_the_way_that_is_there() {
        let by_device = refused(libc::EACCES, true);
        assert_eq!(by_device.status, Status::Missing);
        assert!(
            by_device
                .remedy
                .is_some_and(|r| r.contains("/dev/userfaultfd"))
        );
        let by_call = refused(libc::EPERM, false);
        assert_eq!(by_call.status, Status::Missing);
        assert!(
            by_call
                .remedy
                .is_some_and(|r| r.contains("unprivileged_userfaultfd=1"))
        );
    }

    #[test]
    fn a_kernel_without_it_and_other_errors_are_missing() {
        assert!(
            refused(libc::ENOSYS, false)
                .detail
                .contains("CONFIG_USERFAULTFD")
        );
        let other = refused(libc::EMFILE, true);
        assert_eq!(other.status, Status::Missing);
        assert!(other.detail.contains("cannot be opened"));
    }

    #[test]
    fn the_probe_answers_without_a_panic() {
        if let Ok(features) = userfaultfd_probe() {
            assert!(features.contains(UffdFeatures::MISSING_SHMEM));
        }
    }
}
