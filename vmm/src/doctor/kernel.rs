//! The kernel's version, and its clock.

use super::{Finding, Host};

/// First version in which UFFDIO_CONTINUE can write-protect.
const WANTED: (u32, u32) = (6, 4);
/// First version in which minor faults of shared memory work with write protection.
const FLOOR: (u32, u32) = (5, 19);

/// Installs a newer kernel on Debian 12, whose own is 6.1, from the mirror that this host uses.
/// Later releases have a kernel that is new enough; for other distributions no command is known.
const BACKPORTED: &str = "echo \"deb $(apt-get indextargets --format '$(REPO_URI)' 'Codename: bookworm' | \
     head -n 1) bookworm-backports main\" | \
     sudo tee /etc/apt/sources.list.d/bookworm-backports.list && sudo apt update && \
     sudo apt install -t bookworm-backports linux-image-amd64 && sudo reboot";

/// Returns the command that installs a newer kernel, if known (os-release(5)).
pub(super) fn newer_kernel(host: &Host) -> Option<&'static str> {
    let release = host.read("/etc/os-release");
    let field = |name| {
        let value = |line: &str| Some(line.strip_prefix(name)?.trim_matches('"').to_owned());
        release.lines().find_map(value)
    };
    let is_debian_12 = field("ID=")? == "debian" && field("VERSION_ID=")? == "12";
    is_debian_12.then_some(BACKPORTED)
}

/// Returns a command of apt where that is what installs packages.
pub(super) fn by_apt(host: &Host, command: &'static str) -> Option<&'static str> {
    let release = host.read("/etc/os-release");
    let is_debian = |line: &str| {
        let like = line.strip_prefix("ID=").or(line.strip_prefix("ID_LIKE="));
        like.is_some_and(|like| like.contains("debian"))
    };
    release.lines().any(is_debian).then_some(command)
}

/// Adds the command to a finding, if there is one.
pub(super) fn with_remedy(finding: Finding, command: Option<&'static str>) -> Finding {
    match command {
        Some(command) => finding.remedy(command),
        None => finding,
    }
}

/// Checks that the kernel is new enough for the required features of userfaultfd.
pub(super) fn version(host: &Host) -> Finding {
    const CHECK: &str = "kernel";
    let release = host.read("/proc/sys/kernel/osrelease");
    let Some(version) = release_of(&release) else {
        return Finding::warning(CHECK, format!("`{release}` is not a version that is known"));
    };
    if version >= WANTED {
        Finding::ok(CHECK, format!("Linux {release}"))
    } else if version >= FLOOR {
        let lost = "UFFDIO_CONTINUE cannot write-protect before 6.4, so a page that was only read \
                    and comes back from probation counts as dirty";
        let finding = Finding::warning(CHECK, format!("Linux {release}: {lost}"));
        with_remedy(finding, newer_kernel(host))
    } else {
        let floor = "userfaultfd does what is needed from 5.19 on, best from 6.4 on";
        let finding = Finding::missing(CHECK, format!("Linux {release}: {floor}"));
        with_remedy(finding, newer_kernel(host))
    }
}

/// Parses the first two numbers of a release such as `6.1.0-18-amd64`.
pub(super) fn release_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Checks that reading the time is cheap.
pub(super) fn clock(host: &Host) -> Finding {
    const CHECK: &str = "clock";
    const DIRECTORY: &str = "/sys/devices/system/clocksource/clocksource0";
    let current = host.read(&format!("{DIRECTORY}/current_clocksource"));
    let available = host.read(&format!("{DIRECTORY}/available_clocksource"));
    if current == "tsc" {
        return Finding::ok(CHECK, "tsc");
    }
    if current.is_empty() {
        return Finding::warning(
            CHECK,
            "the clock source cannot be read; times may be inexact",
        );
    }
    let finding = Finding::warning(
        CHECK,
        format!("{current}: slower to read than tsc, so times come out too long"),
    );
    if available.split_whitespace().any(|source| source == "tsc") {
        finding.remedy(format!(
            "echo tsc | sudo tee {DIRECTORY}/current_clocksource"
        ))
    } else {
        finding
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::tests::FakeHost;
    use super::*;

    /// os-release of Debian 12.
    const DEBIAN_12: &str =
        "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_ID=\"12\"\nID=debian\n";

    fn of_release_on(release: &str, os: &str) -> Finding {
        let host = FakeHost::new().file("/proc/sys/kernel/osrelease", release);
        version(&host.file("/etc/os-release", os).host())
    }

    fn of_release(release: &str) -> Finding {
        of_release_on(release, DEBIAN_12)
    }

    #[test]
    fn a_newer_kernel_comes_from_where_this_distribution_has_it() {
        let remedy = of_release("6.1.0-18-amd64").remedy.expect("a command");
        assert!(remedy.contains("sources.list.d") && remedy.contains("apt update"));
        for other in [
            "",
            "ID=debian\nVERSION_ID=\"11\"\n",
            "ID=debian\nVERSION_CODENAME=sid\n",
            "ID=ubuntu\nVERSION_ID=\"12\"\nID_LIKE=debian\n",
        ] {
            assert_eq!(of_release_on("6.1.0", other).remedy, None, "{other}");
        }
    }

    #[test]
    fn a_new_kernel_is_ok() {
        for release in ["6.4.0", "6.18.44-fc", "10.0-rc1"] {
            assert_eq!(of_release(release).status, Status::Ok, "{release}");
        }
    }

    #[test]
    fn a_kernel_that_lacks_something_says_what_is_lost() {
        for release in ["5.19.0", "6.1.0-18-amd64", "6.3.13"] {
            let finding = of_release(release);
            assert_eq!(finding.status, Status::Warning, "{release}");
            assert!(finding.detail.contains("counts as dirty"), "{finding:?}");
            assert!(finding.remedy.is_some());
        }
    }

    #[test]
    fn an_old_kernel_is_missing() {
        for release in ["5.18.9", "4.19.0-20-amd64"] {
            let finding = of_release(release);
            assert_eq!(finding.status, Status::Missing, "{release}");
            assert!(finding.remedy.is_some());
        }
    }

    #[test]
    fn an_unreadable_version_is_not_taken_for_a_good_one() {
        assert_eq!(of_release("").status, Status::Warning);
        assert_eq!(of_release("linux").status, Status::Warning);
    }

    fn of_clock(current: &str, available: &str) -> Finding {
        let directory = "/sys/devices/system/clocksource/clocksource0";
        clock(
            &FakeHost::new()
                .file(&format!("{directory}/current_clocksource"), current)
                .file(&format!("{directory}/available_clocksource"), available)
                .host(),
        )
    }

    #[test]
    fn tsc_is_the_clock_that_is_wanted() {
        assert_eq!(of_clock("tsc\n", "tsc hpet\n").status, Status::Ok);
    }

    #[test]
    fn another_clock_can_be_changed_only_where_tsc_is_offered() {
        let finding = of_clock("hpet\n", "tsc hpet\n");
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.remedy.is_some_and(|r| r.starts_with("echo tsc")));
        let finding = of_clock("acpi_pm\n", "acpi_pm\n");
        assert_eq!(finding.status, Status::Warning);
        assert_eq!(finding.remedy, None);
        assert_eq!(of_clock("", "").status, Status::Warning);
    }
}
