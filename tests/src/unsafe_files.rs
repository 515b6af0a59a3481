//! Limits the number of files with unsafe code, so that adding one is a deliberate decision.

use std::path::{Path, PathBuf};

/// Locations of unsafe code, the highest number of files in each, and the reason.
const ALLOWED: &[(&str, usize, &str)] = &[
    (
        "devices/src/sys.rs",
        1,
        "locks of open file descriptions, ioctls of taps",
    ),
    (
        "kernel-images/faultprobe/src",
        2,
        "memory under test; the time-stamp counter and an I/O port",
    ),
    ("memory-fabric", 19, "guest memory, userfaultfd, verbs"),
    (
        "tests/agent/src/check.rs",
        1,
        "ioctls of /dev/kvm and userfaultfd",
    ),
    ("tests/src/sys.rs", 1, "between fork and exec"),
    ("vmm", 18, "KVM, signals, terminals, the guest's init"),
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
fn unsafe_code_is_in_no_more_files_than_the_table_allows() {
    let root = kernel_images::programs::workspace();
    let mut files = Vec::new();
    sources(&root, Path::new(""), &mut files);
    let has_unsafe =
        |path: &PathBuf| is_unsafe(&std::fs::read_to_string(root.join(path)).expect("a text"));
    // This file contains the marks, but no unsafe code.
    files.retain(|path| is_product(path) && !path.ends_with(file!()) && has_unsafe(path));
    assert!(files.contains(&PathBuf::from("devices/src/sys.rs")));
    for (place, most, _) in ALLOWED {
        let (here, others) = files.into_iter().partition(|path| path.starts_with(place));
        let here: Vec<PathBuf> = here;
        assert!(
            here.len() <= *most,
            "{place}: unsafe code in {} files, {most} is the limit: {here:#?}",
            here.len()
        );
        files = others;
    }
    assert!(files.is_empty(), "not in the table: {files:#?}");
}

#[test]
fn comments_and_tests_do_not_count() {
    assert!(is_unsafe("    unsafe { call() }"));
    assert!(!is_unsafe("// unsafe { call() }\n/// an unsafe fn"));
    assert!(is_product(Path::new("tests/src/sys.rs")));
    assert!(!is_product(Path::new("vmm/tests/integration/up.rs")));
    assert!(!is_product(Path::new("vmm/src/console_tests.rs")));
}
