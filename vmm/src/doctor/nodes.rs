//! What VMs with vCPUs on several hosts need: `run --node`, and `node --cpus`.

use super::kernel::{newer_kernel, release_of, with_remedy};
use super::kvm::Facts;
use super::{Finding, Host};
use crate::host::cpuinfo_field;
use crate::machine::second_level_paging_off;

/// First version in which UFFDIO_CONTINUE can write-protect.
const KERNEL_MIN: (u32, u32) = (6, 4);

/// Switches accessed and dirty bits of second-level page tables off, for all VMs of the host.
const WITHOUT_EPTAD: &str = "echo 'options kvm_intel eptad=0' | sudo tee /etc/modprobe.d/kvm-eptad.conf && \
     sudo modprobe -r kvm_intel && sudo modprobe kvm_intel";

/// Checks what such a VM cannot do without: write protection of pages that come back, and KVM with
/// second-level paging.
pub(super) fn requirements(host: &Host) -> Finding {
    const CHECK: &str = "several nodes";
    if let Some(parameter) = second_level_paging_off(host.root()) {
        return Finding::warning(
            CHECK,
            format!(
                "no --node, no node --cpus: {parameter} is off, and shadow page tables do not follow \
                 pages that other hosts take"
            ),
        )
        .remedy(format!(
            "sudo modprobe -r {0} && sudo modprobe {0} {1}=1",
            parameter.module, parameter.name
        ));
    }
    let release = host.read("/proc/sys/kernel/osrelease");
    match release_of(&release) {
        Some(version) if version >= KERNEL_MIN => {
            Finding::ok(CHECK, "vCPUs of a VM can be on several hosts (--node)")
        }
        Some(_) => {
            let lost = "no --node, no node --cpus: before 6.4 UFFDIO_CONTINUE cannot write-protect";
            with_remedy(Finding::warning(CHECK, lost), newer_kernel(host))
        }
        None => Finding::warning(CHECK, "unknown: the kernel's version is not known"),
    }
}

/// Checks whether the processor writes to page tables that it only walks.
pub(super) fn page_walks(host: &Host) -> Finding {
    const CHECK: &str = "page walks";
    let parameters = "/sys/module/kvm_intel/parameters";
    if host.exists(parameters) {
        return match host.read(&format!("{parameters}/eptad")).as_str() {
            "N" | "0" => Finding::ok(CHECK, "read page tables (kvm_intel.eptad=N)"),
            // Older kernels and processors have no such bits.
            "" => Finding::ok(CHECK, "read page tables (no EPT A/D bits)"),
            _ => Finding::warning(
                CHECK,
                "write to page tables (kvm_intel.eptad=Y), which hosts of a VM with --node then take \
                 from each other",
            )
            .remedy(WITHOUT_EPTAD),
        };
    }
    if host.exists("/sys/module/kvm_amd") {
        return Finding::warning(
            CHECK,
            "write to page tables, as on all AMD processors: hosts of a VM with --node take them from \
             each other",
        );
    }
    Finding::warning(CHECK, "unknown: neither kvm_intel nor kvm_amd is loaded")
}

