//! The kernel and the initramfs of testbed hosts.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use initrd::busybox;
use initrd::cpio::Archive;
use kernel_images::{ImageCache, ImageError, Manifest, command, initramfs, programs};

use super::TestbedError;

const INIT: &str = include_str!("../../testbed/init");
const LINK_UP: &str = include_str!("../../testbed/link-up");

/// Modules in load order, each after its dependencies. rdma_rxe requests crc32 by name from the
/// crypto API, which its declared dependencies do not include.
const MODULES: &[&str] = &[
    "crc32_generic",
    "crc32_pclmul",
    "kvm-amd",
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "9pnet_virtio",
    "9p",
    "tun",
    "veth",
    "dummy",
    "bridge",
    "sch_netem",
    "sch_prio",
    "cls_u32",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "nbd",
];

/// The hosts' shell. Busybox's would run its own `ip` and `tc` whatever PATH says.
const SHELL: &str = "/bin/dash";

/// Programs of this machine, each with its package.
const TOOLS: &[(&str, &str)] = &[
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("ss", "iproute2"),
    ("rdma", "iproute2"),
    ("prlimit", "util-linux"),
    ("ibv_devices", "ibverbs-utils"),
    ("ibv_devinfo", "ibverbs-utils"),
    ("ibv_rc_pingpong", "ibverbs-utils"),
    ("ib_read_lat", "perftest"),
    ("ib_write_lat", "perftest"),
    ("ib_read_bw", "perftest"),
    ("ib_write_bw", "perftest"),
    ("nbd-server", "nbd-server"),
    ("nbd-client", "nbd-client"),
    ("dnsmasq", "dnsmasq-base"),
    ("ssh", "openssh-client"),
    ("ssh-keygen", "openssh-client"),
    ("dropbear", "dropbear-bin"),
    ("dropbearkey", "dropbear-bin"),
    ("iperf3", "iperf3"),
];

/// Libraries that `ssi-hv` needs or loads at run time, and that no tool may need.
const LIBRARIES: &[(&str, &str)] = &[
    ("libc.so.6", "libc6"),
    ("libm.so.6", "libc6"),
    ("libdl.so.2", "libc6"),
    ("libpthread.so.0", "libc6"),
    ("librt.so.1", "libc6"),
    ("libgcc_s.so.1", "libgcc-s1"),
    ("libibverbs.so.1", "libibverbs1"),
    ("librdmacm.so.1", "librdmacm1"),
    ("libibverbs/librxe-rdmav34.so", "ibverbs-providers"),
];

const LIBRARY_DIRS: [&str; 2] = ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu"];
/// The only verbs driver with a device on a testbed host; libibverbs would warn about every other.
const VERBS_DRIVER: &str = "/etc/libibverbs.d/rxe.driver";

/// The kernel of testbed hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum HostKernel {
    /// The kernel of Debian 12.
    #[value(name = "6.1")]
    Linux6_1,
    /// The kernel of Debian 12's backports: userfaultfd and KVM as of Linux 6.4 and later.
    #[value(name = "6.12")]
    Linux6_12,
}

impl HostKernel {
    /// Returns its name in the manifest of kernels.
    #[must_use]
    pub fn image_name(self) -> &'static str {
        match self {
            Self::Linux6_1 => "full",
            Self::Linux6_12 => "backports",
        }
    }
}

/// Kernel and initramfs of a testbed host.
#[derive(Clone, Debug)]
pub struct HostImage {
    /// `uname -r` of its hosts.
    pub release: String,
    /// The ELF kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
}

impl HostImage {
    /// Builds the image from packages of this machine, in `target/images` of the workspace.
    ///
    /// # Errors
    /// Fails when a package is missing, naming it, or the kernel is not available.
    pub fn prepare(workspace: &Path, kernel: HostKernel) -> Result<Self, TestbedError> {
        let cache = ImageCache::open(&workspace.join("target/images"))?;
        let name = kernel.image_name();
        let image = cache.ensure(Manifest::built_in()?.kernel(name)?)?;
        let agent = programs::build_static(workspace, &["testbed-agent", "faultprobe"])?;
        let initrd = cache.root().join(format!("host-{name}.cpio"));
        initramfs::write_atomically(&initrd, |archive| {
            busybox::add_base(archive, &["sh"]).map_err(ImageError::from)?;
            let order = initramfs::add_modules(archive, &image, MODULES)?;
            add_text(
                archive,
                "etc/modules.order",
                0o644,
                &(order.join("\n") + "\n"),
            )?;
            add_text(archive, "init", 0o755, INIT)?;
            add_text(archive, "etc/link-up", 0o755, LINK_UP)?;
            add_text(
                archive,
                "etc/passwd",
                0o644,
                "root:x:0:0:root:/root:/bin/sh\n",
            )?;
            add_text(archive, "etc/hosts", 0o644, "127.0.0.1 localhost\n")?;
            archive
                .directory("share")
                .map_err(|e| io_error("share", e))?;
            for name in ["testbed-agent", "faultprobe"] {
                initramfs::add_file(
                    archive,
                    &format!("usr/bin/{name}"),
                    0o755,
                    &agent.join(name),
                )?;
            }
            add_programs(archive)
        })?;
        Ok(Self {
            release: image.record.release.clone(),
            kernel: image.vmlinux(),
            initrd,
        })
    }
}

