//! Loads kernels in ELF files (`vmlinux`).

use std::io::Cursor;
use std::path::Path;

use linux_loader::loader::KernelLoader;
use linux_loader::loader::elf::Elf;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::elf_check::check_elf;
use super::kernel_error::KernelError;
use super::loaded::{KernelFormat, LoadedKernel};
use crate::layout::HIGH_RAM_START;

/// Loads the ELF kernel `image`, read from the file `path`.
pub(crate) fn load(
    path: &Path,
    image: Vec<u8>,
    memory: &GuestMemoryMmap,
    low_end: u64,
) -> Result<LoadedKernel, KernelError> {
    let end = check_elf(&image).map_err(|source| KernelError::Elf {
        path: path.to_owned(),
        source,
    })?;
    if end > low_end {
        return Err(KernelError::NoRoom {
            path: path.to_owned(),
            needed: end,
            end: low_end,
        });
    }
    let loaded = Elf::load(
        memory,
        None,
        &mut Cursor::new(image),
        Some(GuestAddress(HIGH_RAM_START)),
    )
    .map_err(|source| KernelError::Load {
        path: path.to_owned(),
        source,
    })?;
    Ok(LoadedKernel {
        entry: loaded.kernel_load,
        end,
        setup_header: None,
        format: KernelFormat::Elf,
    })
}
