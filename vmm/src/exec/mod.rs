//! One command in a guest (`ssi-hv run --exec`).
//!
//! The guest boots with an initial RAM disk that is made here ([`archive`]): an init of ours, which
//! this binary carries, the command in a file, and the busybox of this host where no initial RAM
//! disk is given. The init runs the command by `/bin/sh` and sends what it writes, and how it ended,
//! over the second serial port ([`frame`]): stock kernels have a driver for that built in, and the
//! kernel's own messages stay on the first. What comes is taken apart in [`channel`].

pub mod archive;
pub mod channel;
pub mod frame;
#[cfg(test)]
#[allow(dead_code, reason = "the rest is for the first process of a machine")]
mod guest;
pub mod tail;
