//! The first process of a guest that `ssi-hv run --exec` boots.
//!
//! `build.rs` compiles this file alone, without the standard library and without a C library, so
//! that `ssi-hv` embeds only a few kilobytes of our own code. Everything except the entry point is
//! in `src/exec/guest`, where the lints and the tests of the crate cover it as well.

#![no_std]
#![no_main]

#[path = "../src/exec/frame.rs"]
mod frame;
#[path = "../src/exec/guest/mod.rs"]
mod guest;

use core::arch::{asm, global_asm};

// The kernel starts a process with the stack aligned to 16 bytes and without a return address.
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

/// `core` is compiled for unwinding and refers to this symbol; nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

// The compiler may emit calls to these functions, which a C library provides otherwise.

/// # Safety
/// As memcpy(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller passes two areas of `count` bytes that do not overlap; the direction flag
    // is clear at every call (System V ABI, 3.2.1).
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _,
             options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As memset(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
    // SAFETY: the caller passes an area of `count` bytes; the direction flag is clear as above.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("al") byte as u8,
             options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As memcmp(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, count: usize) -> i32 {
    for at in 0..count {
        // SAFETY: the caller passes two areas of `count` bytes.
        let (a, b) = unsafe { (a.add(at).read_volatile(), b.add(at).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// # Safety
/// As strlen(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strlen(text: *const u8) -> usize {
    let mut len = 0;
    // SAFETY: the caller passes bytes that end with a zero.
    while unsafe { text.add(len).read_volatile() } != 0 {
        len += 1;
    }
    len
}
