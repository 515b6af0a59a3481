//! `ssi-hv run --insecure`.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::running::end;

/// A VM with this donor, whose kernel is none.
fn vm(directory: &Path, donor: &str) -> Command {
    let kernel = directory.join("kernel");
    fs::write(&kernel, "none").expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    command
        .args(["run", "--memory", "64M", "--local-memory", "16M"])
        .args(["--insecure", "--donor", donor, "--kernel"])
        .arg(kernel)
        .env("SSI_HV_RUNTIME_DIR", directory.join("sockets"))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

#[test]
fn a_vm_without_certificates_warns_of_a_donor_on_another_host() {
    let directory = tempfile::tempdir().expect("a directory");
    // No host has this address (RFC 5737); the VM would try to reach it for some time.
    let mut command = vm(directory.path(), "192.0.2.1:7000");
    let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
    let warning = "--insecure: connections to donor 192.0.2.1:7000 are neither authenticated";
    let said = end::said_until(child.stderr.take(), warning);
    child.kill().expect("it is a child");
    child.wait().expect("it was killed");
    assert!(said.contains(warning), "{said}");
}

#[test]
fn a_vm_without_certificates_does_not_warn_of_a_donor_on_this_host() {
    let directory = tempfile::tempdir().expect("a directory");
    let output = end::output_of(&mut vm(directory.path(), "127.0.0.1:1"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && !stderr.contains("--insecure"),
        "{stderr}"
    );
}
