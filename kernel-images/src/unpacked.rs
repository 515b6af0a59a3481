//! Packages of another suite that are unpacked and not installed.
//!
//! One directory per set of packages: `root/` with what they contain, and `packages.json`, which
//! describes it. A directory is created under another name and renamed when it is complete.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::apt::{Apt, Package};
use crate::{ImageError, command, digest};

/// What is in a directory.
#[derive(Debug, Deserialize, Serialize)]
struct Record {
    suite: String,
    packages: Vec<Package>,
    /// SHA-256 over the tree of files.
    files_sha256: String,
}

/// Unpacked packages.
#[derive(Clone, Debug)]
pub struct Unpacked {
    /// Where their files are, as below `/` if they were installed.
    pub root: PathBuf,
    /// The packages, in the order in which they were requested.
    pub packages: Vec<Package>,
}

/// Unpacks `packages` of a suite, such as `bookworm-backports`, into the directory `dir`, unless an
/// intact one exists. Packages that they depend on are not considered.
///
/// # Errors
/// Fails when apt cannot deliver a package, or the disk is full.
pub fn ensure(dir: &Path, suite: &str, packages: &[&str]) -> Result<Unpacked, ImageError> {
    if let Some(unpacked) = read(dir, suite, packages) {
        return Ok(unpacked);
    }
    let parent = dir.parent().unwrap_or(dir);
    std::fs::create_dir_all(parent).map_err(ImageError::io(parent))?;
    let temp = tempfile::tempdir_in(parent).map_err(ImageError::io(parent))?;
    let apt = Apt::of_suite(suite, &temp.path().join("apt"))?;
    let new = temp.path().join("new");
    let mut record = Record {
        suite: suite.to_owned(),
        packages: Vec::new(),
        files_sha256: String::new(),
    };
    for name in packages {
        let package = apt.package(name)?;
        let debs = temp.path().join(name);
        std::fs::create_dir(&debs).map_err(ImageError::io(&debs))?;
        unpack(&apt.download(&package, &debs)?, &new.join("root"))?;
        record.packages.push(package);
    }
    record.files_sha256 = digest::tree(&new.join("root"))?;
    let text = serde_json::to_string_pretty(&record).unwrap_or_default() + "\n";
    let path = new.join("packages.json");
    std::fs::write(&path, text).map_err(ImageError::io(&path))?;
    if dir.exists() {
        std::fs::remove_dir_all(dir).map_err(ImageError::io(dir))?;
    }
    std::fs::rename(&new, dir).map_err(ImageError::io(dir))?;
    Ok(Unpacked {
        root: dir.join("root"),
        packages: record.packages,
    })
}

fn unpack(deb: &Path, root: &Path) -> Result<(), ImageError> {
    std::fs::create_dir_all(root).map_err(ImageError::io(root))?;
    command::output(
        Command::new("dpkg-deb").arg("-x").arg(deb).arg(root),
        "dpkg",
        "look whether the disk is full",
    )?;
    Ok(())
}

/// Returns what is there, if it is what is wanted and intact.
fn read(dir: &Path, suite: &str, packages: &[&str]) -> Option<Unpacked> {
    let text = std::fs::read_to_string(dir.join("packages.json")).ok()?;
    let record: Record = serde_json::from_str(&text).ok()?;
    let root = dir.join("root");
    let is_it = record.suite == suite
        && record
            .packages
            .iter()
            .map(|p| p.name.as_str())
            .eq(packages.iter().copied())
        && digest::tree(&root).is_ok_and(|hash| hash == record.files_sha256);
    is_it.then_some(Unpacked {
        root,
        packages: record.packages,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_intact_is_used_and_what_is_not_or_is_of_another_suite_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("root/usr/bin/p");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "program").unwrap();
        let record = Record {
            suite: "s-backports".into(),
            packages: vec![Package {
                name: "p".into(),
                version: "2".into(),
                sha256: "0".repeat(64),
            }],
            files_sha256: digest::tree(&dir.path().join("root")).unwrap(),
        };
        let path = dir.path().join("packages.json");
        std::fs::write(&path, serde_json::to_string(&record).unwrap()).unwrap();
        let found = ensure(dir.path(), "s-backports", &["p"]).unwrap();
        assert_eq!(found.packages[0].version, "2");
        assert!(found.root.join("usr/bin/p").is_file());
        assert!(read(dir.path(), "s", &["p"]).is_none());
        assert!(read(dir.path(), "s-backports", &["p", "q"]).is_none());
        std::fs::write(&file, "other").unwrap();
        assert!(read(dir.path(), "s-backports", &["p"]).is_none());
    }
}
