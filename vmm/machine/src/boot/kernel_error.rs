//! Errors of loading kernel images.

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
        /// The cause.
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
    /// The file is shorter than a header.
    #[error(
        "kernel {} is {bytes} bytes: too short for an ELF or bzImage header; give a vmlinux or a \
         bzImage",
        path.display()
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Size of the file.
        bytes: usize,
    },
    /// The file has an unknown format.
    #[error(
        "kernel {} is neither an ELF file nor a bzImage; give a vmlinux or a bzImage for x86-64",
        path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// The file is shorter than its header states.
    #[error(
        "kernel {} is truncated: it has {bytes} bytes, its header requires {needed}; copy it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Size of the file.
        bytes: usize,
        /// Size according to the header.
        needed: u64,
    },
    /// The compressed kernel is corrupt.
    #[error("the compressed kernel in {} is corrupt; copy it again", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The decoder's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The ELF headers are invalid, or require memory that the guest does not have.
    #[error("kernel {} cannot be loaded", path.display())]
    Elf {
        /// The file.
        path: PathBuf,
        /// The defect.
        #[source]
        source: ElfError,
    },
    /// The bzImage has too old a boot protocol, or is for 32 bits.
    #[error(
        "kernel {} has boot protocol {major}.{minor:02} and no 64-bit entry point; give a kernel \
         for x86-64 of Linux 3.8 or newer",
        path.display()
    )]
    TooOld {
        /// The file.
        path: PathBuf,
        /// Major version of the protocol.
        major: u16,
        /// Minor version of the protocol.
        minor: u16,
    },
    /// The kernel needs more memory than the guest has below 3 GiB.
    #[error(
        "kernel {} needs guest memory up to {needed:#x}, but memory ends at {end:#x}; raise \
         --memory",
        path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// End of the memory that the kernel needs.
        needed: u64,
        /// End of the memory below the hole.
        end: u64,
    },
    /// The image cannot be copied into guest memory.
    #[error("cannot copy the kernel {} into guest memory", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// The loader's error.
        #[source]
        source: linux_loader::loader::Error,
    },
}
