//! The cache of unpacked kernels.
//!
//! One directory per kernel: `package.deb`, `vmlinuz`, `vmlinux`, `lib/modules/RELEASE/` and
//! `image.json`, which describes them. A directory is created under another name and renamed when
//! it is complete.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::apt::{Apt, Package};
use crate::modules::{self, ModuleIndex};
use crate::{ImageError, KernelSpec, command, digest, vmlinux};

/// The version of `image.json`; a record with another version is replaced.
const SCHEMA: u32 = 1;

/// The contents of a cached kernel.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct Record {
    /// The version of this structure.
    pub schema: u32,
    /// The manifest's name of the kernel.
    pub name: String,
    /// The versioned Debian package.
    pub package: String,
    /// The package's version.
    pub version: String,
    /// The output of `uname -r` under this kernel.
    pub release: String,
    /// The requested modules.
    pub modules: Vec<String>,
    /// SHA-256 of the `.deb`.
    pub deb_sha256: String,
    /// SHA-256 of `vmlinuz`.
    pub vmlinuz_sha256: String,
    /// SHA-256 of `vmlinux`.
    pub vmlinux_sha256: String,
    /// SHA-256 over the tree of modules.
    pub modules_sha256: String,
}

/// Where a kernel came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It was cached and its hashes matched.
    Cached,
    /// It was rebuilt from the package in the cache.
    Rebuilt,
    /// Its package was downloaded.
    Downloaded,
}

/// A kernel, ready to boot.
#[derive(Clone, Debug)]
pub struct KernelImage {
    /// Its record.
    pub record: Record,
    /// Where it came from.
    pub origin: Origin,
    dir: PathBuf,
}

