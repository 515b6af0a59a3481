//! Runs tests that inspect their whole process, such as its memory, in a process without other
//! tests.

use std::process::Command;

/// Set in the process of a single test.
const ALONE: &str = "SSI_HV_TEST_IN_OWN_PROCESS";

/// Runs the body of the test `name`, with its modules, in a new process of the same binary.
///
/// # Panics
/// Panics when the test fails there, or is not found.
#[track_caller]
pub fn in_own_process(name: &str, body: fn()) {
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let binary = std::env::current_exe().expect("the path of this binary");
    let output = Command::new(binary)
        .args(["--exact", name, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .expect("this binary starts again");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{name} in a process of its own: {}\n{said}\n{errors}",
        output.status
    );
}
