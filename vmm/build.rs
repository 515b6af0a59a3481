//! Compiles the init of `ssi-hv run --exec` for the guest: a static program of its own, without
//! a standard library, that the binary then carries.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// What the init is made of.
const SOURCES: [&str; 3] = ["exec-init", "src/exec/frame.rs", "src/exec/guest"];

fn main() {
    for source in SOURCES.iter().chain(&["build.rs"]) {
        println!("cargo:rerun-if-changed={source}");
    }
    let variable = |name: &str| env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name}"));
    let out = PathBuf::from(variable("OUT_DIR")).join("exec-init");
    let mut command = Command::new(variable("RUSTC"));
    command
        .args(["exec-init/main.rs", "--crate-name=exec_init"])
        .args(["--crate-type=bin", "--edition=2024", "--target"])
        .arg(variable("TARGET"))
        .arg("-o")
        .arg(&out)
        .args(["-Cpanic=abort", "-Copt-level=s", "-Cstrip=symbols"])
        .args(["-Crelocation-model=static", "-Ctarget-feature=+crt-static"])
        .args(["-Clink-arg=-nostdlib", "-Clink-arg=-nostartfiles"])
        .args(["-Clink-arg=-static", "-Clink-arg=-Wl,--build-id=none"]);
    let status = command
        .status()
        .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    assert!(status.success(), "{command:?} failed: {status}");
}
