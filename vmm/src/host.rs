//! The host's data in a report, and the root directory of this process.

use std::fs;

use fabric_host::root::ProcFile;
pub use fabric_host::root::{changed_to as root_changed_to, path_now};

use crate::machine::is_emulated;
use crate::report::{Host, Virtualization};
use crate::size::ByteSize;

/// Memory of this host.
static MEMINFO: ProcFile = ProcFile::new("/proc/meminfo");

/// Opens what [`available_memory`] reads, for a process that will leave the root directory which has
/// it.
pub fn keep_available_memory() {
    MEMINFO.keep_open();
}

/// Examines this host.
#[must_use]
pub fn detect() -> Host {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Host {
        virtualization: virtualization(&cpuinfo, is_emulated()),
        cpu_model: cpuinfo_field(&cpuinfo, "model name").to_owned(),
        kernel: release.trim().to_owned(),
    }
}

/// Returns the available memory according to `/proc/meminfo`.
#[must_use]
pub(crate) fn available_bytes(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let value = lines.find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Returns the memory that this host can give to processes now, if its kernel reports it.
#[must_use]
pub fn available_memory() -> Option<ByteSize> {
    available_bytes(&MEMINFO.read()?).map(ByteSize::from_bytes)
}

/// Returns the value of a field in `/proc/cpuinfo`, for the first CPU.
pub(crate) fn cpuinfo_field<'a>(cpuinfo: &'a str, name: &str) -> &'a str {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(field, _)| field.trim() == name)
        .map_or("unknown", |(_, value)| value.trim())
}

/// Returns whether the CPU has a virtualization extension, according to `/proc/cpuinfo`.
fn has_virtualization_extension(cpuinfo: &str) -> bool {
    cpuinfo_field(cpuinfo, "flags")
        .split_whitespace()
        .any(|flag| matches!(flag, "svm" | "vmx"))
}

fn virtualization(cpuinfo: &str, is_emulated: bool) -> Virtualization {
    if has_virtualization_extension(cpuinfo) && !is_emulated {
        Virtualization::Hardware
    } else {
        Virtualization::Emulated
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AMD: &str = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu svm sse2\n";
    const SOFTWARE: &str =
        "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 hypervisor\n";

    #[test]
    fn an_emulated_extension_is_not_hardware() {
        assert_eq!(virtualization(AMD, false), Virtualization::Hardware);
        assert_eq!(virtualization(AMD, true), Virtualization::Emulated);
        assert_eq!(virtualization(SOFTWARE, false), Virtualization::Emulated);
        assert_eq!(virtualization("", false), Virtualization::Emulated);
    }

    #[test]
    fn this_host_has_a_processor_and_a_kernel() {
        let host = detect();
        assert_ne!(host.cpu_model, "unknown");
        assert!(host.kernel.contains('.'), "{host:?}");
    }
}
