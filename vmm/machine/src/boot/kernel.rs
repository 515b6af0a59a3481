//! Kernel images: ELF (`vmlinux`) and bzImage (`vmlinuz`).
//!
//! A bzImage is an ELF kernel, compressed, behind a small program that unpacks it. It is
//! unpacked here instead of in the guest: that takes no guest memory, and no time of a vCPU.
//! Only an image whose compression is not known here is left to unpack itself.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::elf::Elf;
use linux_loader::loader::{BzImage, KernelLoader};
use thiserror::Error;
use vm_memory::{Address, ByteValued, GuestAddress, GuestMemoryMmap};

use crate::boot::elf_check::{ElfError, check_elf};
use crate::boot::payload::{KERNEL_BYTES_MAX, PayloadError, unpack};
use crate::layout::{CMDLINE_BYTES_MAX, HIGH_RAM_START};

/// Where the setup header is in a bzImage (Linux, Documentation/arch/x86/boot.rst).
const SETUP_HEADER_OFFSET: usize = 0x1f1;
/// The end of the fields of the setup header that are read here, up to `init_size`.
const SETUP_HEADER_END: usize = 0x264;
/// "HdrS".
const SETUP_HEADER_MAGIC: u32 = 0x5372_6448;
/// The first version of the boot protocol with `payload_offset`.
const PROTOCOL_WITH_PAYLOAD: u16 = 0x0208;
/// Bit of `xloadflags`: the image has a 64-bit entry point.
const XLF_KERNEL_64: u16 = 1;
/// Where the 64-bit entry point is in the protected-mode part of a bzImage.
const ENTRY_64_OFFSET: u64 = 0x200;
/// `setup_sects` when the field is 0.
const SETUP_SECTORS_DEFAULT: usize = 4;
const SECTOR_BYTES: usize = 512;

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

/// How a kernel was found in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelFormat {
    /// An ELF file.
    Elf,
    /// A bzImage whose ELF file was unpacked.
    UnpackedBzImage,
    /// A bzImage that unpacks itself.
    BzImage,
}

/// A kernel in guest memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadedKernel {
    /// Where the boot processor starts, in 64-bit mode.
    pub entry: GuestAddress,
    /// One more than the last address that the kernel uses before it reads the memory map.
    pub end: u64,
    /// The setup header of the bzImage, when there was one.
    pub setup_header: Option<setup_header>,
    /// How it was found.
    pub format: KernelFormat,
}

impl LoadedKernel {
    /// How many bytes of command line the kernel takes, without the terminating zero.
    pub fn cmdline_bytes_max(&self) -> u64 {
        let limit = self
            .setup_header
            .map_or(0, |header| u64::from(header.cmdline_size));
        match limit {
            0 => CMDLINE_BYTES_MAX - 1,
            limit => limit.min(CMDLINE_BYTES_MAX - 1),
        }
    }
}

/// Loads the kernel in the file `path` into `memory`, whose low part ends at `low_end`.
pub(crate) fn load_kernel(
    path: &Path,
    memory: &GuestMemoryMmap,
    low_end: u64,
) -> Result<LoadedKernel, KernelError> {
    load_image(path, read_image(path)?, memory, low_end)
}