/// Checks whether the time stamp counter can be the guest's clock on several hosts.
pub(super) fn time_stamps(host: &Host, kvm: &Facts) -> Finding {
    const CHECK: &str = "time stamps";
    let cpuinfo = host.read("/proc/cpuinfo");
    let flags = cpuinfo_field(&cpuinfo, "flags");
    let has = |flag: &str| flags.split_whitespace().any(|one| one == flag);
    let missing: Vec<&str> = ["constant_tsc", "nonstop_tsc"]
        .into_iter()
        .filter(|flag| !has(flag))
        .collect();
    if !missing.is_empty() {
        return Finding::warning(
            CHECK,
            format!(
                "the processor lacks {}: time differs between the hosts of a VM with --node",
                missing.join(" and ")
            ),
        );
    }
    let rate = kvm.tsc_khz();
    let rate = rate.map_or("constant".to_owned(), |khz| format!("constant, {khz} kHz"));
    let scaling = match kvm.tsc_scaling() {
        Some(true) => "KVM can scale it to the rate of another host",
        Some(false) => {
            "KVM cannot scale it: beside a first host (run --node) whose rate differs by more than \
             250 millionths, this one is refused"
        }
        None => "whether KVM can scale it to the rate of another host is unknown",
    };
    Finding::ok(
        CHECK,
        format!("{rate}; {scaling}; `--node HOST:PORT,cpus=N` compares it with another host's"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::tests::FakeHost;
    use super::*;

    fn with(release: &str) -> FakeHost {
        FakeHost::new().file("/proc/sys/kernel/osrelease", release)
    }

    #[test]
    fn shadow_page_tables_and_old_kernels_cannot_share_memory() {
        let fine = with("6.12.3").file("/sys/module/kvm_amd/parameters/npt", "1\n");
        assert_eq!(requirements(&fine.host()).status, Status::Ok);
        for (module, name, off) in [("kvm_amd", "npt", "0"), ("kvm_intel", "ept", "N")] {
            let path = format!("/sys/module/{module}/parameters/{name}");
            let finding = requirements(&with("6.12.3").file(&path, off).host());
            assert_eq!(finding.status, Status::Warning, "{finding:?}");
            let named = format!("{module}.{name} is off");
            assert!(finding.detail.contains(&named), "{finding:?}");
            assert!(
                finding
                    .remedy
                    .is_some_and(|it| it.contains(&format!("{name}=1")))
            );
        }
        let old = requirements(&with("6.1.0-18").host());
        assert!(old.detail.contains("before 6.4"), "{old:?}");
        assert_eq!(requirements(&with("").host()).status, Status::Warning);
    }

    #[test]
    fn page_walks_write_unless_switched_off() {
        let intel = |eptad: &str| {
            let path = "/sys/module/kvm_intel/parameters/eptad";
            page_walks(&FakeHost::new().file(path, eptad).host())
        };
        assert_eq!(intel("N\n").status, Status::Ok);
        let writes = intel("Y\n");
        assert_eq!(writes.status, Status::Warning);
        assert!(writes.remedy.is_some_and(|it| it.contains("eptad=0")));
        let amd = FakeHost::new().file("/sys/module/kvm_amd/parameters/npt", "1");
        let amd = page_walks(&amd.host());
        assert!(
            amd.detail.contains("AMD") && amd.remedy.is_none(),
            "{amd:?}"
        );
        let none = page_walks(&FakeHost::new().host());
        assert_eq!(none.status, Status::Warning);
    }

    #[test]
    fn a_counter_has_its_rate_and_whether_it_can_have_another() {
        let host = FakeHost::new().file("/proc/cpuinfo", "flags : constant_tsc nonstop_tsc\n");
        let of = |scales, khz| {
            let finding = time_stamps(&host.host(), &Facts::with_tsc(scales, khz));
            assert_eq!(finding.status, Status::Ok);
            finding.detail
        };
        let fine = of(true, Some(2_600_000));
        let begins = "constant, 2600000 kHz; KVM can scale it to the rate of another host;";
        assert!(fine.starts_with(begins), "{fine}");
        let fixed = of(false, None);
        assert!(
            fixed.starts_with("constant; KVM cannot scale it:"),
            "{fixed}"
        );
        assert!(
            fixed.contains("250 millionths, this one is refused;"),
            "{fixed}"
        );
    }

    #[test]
    fn a_counter_that_stops_or_changes_its_rate_is_named() {
        let of = |flags: &str| {
            let host = FakeHost::new().file("/proc/cpuinfo", &format!("flags : {flags}\n"));
            let kvm = super::super::kvm::gather(&host.host());
            time_stamps(&host.host(), &kvm)
        };
        let fine = of("fpu constant_tsc nonstop_tsc");
        assert_eq!(fine.status, Status::Ok);
        assert!(fine.detail.contains("is unknown"), "no KVM there: {fine:?}");
        let stops = of("constant_tsc");
        assert_eq!(stops.status, Status::Warning);
        assert!(stops.detail.contains("lacks nonstop_tsc:"), "{stops:?}");
    }
}
