//! The disk of a whole distribution: a raw image with one ext4 file system, and beside it the
//! kernel and the initial RAM disk that are installed in it.
//!
//! `mmdebstrap` installs packages of the release that apt is configured for, checked by apt against
//! its signed indexes. Additions to Debian are in `debian/`: a few files, and a script that runs at
//! the end. No file system is mounted. A cache entry holds `disk.img`, `vmlinuz`, `initrd.img`,
//! `packages.txt` with every package and its version, and `image.json`; it is rebuilt when one of
//! these files or its recipe changes.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::cache::Origin;
use crate::{DistroSpec, ImageCache, ImageError, command, digest, sources};

/// The version of `image.json`; a record with another version is replaced.
const SCHEMA: u32 = 1;

/// Files that are copied over those of the packages, before these are installed.
const OVERLAY: &[(&str, &str)] = &[
    ("etc/fstab", include_str!("../debian/overlay/etc/fstab")),
    (
        "etc/ssh/sshd_config.d/ssi-hv.conf",
        include_str!("../debian/overlay/etc/ssh/sshd_config.d/ssi-hv.conf"),
    ),
    (
        "etc/systemd/network/80-ethernet.network",
        include_str!("../debian/overlay/etc/systemd/network/80-ethernet.network"),
    ),
    (
        "etc/systemd/system/ssh-host-key.service",
        include_str!("../debian/overlay/etc/systemd/system/ssh-host-key.service"),
    ),
];

/// The script that runs when everything is installed.
const CUSTOMIZE: &str = include_str!("../debian/customize");

/// Files without use in a guest.
const LEFT_OUT: &[&str] = &[
    "/usr/share/man/*",
    "/usr/share/doc/*",
    "/usr/share/locale/*",
];

/// Settings of this machine's apt that it may need to reach its archive or to accept it.
const APT_SETTINGS: &[&str] = &[
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
    "Acquire::http::Proxy",
    "Acquire::https::Proxy",
];

/// Upper bound of file times in the image (seconds since 1970), so that the same packages give the
/// same archive: 14 November 2023.
const NEWEST_FILE_SECONDS: &str = "1700000000";

const REMEDY: &str = "run \"apt-get update\" and try again";

/// The contents of a cached distribution.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct Record {
    /// The version of this structure.
    pub schema: u32,
    /// The manifest's name of the distribution.
    pub name: String,
    /// Its release, such as `bookworm`.
    pub release: String,
    /// SHA-256 of its recipe: packages, files, script, size.
    pub recipe_sha256: String,
    /// SHA-256 of `packages.txt`.
    pub packages_sha256: String,
    /// SHA-256 of its file archive, which is the same for the same packages and recipe.
    pub files_sha256: String,
    /// SHA-256 of `vmlinuz`.
    pub vmlinuz_sha256: String,
    /// SHA-256 of `initrd.img`.
    pub initrd_sha256: String,
    /// SHA-256 of `disk.img`, which contains timestamps and therefore differs each time.
    pub disk_sha256: String,
}

/// A distribution, ready to boot.
#[derive(Clone, Debug)]
pub struct DistroImage {
    /// Its record.
    pub record: Record,
    /// Where it came from.
    pub origin: Origin,
    dir: PathBuf,
}

impl DistroImage {
    /// Returns the path of the disk. A guest that writes needs a copy: a changed image is rebuilt.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.dir.join("disk.img")
    }

    /// Returns the path of the compressed kernel (a bzImage).
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// Returns the path of the initial RAM disk, which finds the disk and boots from it.
    #[must_use]
    pub fn initrd(&self) -> PathBuf {
        self.dir.join("initrd.img")
    }
}

/// Prepares a distribution: from the cache if it is intact there, otherwise through apt.
///
/// # Errors
/// Fails when it is not cached and apt cannot deliver it, without root, or when disk space or a
/// command is missing.
pub fn ensure(cache: &ImageCache, spec: &DistroSpec) -> Result<DistroImage, ImageError> {
    let dir = cache.root().join(&spec.name);
    let text = std::fs::read_to_string(dir.join("image.json")).unwrap_or_default();
    match serde_json::from_str::<Record>(&text) {
        Ok(record) if is_whole(&dir, &record, spec) => Ok(DistroImage {
            record,
            origin: Origin::Cached,
            dir,
        }),
        _ => build(cache, spec),
    }
}