/// Loads the kernel `image`, which was in the file `path`.
pub(crate) fn load_image(
    path: &Path,
    image: Vec<u8>,
    memory: &GuestMemoryMmap,
    low_end: u64,
) -> Result<LoadedKernel, KernelError> {
    if image.starts_with(b"\x7fELF") {
        return load_elf(path, image, memory, low_end);
    }
    if image.len() < SETUP_HEADER_END {
        return Err(KernelError::TooShort {
            path: path.to_owned(),
            bytes: image.len(),
        });
    }
    load_bzimage(path, image, memory, low_end)
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

fn load_elf(
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

/// The setup header at its place in `image`, which is long enough.
fn read_setup_header(image: &[u8]) -> setup_header {
    let mut header = setup_header::default();
    let source = &image[SETUP_HEADER_OFFSET..];
    let target = header.as_mut_slice();
    let len = target.len().min(source.len());
    target[..len].copy_from_slice(&source[..len]);
    header
}

fn load_bzimage(
    path: &Path,
    image: Vec<u8>,
    memory: &GuestMemoryMmap,
    low_end: u64,
) -> Result<LoadedKernel, KernelError> {
    let header = read_setup_header(&image);
    if { header.header } != SETUP_HEADER_MAGIC {
        return Err(KernelError::UnknownFormat {
            path: path.to_owned(),
        });
    }
    if { header.version } >= PROTOCOL_WITH_PAYLOAD {
        let payload = find_payload(path, &image, &header)?;
        match unpack(payload) {
            Ok(elf) if elf.starts_with(b"\x7fELF") => {
                drop(image);
                let kernel = load_elf(path, elf, memory, low_end)?;
                return Ok(LoadedKernel {
                    setup_header: Some(header),
                    format: KernelFormat::UnpackedBzImage,
                    ..kernel
                });
            }
            Ok(_) => {
                return Err(KernelError::Corrupt {
                    path: path.to_owned(),
                    source: "its payload is no ELF file".into(),
                });
            }
            Err(error @ (PayloadError::UnknownFormat | PayloadError::Unsupported { .. })) => {
                tracing::info!(%error, "the kernel unpacks itself in the guest");
            }
            Err(error) => {
                return Err(KernelError::Corrupt {
                    path: path.to_owned(),
                    source: error.into(),
                });
            }
        }
    }
    load_self_unpacking(path, image, &header, memory, low_end)
}

/// The compressed part of a bzImage.
fn find_payload<'a>(
    path: &Path,
    image: &'a [u8],
    header: &setup_header,
) -> Result<&'a [u8], KernelError> {
    let offset =
        u64::try_from(setup_bytes(header)).unwrap_or(u64::MAX) + u64::from(header.payload_offset);
    let needed = offset + u64::from(header.payload_length);
    usize::try_from(offset)
        .ok()
        .zip(usize::try_from(needed).ok())
        .and_then(|(offset, end)| image.get(offset..end))
        .ok_or_else(|| KernelError::Truncated {
            path: path.to_owned(),
            bytes: image.len(),
            needed,
        })
}

/// The length of the real-mode part of a bzImage.
fn setup_bytes(header: &setup_header) -> usize {
    let sectors = match header.setup_sects {
        0 => SETUP_SECTORS_DEFAULT,
        sectors => usize::from(sectors),
    };
    (sectors + 1) * SECTOR_BYTES
}

fn load_self_unpacking(
    path: &Path,
    image: Vec<u8>,
    header: &setup_header,
    memory: &GuestMemoryMmap,
    low_end: u64,
) -> Result<LoadedKernel, KernelError> {
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(KernelError::TooOld {
            path: path.to_owned(),
            major: header.version >> 8,
            minor: header.version & 0xff,
        });
    }
    let code_bytes = image.len().saturating_sub(setup_bytes(header));
    let code_bytes = u64::try_from(code_bytes).unwrap_or(u64::MAX);
    if code_bytes <= ENTRY_64_OFFSET {
        return Err(KernelError::TooShort {
            path: path.to_owned(),
            bytes: image.len(),
        });
    }
    // It moves itself to its preferred address, and needs `init_size` bytes from there.
    let end = header
        .pref_address
        .max(HIGH_RAM_START)
        .saturating_add(u64::from(header.init_size))
        .max(HIGH_RAM_START.saturating_add(code_bytes));
    if end > low_end {
        return Err(KernelError::NoRoom {
            path: path.to_owned(),
            needed: end,
            end: low_end,
        });
    }
    let loaded = BzImage::load(
        memory,
        Some(GuestAddress(HIGH_RAM_START)),
        &mut Cursor::new(image),
        Some(GuestAddress(HIGH_RAM_START)),
    )
    .map_err(|source| KernelError::Load {
        path: path.to_owned(),
        source,
    })?;
    Ok(LoadedKernel {
        entry: loaded.kernel_load.unchecked_add(ENTRY_64_OFFSET),
        end,
        setup_header: loaded.setup_header,
        format: KernelFormat::BzImage,
    })
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