/// Adds programs of this machine (each a name with its package) to `usr/local/bin`, and returns the
/// libraries that they need.
fn add_tools<W: Write>(
    archive: &mut Archive<W>,
    tools: &[(&str, &str)],
) -> Result<BTreeSet<PathBuf>, ImageError> {
    let mut libraries = BTreeSet::new();
    // Prefers programs that were only unpacked, since installing their package would start them.
    let unpacked = programs::workspace().join("target/tools");
    let dirs = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"].map(PathBuf::from);
    let dirs = [&[unpacked], &dirs[..]].concat();
    for (name, package) in tools {
        let path = find(&dirs, name, package)?;
        libraries.extend(needed(&path)?);
        // Not in /bin, where busybox has less complete commands of the same names.
        initramfs::add_file(archive, &format!("usr/local/bin/{name}"), 0o755, &path)?;
    }
    Ok(libraries)
}

/// Like [`add_tools`], and adds the libraries as well, at their paths on this machine.
pub(crate) fn add_tools_with_libraries<W: Write>(
    archive: &mut Archive<W>,
    tools: &[(&str, &str)],
) -> Result<(), ImageError> {
    for path in add_tools(archive, tools)? {
        initramfs::add_file(archive, relative(&path), 0o755, &path)?;
    }
    Ok(())
}

fn add_programs<W: Write>(archive: &mut Archive<W>) -> Result<(), ImageError> {
    let mut libraries = add_tools(archive, TOOLS)?;
    libraries.extend(needed(Path::new(SHELL))?);
    initramfs::add_file(archive, "bin/sh", 0o755, Path::new(SHELL))?;
    for (name, package) in LIBRARIES {
        let path = find(&LIBRARY_DIRS.map(PathBuf::from), name, package)?;
        libraries.extend(needed(&path)?);
        libraries.insert(path);
    }
    let driver = Path::new(VERBS_DRIVER);
    initramfs::add_file(archive, relative(driver), 0o644, driver)?;
    for path in libraries {
        initramfs::add_file(archive, relative(&path), 0o755, &path)?;
    }
    Ok(())
}

/// Returns the libraries that the loader would load for a program, including the loader.
///
/// # Errors
/// Fails when this machine lacks one of them, naming it.
pub(crate) fn needed(path: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let output = command::output(Command::new("ldd").arg(path), "libc-bin", "is it damaged?")?;
    let text = String::from_utf8_lossy(&output);
    match absent(&text) {
        None => Ok(parse_ldd(&text)),
        Some(library) => Err(ImageError::LibraryMissing {
            program: path.to_path_buf(),
            library: library.to_owned(),
        }),
    }
}

/// Returns a library that ldd did not find.
fn absent(text: &str) -> Option<&str> {
    let mut lines = text.lines();
    lines.find_map(|line| line.trim().strip_suffix(" => not found"))
}

fn parse_ldd(text: &str) -> Vec<PathBuf> {
    // "name => /path (0x1)", "/path (0x1)", or "linux-vdso.so.1 (0x1)", which is no file.
    let paths = text.lines().filter_map(|line| {
        let path = line.rsplit("=>").next()?.trim();
        path.starts_with('/')
            .then(|| PathBuf::from(path.split(" (").next().unwrap_or(path)))
    });
    paths.collect()
}

fn find(dirs: &[PathBuf], name: &str, package: &str) -> Result<PathBuf, ImageError> {
    let mut paths = dirs.iter().map(|dir| dir.join(name));
    let found = paths.find(|path| path.is_file());
    found.ok_or_else(|| ImageError::CommandMissing {
        command: name.into(),
        package: package.into(),
    })
}

fn relative(path: &Path) -> &str {
    path.to_str().unwrap_or_default().trim_start_matches('/')
}

/// Adds a text file.
pub(crate) fn add_text<W: Write>(
    archive: &mut Archive<W>,
    path: &str,
    mode: u32,
    text: &str,
) -> Result<(), ImageError> {
    archive
        .file(path, mode, text.as_bytes())
        .map_err(|e| io_error(path, e))
}

fn io_error(path: &str, source: std::io::Error) -> ImageError {
    ImageError::Io {
        path: PathBuf::from(path),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_the_loader_are_read_from_ldd_and_the_vdso_is_not() {
        let text = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x2)\n\t/lib64/ld.so.2 (0x3)\n";
        assert_eq!(
            parse_ldd(text),
            [Path::new("/lib/x/libc.so.6"), Path::new("/lib64/ld.so.2")]
        );
        assert!(parse_ldd("\tnot a dynamic executable\n").is_empty());
        assert_eq!(absent(text), None);
        let text = format!("{text}\tliburing.so.2 => not found\n");
        assert_eq!(absent(&text), Some("liburing.so.2"));
    }
}
