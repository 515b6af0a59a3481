//! Checks an ELF kernel before it is loaded, so that errors name the faulty field.

use thiserror::Error;

use crate::layout::HIGH_RAM_START;

const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;

/// Defect of an ELF kernel.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ElfError {
    /// The file ends inside the header.
    #[error("it has {bytes} bytes, an ELF header has {HEADER_BYTES}; copy it again")]
    HeaderTruncated {
        /// Size of the image.
        bytes: usize,
    },
    /// The kernel is for another architecture.
    #[error("it is ELF class {class}, machine {machine}: only 64-bit x86-64 kernels run here")]
    WrongMachine {
        /// The field `EI_CLASS`.
        class: u8,
        /// The field `e_machine`.
        machine: u16,
    },
    /// The program headers, or the segments, extend past the end of the file.
    #[error("it is truncated: it has {bytes} bytes, its headers ask for {needed}; copy it again")]
    Truncated {
        /// Size of the image.
        bytes: usize,
        /// Size according to the headers.
        needed: u64,
    },
    /// The program headers do not have the standard size.
    #[error("its program headers have {found} bytes each, not {PROGRAM_HEADER_BYTES}")]
    ProgramHeaderSize {
        /// The field `e_phentsize`.
        found: u16,
    },
    /// A segment overlaps the boot structures, or its address wraps around.
    #[error(
        "a segment of {bytes} bytes at {address:#x} is outside the memory for kernels, which \
         starts at {HIGH_RAM_START:#x}"
    )]
    SegmentAddress {
        /// The field `p_paddr`.
        address: u64,
        /// The field `p_memsz`.
        bytes: u64,
    },
    /// A segment has more bytes in the file than in memory.
    #[error("the segment at {address:#x} has more bytes in the file than in memory")]
    SegmentSize {
        /// The field `p_paddr`.
        address: u64,
    },
    /// No loaded segment contains the entry point.
    #[error("its entry point {entry:#x} is in no loaded segment; give a vmlinux or bzImage")]
    Entry {
        /// The field `e_entry`.
        entry: u64,
    },
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |word| u16::from_le_bytes(*word))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |word| u32::from_le_bytes(*word))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |word| u64::from_le_bytes(*word))
}

/// Checks the headers of `image` and returns the end of the highest segment, as a physical address.
pub(crate) fn check_elf(image: &[u8]) -> Result<u64, ElfError> {
    if image.len() < HEADER_BYTES {
        return Err(ElfError::HeaderTruncated { bytes: image.len() });
    }
    let (class, data) = (image[4], image[5]);
    let machine = u16_at(image, 18);
    if class != CLASS_64 || data != LITTLE_ENDIAN || machine != MACHINE_X86_64 {
        return Err(ElfError::WrongMachine { class, machine });
    }
    let entry = u64_at(image, 24);
    let entry_size = u16_at(image, 54);
    let count = u64::from(u16_at(image, 56));
    if usize::from(entry_size) != PROGRAM_HEADER_BYTES {
        return Err(ElfError::ProgramHeaderSize { found: entry_size });
    }
    let table_start = u64_at(image, 32);
    let table = slice(image, table_start, count * u64::from(entry_size))?;

    let mut end = 0;
    let mut entry_is_loaded = false;
    for header in table.chunks_exact(PROGRAM_HEADER_BYTES) {
        let offset = u64_at(header, 8);
        let (address, file_bytes, bytes) =
            (u64_at(header, 24), u64_at(header, 32), u64_at(header, 40));
        // All segments are checked, not only those with code: the loader reads notes as well.
        slice(image, offset, file_bytes)?;
        if u32_at(header, 0) != PT_LOAD || bytes == 0 {
            continue;
        }
        if file_bytes > bytes {
            return Err(ElfError::SegmentSize { address });
        }
        let segment_end = address
            .checked_add(bytes)
            .filter(|_| address >= HIGH_RAM_START)
            .ok_or(ElfError::SegmentAddress { address, bytes })?;
        end = end.max(segment_end);
        entry_is_loaded |= entry >= address && entry - address < file_bytes;
    }
    if entry_is_loaded {
        Ok(end)
    } else {
        Err(ElfError::Entry { entry })
    }
}

/// Returns `len` bytes of `image` from `start`.
fn slice(image: &[u8], start: u64, len: u64) -> Result<&[u8], ElfError> {
    let needed = start.saturating_add(len);
    let range = usize::try_from(start)
        .ok()
        .zip(usize::try_from(needed).ok());
    range
        .and_then(|(start, end)| image.get(start..end))
        .ok_or(ElfError::Truncated {
            bytes: image.len(),
            needed,
        })
}
