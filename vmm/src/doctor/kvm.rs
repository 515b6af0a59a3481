//! KVM: its presence, permissions and capabilities.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStringExt;

use kvm_ioctls::{Cap, Kvm};

use super::{Finding, Host};
use crate::host::cpuinfo_field;
use crate::machine::{halt_exits_can_be_disabled, is_emulated};

/// The API version of every kernel since 2.6.22 (Linux, Documentation/virt/kvm/api.rst,
/// KVM_GET_API_VERSION).
const API_VERSION: i32 = 12;

/// Emulated hosts need neither KVM nor a processor extension.
const TESTBED: &str = "scripts/demo  # boots it in the testbed";

/// The required capabilities, with their names in the kernel's documentation.
const NEEDED: [(Cap, &str); 8] = [
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    // Without it the guest's memory would be pinned, which prevents eviction.
    (Cap::SyncMmu, "KVM_CAP_SYNC_MMU"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
];

/// The facts about KVM.
#[derive(Debug)]
pub(super) struct Facts {
    /// The device's answers, or the error of opening it.
    device: Result<Device, io::Error>,
    /// `svm` or `vmx`, when the CPU has it.
    extension: Option<&'static str>,
    /// The module for this CPU.
    module: &'static str,
    /// Whether QEMU emulates the CPU itself.
    emulated: bool,
}

/// The device's answers.
#[derive(Debug)]
struct Device {
    api_version: i32,
    capabilities_missing: Vec<&'static str>,
    /// Whether a halted vCPU can stay in the guest.
    halts_in_guest: bool,
    /// Whether a vCPU's time stamp counter can have a rate of its own.
    tsc_scaling: bool,
    /// The rate of this host's counter; `None` if KVM does not report it.
    tsc_khz: Option<u32>,
}

impl Facts {
    /// Whether a vCPU's time stamp counter can have a rate of its own; `None` without KVM.
    pub(super) fn tsc_scaling(&self) -> Option<bool> {
        self.device.as_ref().ok().map(|device| device.tsc_scaling)
    }

    /// The rate of this host's time stamp counter in kHz; `None` if KVM does not report it.
    pub(super) fn tsc_khz(&self) -> Option<u32> {
        self.device.as_ref().ok()?.tsc_khz
    }

    /// What a KVM is that says so of the time stamp counter.
    #[cfg(test)]
    pub(super) fn with_tsc(tsc_scaling: bool, tsc_khz: Option<u32>) -> Self {
        Self {
            device: Ok(Device {
                api_version: API_VERSION,
                capabilities_missing: Vec::new(),
                halts_in_guest: true,
                tsc_scaling,
                tsc_khz,
            }),
            extension: Some("svm"),
            module: "kvm-amd",
            emulated: false,
        }
    }
}

/// Queries the device and the CPU.
pub(super) fn gather(host: &Host) -> Facts {
    let cpuinfo = host.read("/proc/cpuinfo");
    let flags = cpuinfo_field(&cpuinfo, "flags");
    let extension = ["svm", "vmx"]
        .into_iter()
        .find(|extension| flags.split_whitespace().any(|flag| flag == *extension));
    let module = match (extension, cpuinfo_field(&cpuinfo, "vendor_id")) {
        (Some("svm"), _) | (None, "AuthenticAMD") => "kvm-amd",
        _ => "kvm-intel",
    };
    Facts {
        device: ask(host),
        extension,
        module,
        emulated: is_emulated(),
    }
}

fn ask(host: &Host) -> io::Result<Device> {
    let path = CString::new(host.path("/dev/kvm").into_os_string().into_vec())?;
    // Opened directly first: the crate's error is less specific.
    host.opens("/dev/kvm")?;
    let kvm = Kvm::new_with_path(path).map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
    let capabilities_missing = NEEDED
        .into_iter()
        .filter(|(capability, _)| !kvm.check_extension(*capability))
        .map(|(_, name)| name)
        .collect();
    Ok(Device {
        api_version: kvm.get_api_version(),
        capabilities_missing,
        halts_in_guest: halt_exits_can_be_disabled(&kvm),
        tsc_scaling: kvm.check_extension(Cap::TscControl),
        tsc_khz: tsc_khz(&kvm).ok().filter(|khz| *khz > 0),
    })
}

/// Asks for the rate of a new vCPU's counter, which is that of the host's.
fn tsc_khz(kvm: &Kvm) -> Result<u32, kvm_ioctls::Error> {
    kvm.create_vm()?.create_vcpu(0)?.get_tsc_khz()
}

/// Evaluates the facts.
pub(super) fn judge(facts: &Facts) -> Finding {
    const CHECK: &str = "kvm";
    let device = match &facts.device {
        Ok(device) => device,
        Err(error) => return judge_closed(error, facts),
    };
    if device.api_version != API_VERSION {
        let found = device.api_version;
        return Finding::missing(
            CHECK,
            format!("the interface has version {found}, {API_VERSION} is needed"),
        );
    }
    if !device.capabilities_missing.is_empty() {
        let names = device.capabilities_missing.join(", ");
        return Finding::missing(CHECK, format!("this KVM lacks {names}"));
    }
    match (facts.extension, facts.emulated) {
        (None, _) => Finding::missing(CHECK, "a software KVM (no svm, no vmx): cannot boot Linux")
            .remedy(TESTBED),
        (Some(extension), true) => Finding::ok(
            CHECK,
            format!("/dev/kvm opens, {extension} is emulated: times are not representative"),
        ),
        (Some(extension), false) => Finding::ok(CHECK, format!("/dev/kvm opens, {extension}")),
    }
}

/// Evaluates what `run --dedicated-cpus` needs.
pub(super) fn judge_dedicated_cpus(facts: &Facts) -> Finding {
    const CHECK: &str = "dedicated CPUs";
    match &facts.device {
        Ok(device) if device.halts_in_guest => Finding::ok(
            CHECK,
            "halted vCPUs can stay in the guest (--dedicated-cpus)",
        ),
        Ok(_) => Finding::warning(
            CHECK,
            "no --dedicated-cpus: KVM_CAP_X86_DISABLE_EXITS lacks HLT, as with kvm.mitigate_smt_rsb=1",
        ),
        // That the device does not open has its own finding, with the remedy.
        Err(error) => Finding::warning(CHECK, format!("unknown without /dev/kvm: {error}")),
    }
}

fn judge_closed(error: &io::Error, facts: &Facts) -> Finding {
    const CHECK: &str = "kvm";
    if error.kind() == io::ErrorKind::PermissionDenied {
        return Finding::missing(CHECK, "/dev/kvm: permission denied")
            .remedy("sudo usermod -aG kvm \"$USER\" && newgrp kvm");
    }
    if facts.extension.is_none() {
        return Finding::missing(
            CHECK,
            "no /dev/kvm, and neither svm nor vmx in the processor",
        )
        .remedy(TESTBED);
    }
    let load = format!("sudo modprobe {}", facts.module);
    match error.kind() {
        io::ErrorKind::NotFound => Finding::missing(CHECK, "no /dev/kvm").remedy(load),
        _ => Finding::missing(CHECK, format!("/dev/kvm does not open: {error}")).remedy(load),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::tests::FakeHost;
    use super::*;

    fn hardware() -> Facts {
        Facts::with_tsc(true, Some(2_600_000))
    }

    #[test]
    fn hardware_with_every_capability_is_ok() {
        let finding = judge(&hardware());
        assert_eq!(finding.status, Status::Ok);
        assert_eq!(finding.detail, "/dev/kvm opens, svm");
    }

    #[test]
    fn an_emulated_processor_is_ok_and_says_that_times_mean_little() {
        let finding = judge(&Facts {
            emulated: true,
            ..hardware()
        });
        assert_eq!(finding.status, Status::Ok);
        assert!(finding.detail.contains("not representative"));
    }

    #[test]
    fn a_software_kvm_is_missing() {
        let finding = judge(&Facts {
            extension: None,
            ..hardware()
        });
        assert_eq!(finding.status, Status::Missing);
        assert!(finding.detail.contains("cannot boot Linux"));
        assert_eq!(finding.remedy.as_deref(), Some(TESTBED));
    }

    #[test]
    fn another_interface_or_a_missing_capability_is_missing() {
        let with = |api_version, capabilities_missing| Facts {
            device: Ok(Device {
                api_version,
                capabilities_missing,
                halts_in_guest: true,
                tsc_scaling: true,
                tsc_khz: None,
            }),
            ..hardware()
        };
        let old = judge(&with(11, Vec::new()));
        assert_eq!(old.status, Status::Missing);
        assert!(old.detail.contains("11"));
        let poor = judge(&with(12, vec!["KVM_CAP_SYNC_MMU"]));
        assert_eq!(poor.status, Status::Missing);
        assert!(poor.detail.contains("KVM_CAP_SYNC_MMU"));
    }

    #[test]
    fn dedicated_cpus_need_halts_that_stay_in_the_guest() {
        let with = |halts_in_guest| {
            judge_dedicated_cpus(&Facts {
                device: Ok(Device {
                    api_version: API_VERSION,
                    capabilities_missing: Vec::new(),
                    halts_in_guest,
                    tsc_scaling: true,
                    tsc_khz: None,
                }),
                ..hardware()
            })
        };
        assert_eq!(with(true).status, Status::Ok);
        let refused = with(false);
        assert_eq!(refused.status, Status::Warning);
        assert!(refused.detail.contains("KVM_CAP_X86_DISABLE_EXITS"));
        let closed = judge_dedicated_cpus(&Facts {
            device: Err(io::ErrorKind::NotFound.into()),
            ..hardware()
        });
        assert_eq!(closed.status, Status::Warning);
    }

    fn closed(kind: io::ErrorKind, extension: Option<&'static str>) -> Finding {
        judge(&Facts {
            device: Err(kind.into()),
            extension,
            ..hardware()
        })
    }

    #[test]
    fn a_device_that_does_not_open_gets_the_remedy_for_its_cause() {
        let remedy = |finding: Finding| {
            assert_eq!(finding.status, Status::Missing);
            finding.remedy.expect("a remedy")
        };
        let denied = remedy(closed(io::ErrorKind::PermissionDenied, Some("svm")));
        assert!(denied.contains("usermod"), "{denied}");
        let absent = remedy(closed(io::ErrorKind::NotFound, Some("svm")));
        assert_eq!(absent, "sudo modprobe kvm-amd");
        let busy = remedy(closed(io::ErrorKind::ResourceBusy, Some("svm")));
        assert_eq!(busy, "sudo modprobe kvm-amd");
        assert_eq!(remedy(closed(io::ErrorKind::NotFound, None)), TESTBED);
    }

    #[test]
    fn the_module_follows_the_processor() {
        let module =
            |cpuinfo: &str| gather(&FakeHost::new().file("/proc/cpuinfo", cpuinfo).host()).module;
        assert_eq!(module("vendor_id : AuthenticAMD\nflags : svm\n"), "kvm-amd");
        assert_eq!(
            module("vendor_id : GenuineIntel\nflags : vmx\n"),
            "kvm-intel"
        );
        assert_eq!(module("vendor_id : AuthenticAMD\nflags : fpu\n"), "kvm-amd");
    }

    #[test]
    fn a_host_without_the_device_is_seen_as_such() {
        let facts = gather(&FakeHost::new().host());
        assert!(matches!(facts.device, Err(error) if error.kind() == io::ErrorKind::NotFound));
    }
}
