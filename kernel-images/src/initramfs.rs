//! The initramfs of guests, and the parts that it shares with that of testbed hosts.

use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use initrd::busybox::add_base;
use initrd::cpio::Archive;

use crate::{ImageError, KernelImage};

const INIT: &str = include_str!("../guest/init");

/// Modules that a guest may request with `ssi_modules=`.
const GUEST_MODULES: &[&str] = &[
    "pvpanic-mmio",
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_balloon",
    "virtio_mem",
    "virtio_rng",
    "vmw_vsock_virtio_transport",
    "virtio_console",
    "button",
    "evdev",
];

/// Our programs in a guest.
const GUEST_PROGRAMS: &[&str] = &["faultprobe", "notify-monitor", "socket-pipe"];

/// An archive that is being written to a file.
pub type GuestArchive<'a> = Archive<BufWriter<&'a mut tempfile::NamedTempFile>>;

/// Writes the guest's initramfs for a kernel, with our static programs from the directory
/// `programs`, to `out`, uncompressed, which boots fastest under emulation. The file appears by one
/// rename.
///
/// # Errors
/// Fails when busybox or one of our programs is missing, or `out` cannot be written.
pub fn write_guest(image: &KernelImage, programs: &Path, out: &Path) -> Result<(), ImageError> {
    write_guest_with(image, programs, out, &[], |_| Ok(()))
}

/// Writes an initramfs as [`write_guest`] does, with further modules and with what `more` adds.
///
/// # Errors
/// As [`write_guest`], and when `more` fails or the kernel's cache entry lacks a module.
pub fn write_guest_with(
    image: &KernelImage,
    programs: &Path,
    out: &Path,
    modules: &[&str],
    more: impl FnOnce(&mut GuestArchive<'_>) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    write_atomically(out, |archive| {
        add_base(archive, &[])?;
        add_modules(archive, image, &[GUEST_MODULES, modules].concat())?;
        more(archive)?;
        for name in GUEST_PROGRAMS {
            add_file(archive, &format!("bin/{name}"), 0o755, &programs.join(name))?;
        }
        archive
            .file("init", 0o755, INIT.as_bytes())
            .map_err(ImageError::io(Path::new("init")))
    })
}

/// Writes an archive that `fill` fills to `out`, through a temporary file beside it.
///
/// # Errors
/// Fails when `fill` does or `out` cannot be written.
pub fn write_atomically(
    out: &Path,
    fill: impl FnOnce(&mut GuestArchive<'_>) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let parent = out
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(ImageError::io(parent))?;
    let mut temp = tempfile::NamedTempFile::new_in(parent).map_err(ImageError::io(parent))?;
    let mut archive = Archive::new(BufWriter::new(&mut temp));
    fill(&mut archive)?;
    let mut writer = archive.finish().map_err(ImageError::io(out))?;
    writer.flush().map_err(ImageError::io(out))?;
    drop(writer);
    // Temporary files are private; an archive is readable by everyone.
    let mode = std::fs::Permissions::from_mode(0o644);
    temp.as_file()
        .set_permissions(mode)
        .map_err(ImageError::io(out))?;
    temp.persist(out)
        .map(drop)
        .map_err(|e| ImageError::io(out)(e.error))
}

/// Adds modules with their dependencies, and the files that `modprobe` reads, and returns their
/// paths in the archive in loading order.
///
/// # Errors
/// Fails when the kernel's cache entry lacks one, or the output fails.
pub fn add_modules<W: Write>(
    archive: &mut Archive<W>,
    image: &KernelImage,
    modules: &[&str],
) -> Result<Vec<String>, ImageError> {
    let from = image.modules_dir();
    let to = format!("lib/modules/{}", image.record.release);
    let files = image.module_files(modules.iter().copied())?;
    let mut paths = Vec::new();
    for file in &files {
        let path = format!("{to}/{file}");
        add_file(archive, &path, 0o644, &from.join(file))?;
        paths.push(path);
    }
    for file in ["modules.dep", "modules.builtin"] {
        add_file(archive, &format!("{to}/{file}"), 0o644, &from.join(file))?;
    }
    Ok(paths)
}

/// Adds a file of this machine.
///
/// # Errors
/// Fails when it cannot be read, or the output fails.
pub fn add_file<W: Write>(
    archive: &mut Archive<W>,
    path: &str,
    mode: u32,
    from: &Path,
) -> Result<(), ImageError> {
    let bytes = std::fs::read(from).map_err(ImageError::io(from))?;
    archive
        .file(path, mode, &bytes)
        .map_err(ImageError::io(Path::new(path)))
}
