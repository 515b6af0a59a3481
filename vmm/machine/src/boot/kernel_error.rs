//! Why a kernel image cannot be loaded.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::elf_check::ElfError;
use super::payload::KERNEL_BYTES_MAX;

/// Why a kernel image cannot be loaded.
#[derive(Debug, Error)]
pub enum KernelError {
    /// The file cannot be read.
    #[error("cannot read the kernel {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The file is larger than any kernel.
    #[error(
        "kernel {} is larger than {KERNEL_BYTES_MAX} bytes, the limit; give a vmlinux or a bzImage",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The file has not even a header.
    #[error(
        "kernel {} is {bytes} bytes: too short for an ELF or bzImage header; give a vmlinux or a \
         bzImage",
        path.display()
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
    },
    /// The file is something else.
    #[error(
        "kernel {} is neither an ELF file nor a bzImage; give a vmlinux or a bzImage for x86-64",
        path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// The file is shorter than its header says.
    #[error(
        "kernel {} is truncated: it has {bytes} bytes, its header asks for {needed}; copy it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
        /// The size that the header implies.
        needed: u64,
    },
    /// The compressed kernel is broken.
    #[error("the compressed kernel in {} is corrupt; copy it again", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The word of the decoder.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The ELF headers are wrong, or ask for memory that is not there.
    #[error("kernel {} cannot be loaded", path.display())]
    Elf {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: ElfError,
    },
    /// A bzImage of a boot protocol that is too old, or for 32 bits.
    #[error(
        "kernel {} has boot protocol {major}.{minor:02} and no 64-bit entry point; give a kernel \
         for x86-64 of Linux 3.8 or newer",
        path.display()
    )]
    TooOld {
        /// The file.
        path: PathBuf,
        /// First part of the protocol's version.
        major: u16,
        /// Second part.
        minor: u16,
    },
    /// The kernel needs more memory than there is below 3 GiB.
    #[error(
        "kernel {} needs guest memory up to {needed:#x}, there is none from {end:#x} on; raise \
         --memory",
        path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// One more than the last address needed.
        needed: u64,
        /// One more than the last address of memory below the hole.
        end: u64,
    },
    /// The image cannot be copied into guest memory.
    #[error("cannot copy the kernel {} into guest memory", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// The word of the loader.
        #[source]
        source: linux_loader::loader::Error,
    },
}
