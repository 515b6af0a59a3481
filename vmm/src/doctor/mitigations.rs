//! Does the processor keep guests from reading what is not theirs?

use super::{Finding, Host};

/// A file for each vulnerability of processors that the kernel knows (Linux,
/// Documentation/ABI/testing/sysfs-devices-system-cpu).
const DIRECTORY: &str = "/sys/devices/system/cpu/vulnerabilities";

/// Turns the second thread of each core off until the next boot.
const WITHOUT_SMT: &str = "echo off | sudo tee /sys/devices/system/cpu/smt/control";

/// What a line of the kernel says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// Not affected, or mitigated.
    Safe,
    /// Mitigated for one thread of a core, and not between the two.
    SafeWithoutSmt,
    Vulnerable,
    /// A hypervisor would have to say.
    Unknown,
}

fn state_of(line: &str) -> State {
    // `itlb_multihit` has the state of KVM behind a prefix, or "Processor vulnerable".
    let state = line.strip_prefix("KVM: ").unwrap_or(line);
    // A mitigation may leave parts open: "VMX: vulnerable, SMT disabled", "BHI: Vulnerable"; unless
    // KVM does something of its own: "BHI: Vulnerable, KVM: SW loop".
    let mut parts = state.split(';').map(str::trim);
    let is_open = |part: &str| {
        let (first, more) = part.split_once(',').unwrap_or((part, ""));
        let what = first.rsplit(": ").next().unwrap_or(first);
        what.eq_ignore_ascii_case("vulnerable") && !more.contains("KVM: ")
    };
    if state.starts_with("Vulnerable")
        || state.starts_with("Processor vulnerable")
        || parts.clone().any(is_open)
    {
        State::Vulnerable
    } else if state.contains("SMT vulnerable") {
        State::SafeWithoutSmt
    } else if parts.any(|part| part == "SMT Host state unknown") {
        State::Unknown
    } else if state.starts_with("Not affected") || state.starts_with("Mitigation") {
        State::Safe
    } else {
        State::Unknown
    }
}

/// Checks that the kernel counters all that its processor is vulnerable to.
pub(super) fn judge(host: &Host) -> Finding {
    const CHECK: &str = "mitigations";
    let names = host.names_in(DIRECTORY);
    if names.is_empty() {
        let detail = format!("not known: the kernel has no {DIRECTORY}");
        return Finding::warning(CHECK, detail);
    }
    let of = |wanted| {
        let lines = names.iter().filter(|name| {
            let line = host.read(&format!("{DIRECTORY}/{name}"));
            state_of(&line) == wanted
        });
        lines.map(String::as_str).collect::<Vec<_>>().join(", ")
    };
    let vulnerable = of(State::Vulnerable);
    if !vulnerable.is_empty() {
        let off = host
            .read("/proc/cmdline")
            .split_whitespace()
            .any(|word| word == "mitigations=off");
        let remedy = if off {
            "remove mitigations=off from the command line of the kernel, and reboot"
        } else {
            "install the newest kernel and microcode of the processor, and reboot"
        };
        let detail = format!(
            "none against {vulnerable}: a guest may read memory of this host and of its neighbours; {remedy}"
        );
        return Finding::warning(CHECK, detail);
    }
    let shared = of(State::SafeWithoutSmt);
    if !shared.is_empty() {
        let detail = format!(
            "incomplete with two threads in a core ({shared}): a guest may read what runs beside it"
        );
        return Finding::warning(CHECK, detail).remedy(WITHOUT_SMT);
    }
    let unknown = of(State::Unknown);
    if !unknown.is_empty() {
        let detail = format!("the kernel cannot tell for {unknown}; ask who runs this machine");
        return Finding::warning(CHECK, detail);
    }
    let detail = format!("against all {} known vulnerabilities", names.len());
    Finding::ok(CHECK, detail)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::tests::FakeHost;
    use super::*;

    /// A host whose kernel reports these lines.
    fn with(lines: &[(&str, &str)]) -> FakeHost {
        let add = |host: FakeHost, (name, line): &(&str, &str)| {
            host.file(&format!("{DIRECTORY}/{name}"), &format!("{line}\n"))
        };
        lines.iter().fold(FakeHost::new(), add)
    }

    fn judged(lines: &[(&str, &str)]) -> Finding {
        judge(&with(lines).host())
    }

    const SAFE: [(&str, &str); 4] = [
        (
            "l1tf",
            "Mitigation: PTE Inversion; VMX: flush not necessary, SMT disabled",
        ),
        ("meltdown", "Not affected"),
        ("itlb_multihit", "KVM: Mitigation: VMX disabled"),
        (
            "spectre_v2",
            "Mitigation: Retpolines; STIBP: disabled; RSB filling; BHI: Vulnerable, KVM: SW loop",
        ),
    ];

    #[test]
    fn a_processor_that_is_not_affected_or_mitigated_is_ok() {
        let finding = judged(&SAFE);
        assert_eq!(finding.status, Status::Ok);
        assert_eq!(finding.detail, "against all 4 known vulnerabilities");
    }

    #[test]
    fn every_vulnerability_without_mitigation_is_named() {
        let lines = [
            SAFE[0],
            ("itlb_multihit", "KVM: Vulnerable"),
            (
                "mds",
                "Vulnerable: Clear CPU buffers attempted, no microcode; SMT vulnerable",
            ),
            ("retbleed", "Vulnerable"),
            (
                "spectre_v2",
                "Mitigation: Enhanced / Automatic IBRS; IBPB: conditional; PBRSB-eIBRS: SW sequence; BHI: Vulnerable",
            ),
            (
                "srbds",
                "Mitigation: PTE Inversion; VMX: vulnerable, SMT disabled",
            ),
        ];
        let finding = judged(&lines);
        assert_eq!(finding.status, Status::Warning);
        let named = "none against itlb_multihit, mds, retbleed, spectre_v2, srbds:";
        assert!(finding.detail.starts_with(named), "{}", finding.detail);
        assert!(finding.detail.contains("microcode"), "{}", finding.detail);
        assert_eq!(finding.remedy, None, "no command does it");

        let off = with(&lines).file("/proc/cmdline", "quiet mitigations=off panic=-1\n");
        let remedy = judge(&off.host()).detail;
        assert!(remedy.contains("remove mitigations=off"), "{remedy}");
    }

    #[test]
    fn what_only_one_thread_of_a_core_is_safe_from_has_another_remedy() {
        let finding = judged(&[
            SAFE[1],
            ("mds", "Mitigation: Clear CPU buffers; SMT vulnerable"),
        ]);
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.detail.contains("(mds)"), "{}", finding.detail);
        assert_eq!(finding.remedy.as_deref(), Some(WITHOUT_SMT));
    }

    #[test]
    fn what_the_kernel_does_not_know_is_not_ok() {
        let unknown = "Unknown: Dependent on hypervisor status";
        let finding = judged(&[SAFE[1], ("gather_data_sampling", unknown)]);
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.detail.contains("gather_data_sampling"));
        let nested = "Mitigation: Clear CPU buffers; SMT Host state unknown";
        assert_eq!(judged(&[SAFE[1], ("mds", nested)]).status, Status::Warning);
        assert_eq!(judged(&[]).status, Status::Warning);
    }
}
