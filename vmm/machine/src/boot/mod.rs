//! What the guest boots from: kernel, initial RAM disk and boot parameters.

pub(crate) mod elf_check;
pub(crate) mod kernel;
pub(crate) mod params;
pub(crate) mod payload;
