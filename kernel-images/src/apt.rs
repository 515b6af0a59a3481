//! Queries apt: which versioned package a meta package depends on, and its hash.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::{ImageError, command, digest, sources};

const REMEDY: &str = "run \"apt-get update\" and try again";
/// The keys of Debian's archive, from the package debian-archive-keyring.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// apt's own user may not write where we do.
const SANDBOX: &str = "-oAPT::Sandbox::User=root";

/// A versioned package, as apt's signed indexes describe it.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct Package {
    /// The name, such as `linux-image-6.1.0-56-cloud-amd64`.
    pub name: String,
    /// The version, such as `6.1.192-2`.
    pub version: String,
    /// The hash of the `.deb`.
    pub sha256: String,
}

/// apt, as this machine is set up or restricted to one suite.
#[derive(Clone, Debug, Default)]
pub struct Apt {
    /// Given to every command, before its own arguments.
    options: Vec<String>,
}

impl Apt {
    /// Another suite of the mirror that this machine uses for Debian, such as `bookworm-backports`.
    ///
    /// Sources, lists and cache are kept in `dir`, so the machine's apt does not change.
    ///
    /// # Errors
    /// Fails when apt knows no mirror, or cannot fetch the lists of the suite.
    pub fn of_suite(suite: &str, dir: &Path) -> Result<Self, ImageError> {
        let mirror = sources::mirror(&sources::debian()?).ok_or(ImageError::NoRelease)?;
        let source = format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
        Self::of_source(&source, dir)
    }

    /// Uses `source`, a line as in `sources.list`, and nothing else.
    fn of_source(source: &str, dir: &Path) -> Result<Self, ImageError> {
        let (list, lists, cache) = (
            dir.join("sources.list"),
            dir.join("lists"),
            dir.join("cache"),
        );
        for made in [lists.join("partial"), cache.join("archives/partial")] {
            std::fs::create_dir_all(&made).map_err(ImageError::io(&made))?;
        }
        std::fs::write(&list, source).map_err(ImageError::io(&list))?;
        // Options of the command line take precedence over every file of the machine.
        let options = [
            format!("Dir::Etc::sourcelist={}", list.display()),
            "Dir::Etc::sourceparts=/dev/null".into(),
            format!("Dir::State::lists={}", lists.display()),
            format!("Dir::Cache={}", cache.display()),
        ];
        let apt = Self {
            options: options.map(|option| format!("-o{option}")).into(),
        };
        apt.output("apt-get", &["update", "-q", SANDBOX])?;
        Ok(apt)
    }

    fn output(&self, program: &str, args: &[&str]) -> Result<Vec<u8>, ImageError> {
        self.output_in(Path::new("."), program, args)
    }

    fn output_in(&self, dir: &Path, program: &str, args: &[&str]) -> Result<Vec<u8>, ImageError> {
        let mut command = Command::new(program);
        command.current_dir(dir).args(&self.options).args(args);
        command::output(&mut command, "apt", REMEDY)
    }

    /// Asks apt which versioned kernel package `meta` depends on.
    ///
    /// # Errors
    /// Fails when apt does not know it.
    pub fn resolve(&self, meta: &str) -> Result<Package, ImageError> {
        let unresolved = || ImageError::Unresolved {
            package: meta.to_owned(),
        };
        // apt-cache answers an unknown package with an error, an outdated index with silence.
        let depends = self.output("apt-cache", &["depends", "--no-recommends", "--", meta])?;
        let name = kernel_dependency(&String::from_utf8_lossy(&depends)).ok_or_else(unresolved)?;
        self.package(&name)
    }

    /// Asks apt for the newest version of a package.
    ///
    /// # Errors
    /// Fails when apt does not know it.
    pub fn package(&self, name: &str) -> Result<Package, ImageError> {
        let show = self.output("apt-cache", &["show", "--no-all-versions", "--", name])?;
        parse_show(&String::from_utf8_lossy(&show))
            .filter(|p| p.name == name)
            .ok_or_else(|| ImageError::UnknownPackage {
                package: name.to_owned(),
            })
    }

    /// Downloads a package into `dir`. apt checks it against its signed indexes, and the hash is
    /// compared again here.
    ///
    /// # Errors
    /// Fails when apt does, or when the hash differs.
    pub fn download(&self, package: &Package, dir: &Path) -> Result<PathBuf, ImageError> {
        let wanted = format!("{}={}", package.name, package.version);
        self.output_in(dir, "apt-get", &["download", "-q", SANDBOX, "--", &wanted])?;
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

    /// A flat archive in `dir` with a meta package and the package that it depends on.
    fn make_archive(dir: &Path) -> String {
        let mut index = String::new();
        for (name, depends) in [
            ("linux-image-absent-elsewhere", "linux-image-9.9-absent"),
            ("linux-image-9.9-absent", ""),
        ] {
            let tree = dir.join(name);
            std::fs::create_dir_all(tree.join("DEBIAN")).unwrap();
            let mut control = format!(
                "Package: {name}\nVersion: 9.9\nArchitecture: all\n\
                 Maintainer: n <n@example.org>\nDescription: d\n"
            );
            if !depends.is_empty() {
                control += &format!("Depends: {depends}\n");
            }
            std::fs::write(tree.join("DEBIAN/control"), &control).unwrap();
            let deb = dir.join(format!("{name}.deb"));
            let mut build = Command::new("dpkg-deb");
            build
                .args(["-b", "--root-owner-group"])
                .arg(&tree)
                .arg(&deb);
            command::output(&mut build, "dpkg", "").unwrap();
            let (size, hash) = (
                std::fs::metadata(&deb).unwrap().len(),
                digest::file(&deb).unwrap(),
            );
            index += &format!("{control}Filename: ./{name}.deb\nSize: {size}\nSHA256: {hash}\n\n");
        }
        std::fs::write(dir.join("Packages"), index).unwrap();
        format!("deb [trusted=yes] file:{} ./\n", dir.display())
    }

    #[test]
    fn a_source_of_its_own_is_used_alone_and_the_machines_apt_does_not_learn_of_it() {
        let archive = tempfile::tempdir().unwrap();
        let source = make_archive(archive.path());
        let dir = tempfile::tempdir().unwrap();
        let apt = Apt::of_source(&source, dir.path()).unwrap();
        let package = apt.resolve("linux-image-absent-elsewhere").unwrap();
        assert_eq!(
            (package.name.as_str(), package.version.as_str()),
            ("linux-image-9.9-absent", "9.9")
        );
        let into = tempfile::tempdir().unwrap();
        let deb = apt.download(&package, into.path()).unwrap();
        assert_eq!(digest::file(&deb).unwrap(), package.sha256);

        let machine = Apt::default().resolve("linux-image-absent-elsewhere");
        assert!(machine.is_err(), "{machine:?}");
    }
}
