//! Writes the zero page and the memory map of Linux's 64-bit boot protocol.
//!
//! Linux, Documentation/arch/x86/boot.rst, section "64-bit boot protocol".

use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::bzimage::SETUP_HEADER_MAGIC;
use super::cmdline::check_cmdline;
use super::initrd::LoadedInitrd;
use super::loaded::LoadedKernel;
use crate::error::MachineError;
use crate::layout::{
    ACPI_END, ACPI_START, CMDLINE_START, DEVICE_HOLE_END, HIGH_RAM_START, LOW_RAM_END,
    ZERO_PAGE_START,
};
use crate::memory::MemorySize;

/// `type_of_loader` of a loader without an assigned number.
const LOADER_UNDEFINED: u8 = 0xff;
const BOOT_FLAG: u16 = 0xaa55;
/// The version of the boot protocol that is implemented here.
const PROTOCOL: u16 = 0x020f;
/// `loadflags`: the kernel is loaded above 1 MiB.
const LOADED_HIGH: u8 = 1;
/// Physical alignment of x86-64 kernels (CONFIG_PHYSICAL_ALIGN).
const KERNEL_ALIGNMENT: u32 = 0x20_0000;

/// Memory map: usable RAM.
const E820_RAM: u32 = 1;
/// Memory map: reserved.
const E820_RESERVED: u32 = 2;

/// Returns the memory map: start, length and type of each range.
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

/// Writes the command line and the zero page for `kernel`.
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

/// Converts an address or length below the device hole, which ends at 4 GiB.
fn low_address(address: u64) -> u32 {
    debug_assert!(address < DEVICE_HOLE_END);
    u32::try_from(address).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::boot::loaded::KernelFormat;
    use crate::layout::{DEVICE_HOLE_START, PAGE_BYTES};
    use crate::memory::guest_memory_ranges;

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
