//! Memory: its size, its kind, and the limit of locked memory.

use std::io;

use rustix::fs::{MemfdFlags, memfd_create};

use super::{Finding, Host};
use crate::config::{DEFAULT_MEMORY, GUEST_MEMORY_MIN};
use crate::host::available_bytes;
use crate::size::ByteSize;

/// Memory that RDMA pins: everything that a donor lends by it, as much as a guest has by default.
const LOCKED_WANTED: ByteSize = DEFAULT_MEMORY;

/// Checks that memory for a guest is available.
pub(super) fn available(host: &Host) -> Finding {
    const CHECK: &str = "memory";
    let meminfo = host.read("/proc/meminfo");
    let Some(available) = available_bytes(&meminfo).map(ByteSize::from_bytes) else {
        return Finding::warning(CHECK, "/proc/meminfo does not say how much is available");
    };
    let shown = available.rounded();
    if available < GUEST_MEMORY_MIN {
        Finding::missing(
            CHECK,
            format!("{shown} available, {GUEST_MEMORY_MIN} is the least for a guest"),
        )
    } else if available < DEFAULT_MEMORY {
        Finding::warning(
            CHECK,
            format!("{shown} available, less than the {DEFAULT_MEMORY} of a guest by default"),
        )
        .remedy("ssi-hv run --memory 256M ...")
    } else {
        Finding::ok(CHECK, format!("{shown} available"))
    }
}

/// Creates a memory file like that of a guest, and closes it.
pub(super) fn create_memfd() -> io::Result<()> {
    drop(memfd_create("ssi-hv-doctor", MemfdFlags::CLOEXEC)?);
    Ok(())
}

/// Checks that the guest's memory can be a memory file that is not reserved in full.
pub(super) fn memfd(host: &Host, created: io::Result<()>) -> Finding {
    const CHECK: &str = "memfd";
    if let Err(error) = created {
        let finding = Finding::missing(CHECK, format!("no memory file can be made: {error}"));
        return if host.read("/proc/sys/vm/memfd_noexec") == "2" {
            finding.remedy("sudo sysctl -w vm.memfd_noexec=1")
        } else {
            finding
        };
    }
    if host.read("/proc/sys/vm/overcommit_memory") == "2" {
        return Finding::warning(
            CHECK,
            "no overcommit: the guest's whole memory is reserved, also what is on donors",
        )
        .remedy("sudo sysctl -w vm.overcommit_memory=0");
    }
    Finding::ok(CHECK, "memory files can be made, overcommit is allowed")
}

/// Checks that home memory of this node can use huge pages, and other memory does not.
pub(super) fn huge_pages(host: &Host) -> Finding {
    const CHECK: &str = "huge pages";
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let setting = host.read(FILE);
    let chosen = setting
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("", |(chosen, _)| chosen);
    match chosen {
        "" => Finding::ok(CHECK, "not for shared memory in this kernel, and not used"),
        "advise" => Finding::ok(
            CHECK,
            "`advise` for shared memory: used for what is at home here",
        ),
        "always" | "within_size" | "force" => Finding::warning(
            CHECK,
            format!(
                "`{chosen}` for shared memory: also where nobody asks for them; fetching ahead takes more time"
            ),
        )
        .remedy(format!("echo advise | sudo tee {FILE}")),
        _ => Finding::warning(
            CHECK,
            format!("`{chosen}` for shared memory: memory at home here is in pages of 4 KiB"),
        )
        .remedy(format!("echo advise | sudo tee {FILE}")),
    }
}

/// Checks that as much memory can be locked as RDMA registers.
pub(super) fn locked(host: &Host) -> Finding {
    const CHECK: &str = "locked memory";
    let limits = host.read("/proc/self/limits");
    let soft = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))
        .and_then(|values| values.split_whitespace().next())
        .unwrap_or_default();
    if soft == "unlimited" {
        return Finding::ok(CHECK, "unlimited");
    }
    let Ok(bytes) = soft.parse() else {
        return Finding::warning(CHECK, "/proc/self/limits does not give the limit");
    };
    let limit = ByteSize::from_bytes(bytes);
    let shown = limit.rounded();
    if has_ipc_lock(host) {
        Finding::ok(
            CHECK,
            format!("the limit of {shown} does not bind this user"),
        )
    } else if limit >= LOCKED_WANTED {
        Finding::ok(CHECK, shown)
    } else if host.names_in("/sys/class/infiniband").is_empty() {
        Finding::ok(CHECK, format!("{shown}; only RDMA needs more"))
    } else {
        Finding::warning(CHECK, format!("{shown}: RDMA pins what a donor lends"))
            .remedy("sudo prlimit --pid $$ --memlock=unlimited")
    }
}

