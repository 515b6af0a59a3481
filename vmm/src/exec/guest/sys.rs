//! System calls of Linux on x86-64, without a C library.

use core::arch::asm;
use core::ffi::{CStr, c_char};
use core::ptr;

/// The error number of a failed system call.
pub type Errno = i32;

/// An open file descriptor, which is not closed automatically.
pub type Fd = i32;

pub const O_RDONLY: usize = 0;
pub const O_RDWR: usize = 2;
pub const O_NOCTTY: usize = 0o400;
pub const O_NONBLOCK: usize = 0o4000;
pub const O_CLOEXEC: usize = 0o2_000_000;
pub const S_IFCHR: usize = 0o020_000;
pub const POLLIN: i16 = 1;
pub const EINTR: Errno = 4;
const E2BIG: Errno = 7;
pub const EAGAIN: Errno = 11;
const F_SETFL: usize = 4;
const WNOHANG: usize = 1;

/// Numbers of system calls (`arch/x86/entry/syscalls/syscall_64.tbl`).
mod number {
    pub const READ: usize = 0;
    pub const WRITE: usize = 1;
    pub const OPEN: usize = 2;
    pub const CLOSE: usize = 3;
    pub const POLL: usize = 7;
    pub const IOCTL: usize = 16;
    pub const DUP2: usize = 33;
    pub const PAUSE: usize = 34;
    pub const FORK: usize = 57;
    pub const EXECVE: usize = 59;
    pub const EXIT: usize = 60;
    pub const WAIT4: usize = 61;
    pub const FCNTL: usize = 72;
    pub const MKDIR: usize = 83;
    pub const SETSID: usize = 112;
    pub const MKNOD: usize = 133;
    pub const SYNC: usize = 162;
    pub const MOUNT: usize = 165;
    pub const REBOOT: usize = 169;
    pub const IOPERM: usize = 173;
    pub const PIPE2: usize = 293;
}

/// Executes a system call.
///
/// # Safety
/// The arguments must match the call, and pointers among them must be valid for it.
unsafe fn call(number: usize, arguments: [usize; 5]) -> Result<usize, Errno> {
    let [a, b, c, d, e] = arguments;
    let result: isize;
    // SAFETY: the instruction changes RAX, RCX and R11, and memory only as the call does, which the
    // caller guarantees to be valid.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    // Errors are -4095 to -1.
    match usize::try_from(result) {
        Ok(value) => Ok(value),
        Err(_) => Err(i32::try_from(-result).unwrap_or(0)),
    }
}

/// Converts a descriptor to an argument.
fn raw(fd: Fd) -> usize {
    usize::try_from(fd).unwrap_or(usize::MAX)
}

/// Converts a number from the kernel, which fits.
fn small(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(-1)
}

fn address(text: &CStr) -> usize {
    text.as_ptr() as usize
}

pub fn open(path: &CStr, flags: usize) -> Result<Fd, Errno> {
    // SAFETY: the path ends with a zero.
    unsafe { call(number::OPEN, [address(path), flags, 0, 0, 0]) }.map(small)
}

pub fn close(fd: Fd) {
    // SAFETY: takes a number. An error cannot be handled.
    let _ = unsafe { call(number::CLOSE, [raw(fd), 0, 0, 0, 0]) };
}

pub fn read(fd: Fd, into: &mut [u8]) -> Result<usize, Errno> {
    let (to, len) = (into.as_mut_ptr() as usize, into.len());
    loop {
        // SAFETY: the kernel writes at most `len` bytes to `into`.
        match unsafe { call(number::READ, [raw(fd), to, len, 0, 0]) } {
            Err(EINTR) => {}
            other => return other,
        }
    }
}

