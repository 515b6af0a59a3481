//! Fuzz targets of the machine: the boot loaders, which read untrusted files, and the bus of ports.
//! [`devices::fuzzing`] describes how targets are run.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arbitrary::{Arbitrary, Result, Unstructured};
use devices::fuzzing::Target;
use devices::{
    BootTimer, ConsoleOutput, EventFdTrigger, InterruptLine, MachineEvents, PmRegisters, SerialPort,
};
use linux_loader::loader::bootparam::{boot_params, setup_header};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

use crate::boot::initrd::{Initrd, load_initrd};
use crate::boot::kernel::load_image;
use crate::boot::loaded::{KernelFormat, LoadedKernel};
use crate::boot::params::write_boot_params;
use crate::layout::{
    ACPI_START, CMDLINE_BYTES_MAX, CMDLINE_START, HIGH_RAM_START, PAGE_BYTES, ZERO_PAGE_START,
};
use crate::memory::MemorySize;
use crate::ports::port_bus;

/// The targets of this crate.
pub const TARGETS: &[Target] = &[
    Target {
        name: "kernel",
        run: kernel,
    },
    Target {
        name: "initrd",
        run: initrd,
    },
    Target {
        name: "command_line",
        run: command_line,
    },
    Target {
        name: "machine_ports",
        run: machine_ports,
    },
];

/// Bytes of guest memory.
const MEMORY_BYTES: u64 = 4 << 20;
/// Bytes after a kernel that are examined.
const AFTER_BYTES: u64 = 128 << 10;
/// Limit of port accesses of one input.
const ACCESSES_MAX: usize = 300;

fn memory() -> GuestMemoryMmap {
    let bytes = usize::try_from(MEMORY_BYTES).expect("a small memory");
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).expect("memory")
}

fn bytes_at(memory: &GuestMemoryMmap, start: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    memory
        .read_slice(&mut bytes, GuestAddress(start))
        .expect("memory of the guest");
    bytes
}

/// Loads any file as a kernel: what is loaded lies between the boot structures and the end of
/// memory.
fn kernel(input: &[u8]) {
    let memory = memory();
    // Guest memory ends somewhere in what is mapped here.
    let Some((room, image)) = input.split_first() else {
        return;
    };
    let low_end = HIGH_RAM_START + u64::from(*room) * (MEMORY_BYTES - HIGH_RAM_START) / 255;
    let loaded = load_image(Path::new("fuzzed"), image.to_vec(), &memory, low_end);
    let below = usize::try_from(HIGH_RAM_START).expect("small");
    let boot_structures = bytes_at(&memory, 0, below);
    assert!(boot_structures.iter().all(|byte| *byte == 0), "overwritten");
    let Ok(kernel) = loaded else {
        return;
    };
    assert!((HIGH_RAM_START..kernel.end).contains(&kernel.entry.0));
    assert!(kernel.end <= low_end);
    let after = (MEMORY_BYTES - kernel.end).min(AFTER_BYTES);
    let after = bytes_at(&memory, kernel.end, usize::try_from(after).expect("small"));
    assert!(after.iter().all(|byte| *byte == 0), "more than it said");
    assert!(kernel.cmdline_bytes_max() < CMDLINE_BYTES_MAX);
}

/// Loads any archive after any kernel: it is complete, and overlaps neither the kernel nor the end
/// of memory.
fn initrd(input: &[u8]) {
    let mut data = Unstructured::new(input);
    let Ok((pages, end, times)) = <(u16, u64, u8)>::arbitrary(&mut data) else {
        return;
    };
    let total = (u64::from(pages) % (MEMORY_BYTES / PAGE_BYTES) + 1) * PAGE_BYTES;
    let kernel_end = end % (2 * MEMORY_BYTES);
    let size = MemorySize {
        total,
        low_end: total,
    };
    let memory = memory();
    let archive = data.take_rest().repeat(usize::from(times));
    let built = Initrd::Built(archive.as_slice().into());
    match load_initrd(&built, &memory, size, kernel_end, &[]) {
        Ok(loaded) => {
            assert!(loaded.start >= kernel_end && loaded.start % PAGE_BYTES == 0);
            assert!(loaded.start + loaded.bytes <= total);
            assert_eq!(bytes_at(&memory, loaded.start, archive.len()), archive);
        }
        Err(error) => {
            let bytes = u64::try_from(archive.len()).expect("a length");
            let first = kernel_end.next_multiple_of(PAGE_BYTES);
            assert!(first + bytes > total.saturating_sub(PAGE_BYTES), "{error}");
        }
    }
}

