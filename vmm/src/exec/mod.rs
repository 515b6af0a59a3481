//! One command in a guest (`ssi-hv run --exec`).
//!
//! The guest boots with an initial RAM disk that is created here ([`archive`]): an init of ours,
//! which this binary embeds, the command in a file, and the busybox of this host unless an initial
//! RAM disk is given. The init runs the command with `/bin/sh` and sends its output and its status
//! over the second serial port ([`frame`]): stock kernels have a built-in driver for it, and the
//! kernel's own messages stay on the first. [`channel`] parses what arrives.

pub mod archive;
pub mod channel;
#[allow(
    dead_code,
    reason = "the init writes headers, and the monitor reads them"
)]
pub mod frame;
#[cfg(test)]
#[allow(dead_code, reason = "the rest is for the first process of a machine")]
mod guest;
pub mod tail;