fn is_whole(dir: &Path, record: &Record, spec: &DistroSpec) -> bool {
    let is =
        |path: &str, hash: &str| digest::file(&dir.join(path)).is_ok_and(|found| found == hash);
    record.schema == SCHEMA
        && record.name == spec.name
        && record.recipe_sha256 == recipe(spec)
        && is("packages.txt", &record.packages_sha256)
        && is("vmlinuz", &record.vmlinuz_sha256)
        && is("initrd.img", &record.initrd_sha256)
        && is("disk.img", &record.disk_sha256)
}

/// Returns the hash of a distribution's recipe.
fn recipe(spec: &DistroSpec) -> String {
    let mut text = format!(
        "{} MiB\0{}\0{CUSTOMIZE}\0",
        spec.disk_mib,
        spec.packages.join(",")
    );
    for (path, content) in OVERLAY {
        text.extend([path, "\0", content, "\0"]);
    }
    text.extend(LEFT_OUT.iter().flat_map(|path| [path, "\0"]));
    digest::bytes(text.as_bytes())
}

fn build(cache: &ImageCache, spec: &DistroSpec) -> Result<DistroImage, ImageError> {
    need_root(&spec.name)?;
    let sources = sources::debian()?;
    let temp = cache.temp_dir()?;
    let (archive, tree, made) = (
        temp.path().join("files.tar"),
        temp.path().join("files"),
        temp.path().join("image"),
    );
    for dir in [&tree, &made] {
        std::fs::create_dir(dir).map_err(ImageError::io(dir))?;
    }
    install_packages(spec, &sources, temp.path(), &archive)?;
    command::output(
        Command::new("tar")
            .args(["--numeric-owner", "--xattrs", "-xf"])
            .arg(&archive)
            .arg("-C")
            .arg(&tree),
        "tar",
        "is the disk full?",
    )?;
    // Device nodes are created at run time, but `/dev` must exist.
    let devices = tree.join("dev");
    std::fs::create_dir_all(&devices).map_err(ImageError::io(&devices))?;

    let boot = digest::files(&tree.join("boot"))?;
    for (begin, name) in [("vmlinuz-", "vmlinuz"), ("initrd.img-", "initrd.img")] {
        let is_it = |path: &&PathBuf| {
            let name = path.file_name().unwrap_or_default();
            name.to_string_lossy().starts_with(begin)
        };
        let from = boot
            .iter()
            .find(is_it)
            .ok_or_else(|| ImageError::Incomplete {
                package: spec.packages.join(" "),
                what: format!("boot/{begin}*"),
            })?;
        std::fs::copy(from, made.join(name)).map_err(ImageError::io(from))?;
    }
    let packages = command::output(
        Command::new("dpkg-query")
            .arg("--admindir")
            .arg(tree.join("var/lib/dpkg"))
            .args(["-W", "-f", "${Package} ${Version}\\n"]),
        "dpkg",
        "is the disk full?",
    )?;
    write(&made.join("packages.txt"), &packages)?;
    let disk = made.join("disk.img");
    command::output(
        Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-m", "0", "-L", &spec.name, "-d"])
            .args([&tree, &disk])
            .arg(format!("{}M", spec.disk_mib)),
        "e2fsprogs",
        "is disk_mib in kernel-images/kernels.toml enough, and the disk not full?",
    )?;

    let record = Record {
        schema: SCHEMA,
        name: spec.name.clone(),
        release: sources::release(&sources),
        recipe_sha256: recipe(spec),
        packages_sha256: digest::file(&made.join("packages.txt"))?,
        files_sha256: digest::file(&archive)?,
        vmlinuz_sha256: digest::file(&made.join("vmlinuz"))?,
        initrd_sha256: digest::file(&made.join("initrd.img"))?,
        disk_sha256: digest::file(&disk)?,
    };
    let text = serde_json::to_string_pretty(&record).unwrap_or_default() + "\n";
    write(&made.join("image.json"), text.as_bytes())?;
    let dir = cache.install(&made, &spec.name, &temp)?;
    Ok(DistroImage {
        record,
        origin: Origin::Downloaded,
        dir,
    })
}

/// Installs the packages and writes an archive of all files.
fn install_packages(
    spec: &DistroSpec,
    sources: &[String],
    temp: &Path,
    archive: &Path,
) -> Result<(), ImageError> {
    let overlay = temp.join("overlay");
    for (path, content) in OVERLAY {
        let to = overlay.join(path);
        let parent = to.parent().unwrap_or(&overlay);
        std::fs::create_dir_all(parent).map_err(ImageError::io(parent))?;
        write(&to, content.as_bytes())?;
    }
    let script = temp.join("customize");
    write(&script, CUSTOMIZE.as_bytes())?;
    let mut more = vec![
        format!("--essential-hook=sync-in {} /", quoted(&overlay)),
        format!("--customize-hook=sh {} \"$1\"", quoted(&script)),
    ];
    more.extend(
        LEFT_OUT
            .iter()
            .map(|path| format!("--dpkgopt=path-exclude={path}")),
    );
    bootstrap(&spec.packages.join(","), &more, sources, archive)
}

