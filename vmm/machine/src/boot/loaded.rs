//! A kernel in guest memory.

use linux_loader::loader::bootparam::setup_header;
use vm_memory::GuestAddress;

use crate::layout::CMDLINE_BYTES_MAX;

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
