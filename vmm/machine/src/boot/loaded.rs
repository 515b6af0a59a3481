//! A kernel in guest memory.

use linux_loader::loader::bootparam::setup_header;
use vm_memory::GuestAddress;

use crate::layout::CMDLINE_BYTES_MAX;

/// The format of a kernel's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelFormat {
    /// An ELF file.
    Elf,
    /// A bzImage that the monitor has unpacked.
    UnpackedBzImage,
    /// A bzImage that unpacks itself in the guest.
    BzImage,
}

/// A kernel in guest memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadedKernel {
    /// Entry point of the boot processor, in 64-bit mode.
    pub entry: GuestAddress,
    /// End of the memory that the kernel uses before it reads the memory map.
    pub end: u64,
    /// The setup header, if the file was a bzImage.
    pub setup_header: Option<setup_header>,
    /// Format of the file.
    pub format: KernelFormat,
}

impl LoadedKernel {
    /// Returns the kernel's limit of its command line in bytes, without the terminating zero.
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
