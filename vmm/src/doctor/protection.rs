//! Does the kernel keep userfaultfd's write protection?

use super::kernel::{newer_kernel, with_remedy};
use super::{Finding, Host};
use memory_fabric::protection::{self, ProbeError};
use std::error::Error as _;

/// What was tried.
#[derive(Debug)]
pub(super) struct Facts {
    kept: Result<bool, ProbeError>,
    /// What `uname -r` says.
    release: String,
    /// The command for a kernel that keeps it, where one is known.
    newer_kernel: Option<&'static str>,
}

/// Tries it.
pub(super) fn gather(host: &Host) -> Facts {
    Facts {
        kept: protection::is_kept(),
        release: host.read("/proc/sys/kernel/osrelease"),
        newer_kernel: newer_kernel(host),
    }
}

/// Says what the facts mean.
pub(super) fn judge(facts: &Facts) -> Finding {
    const CHECK: &str = "write protection";
    const COST: &str = "every page that is fetched counts as changed and is written back";
    match &facts.kept {
        Ok(true) => Finding::ok(CHECK, "kept when the kernel maps a page anew"),
        Ok(false) => {
            let release = &facts.release;
            let detail = format!(
                "Linux {release} loses it when it migrates a page, so {COST}; 6.2, and 6.1 from \
                 about 6.1.8 on, keep it"
            );
            with_remedy(Finding::warning(CHECK, detail), facts.newer_kernel)
        }
        // That userfaultfd cannot be used has its own finding, with the remedy.
        Err(ProbeError::Userfaultfd(error)) => {
            Finding::warning(CHECK, format!("could not be tried: {error}"))
        }
        Err(error) => {
            let cause = error.source().map(|cause| format!(": {cause}"));
            let cause = cause.unwrap_or_default();
            Finding::warning(
                CHECK,
                format!("could not be tried, so {COST}: {error}{cause}"),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    fn with(kept: Result<bool, ProbeError>, newer_kernel: Option<&'static str>) -> Finding {
        judge(&Facts {
            kept,
            release: "6.1.0-3-amd64".to_owned(),
            newer_kernel,
        })
    }

    #[test]
    fn a_kernel_that_keeps_it_is_ok() {
        assert_eq!(with(Ok(true), None).status, Status::Ok);
    }

    #[test]
    fn a_kernel_that_loses_it_is_named_with_the_cost_and_the_remedy() {
        let finding = with(Ok(false), Some("apt install linux"));
        assert_eq!(
            (finding.check, finding.status),
            ("write protection", Status::Warning)
        );
        assert!(finding.detail.contains("6.1.0-3-amd64"), "{finding:?}");
        assert!(finding.detail.contains("written back"), "{finding:?}");
        assert_eq!(finding.remedy.as_deref(), Some("apt install linux"));
        assert_eq!(with(Ok(false), None).remedy, None);
    }

    #[test]
    fn a_probe_that_fails_is_a_warning_with_the_reason() {
        let finding = with(Err(ProbeError::Late), None);
        assert_eq!(finding.status, Status::Warning);
        assert!(
            finding.detail.contains("neither faulted nor ended"),
            "{finding:?}"
        );
    }
}