/// Writes any command line for any kernel: it is complete and terminated at the address in the zero
/// page, or refused.
fn command_line(input: &[u8]) {
    let mut header = setup_header::default();
    let place = header.as_mut_slice();
    let Some((of_kernel, line)) = input.split_at_checked(place.len() + 1) else {
        return;
    };
    place.copy_from_slice(&of_kernel[1..]);
    let kernel = LoadedKernel {
        entry: GuestAddress(HIGH_RAM_START),
        end: HIGH_RAM_START + PAGE_BYTES,
        setup_header: (of_kernel[0] & 1 == 1).then_some(header),
        format: KernelFormat::BzImage,
    };
    let line = String::from_utf8_lossy(line);
    let memory = memory();
    let size = MemorySize {
        total: MEMORY_BYTES,
        low_end: MEMORY_BYTES,
    };
    let written = write_boot_params(&memory, size, &kernel, None, &line, ACPI_START);
    let most = usize::try_from(kernel.cmdline_bytes_max()).expect("small");
    let printable = line.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    assert_eq!(written.is_ok(), line.len() <= most && printable, "{line:?}");
    if written.is_err() {
        return;
    }
    let there = bytes_at(&memory, CMDLINE_START, line.len() + 1);
    assert_eq!(there, [line.as_bytes(), b"\0"].concat());
    let params: boot_params = memory
        .read_obj(GuestAddress(ZERO_PAGE_START))
        .expect("the zero page");
    let pointer = params.hdr.cmd_line_ptr;
    assert_eq!(u64::from(pointer), CMDLINE_START);
    let entries = usize::from(params.e820_entries);
    assert!((1..=params.e820_table.len()).contains(&entries));
}

/// An interrupt line without a controller.
#[derive(Debug)]
struct NoLine;

impl InterruptLine for NoLine {
    fn set(&self, _raised: bool) {}
}

/// Makes any accesses to any ports of the machine.
fn machine_ports(input: &[u8]) {
    let output = ConsoleOutput::spawn(Box::new(io::sink())).expect("a thread");
    let interrupt = EventFdTrigger::new().expect("a descriptor");
    let serial = SerialPort::new(interrupt, output.clone()).expect("a descriptor");
    let events = MachineEvents::new().expect("a descriptor");
    let power = Arc::new(PmRegisters::new(events.clone(), Arc::new(NoLine)));
    let timer = Arc::new(BootTimer::new());
    let ports = port_bus(&Arc::new(serial), &timer, &events, &power).expect("free places");
    let mut data = Unstructured::new(input);
    let access = |data: &mut Unstructured<'_>| -> Result<()> {
        let (what, port) = <(u8, u16)>::arbitrary(data)?;
        // KVM exits for 1, 2 or 4 bytes.
        let width = 1_usize << (what >> 1 & 3).min(2);
        let mut bytes = [0; 4];
        if what & 1 == 0 {
            ports.read(u64::from(port), &mut bytes[..width]);
        } else {
            data.fill_buffer(&mut bytes[..width])?;
            ports.write(u64::from(port), &bytes[..width]);
        }
        Ok(())
    };
    for _ in 0..ACCESSES_MAX {
        if data.is_empty() || access(&mut data).is_err() {
            break;
        }
    }
    let lost = output.close(Duration::from_secs(5));
    assert_eq!(lost, 0, "nothing of the console is lost");
}

#[cfg(test)]
mod tests {
    devices::fuzz_tests! { kernel initrd command_line machine_ports }
}