/// Writes all bytes.
pub fn write_all(fd: Fd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let (from, len) = (bytes.as_ptr() as usize, bytes.len());
        // SAFETY: the kernel reads `len` bytes of `bytes`.
        match unsafe { call(number::WRITE, [raw(fd), from, len, 0, 0]) } {
            Ok(0) => return Err(EAGAIN),
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// An element of `poll` (`struct pollfd`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Poll {
    pub fd: Fd,
    pub events: i16,
    pub revents: i16,
}

/// Waits until one of them is ready, or for this many milliseconds.
pub fn poll(fds: &mut [Poll], timeout_ms: usize) -> Result<usize, Errno> {
    let (at, len) = (fds.as_mut_ptr() as usize, fds.len());
    // SAFETY: the kernel writes into the `len` structures, which have its layout.
    unsafe { call(number::POLL, [at, len, timeout_ms, 0, 0]) }
}

/// Creates a close-on-exec pipe: reading end, writing end.
pub fn pipe() -> Result<(Fd, Fd), Errno> {
    let mut ends = [0_i32; 2];
    let at = ends.as_mut_ptr() as usize;
    // SAFETY: the kernel writes two numbers.
    unsafe { call(number::PIPE2, [at, O_CLOEXEC, 0, 0, 0]) }?;
    Ok((ends[0], ends[1]))
}

/// Forks: returns 0 in the child, and its process id in this process.
pub fn fork() -> Result<i32, Errno> {
    // SAFETY: takes no arguments. The child has memory of its own, and only makes system calls here
    // until it exits or executes another program.
    unsafe { call(number::FORK, [0; 5]) }.map(small)
}

pub fn exit(status: u8) -> ! {
    loop {
        // SAFETY: takes a number, and does not return.
        let _ = unsafe { call(number::EXIT, [usize::from(status), 0, 0, 0, 0]) };
    }
}

pub fn dup2(from: Fd, to: Fd) -> Result<(), Errno> {
    // SAFETY: takes two numbers.
    unsafe { call(number::DUP2, [raw(from), raw(to), 0, 0, 0]) }.map(|_| ())
}

/// Starts a session without a terminal.
pub fn setsid() {
    // SAFETY: takes no arguments. It fails only if this is a session leader already.
    let _ = unsafe { call(number::SETSID, [0; 5]) };
}

/// Strings of a list for [`execve`].
const STRINGS_MAX: usize = 7;

/// Returns pointers to the strings, and null pointers after them.
fn pointers(strings: &[&CStr]) -> Result<[*const c_char; STRINGS_MAX + 1], Errno> {
    let mut list = [ptr::null(); STRINGS_MAX + 1];
    if strings.len() > STRINGS_MAX {
        return Err(E2BIG);
    }
    for (place, string) in list.iter_mut().zip(strings) {
        *place = string.as_ptr();
    }
    Ok(list)
}

/// Executes another program; returns only on an error.
pub fn execve(path: &CStr, arguments: &[&CStr], environment: &[&CStr]) -> Errno {
    let lists = pointers(arguments).and_then(|first| Ok((first, pointers(environment)?)));
    let (arguments, environment) = match lists {
        Ok(lists) => lists,
        Err(error) => return error,
    };
    let lists = [arguments.as_ptr() as usize, environment.as_ptr() as usize];
    // SAFETY: the path and each string end with a zero, and both lists with a null pointer.
    let result = unsafe { call(number::EXECVE, [address(path), lists[0], lists[1], 0, 0]) };
    result.err().unwrap_or(0)
}

/// Waits for a child, or for any child with -1; returns its process id and status.
pub fn wait(pid: i32, hang: bool) -> Result<(i32, i32), Errno> {
    let mut status = 0_i32;
    let pid = isize::try_from(pid).unwrap_or(-1).cast_unsigned();
    let options = if hang { 0 } else { WNOHANG };
    loop {
        let at = &raw mut status as usize;
        // SAFETY: the kernel writes one number to `status`.
        match unsafe { call(number::WAIT4, [pid, at, options, 0, 0]) } {
            Err(EINTR) => {}
            other => return other.map(|pid| (small(pid), status)),
        }
    }
}

pub fn set_blocking(fd: Fd) -> Result<(), Errno> {
    // SAFETY: takes numbers.
    unsafe { call(number::FCNTL, [raw(fd), F_SETFL, O_RDWR, 0, 0]) }.map(|_| ())
}

/// `struct termios` of the kernel, not that of the C library.
#[repr(C)]
#[derive(Debug, Default)]
struct Termios {
    input: u32,
    output: u32,
    control: u32,
    local: u32,
    line: u8,
    characters: [u8; 19],
}

const _: () = assert!(size_of::<Termios>() == 36);

const TCGETS: usize = 0x5401;
const TCSETS: usize = 0x5402;
const TCSBRK: usize = 0x5409;
const FIONREAD: usize = 0x541b;
/// 115,200 baud, 8 bits, receiver enabled, modem lines ignored.
const CONTROL: u32 = 0o010_002 | 0o60 | 0o200 | 0o4000;

/// Puts a serial port into raw mode. Fails when the file has no port.
pub fn make_raw(fd: Fd) -> Result<(), Errno> {
    let mut termios = Termios::default();
    let old = &raw mut termios as usize;
    // SAFETY: the kernel writes into the structure, which has its layout.
    unsafe { call(number::IOCTL, [raw(fd), TCGETS, old, 0, 0]) }?;
    termios.input = 0;
    termios.output = 0;
    termios.local = 0;
    termios.control = CONTROL;
    let new = &raw const termios as usize;
    // SAFETY: the kernel reads the structure.
    unsafe { call(number::IOCTL, [raw(fd), TCSETS, new, 0, 0]) }.map(|_| ())
}

/// Returns how many bytes are in a pipe; 0 if that is not known.
pub fn unread_bytes(fd: Fd) -> usize {
    let mut bytes = 0_i32;
    let into = &raw mut bytes as usize;
    // SAFETY: the kernel writes an `int`.
    let found = unsafe { call(number::IOCTL, [raw(fd), FIONREAD, into, 0, 0]) };
    found.map_or(0, |_| usize::try_from(bytes).unwrap_or(0))
}

/// Waits until a serial port has sent everything (`tcdrain`).
pub fn drain(fd: Fd) {
    // SAFETY: takes numbers. An error cannot be handled.
    let _ = unsafe { call(number::IOCTL, [raw(fd), TCSBRK, 1, 0, 0]) };
}

pub fn mkdir(path: &CStr) {
    // SAFETY: the path ends with a zero. An existing directory is fine.
    let _ = unsafe { call(number::MKDIR, [address(path), 0o755, 0, 0, 0]) };
}

/// Creates a character device unless the name exists.
pub fn mknod(path: &CStr, major: usize, minor: usize) {
    let mode = S_IFCHR | 0o600;
    // SAFETY: the path ends with a zero.
    let _ = unsafe {
        call(
            number::MKNOD,
            [address(path), mode, major << 8 | minor, 0, 0],
        )
    };
}

pub fn mount(kind: &CStr, on: &CStr) -> Result<(), Errno> {
    let kind = address(kind);
    // SAFETY: all texts end with a zero; these file systems need no data.
    unsafe { call(number::MOUNT, [kind, address(on), kind, 0, 0]) }.map(|_| ())
}

/// The monitor's port for boot events (`BOOT_TIMER_PORT` of the devices).
const MONITOR_PORT: u16 = 0x5f4;

/// Reports a boot event to the monitor.
pub fn report_boot(event: u8) {
    // SAFETY: takes numbers, and changes only the port permissions.
    if unsafe { call(number::IOPERM, [MONITOR_PORT.into(), 1, 1, 0, 0]) }.is_err() {
        return;
    }
    // SAFETY: the permission was granted. The monitor's device does not access memory, and on a
    // machine without one the write has no effect.
    unsafe {
        asm!("out dx, al", in("dx") MONITOR_PORT, in("al") event,
             options(nomem, nostack, preserves_flags));
    }
}

/// Writes file contents to disks, and waits for that.
pub fn sync() {
    // SAFETY: takes no arguments.
    let _ = unsafe { call(number::SYNC, [0; 5]) };
}

/// Writes file contents to disks, and powers the machine off, or restarts it if that is not
/// possible. Returns if neither is.
pub fn power_off() {
    // The two magic numbers before the command (`include/uapi/linux/reboot.h`).
    const MAGIC: [usize; 2] = [0xfee1_dead, 672_274_793];
    const POWER_OFF: usize = 0x4321_fedc;
    const RESTART: usize = 0x0123_4567;
    sync();
    for command in [POWER_OFF, RESTART] {
        // SAFETY: takes numbers.
        let _ = unsafe { call(number::REBOOT, [MAGIC[0], MAGIC[1], command, 0, 0]) };
    }
}

/// Waits for a signal.
pub fn pause() {
    // SAFETY: takes no arguments.
    let _ = unsafe { call(number::PAUSE, [0; 5]) };
}
