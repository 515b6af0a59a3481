//! The directory that testbed hosts see as `/share`: the product and everything that its guests
//! boot.

use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use kernel_images::{ImageCache, Manifest, distro, initramfs, programs};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

/// File that records the contents of the directory.
const RECORD: &str = "share.json";

/// A prepared directory.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Share {
    /// Its path.
    pub dir: PathBuf,
    /// `uname -r` of the default guest.
    pub guest_kernel: String,
    /// `uname -r` of the testbed hosts and of the second guest.
    pub host_kernel: String,
    /// Why there is no distribution; `None` when there is one, or none was requested.
    pub distro_missing: Option<String>,
}

impl Share {
    /// Fills `target/share` of the workspace with `cloud-vmlinuz`, `cloud-vmlinux`, `full-vmlinuz`,
    /// `full-vmlinux`, `guest.cpio` (for the cloud kernel), `guest-full.cpio`, and, if they exist,
    /// `ssi-hv`, `rdma-probe`, `rdma-faults` and `demo` of the release build and the `prometheus`
    /// that `scripts/setup` unpacks.
    ///
    /// # Errors
    /// Fails when a kernel is not available or the disk is full.
    pub fn prepare(workspace: &Path) -> anyhow::Result<Self> {
        let dir = workspace.join("target/share");
        std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        let manifest = Manifest::built_in()?;
        let cache = ImageCache::open(&workspace.join("target/images"))?;
        let tools = programs::build_static(workspace, &["testbed-agent", "faultprobe"])?;
        let mut releases = Vec::new();
        for (name, initrd) in [("cloud", "guest.cpio"), ("full", "guest-full.cpio")] {
            let image = cache
                .ensure(manifest.kernel(name)?)
                .with_context(|| format!("kernel {name}"))?;
            install(&image.vmlinuz(), &dir.join(format!("{name}-vmlinuz")))?;
            install(&image.vmlinux(), &dir.join(format!("{name}-vmlinux")))?;
            initramfs::write_guest(&image, &tools, &dir.join(initrd))?;
            releases.push(image.record.release);
        }
        for name in ["faultprobe", "socket-pipe", "qmp"] {
            install(&tools.join(name), &dir.join(name))?;
        }
        for program in [
            "target/release/ssi-hv",
            "target/release/rdma-probe",
            "target/release/rdma-faults",
            "target/release/demo",
            "target/tools/prometheus",
        ] {
            let program = workspace.join(program);
            if program.is_file() {
                install(&program, &dir.join(program.file_name().unwrap_or_default()))?;
            }
        }
        let [guest_kernel, host_kernel] = <[String; 2]>::try_from(releases)
            .map_err(|_| anyhow::anyhow!("two kernels are wanted"))?;
        let share = Self {
            dir,
            guest_kernel,
            host_kernel,
            distro_missing: None,
        };
        share.record()?;
        Ok(share)
    }

    /// Writes what [`open`](Self::open) reads. Another command may read it meanwhile.
    fn record(&self) -> anyhow::Result<()> {
        let record = self.dir.join(RECORD);
        let mut temp = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o644))
            .tempfile_in(&self.dir)
            .with_context(|| self.dir.display().to_string())?;
        writeln!(temp, "{}", serde_json::to_string_pretty(self)?)
            .with_context(|| temp.path().display().to_string())?;
        let placed = temp.persist(&record).map_err(|error| error.error);
        placed.with_context(|| record.display().to_string())?;
        Ok(())
    }

    /// Uses a directory that [`prepare`](Self::prepare) has filled, wherever it is mounted now.
    ///
    /// # Errors
    /// Fails when it has no record of its contents.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        let record = dir.join(RECORD);
        let text =
            std::fs::read_to_string(&record).with_context(|| record.display().to_string())?;
        let share: Self =
            serde_json::from_str(&text).with_context(|| record.display().to_string())?;
        Ok(Self {
            dir: dir.to_path_buf(),
            ..share
        })
    }

    /// Adds `backports-vmlinuz`: the kernel of newer testbed hosts, as a guest's.
    ///
    /// # Errors
    /// Fails when it is not available or the disk is full.
    pub fn add_newer_kernel(&self, workspace: &Path) -> anyhow::Result<()> {
        let cache = ImageCache::open(&workspace.join("target/images"))?;
        let image = cache.ensure(Manifest::built_in()?.kernel("backports")?)?;
        install(&image.vmlinuz(), &self.dir.join("backports-vmlinuz"))
    }

    /// Adds `debian-vmlinuz` and `debian-initrd.img`, and returns the matching disk image. If
    /// necessary the image is built, which takes about a minute. If it cannot be built, the reason
    /// is recorded.
    pub fn add_distro(&mut self, workspace: &Path) -> Option<PathBuf> {
        match self.try_add_distro(workspace) {
            Ok(disk) => Some(disk),
            Err(error) => {
                self.distro_missing = Some(format!("{error:#}"));
                None
            }
        }
    }

    fn try_add_distro(&self, workspace: &Path) -> anyhow::Result<PathBuf> {
        let cache = ImageCache::open(&workspace.join("target/images"))?;
        let image = distro::ensure(&cache, Manifest::built_in()?.distro("debian")?)?;
        install(&image.kernel(), &self.dir.join("debian-vmlinuz"))?;
        install(&image.initrd(), &self.dir.join("debian-initrd.img"))?;
        Ok(image.disk())
    }

    /// Returns whether the product is present.
    #[must_use]
    pub fn has_product(&self) -> bool {
        self.dir.join("ssi-hv").is_file()
    }
}

