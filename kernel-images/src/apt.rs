//! Queries apt: which versioned package a meta package depends on, and its hash.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{ImageError, command, digest};

const REMEDY: &str = "run \"apt-get update\" and try again";

/// A versioned package, as apt's signed indexes describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// The name, such as `linux-image-6.1.0-56-cloud-amd64`.
    pub name: String,
    /// The version, such as `6.1.192-2`.
    pub version: String,
    /// The hash of the `.deb`.
    pub sha256: String,
}

/// Asks apt which versioned kernel package `meta` depends on.
///
/// # Errors
/// Fails when apt does not know it.
pub fn resolve(meta: &str) -> Result<Package, ImageError> {
    let unresolved = || ImageError::Unresolved {
        package: meta.to_owned(),
    };
    // apt-cache answers an unknown package with an error, an outdated index with silence.
    let depends = command::output(
        Command::new("apt-cache").args(["depends", "--no-recommends", "--", meta]),
        "apt",
        REMEDY,
    )?;
    let name = kernel_dependency(&String::from_utf8_lossy(&depends)).ok_or_else(unresolved)?;
    let show = command::output(
        Command::new("apt-cache").args(["show", "--no-all-versions", "--", &name]),
        "apt",
        REMEDY,
    )?;
    parse_show(&String::from_utf8_lossy(&show))
        .filter(|p| p.name == name)
        .ok_or_else(unresolved)
}

/// Downloads a package into `dir`. apt checks it against its signed indexes, and the hash is
/// compared again here.
///
/// # Errors
/// Fails when apt does, or when the hash differs.
pub fn download(package: &Package, dir: &Path) -> Result<PathBuf, ImageError> {
    let wanted = format!("{}={}", package.name, package.version);
    command::output(
        Command::new("apt-get").current_dir(dir).args([
            "download",
            "-q",
            "-o",
            "APT::Sandbox::User=root",
            "--",
            &wanted,
        ]),
        "apt",
        REMEDY,
    )?;
    let deb = digest::files(dir)?
        .into_iter()
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| ImageError::Incomplete {
            package: wanted,
            what: "file after its download".into(),
        })?;
    let found = digest::file(&deb)?;
    if found != package.sha256 {
        return Err(ImageError::Checksum {
            what: deb.display().to_string(),
            expected: package.sha256.clone(),
            found,
        });
    }
    Ok(deb)
}

/// Finds `Depends: linux-image-...` in the output of `apt-cache depends`.
fn kernel_dependency(text: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("Depends:"))
        .map(str::trim)
        .find(|name| name.starts_with("linux-image-"))
        .map(str::to_owned)
}

/// Reads the first stanza of the output of `apt-cache show`.
fn parse_show(text: &str) -> Option<Package> {
    let stanza = text.split("\n\n").next()?;
    let field = |key: &str| {
        stanza
            .lines()
            .find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))
            .map(|v| v.trim().to_owned())
    };
    let package = Package {
        name: field("Package")?,
        version: field("Version")?,
        sha256: field("SHA256")?,
    };
    let is_hash =
        package.sha256.len() == 64 && package.sha256.chars().all(|c| c.is_ascii_hexdigit());
    is_hash.then_some(package)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dependency_on_the_versioned_kernel_is_found_among_others() {
        let text =
            "linux-image-x\n  PreDepends: a\n  Depends: b\n  Depends: linux-image-6.1.0-9-x\n";
        assert_eq!(
            kernel_dependency(text).as_deref(),
            Some("linux-image-6.1.0-9-x")
        );
        assert_eq!(kernel_dependency("linux-image-x\n"), None);
    }

    #[test]
    fn the_first_stanza_counts_and_a_short_hash_is_no_hash() {
        let hash = "0".repeat(64);
        let text = format!(
            "Package: p\nVersion: 2\nSHA256: {hash}\nDescription: d\n SHA256: no\n\nPackage: p\nVersion: 1\n"
        );
        let package = parse_show(&text).unwrap();
        assert_eq!((package.version.as_str(), package.sha256), ("2", hash));
        assert_eq!(parse_show("Package: p\nVersion: 2\nSHA256: 12\n"), None);
    }
}