impl KernelImage {
    /// Returns the path of the compressed kernel (a bzImage).
    #[must_use]
    pub fn vmlinuz(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// Returns the path of the ELF kernel.
    #[must_use]
    pub fn vmlinux(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// Returns the directory with `modules.dep` and the kept modules.
    #[must_use]
    pub fn modules_dir(&self) -> PathBuf {
        self.dir.join("lib/modules").join(&self.record.release)
    }

    /// Returns the files of these modules and of their dependencies, in loading order, relative to
    /// [`modules_dir`](Self::modules_dir).
    ///
    /// # Errors
    /// Fails when a module was not kept.
    pub fn module_files<'a>(
        &self,
        wanted: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<String>, ImageError> {
        read_index(&self.modules_dir())?
            .closure(wanted)
            .map_err(|name| self.no_module(&name))
    }

    fn no_module(&self, name: &str) -> ImageError {
        ImageError::Incomplete {
            package: self.record.package.clone(),
            what: format!("module {name}"),
        }
    }
}

/// A directory of kernels.
#[derive(Clone, Debug)]
pub struct ImageCache {
    root: PathBuf,
}

impl ImageCache {
    /// Opens the cache in `root`, which is created if necessary.
    ///
    /// # Errors
    /// Fails when it cannot be created.
    pub fn open(root: &Path) -> Result<Self, ImageError> {
        std::fs::create_dir_all(root).map_err(ImageError::io(root))?;
        let root = root.canonicalize().map_err(ImageError::io(root))?;
        Ok(Self { root })
    }

    /// Returns the directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Prepares a kernel: from the cache if it is intact there, otherwise through apt.
    ///
    /// # Errors
    /// Fails when the kernel is not cached and apt cannot deliver it, or disk space or a
    /// command is missing.
    pub fn ensure(&self, spec: &KernelSpec) -> Result<KernelImage, ImageError> {
        let dir = self.root.join(&spec.name);
        let Some(record) = read_record(&dir, spec) else {
            return self.download(spec);
        };
        if is_whole(&dir, &record) && record.modules == spec.modules {
            return Ok(KernelImage {
                record,
                origin: Origin::Cached,
                dir,
            });
        }
        let deb = dir.join("package.deb");
        if digest::file(&deb).is_ok_and(|hash| hash == record.deb_sha256) {
            let package = Package {
                name: record.package,
                version: record.version,
                sha256: record.deb_sha256,
            };
            return self.build(spec, &package, &deb, Origin::Rebuilt);
        }
        self.download(spec)
    }

    /// Prepares a kernel from apt's current version, even if one is cached.
    ///
    /// # Errors
    /// As [`ensure`](Self::ensure).
    pub fn download(&self, spec: &KernelSpec) -> Result<KernelImage, ImageError> {
        let (temp, lists) = (self.temp_dir()?, self.temp_dir()?);
        let apt = match &spec.suite {
            Some(suite) => Apt::of_suite(suite, lists.path())?,
            None => Apt::default(),
        };
        let package = apt.resolve(&spec.package)?;
        let deb = apt.download(&package, temp.path())?;
        self.build(spec, &package, &deb, Origin::Downloaded)
    }

    fn build(
        &self,
        spec: &KernelSpec,
        package: &Package,
        deb: &Path,
        origin: Origin,
    ) -> Result<KernelImage, ImageError> {
        let temp = self.temp_dir()?;
        let tree = temp.path().join("unpacked");
        command::output(
            Command::new("dpkg-deb").arg("-x").arg(deb).arg(&tree),
            "dpkg",
            "is the disk full?",
        )?;
        let made = temp.path().join("image");
        std::fs::create_dir(&made).map_err(ImageError::io(&made))?;
        let record = assemble(spec, package, &tree, &made)?;
        copy(deb, &made.join("package.deb"))?;
        let text = serde_json::to_string_pretty(&record).unwrap_or_default() + "\n";
        let path = made.join("image.json");
        std::fs::write(&path, text).map_err(ImageError::io(&path))?;

        let dir = self.install(&made, &spec.name, &temp)?;
        Ok(KernelImage {
            record,
            origin,
            dir,
        })
    }

    /// Replaces `name` by the directory `temp`.
    pub(crate) fn install(
        &self,
        made: &Path,
        name: &str,
        temp: &tempfile::TempDir,
    ) -> Result<PathBuf, ImageError> {
        let dir = self.root.join(name);
        if dir.exists() {
            let old = temp.path().join("old");
            std::fs::rename(&dir, &old).map_err(ImageError::io(&dir))?;
        }
        std::fs::rename(made, &dir).map_err(ImageError::io(&dir))?;
        Ok(dir)
    }

    /// Creates a directory on the same file system, removed on drop.
    pub(crate) fn temp_dir(&self) -> Result<tempfile::TempDir, ImageError> {
        tempfile::Builder::new()
            .prefix(".making-")
            .tempdir_in(&self.root)
            .map_err(ImageError::io(&self.root))
    }
}

/// Takes the needed files from an unpacked package.
fn assemble(
    spec: &KernelSpec,
    package: &Package,
    tree: &Path,
    made: &Path,
) -> Result<Record, ImageError> {
    let lacks = |what: String| ImageError::Incomplete {
        package: package.name.clone(),
        what,
    };
    let boot = tree.join("boot");
    let kernel = digest::files(&boot)?
        .into_iter()
        .find(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"))
        })
        .ok_or_else(|| lacks("boot/vmlinuz-*".into()))?;
    let file_name = kernel
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let release = file_name.trim_start_matches("vmlinuz-").to_owned();
    copy(&kernel, &made.join("vmlinuz"))?;
    let image = std::fs::read(&kernel).map_err(ImageError::io(&kernel))?;
    let elf = made.join("vmlinux");
    std::fs::write(&elf, vmlinux::extract(&kernel, &image)?).map_err(ImageError::io(&elf))?;

    // Releases after Debian 12 have the modules below /usr.
    let base = [tree.to_path_buf(), tree.join("usr")]
        .into_iter()
        .find(|b| b.join("lib/modules").join(&release).is_dir())
        .ok_or_else(|| lacks(format!("lib/modules/{release}")))?;
    command::output(
        Command::new("depmod").arg("-b").arg(&base).arg(&release),
        "kmod",
        "is the package damaged?",
    )?;
    let from = base.join("lib/modules").join(&release);
    let to = made.join("lib/modules").join(&release);
    let index = read_index(&from)?;
    let files = index
        .closure(spec.modules.iter().map(String::as_str))
        .map_err(|name| lacks(format!("module {name}")))?;
    for file in &files {
        copy_module(&from.join(file), &to.join(modules::plain(file)))?;
    }
    let dep = to.join("modules.dep");
    make_parent(&dep)?;
    std::fs::write(&dep, index.dep_lines(&files)).map_err(ImageError::io(&dep))?;
    copy(&from.join("modules.builtin"), &to.join("modules.builtin"))?;

    Ok(Record {
        schema: SCHEMA,
        name: spec.name.clone(),
        package: package.name.clone(),
        version: package.version.clone(),
        release,
        modules: spec.modules.clone(),
        deb_sha256: package.sha256.clone(),
        vmlinuz_sha256: digest::file(&made.join("vmlinuz"))?,
        vmlinux_sha256: digest::file(&elf)?,
        modules_sha256: digest::tree(&made.join("lib"))?,
    })
}

/// Returns the record of a cached kernel, if a usable one exists.
fn read_record(dir: &Path, spec: &KernelSpec) -> Option<Record> {
    let text = std::fs::read_to_string(dir.join("image.json")).ok()?;
    let record: Record = serde_json::from_str(&text).ok()?;
    (record.schema == SCHEMA && record.name == spec.name).then_some(record)
}

fn is_whole(dir: &Path, record: &Record) -> bool {
    let is =
        |path: &str, hash: &str| digest::file(&dir.join(path)).is_ok_and(|found| found == hash);
    is("vmlinuz", &record.vmlinuz_sha256)
        && is("vmlinux", &record.vmlinux_sha256)
        && digest::tree(&dir.join("lib")).is_ok_and(|found| found == record.modules_sha256)
}

fn read_index(dir: &Path) -> Result<ModuleIndex, ImageError> {
    let read = |name: &str| {
        let path = dir.join(name);
        std::fs::read_to_string(&path).map_err(ImageError::io(&path))
    };
    Ok(ModuleIndex::parse(
        &read("modules.dep")?,
        &read("modules.builtin")?,
    ))
}

/// Copies a module, decompressed: busybox cannot load a compressed one.
fn copy_module(from: &Path, to: &Path) -> Result<(), ImageError> {
    if from.extension().is_none_or(|extension| extension != "xz") {
        return copy(from, to);
    }
    let packed = std::fs::read(from).map_err(ImageError::io(from))?;
    let mut xz = Command::new("xz");
    let plain = command::filter(
        xz.args(["-d", "-c"]),
        &packed,
        "xz-utils",
        "is the package damaged?",
    )?;
    make_parent(to)?;
    std::fs::write(to, plain).map_err(ImageError::io(to))
}

fn copy(from: &Path, to: &Path) -> Result<(), ImageError> {
    make_parent(to)?;
    std::fs::copy(from, to)
        .map(drop)
        .map_err(ImageError::io(from))
}

fn make_parent(path: &Path) -> Result<(), ImageError> {
    match path.parent() {
        Some(parent) => std::fs::create_dir_all(parent).map_err(ImageError::io(parent)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(package: &str) -> KernelSpec {
        KernelSpec {
            name: "tiny".into(),
            package: package.into(),
            suite: None,
            about: String::new(),
            modules: vec!["m".into()],
        }
    }

    /// Builds a `.deb` with a kernel that is an ELF file and a module that depmod can read.
    fn make_deb(dir: &Path) -> Package {
        make_deb_with(dir, |_| {})
    }

    /// Builds the same package after `change` has changed the module.
    fn make_deb_with(dir: &Path, change: impl FnOnce(&Path)) -> Package {
        let tree = dir.join("tree");
        let modules = tree.join("lib/modules/9.9-tiny");
        std::fs::create_dir_all(modules.join("kernel")).unwrap();
        std::fs::create_dir_all(tree.join("boot")).unwrap();
        std::fs::create_dir_all(tree.join("DEBIAN")).unwrap();
        std::fs::write(tree.join("boot/vmlinuz-9.9-tiny"), b"\x7fELF and so on").unwrap();
        // Any relocatable object is a module for depmod.
        std::fs::write(dir.join("m.c"), "int m;\n").unwrap();
        let object = modules.join("kernel/m.ko");
        let mut cc = Command::new("cc");
        cc.arg("-c").arg("-o").arg(&object).arg(dir.join("m.c"));
        command::output(&mut cc, "gcc", "").unwrap();
        change(&object);
        std::fs::write(modules.join("modules.order"), "kernel/m.ko\n").unwrap();
        std::fs::write(modules.join("modules.builtin"), "").unwrap();
        let control = "Package: linux-image-tiny\nVersion: 1\nArchitecture: all\n\
                       Maintainer: n <n@example.org>\nDescription: d\n";
        std::fs::write(tree.join("DEBIAN/control"), control).unwrap();
        let deb = dir.join("tiny.deb");
        let mut build = Command::new("dpkg-deb");
        build
            .args(["-b", "--root-owner-group"])
            .arg(&tree)
            .arg(&deb);
        command::output(&mut build, "dpkg", "").unwrap();
        let sha256 = digest::file(&deb).unwrap();
        Package {
            name: "linux-image-tiny".into(),
            version: "1".into(),
            sha256,
        }
    }

    #[test]
    fn a_damaged_entry_is_made_again_from_its_package_without_apt() {
        let dir = tempfile::tempdir().unwrap();
        let package = make_deb(dir.path());
        let cache = ImageCache::open(&dir.path().join("cache")).unwrap();
        let spec = spec("no-such-meta-package");
        let deb = dir.path().join("tiny.deb");
        let image = cache
            .build(&spec, &package, &deb, Origin::Downloaded)
            .unwrap();
        assert_eq!(image.record.release, "9.9-tiny");
        assert_eq!(image.module_files(["m"]).unwrap(), ["kernel/m.ko"]);
        assert_eq!(cache.ensure(&spec).unwrap().origin, Origin::Cached);

        for damaged in [
            image.vmlinuz(),
            image.vmlinux(),
            image.modules_dir().join("kernel/m.ko"),
        ] {
            std::fs::write(&damaged, "damaged").unwrap();
            assert_eq!(
                cache.ensure(&spec).unwrap().origin,
                Origin::Rebuilt,
                "{damaged:?}"
            );
            assert_eq!(cache.ensure(&spec).unwrap().origin, Origin::Cached);
        }

        // Another list of modules needs another tree.
        let mut other = spec.clone();
        other.modules.clear();
        assert_eq!(cache.ensure(&other).unwrap().origin, Origin::Rebuilt);

        // With the package damaged as well, only apt can help, and apt does not know this name.
        std::fs::write(image.vmlinuz(), "damaged").unwrap();
        std::fs::write(cache.root().join("tiny/package.deb"), "damaged").unwrap();
        let text = cache.ensure(&spec).unwrap_err().to_string();
        assert!(
            text.contains("no-such-meta-package") && text.contains("apt-get update"),
            "{text}"
        );
    }

    #[test]
    fn a_compressed_module_is_kept_decompressed() {
        let dir = tempfile::tempdir().unwrap();
        let mut object = Vec::new();
        let package = make_deb_with(dir.path(), |module| {
            object = std::fs::read(module).unwrap();
            command::output(Command::new("xz").arg(module), "xz-utils", "").unwrap();
        });
        let cache = ImageCache::open(&dir.path().join("cache")).unwrap();
        let deb = dir.path().join("tiny.deb");
        let image = cache
            .build(&spec("p"), &package, &deb, Origin::Downloaded)
            .unwrap();
        assert_eq!(image.module_files(["m"]).unwrap(), ["kernel/m.ko"]);
        let kept = std::fs::read(image.modules_dir().join("kernel/m.ko")).unwrap();
        assert!(kept == object);
    }

    #[test]
    fn nothing_half_made_is_left_after_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let package = make_deb(dir.path());
        let cache = ImageCache::open(&dir.path().join("cache")).unwrap();
        let mut spec = spec("p");
        spec.modules.push("absent".into());
        let deb = dir.path().join("tiny.deb");
        let error = cache
            .build(&spec, &package, &deb, Origin::Downloaded)
            .unwrap_err();
        assert!(error.to_string().contains("module absent"), "{error}");
        assert_eq!(std::fs::read_dir(cache.root()).unwrap().count(), 0);
    }
}
