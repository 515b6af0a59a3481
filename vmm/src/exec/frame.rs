//! The protocol of the guest's init on the second serial port: [`HELLO`], then frames.
//!
//! A frame is its kind (a byte), the length of its contents (two bytes, little endian), and the
//! contents. This file is part of this crate and of the init, which has no standard library.

/// Precedes the first frame. Bytes before it are ignored.
pub const HELLO: [u8; 16] = *b"\0SSI-HV exec 1\n\0";

/// Bytes before the contents of a frame.
pub const HEADER_BYTES: usize = 3;

/// Largest contents of a frame: what is read from a pipe at once.
pub const CONTENTS_BYTES_MAX: usize = 4096;

/// Longest command: the kernel accepts 128 KiB for one argument (`MAX_ARG_STRLEN`,
/// `include/uapi/linux/binfmts.h`), and half of that is a round number.
pub const COMMAND_BYTES_MAX: usize = 64 << 10;

/// Path of the init in the archive.
pub const INIT_PATH: &core::ffi::CStr = c"/ssi-hv/init";

/// Path of the command in the archive.
pub const COMMAND_PATH: &core::ffi::CStr = c"/ssi-hv/command";

/// Bytes that the command has written to its standard output.
pub const STDOUT: u8 = b'o';
/// Bytes that the command has written to its standard error.
pub const STDERR: u8 = b'e';
/// The command has ended: one byte, its exit status as a shell reports it. The last frame.
pub const STATUS: u8 = b's';
/// The command could not be run: a text with the reason. The last frame.
pub const FAILURE: u8 = b'f';

/// Returns the header of a frame with `len` bytes of contents, at most [`CONTENTS_BYTES_MAX`].
#[must_use]
pub fn header(kind: u8, len: usize) -> [u8; HEADER_BYTES] {
    let [low, high, ..] = len.to_le_bytes();
    [kind, low, high]
}
