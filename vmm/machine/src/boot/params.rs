//! The 64-bit boot protocol of Linux: zero page, memory map, command line, initrd.
//!
//! Linux, Documentation/arch/x86/boot.rst, section "64-bit boot protocol".

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::boot::kernel::LoadedKernel;
use crate::error::MachineError;
use crate::layout::{
    ACPI_END, ACPI_START, CMDLINE_START, DEVICE_HOLE_END, HIGH_RAM_START, LOW_RAM_END, MemorySize,
    PAGE_BYTES, ZERO_PAGE_START,
};

/// `type_of_loader` of a loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
const BOOT_FLAG: u16 = 0xaa55;
const SETUP_HEADER_MAGIC: u32 = 0x5372_6448;
/// The version of the boot protocol that this loader speaks.
const PROTOCOL: u16 = 0x020f;
/// `loadflags`: the kernel is above 1 MiB.
const LOADED_HIGH: u8 = 1;
/// Physical alignment of x86-64 kernels (CONFIG_PHYSICAL_ALIGN).
const KERNEL_ALIGNMENT: u32 = 0x20_0000;

/// An initrd is read in pieces of this size.
const PIECE_BYTES: usize = 1 << 20;

/// Memory map: usable RAM.
const E820_RAM: u32 = 1;
/// Memory map: not for the kernel.
const E820_RESERVED: u32 = 2;

/// An initrd in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoadedInitrd {
    pub start: u64,
    pub bytes: u64,
}

/// The archive of a first root file system.
#[derive(Clone, Debug)]
pub enum Initrd {
    /// In a file.
    File(PathBuf),
    /// In memory.
    Built(Arc<[u8]>),
}

impl Initrd {
    /// How messages name it.
    fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::Built(_) => Path::new("of --exec"),
        }
    }
}

/// Loads the initrd as high as it fits below the device hole, so that it is out of the way of
/// the kernel, which ends at `kernel_end`.
pub(crate) fn load_initrd(
    initrd: &Initrd,
    memory: &GuestMemoryMmap,
    size: MemorySize,
    kernel_end: u64,
) -> Result<LoadedInitrd, MachineError> {
    match initrd {
        Initrd::File(path) => load_initrd_file(path, memory, size, kernel_end),
        Initrd::Built(archive) => {
            let bytes = u64::try_from(archive.len()).unwrap_or(u64::MAX);
            let start = room_for_initrd(initrd.path(), bytes, size, kernel_end)?;
            memory
                .write_slice(archive, GuestAddress(start))
                .map_err(initrd_not_written)?;
            Ok(LoadedInitrd { start, bytes })
        }
    }
}

fn initrd_not_written(source: vm_memory::GuestMemoryError) -> MachineError {
    MachineError::WriteMemory {
        what: "initrd",
        source,
    }
}

