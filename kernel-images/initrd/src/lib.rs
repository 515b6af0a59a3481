//! Initial RAM disks: an archive writer, and the busybox of this host as a guest's userland.
//!
//! It builds no kernel images and starts no package manager, so the monitor can depend on it.

pub mod busybox;
pub mod cpio;

mod error;

pub use error::InitrdError;
