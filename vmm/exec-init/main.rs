//! The first process of a guest that `ssi-hv run --exec` boots.
//!
//! `build.rs` compiles this file alone, without a standard library and without a C library, so
//! that what `ssi-hv` carries with it is a few kilobytes of our own. All but the entry is in
//! `src/exec/guest`, where the lints and the tests of the crate reach it too.

#![no_std]
#![no_main]

#[path = "../src/exec/frame.rs"]
mod frame;
#[path = "../src/exec/guest/mod.rs"]
mod guest;

use core::arch::{asm, global_asm};

// The kernel starts a process with the stack at a multiple of 16 and nothing to return to.
global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "call {start}",
    "ud2",
    start = sym start,
);

extern "C" fn start() -> ! {
    guest::init::main()
}

#[panic_handler]
fn panicked(_: &core::panic::PanicInfo<'_>) -> ! {
    guest::init::give_up(c"ssi-hv init: internal error\n")
}

/// `core` is compiled for unwinding and names this; nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

// What the compiler may call for copies, which a C library else has.

/// # Safety
/// As that of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller gives two areas of `count` bytes that do not overlap; the direction
    // flag is clear at every call (System V ABI, 3.2.1).
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _,
             options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As that of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
    // SAFETY: the caller gives an area of `count` bytes; as above.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("al") byte as u8,
             options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As that of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, count: usize) -> i32 {
    for at in 0..count {
        // SAFETY: the caller gives two areas of `count` bytes.
        let (a, b) = unsafe { (a.add(at).read_volatile(), b.add(at).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// # Safety
/// As that of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strlen(text: *const u8) -> usize {
    let mut len = 0;
    // SAFETY: the caller gives bytes that end with a zero.
    while unsafe { text.add(len).read_volatile() } != 0 {
        len += 1;
    }
    len
}
