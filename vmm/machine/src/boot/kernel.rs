//! Kernel images: ELF (`vmlinux`) and bzImage (`vmlinuz`).
//!
//! A bzImage is a compressed ELF kernel behind a small program that unpacks it. The monitor unpacks
//! it instead, which takes neither guest memory nor vCPU time. Only an image with an unknown
//! compression unpacks itself in the guest.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use vm_memory::GuestMemoryMmap;

use super::kernel_error::KernelError;
use super::loaded::LoadedKernel;
use super::payload::KERNEL_BYTES_MAX;
use super::{bzimage, elf};

/// Loads the kernel in the file `path` into `memory`, whose low part ends at `low_end`.
pub(crate) fn load_kernel(
    path: &Path,
    memory: &GuestMemoryMmap,
    low_end: u64,
) -> Result<LoadedKernel, KernelError> {
    load_image(path, read_image(path)?, memory, low_end)
}

/// Loads the kernel `image`, read from the file `path`.
pub(crate) fn load_image(
    path: &Path,
    image: Vec<u8>,
    memory: &GuestMemoryMmap,
    low_end: u64,
) -> Result<LoadedKernel, KernelError> {
    if image.starts_with(b"\x7fELF") {
        return elf::load(path, image, memory, low_end);
    }
    bzimage::load(path, image, memory, low_end)
}

fn read_image(path: &Path) -> Result<Vec<u8>, KernelError> {
    let mut image = Vec::new();
    File::open(path)
        .and_then(|file| file.take(KERNEL_BYTES_MAX + 1).read_to_end(&mut image))
        .map_err(|source| KernelError::Read {
            path: path.to_owned(),
            source,
        })?;
    if u64::try_from(image.len()).unwrap_or(u64::MAX) > KERNEL_BYTES_MAX {
        return Err(KernelError::TooLarge {
            path: path.to_owned(),
        });
    }
    Ok(image)
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
