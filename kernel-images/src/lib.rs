//! Stock guest kernels, by Debian package, and the initramfs that guests boot with.
//!
//! The [manifest](manifest) names kernels. [`cache::ImageCache::ensure`] turns a name into files:
//! it asks apt for the versioned package, downloads it (apt checks it against its signed indexes;
//! the hash is compared again here), unpacks it without installing anything, extracts the ELF
//! `vmlinux` from the compressed `vmlinuz`, keeps the requested modules, and records versions and
//! hashes in `image.json`. An entry appears by one rename, so an interrupted run leaves nothing
//! incomplete; an entry whose hashes no longer match is rebuilt, from its package if that is
//! intact.
//!
//! [`distro`] builds the disk of a whole distribution, which boots like a machine.
//!
//! [`root`] creates a bare Debian in a directory, in which packages are tested.
//!
//! [`unpacked`] holds packages of another suite that are only unpacked.
//!
//! [`initramfs`] packs busybox, modules and `faultprobe` into a cpio archive whose `/init`
//! runs the command given on the kernel's command line.

pub mod apt;
pub mod cache;
pub mod command;
pub mod digest;
pub mod distro;
pub mod error;
pub mod initramfs;
pub mod manifest;
pub mod modules;
pub mod programs;
pub mod root;
mod sources;
pub mod unpacked;
pub mod vmlinux;

pub use cache::{ImageCache, KernelImage};
pub use distro::DistroImage;
pub use error::ImageError;
pub use manifest::{DistroSpec, KernelSpec, Manifest};