fn load_initrd_file(
    path: &Path,
    memory: &GuestMemoryMmap,
    size: MemorySize,
    kernel_end: u64,
) -> Result<LoadedInitrd, MachineError> {
    let read_error = |source| MachineError::InitrdRead {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(read_error)?;
    let metadata = file.metadata().map_err(read_error)?;
    if !metadata.is_file() {
        return Err(read_error(std::io::Error::other("not a regular file")));
    }
    let bytes = metadata.len();
    if bytes == 0 {
        return Err(MachineError::InitrdEmpty {
            path: path.to_owned(),
        });
    }
    let start = room_for_initrd(path, bytes, size, kernel_end)?;
    // Not straight into guest memory: a file system that pins the pages which it reads into, as 9p does,
    // waits for them where not even SIGKILL ends a process, and their donor may be lost.
    let mut piece = vec![0; PIECE_BYTES];
    let mut done = 0;
    while done < bytes {
        let left = usize::try_from(bytes - done).unwrap_or(PIECE_BYTES);
        piece.truncate(left);
        file.read_exact(&mut piece).map_err(read_error)?;
        memory
            .write_slice(&piece, GuestAddress(start + done))
            .map_err(initrd_not_written)?;
        done += piece.len() as u64;
    }
    Ok(LoadedInitrd { start, bytes })
}

fn room_for_initrd(
    path: &Path,
    bytes: u64,
    size: MemorySize,
    kernel_end: u64,
) -> Result<u64, MachineError> {
    initrd_start(bytes, size, kernel_end).ok_or_else(|| MachineError::InitrdTooLarge {
        path: path.to_owned(),
        bytes,
        room: size
            .low_end
            .saturating_sub(kernel_end.next_multiple_of(PAGE_BYTES)),
    })
}

/// The highest page from which `bytes` fit in low RAM after the kernel.
fn initrd_start(bytes: u64, size: MemorySize, kernel_end: u64) -> Option<u64> {
    let start = size.low_end.checked_sub(bytes)? / PAGE_BYTES * PAGE_BYTES;
    (start >= kernel_end).then_some(start)
}

/// The memory map: pairs of start and length, with their type.
fn memory_map(size: MemorySize) -> Vec<boot_e820_entry> {
    let entry = |start, end, kind| boot_e820_entry {
        addr: start,
        size: end - start,
        r#type: kind,
    };
    let mut map = vec![
        entry(0, LOW_RAM_END, E820_RAM),
        entry(LOW_RAM_END, 0xa_0000, E820_RESERVED),
        entry(ACPI_START, ACPI_END, E820_RESERVED),
        entry(HIGH_RAM_START, size.low_end, E820_RAM),
    ];
    if size.total > size.low_end {
        let high_end = DEVICE_HOLE_END + (size.total - size.low_end);
        map.push(entry(DEVICE_HOLE_END, high_end, E820_RAM));
    }
    map
}

/// Whether a command line may have this byte: printable ASCII.
#[must_use]
pub const fn is_of_cmdline(byte: u8) -> bool {
    matches!(byte, b' '..=b'~')
}

/// Checks that a kernel which takes `limit` bytes can be given `cmdline`.
pub(crate) fn check_cmdline(cmdline: &str, limit: u64) -> Result<(), MachineError> {
    let bytes = u64::try_from(cmdline.len()).unwrap_or(u64::MAX);
    if bytes > limit {
        return Err(MachineError::CmdlineTooLong { bytes, limit });
    }
    match cmdline
        .bytes()
        .enumerate()
        .find(|(_, byte)| !is_of_cmdline(*byte))
    {
        Some((position, byte)) => Err(MachineError::CmdlineByte { byte, position }),
        None => Ok(()),
    }
}

/// Writes command line and zero page for `kernel`.
pub(crate) fn write_boot_params(
    memory: &GuestMemoryMmap,
    size: MemorySize,
    kernel: &LoadedKernel,
    initrd: Option<LoadedInitrd>,
    cmdline: &str,
    rsdp: u64,
) -> Result<(), MachineError> {
    check_cmdline(cmdline, kernel.cmdline_bytes_max())?;
    let line = [cmdline.as_bytes(), b"\0"].concat();
    memory
        .write_slice(&line, GuestAddress(CMDLINE_START))
        .map_err(|source| MachineError::WriteMemory {
            what: "kernel command line",
            source,
        })?;
    let params = boot_params_for(size, kernel, initrd, rsdp);
    let params = BootParams::new(&params, GuestAddress(ZERO_PAGE_START));
    LinuxBootConfigurator::write_bootparams(&params, memory).map_err(|error| {
        MachineError::WriteMemory {
            what: "boot parameters",
            source: vm_memory::GuestMemoryError::IOError(std::io::Error::other(error.to_string())),
        }
    })
}

fn boot_params_for(
    size: MemorySize,
    kernel: &LoadedKernel,
    initrd: Option<LoadedInitrd>,
    rsdp: u64,
) -> boot_params {
    let mut params = boot_params {
        hdr: kernel.setup_header.unwrap_or_default(),
        acpi_rsdp_addr: rsdp,
        ..Default::default()
    };
    if kernel.setup_header.is_none() {
        params.hdr.boot_flag = BOOT_FLAG;
        params.hdr.header = SETUP_HEADER_MAGIC;
        params.hdr.version = PROTOCOL;
        params.hdr.loadflags = LOADED_HIGH;
        params.hdr.kernel_alignment = KERNEL_ALIGNMENT;
    }
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = low_address(CMDLINE_START);
    if let Some(initrd) = initrd {
        params.hdr.ramdisk_image = low_address(initrd.start);
        params.hdr.ramdisk_size = low_address(initrd.bytes);
    }
    let map = memory_map(size);
    for (slot, entry) in params.e820_table.iter_mut().zip(&map) {
        *slot = *entry;
    }
    params.e820_entries = u8::try_from(map.len()).unwrap_or(0);
    params
}

/// An address or length below the device hole, which is below 4 GiB.
fn low_address(address: u64) -> u32 {
    debug_assert!(address < DEVICE_HOLE_END);
    u32::try_from(address).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;
    use crate::boot::kernel::KernelFormat;
    use crate::layout::{DEVICE_HOLE_START, guest_memory_ranges};

    const GIB: u64 = 1 << 30;

    fn size(total: u64) -> MemorySize {
        MemorySize {
            total,
            low_end: total.min(DEVICE_HOLE_START),
        }
    }

    fn ram(total: u64) -> Vec<(u64, u64)> {
        memory_map(size(total))
            .iter()
            .filter(|entry| { entry.r#type } == E820_RAM)
            .map(|entry| (entry.addr, entry.size))
            .collect()
    }

    #[test]
    fn the_memory_map_has_the_hole_below_4_gib() {
        let low = [(0, LOW_RAM_END)];
        let below = |bytes: u64| (HIGH_RAM_START, bytes - HIGH_RAM_START);
        assert_eq!(ram(GIB), [&low[..], &[below(GIB)]].concat());
        assert_eq!(ram(3 * GIB), [&low[..], &[below(3 * GIB)]].concat());
        let more = 3 * GIB + PAGE_BYTES;
        let above = (4 * GIB, PAGE_BYTES);
        assert_eq!(ram(more), [&low[..], &[below(3 * GIB), above]].concat());
    }

    proptest! {
        #[test]
        fn the_memory_map_stays_inside_the_memory(pages in 512u64..(16 << 18)) {
            let total = pages * PAGE_BYTES;
            let ranges = guest_memory_ranges(total);
            let mut last_end = 0;
            for entry in memory_map(size(total)) {
                let (start, end) = (entry.addr, entry.addr + entry.size);
                prop_assert!(start >= last_end && end > start);
                last_end = end;
                let inside = ranges.iter().any(|(base, len)| start >= base.0 && end <= base.0 + len);
                prop_assert!(inside, "{:#x}..{:#x}", start, end);
            }
        }
    }

    #[test]
    fn the_initrd_goes_to_the_end_of_low_memory() {
        assert_eq!(initrd_start(1, size(GIB), 0), Some(GIB - PAGE_BYTES));
        assert_eq!(
            initrd_start(PAGE_BYTES + 1, size(5 * GIB), 0),
            Some(3 * GIB - 2 * PAGE_BYTES)
        );
        assert_eq!(initrd_start(GIB, size(GIB), 0), Some(0));
        assert_eq!(initrd_start(GIB, size(GIB), 1), None);
        assert_eq!(initrd_start(GIB + 1, size(GIB), 0), None);
        assert_eq!(initrd_start(u64::MAX, size(GIB), 0), None);
    }

    #[test]
    fn an_initrd_larger_than_memory_is_refused_with_the_room_there_is() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let load = |path: &Path| load_initrd_file(path, &memory, size(4 << 20), 3 << 20);
        assert!(matches!(
            load(file.path()),
            Err(MachineError::InitrdEmpty { .. })
        ));
        file.write_all(&[1; (1 << 20) + 1]).unwrap();
        let text = load(file.path()).unwrap_err().to_string();
        assert!(
            text.contains("1048577 bytes, larger than the 1048576"),
            "{text}"
        );
        file.as_file().set_len(1 << 20).unwrap();
        assert_eq!(load(file.path()).unwrap().start, 3 << 20);
        assert_eq!(memory.read_obj::<u8>(GuestAddress(3 << 20)).unwrap(), 1);
        let missing = load(Path::new("/does/not/exist"));
        assert!(matches!(missing, Err(MachineError::InitrdRead { .. })));
    }

    #[test]
    fn long_or_strange_command_lines_are_refused() {
        assert!(check_cmdline("console=ttyS0", 2047).is_ok());
        assert!(check_cmdline(&"a".repeat(2047), 2047).is_ok());
        let text = check_cmdline(&"a".repeat(2048), 2047)
            .unwrap_err()
            .to_string();
        assert!(text.contains("2048 bytes, 2047 is the limit"), "{text}");
        for strange in ["a\0b", "a\nb", "caf\u{e9}"] {
            let error = check_cmdline(strange, 2047).unwrap_err();
            assert!(matches!(error, MachineError::CmdlineByte { .. }));
        }
    }

    #[test]
    fn the_zero_page_names_command_line_initrd_and_rsdp() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let kernel = LoadedKernel {
            entry: GuestAddress(0x10_0000),
            end: 0x11_0000,
            setup_header: None,
            format: KernelFormat::Elf,
        };
        let initrd = LoadedInitrd {
            start: 0x20_0000,
            bytes: 77,
        };
        write_boot_params(
            &memory,
            size(4 << 20),
            &kernel,
            Some(initrd),
            "abc",
            0xe_0000,
        )
        .unwrap();
        let params: boot_params = memory.read_obj(GuestAddress(ZERO_PAGE_START)).unwrap();
        assert_eq!({ params.acpi_rsdp_addr }, 0xe_0000);
        assert_eq!({ params.hdr.ramdisk_image }, 0x20_0000);
        assert_eq!({ params.hdr.ramdisk_size }, 77);
        assert_eq!(params.e820_entries, 4);
        let line = GuestAddress(u64::from(params.hdr.cmd_line_ptr));
        assert_eq!(&memory.read_obj::<[u8; 4]>(line).unwrap(), b"abc\0");
    }
}
