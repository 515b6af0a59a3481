//! Builds the project's static programs for guests and testbed hosts.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::ImageError;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds workspace packages as static programs of the same names and returns their directory.
///
/// They have a target directory of their own, since their flags would otherwise make cargo rebuild
/// everything in alternation.
///
/// # Errors
/// Fails when cargo does.
pub fn build_static(workspace: &Path, packages: &[&str]) -> Result<PathBuf, ImageError> {
    let target = workspace.join("target/static");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(workspace)
        .args([
            "build",
            "--release",
            "--quiet",
            "--target",
            TARGET,
            "--target-dir",
        ])
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        // They are copied into an initramfs.
        .env("CARGO_PROFILE_RELEASE_STRIP", "true")
        .stdin(Stdio::null());
    for package in packages {
        command.args(["-p", package]);
    }
    let status = command
        .status()
        .map_err(ImageError::io(Path::new("cargo")))?;
    if !status.success() {
        return Err(ImageError::CommandFailed {
            command: format!("cargo build -p {}", packages.join(" -p ")),
            status: status.to_string(),
            detail: "see its messages above".into(),
            remedy: "static programs need libc6-dev: run scripts/setup".into(),
        });
    }
    Ok(target.join(TARGET).join("release"))
}

/// Returns the workspace that this crate was built in.
#[must_use]
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
