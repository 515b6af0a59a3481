//! What the process of a VM may still do.

use std::fs;

use crate::running::{Place, Running, vm};
use crate::support::kvm_is_there;

/// A field of the status of each thread of a process.
pub fn of_threads(pid: &str, field: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let statuses = threads.map(|thread| {
        let path = thread.expect("a thread").path().join("status");
        let status = fs::read_to_string(path).expect("a status");
        let value = status.lines().find_map(|line| line.strip_prefix(field));
        value
            .expect("the field")
            .trim_start_matches(':')
            .trim()
            .to_owned()
    });
    statuses.collect()
}

pub fn all_are(vm: &Running, field: &str, value: &str) -> bool {
    let values = of_threads(&vm.pid(), field);
    values.len() > 1 && values.iter().all(|one| one == value)
}

#[test]
fn all_threads_of_a_vm_are_restricted_unless_that_is_turned_off() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let restricted = vm(&place, &[]);
    assert!(all_are(&restricted, "Seccomp", "2"));
    assert!(all_are(&restricted, "NoNewPrivs", "1"));
    let free = vm(&place, &["--sandbox", "off"]);
    for vm in [&restricted, &free] {
        let limits = fs::read_to_string(format!("/proc/{}/limits", vm.pid())).expect("it runs");
        let of_core = limits
            .lines()
            .find(|line| line.starts_with("Max core file size"));
        let of_core = of_core.expect("a limit").split_whitespace().nth(4);
        assert!(matches!(of_core, Some("0" | "1")), "{limits}");
    }
    // As restricted as this process.
    for field in ["Seccomp", "NoNewPrivs"] {
        let own = of_threads("self", field).remove(0);
        assert!(all_are(&free, field, &own), "{field}");
    }
    assert_eq!(restricted.end(libc::SIGINT), free.end(libc::SIGINT));
}