/// Returns whether this process has CAP_IPC_LOCK, which lifts the limit.
fn has_ipc_lock(host: &Host) -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    host.read("/proc/self/status")
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok())
        .is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::tests::FakeHost;
    use super::*;

    fn with_available(kib: &str) -> Finding {
        let meminfo = format!("MemTotal: 9 kB\nMemAvailable:   {kib} kB\n");
        available(&FakeHost::new().file("/proc/meminfo", &meminfo).host())
    }

    #[test]
    fn memory_is_judged_by_what_a_guest_needs() {
        assert_eq!(with_available("8000000").status, Status::Ok);
        assert_eq!(with_available("524288").status, Status::Warning);
        assert_eq!(with_available("1024").status, Status::Missing);
        assert_eq!(with_available("?").status, Status::Warning);
    }

    #[test]
    fn memory_files_and_overcommit_are_judged() {
        let host = FakeHost::new().file("/proc/sys/vm/overcommit_memory", "0\n");
        assert_eq!(memfd(&host.host(), Ok(())).status, Status::Ok);
        let strict = FakeHost::new().file("/proc/sys/vm/overcommit_memory", "2\n");
        let finding = memfd(&strict.host(), Ok(()));
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.remedy.is_some());
    }

    #[test]
    fn a_refused_memory_file_is_missing() {
        let denied = || Err(io::ErrorKind::PermissionDenied.into());
        let finding = memfd(&FakeHost::new().host(), denied());
        assert_eq!((finding.status, finding.remedy), (Status::Missing, None));
        let sealed = FakeHost::new().file("/proc/sys/vm/memfd_noexec", "2\n");
        let finding = memfd(&sealed.host(), denied());
        assert_eq!(finding.status, Status::Missing);
        assert!(finding.remedy.is_some_and(|r| r.contains("memfd_noexec=1")));
    }

    #[test]
    fn this_host_makes_a_memory_file() {
        create_memfd().expect("a memory file");
    }

    #[test]
    fn huge_pages_that_are_never_or_always_made_are_a_warning() {
        let file = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
        let with = |setting: &str| huge_pages(&FakeHost::new().file(file, setting).host());
        let good = "always within_size [advise] never deny force\n";
        assert_eq!(with(good).status, Status::Ok);
        assert_eq!(huge_pages(&FakeHost::new().host()).status, Status::Ok);
        for bad in [
            "[always] within_size advise never deny force\n",
            "always [within_size] advise never deny force\n",
            "always within_size advise [never] deny force\n",
            "always within_size advise never [deny] force\n",
            "always within_size advise never deny [force]\n",
        ] {
            let finding = with(bad);
            assert_eq!(finding.status, Status::Warning);
            let remedy = finding.remedy.expect("a command");
            assert!(remedy.contains("advise") && remedy.contains(file));
        }
    }

    fn with_limit(limit: &str, capabilities: &str, rdma: bool) -> Finding {
        let limits =
            format!("Limit  Soft  Hard  Units\nMax locked memory  {limit}  {limit}  bytes\n");
        let host = FakeHost::new()
            .file("/proc/self/limits", &limits)
            .file("/proc/self/status", &format!("CapEff:\t{capabilities}\n"));
        let host = if rdma {
            host.file("/sys/class/infiniband/rxe0/node_type", "1: CA\n")
        } else {
            host
        };
        locked(&host.host())
    }

    #[test]
    fn the_limit_of_locked_memory_matters_only_with_rdma() {
        assert_eq!(with_limit("unlimited", "0", true).status, Status::Ok);
        assert_eq!(with_limit("8388608", "0", false).status, Status::Ok);
        assert_eq!(with_limit("2147483648", "0", true).status, Status::Ok);
        let finding = with_limit("8388608", "0", true);
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.remedy.is_some());
        assert_eq!(with_limit("?", "0", true).status, Status::Warning);
    }

    #[test]
    fn a_privileged_process_has_no_limit() {
        assert_eq!(
            with_limit("8388608", "000001ffffffffff", true).status,
            Status::Ok
        );
    }
}