/// Creates a root file system of these packages: an archive, or a directory if it exists. Nothing
/// of this machine is mounted visibly to other processes.
pub(crate) fn bootstrap(
    packages: &str,
    more: &[String],
    sources: &[String],
    target: &Path,
) -> Result<(), ImageError> {
    let mut command = Command::new("mmdebstrap");
    command
        .env("SOURCE_DATE_EPOCH", NEWEST_FILE_SECONDS)
        .args(["--quiet", "--mode=root", "--variant=minbase"])
        // The caller's kernel may not allow creating device nodes.
        .arg("--skip=output/dev")
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .arg(format!("--include={packages}"))
        .args(more);
    for setting in APT_SETTINGS {
        let line = command::output(
            Command::new("apt-config").args(["dump", "--format", "%F \"%v\";", setting]),
            "apt",
            REMEDY,
        )?;
        let line = String::from_utf8_lossy(&line).trim().to_owned();
        if !line.is_empty() {
            command.arg(format!("--aptopt={line}"));
        }
    }
    command
        .arg(sources::release(sources))
        .arg(target)
        .args(sources);
    command::output(&mut command, "mmdebstrap", REMEDY).map(drop)
}

/// Fails unless this is root.
pub(crate) fn need_root(name: &str) -> Result<(), ImageError> {
    let me = Path::new("/proc/self");
    if std::fs::metadata(me).map_err(ImageError::io(me))?.uid() == 0 {
        return Ok(());
    }
    Err(ImageError::NeedsRoot {
        name: name.to_owned(),
    })
}

/// Quotes a word for a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', "'\\''"))
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    std::fs::write(path, bytes).map_err(ImageError::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Manifest;

    #[test]
    fn a_path_is_one_word_for_a_shell_whatever_is_in_it() {
        let path = "/a b/it's $HOME";
        let mut echo = Command::new("sh");
        echo.args(["-c", &format!("printf %s {}", quoted(Path::new(path)))]);
        let said = command::output(&mut echo, "dash", "").unwrap();
        assert_eq!(String::from_utf8_lossy(&said), path);
    }

    /// Creates a cached entry whose files all have the recorded hashes.
    fn cached(cache: &ImageCache, spec: &DistroSpec) -> PathBuf {
        let dir = cache.root().join(&spec.name);
        std::fs::create_dir(&dir).unwrap();
        for name in ["packages.txt", "vmlinuz", "initrd.img", "disk.img"] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        let hash = |name: &str| digest::bytes(name.as_bytes());
        let record = Record {
            schema: SCHEMA,
            name: spec.name.clone(),
            release: "bookworm".into(),
            recipe_sha256: recipe(spec),
            packages_sha256: hash("packages.txt"),
            files_sha256: String::new(),
            vmlinuz_sha256: hash("vmlinuz"),
            initrd_sha256: hash("initrd.img"),
            disk_sha256: hash("disk.img"),
        };
        let text = serde_json::to_string(&record).unwrap();
        std::fs::write(dir.join("image.json"), text).unwrap();
        dir
    }

    #[test]
    fn an_entry_is_used_until_a_file_or_the_recipe_changes() {
        let temp = tempfile::tempdir().unwrap();
        let cache = ImageCache::open(temp.path()).unwrap();
        let spec = Manifest::built_in()
            .unwrap()
            .distro("debian")
            .unwrap()
            .clone();
        let dir = cached(&cache, &spec);
        let image = ensure(&cache, &spec).unwrap();
        assert_eq!(image.origin, Origin::Cached);
        assert_eq!(image.disk(), dir.join("disk.img"));

        let mut more = spec.clone();
        more.packages.push("hello".into());
        assert!(!is_whole(&dir, &image.record, &more));
        let mut larger = spec.clone();
        larger.disk_mib += 1;
        assert!(!is_whole(&dir, &image.record, &larger));
        for name in ["packages.txt", "vmlinuz", "initrd.img", "disk.img"] {
            assert!(is_whole(&dir, &image.record, &spec), "{name}");
            std::fs::write(dir.join(name), "damaged").unwrap();
            assert!(!is_whole(&dir, &image.record, &spec), "{name}");
            std::fs::write(dir.join(name), name).unwrap();
        }
    }
}
