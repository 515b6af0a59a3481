//! Loads what the guest boots from: kernel, initial RAM disk, command line and boot parameters.

mod bzimage;
pub(crate) mod cmdline;
mod elf;
pub(crate) mod elf_check;
pub(crate) mod initrd;
pub(crate) mod kernel;
pub(crate) mod kernel_error;
pub(crate) mod loaded;
pub(crate) mod params;
pub(crate) mod payload;
