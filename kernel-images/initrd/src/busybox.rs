//! The busybox of this host as the userland of an initial RAM disk.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::InitrdError;
use crate::cpio::Archive;

/// Adds empty mount points, `/dev/console`, and busybox under all its names except `without`.
///
/// # Errors
/// Fails when no static busybox is installed, or the output fails.
pub fn add_base<W: Write>(archive: &mut Archive<W>, without: &[&str]) -> Result<(), InitrdError> {
    let busybox = find()?;
    let commands = list(&busybox)?;
    let bytes = std::fs::read(&busybox).map_err(InitrdError::io(&busybox))?;
    let mut add = || -> io::Result<()> {
        archive.file("bin/busybox", 0o755, &bytes)?;
        for directory in ["dev", "proc", "sys", "tmp", "run", "sbin", "etc", "root"] {
            archive.directory(directory)?;
        }
        // The kernel opens it as the standard input and outputs of init, before init could mount
        // anything.
        archive.character_device("dev/console", 0o600, 5, 1)?;
        for command in commands
            .lines()
            .filter(|command| *command != "busybox" && !without.contains(command))
        {
            archive.symlink(&format!("bin/{command}"), "busybox")?;
        }
        // The kernel calls this path itself to load modules.
        archive.symlink("sbin/modprobe", "../bin/busybox")
    };
    add().map_err(InitrdError::io(Path::new("initramfs")))
}

/// Returns the commands of busybox, one per line.
fn list(busybox: &Path) -> Result<String, InitrdError> {
    let listed = Command::new(busybox)
        .arg("--list")
        .stdin(Stdio::null())
        .output()
        .map_err(InitrdError::io(busybox))?;
    if !listed.status.success() {
        return Err(InitrdError::BusyboxList {
            path: busybox.to_owned(),
            status: listed.status,
        });
    }
    Ok(String::from_utf8_lossy(&listed.stdout).into_owned())
}

/// Finds this host's static busybox.
fn find() -> Result<PathBuf, InitrdError> {
    let path = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .map(PathBuf::from)
        .find(|path| path.is_file())
        .ok_or(InitrdError::BusyboxMissing)?;
    let bytes = std::fs::read(&path).map_err(InitrdError::io(&path))?;
    // A dynamic program names its loader; no busybox has another reason to name it.
    let loader = b"/lib64/ld-linux";
    if bytes.windows(loader.len()).any(|window| window == loader) {
        return Err(InitrdError::BusyboxMissing);
    }
    Ok(path)
}
