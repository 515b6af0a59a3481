//! The initial RAM disk that runs one command.

use std::ffi::CStr;
use std::io;
use std::path::{Path, PathBuf};

use initrd::cpio::Archive;
use initrd::{InitrdError, busybox};

use super::frame::{COMMAND_PATH, INIT_PATH};

/// Our init, built by `build.rs`.
static INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/exec-init"));

/// Why the initial RAM disk cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// This host has no busybox for the guest.
    #[error(
        "--exec needs a shell in the guest: install busybox-static on this host (apt-get install busybox-static), or give an initial RAM disk with a /bin/sh by --initrd"
    )]
    Shell(#[source] InitrdError),
    /// The given initial RAM disk cannot be read.
    #[error("cannot read --initrd {}", path.display())]
    Initrd {
        /// The file.
        path: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// The archive cannot be written.
    #[error("cannot make the initial RAM disk of --exec")]
    Write(#[source] io::Error),
}

/// Creates an initial RAM disk for `command`: with the contents of `initrd`, or otherwise with the
/// busybox of this host.
///
/// # Errors
///
/// Fails when there is no shell to run the command, or `initrd` cannot be read.
pub fn with_command(command: &str, initrd: Option<&Path>) -> Result<Vec<u8>, ArchiveError> {
    let mut archive = Archive::new(Vec::new());
    if initrd.is_none() {
        busybox::add_base(&mut archive, &[]).map_err(ArchiveError::Shell)?;
    }
    let mut add = |path, mode, bytes: &[u8]| {
        archive
            .file(in_archive(path), mode, bytes)
            .map_err(ArchiveError::Write)
    };
    add(INIT_PATH, 0o755, INIT)?;
    add(COMMAND_PATH, 0o644, &[command.as_bytes(), b"\0"].concat())?;
    let mut bytes = archive.finish().map_err(ArchiveError::Write)?;
    if let Some(path) = initrd {
        // The kernel unpacks concatenated archives, each compressed or not. The first one ends at a
        // multiple of four bytes, where the second must start
        // (Documentation/driver-api/early-userspace/buffer-format.rst).
        let theirs = std::fs::read(path).map_err(|source| ArchiveError::Initrd {
            path: path.into(),
            source,
        })?;
        bytes.extend(theirs);
    }
    Ok(bytes)
}

/// Returns the kernel parameter that starts our init.
#[must_use]
pub fn kernel_parameter() -> String {
    format!("rdinit=/{}", in_archive(INIT_PATH))
}

/// Returns a path in the form of archives, without the leading slash.
fn in_archive(path: &'static CStr) -> &'static str {
    path.to_str().unwrap_or_default().trim_start_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(bytes: &[u8], part: &[u8]) -> bool {
        bytes.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn the_init_is_a_static_program() {
        assert!(INIT.starts_with(b"\x7fELF\x02\x01\x01"));
        assert!(!contains(INIT, b"ld-linux"), "names a loader");
        assert!(INIT.len() < 64 << 10, "{} bytes", INIT.len());
    }

    #[test]
    fn an_initial_ram_disk_that_is_given_follows_ours_unchanged() {
        let given = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(given.path(), b"\x1f\x8b compressed").expect("is written");
        let all = with_command("echo hi", Some(given.path())).expect("is made");
        assert!(contains(&all, b"echo hi\0"));
        assert!(contains(&all, INIT));
        let (ours, theirs) = all.split_at(all.len() - 13);
        assert_eq!(theirs, b"\x1f\x8b compressed");
        assert!(ours.len().is_multiple_of(4) && contains(ours, b"TRAILER!!!"));
        let error = with_command("true", Some(Path::new("/no/such"))).expect_err("is absent");
        assert!(error.to_string().contains("--initrd /no/such"), "{error}");
    }

    #[test]
    fn the_kernel_is_told_where_the_init_is() {
        assert_eq!(kernel_parameter(), "rdinit=/ssi-hv/init");
    }
}
