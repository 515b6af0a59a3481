//! Limits the number of files with unsafe code, so that adding one is a deliberate decision.

use std::path::{Path, PathBuf};

/// Highest number of files with unsafe code in what users run: enough for the boundaries below, and
/// for no other.
const FILES_MAX: usize = 25;

/// The files with unsafe code, and for what. Each is the boundary to an interface that has no safe
/// form, and offers safe calls to the rest.
const ALLOWED: &[(&str, &str)] = &[
    (
        "devices/src/sys.rs",
        "locks of open file descriptions, ioctls of taps",
    ),
    (
        "kernel-images/faultprobe/src/cpu.rs",
        "the time-stamp counter and an I/O port",
    ),
    (
        "kernel-images/faultprobe/src/memory.rs",
        "memory under test, mbind",
    ),
    (
        "memory-fabric/host/src/mapping.rs",
        "mappings, and bytes in them that others may write",
    ),
    (
        "memory-fabric/host/src/poll.rs",
        "ppoll of descriptors that others own",
    ),
    (
        "memory-fabric/host/src/slices.rs",
        "sched_setattr, processor time of a thread",
    ),
    (
        "memory-fabric/host/src/tcp.rs",
        "socket options newer than the libraries",
    ),
    ("memory-fabric/pages/src/uffd.rs", "ioctls of userfaultfd"),
    (
        "memory-fabric/sealing/src/key.rs",
        "keys that are overwritten at their end",
    ),
    (
        "memory-fabric/transport/src/rdma/connection.rs",
        "pages that an adapter may be writing",
    ),
    ("memory-fabric/verbs/src/device.rs", "libibverbs: devices"),
    (
        "memory-fabric/verbs/src/library.rs",
        "libibverbs: loading it",
    ),
    (
        "memory-fabric/verbs/src/memory.rs",
        "libibverbs: protection domains and regions",
    ),
    ("memory-fabric/verbs/src/pair.rs", "libibverbs: queue pairs"),
    (
        "memory-fabric/verbs/src/queue.rs",
        "libibverbs: completion queues",
    ),
    (
        "memory-fabric/verbs/src/staging.rs",
        "buffers that an adapter writes",
    ),
    ("vmm/exec-init/main.rs", "a program without a C library"),
    (
        "vmm/machine/src/kvm.rs",
        "guest memory for KVM, and fields of kvm_run",
    ),
    (
        "vmm/machine/src/lifecycle/kick.rs",
        "signals, POSIX timers, immediate_exit",
    ),
    (
        "vmm/machine/src/memory_errors.rs",
        "SIGBUS, and a read that may raise it",
    ),
    (
        "vmm/machine/src/sys.rs",
        "CPUID, RDTSC, sets of more CPUs than those of rustix",
    ),
    (
        "vmm/machine/src/vcpu/state/mod.rs",
        "KVM_SET_XSAVE, whose size depends on the host",
    ),
    (
        "vmm/src/commands/up/before_exec.rs",
        "between fork and exec",
    ),
    (
        "vmm/src/exec/guest/sys.rs",
        "system calls without a C library",
    ),
    (
        "vmm/src/instance/memory.rs",
        "the guest view as memory of vm-memory",
    ),
];

/// The same for the programs that test the product.
const OF_TESTS: &[(&str, &str)] = &[
    (
        "tests/agent/src/sys.rs",
        "ioctls of /dev/kvm and userfaultfd",
    ),
    ("tests/src/sys.rs", "between fork and exec"),
];

/// Returns whether a file counts: files that only tests use do not.
fn is_product(path: &Path) -> bool {
    let of_tests = ["tests", "benches", "test-support", "tiny-guests"];
    let parts = || path.iter().filter_map(|part| part.to_str());
    let name = path.file_name().and_then(|name| name.to_str());
    let in_tests = parts().skip(1).any(|part| of_tests.contains(&part));
    !in_tests && !name.is_some_and(|name| name.ends_with("tests.rs"))
}

/// Returns whether a file has unsafe blocks, functions or implementations.
fn is_unsafe(text: &str) -> bool {
    let marks = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"];
    let code = text.lines().map(str::trim_start);
    let mut code = code.filter(|line| !line.starts_with("//"));
    code.any(|line| marks.iter().any(|mark| line.contains(mark)))
}

/// Collects all Rust files below a directory, relative to `root`.
fn sources(root: &Path, below: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(root.join(below))
        .expect("a directory")
        .flatten()
    {
        let path = below.join(entry.file_name());
        let name = entry.file_name();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if name != "target" && !name.to_string_lossy().starts_with('.') {
                sources(root, &path, found);
            }
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn unsafe_code_is_in_the_files_of_the_table_and_nowhere_else() {
    // That of this crate: `kernel_images` may have been built in another tree, whose files it names.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    sources(&root, Path::new(""), &mut files);
    let has_unsafe =
        |path: &PathBuf| is_unsafe(&std::fs::read_to_string(root.join(path)).expect("a text"));
    // This file contains the marks, but no unsafe code.
    files.retain(|path| is_product(path) && !path.ends_with(file!()) && has_unsafe(path));
    let tables = ALLOWED.iter().chain(OF_TESTS);
    let allowed: Vec<PathBuf> = tables.map(|(path, _)| path.into()).collect();
    let extra: Vec<_> = files
        .iter()
        .filter(|path| !allowed.contains(path))
        .collect();
    assert!(extra.is_empty(), "not in the table: {extra:#?}");
    let stale: Vec<_> = allowed
        .iter()
        .filter(|path| !files.contains(path))
        .collect();
    assert!(stale.is_empty(), "without unsafe code: {stale:#?}");
    let files = ALLOWED.len();
    assert!(
        files <= FILES_MAX,
        "{files} files, the limit is {FILES_MAX}"
    );
}

#[test]
fn comments_and_tests_do_not_count() {
    assert!(is_unsafe("    unsafe { call() }"));
    assert!(!is_unsafe("// unsafe { call() }\n/// an unsafe fn"));
    assert!(is_product(Path::new("tests/src/sys.rs")));
    assert!(!is_product(Path::new("vmm/tests/integration/up.rs")));
    assert!(!is_product(Path::new("vmm/src/console_tests.rs")));
}
