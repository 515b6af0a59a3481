//! Loads kernels in bzImages (`vmlinuz`): a compressed ELF kernel behind a small program that
//! unpacks it.

use std::io::Cursor;
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::{Address, ByteValued, GuestAddress, GuestMemoryMmap};

use super::elf;
use super::kernel_error::KernelError;
use super::loaded::{KernelFormat, LoadedKernel};
use super::payload::{PayloadError, unpack};
use crate::layout::HIGH_RAM_START;

/// Offset of the setup header in a bzImage (Linux, Documentation/arch/x86/boot.rst).
pub(super) const SETUP_HEADER_OFFSET: usize = 0x1f1;
/// End of the setup header's fields that are read here; `init_size` is the last.
pub(super) const SETUP_HEADER_END: usize = 0x264;
/// The magic number "HdrS".
pub(super) const SETUP_HEADER_MAGIC: u32 = 0x5372_6448;
/// The first version of the boot protocol with `payload_offset`.
const PROTOCOL_WITH_PAYLOAD: u16 = 0x0208;
/// Bit of `xloadflags`: the image has a 64-bit entry point.
pub(super) const XLF_KERNEL_64: u16 = 1;
/// Offset of the 64-bit entry point in the protected-mode part of a bzImage.
const ENTRY_64_OFFSET: u64 = 0x200;
/// Value of `setup_sects` if the field is 0.
const SETUP_SECTORS_DEFAULT: usize = 4;
const SECTOR_BYTES: usize = 512;

/// Reads the setup header of `image`, which is long enough.
fn read_setup_header(image: &[u8]) -> setup_header {
    let mut header = setup_header::default();
    let source = &image[SETUP_HEADER_OFFSET..];
    let target = header.as_mut_slice();
    let len = target.len().min(source.len());
    target[..len].copy_from_slice(&source[..len]);
    header
}

/// Loads the bzImage `image`, read from the file `path`.
pub(crate) fn load(
    path: &Path,
    image: Vec<u8>,
    memory: &GuestMemoryMmap,
    low_end: u64,
) -> Result<LoadedKernel, KernelError> {
    if image.len() < SETUP_HEADER_END {
        return Err(KernelError::TooShort {
            path: path.to_owned(),
            bytes: image.len(),
        });
    }
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
                let kernel = elf::load(path, elf, memory, low_end)?;
                return Ok(LoadedKernel {
                    setup_header: Some(header),
                    format: KernelFormat::UnpackedBzImage,
                    ..kernel
                });
            }
            Ok(_) => {
                return Err(KernelError::Corrupt {
                    path: path.to_owned(),
                    source: "its payload is not an ELF file".into(),
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

/// Returns the compressed part of a bzImage.
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

/// Returns the length of the real-mode part of a bzImage.
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
    // The kernel moves itself to its preferred address, and needs `init_size` bytes from there.
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