/// Copies a file unless an equal one (by size and time) exists; the copy appears by one rename.
pub(crate) fn install(from: &Path, to: &Path) -> anyhow::Result<()> {
    let source = std::fs::metadata(from).with_context(|| from.display().to_string())?;
    let same = |there: std::fs::Metadata| {
        there.len() == source.len()
            && matches!((there.modified(), source.modified()), (Ok(a), Ok(b)) if a == b)
    };
    if std::fs::metadata(to).is_ok_and(same) {
        return Ok(());
    }
    // Of its own name: two commands may fill the directory at once.
    let dir = to.parent().unwrap_or(Path::new("."));
    let temp = NamedTempFile::new_in(dir).with_context(|| dir.display().to_string())?;
    // With its permissions.
    std::fs::copy(from, temp.path())
        .with_context(|| format!("copy {} to {}", from.display(), temp.path().display()))?;
    let set = temp.as_file().set_modified(source.modified()?);
    set.with_context(|| temp.path().display().to_string())?;
    let placed = temp.persist(to).map_err(|error| error.error);
    placed.with_context(|| to.display().to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_installed_again_and_an_equal_one_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        std::fs::write(&from, "one").unwrap();
        install(&from, &to).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"one");
        std::fs::write(&from, "three").unwrap();
        install(&from, &to).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"three");
    }

    #[test]
    fn commands_that_install_a_file_at_once_all_do_and_leave_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (from, shared) = (dir.path().join("from"), dir.path().join("shared"));
        std::fs::create_dir(&shared).unwrap();
        let to = shared.join("to");
        for round in 0..50 {
            let text = "x".repeat(10_000 + round);
            std::fs::write(&from, &text).unwrap();
            std::fs::set_permissions(&from, Permissions::from_mode(0o755)).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| install(&from, &to).unwrap());
                }
            });
            assert_eq!(std::fs::read_to_string(&to).unwrap(), text);
        }
        let mode = std::fs::metadata(&to).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
        assert_eq!(std::fs::read_dir(&shared).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_is_opened_by_its_record_wherever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (made, moved) = (dir.path().join("made"), dir.path().join("moved"));
        std::fs::create_dir(&made).unwrap();
        let share = Share {
            dir: made.clone(),
            guest_kernel: "9.9".into(),
            host_kernel: "9.8".into(),
            distro_missing: None,
        };
        share.record().unwrap();
        std::fs::rename(&made, &moved).unwrap();
        let opened = Share::open(&moved).unwrap();
        assert_eq!(opened.dir, moved);
        assert_eq!(opened.guest_kernel, "9.9");
        assert!(Share::open(&dir.path().join("absent")).is_err());
    }

    #[test]
    fn a_record_is_whole_whenever_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let share = Share {
            dir: dir.path().into(),
            guest_kernel: "9".repeat(100_000),
            host_kernel: "9.8".into(),
            distro_missing: None,
        };
        share.record().unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for _ in 0..200 {
                    share.record().unwrap();
                }
            });
            while !writer.is_finished() {
                Share::open(dir.path()).unwrap();
            }
        });
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
