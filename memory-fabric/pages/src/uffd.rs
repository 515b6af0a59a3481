//! userfaultfd: the only file that makes its ioctls.
//!
//! The `userfaultfd` crate creates the descriptor, registers ranges and decodes events. It lacks
//! write protection in COPY and CONTINUE, loses the error code of a failed COPY, and has no name
//! for some features; those calls are made here on its descriptor, with the structures of
//! `include/uapi/linux/userfaultfd.h`.

mod end;
mod error;
mod features;
mod number;
mod poison;

use crate::page::{PAGE_SIZE, PageBytes};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, RawFd};
use std::sync::Mutex;

pub use error::UffdError;
pub use features::{REQUIRED_FEATURES, probe_features};
pub use userfaultfd::EventBuffer;
use userfaultfd::{Event, FaultKind, FeatureFlags, ReadWrite, RegisterMode, UffdBuilder};

fn into_io(error: userfaultfd::Error) -> io::Error {
    match error {
        userfaultfd::Error::OpenDevUserfaultfd(source) => source,
        userfaultfd::Error::SystemError(errno) => io::Error::from_raw_os_error(errno as i32),
        other => io::Error::other(other.to_string()),
    }
}

fn builder() -> UffdBuilder {
    let mut builder = UffdBuilder::new();
    // KVM's faults are kernel faults; a blocking descriptor would make poll return POLLERR.
    builder
        .close_on_exec(true)
        .non_blocking(true)
        .user_mode_only(false);
    builder
}

/// A fault to be served.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The address in the guest view.
    pub address: usize,
    /// Whether the access is a write.
    pub write: bool,
    /// Whether the page is mapped but write-protected. A hint: it may be outdated.
    pub write_protected: bool,
    /// The waiting thread. For a vCPU, the one that runs it.
    pub thread: u32,
}

/// Result of mapping a page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mapped {
    /// The page was mapped, and its waiters were woken.
    Now,
    /// It was mapped already; no waiter was woken.
    Already,
}

/// Protection of a mapping.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Protection {
    /// Reads and writes proceed.
    Writable,
    /// The next write faults.
    WriteProtected,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `uffdio_zeropage`, `uffdio_continue` and `uffdio_poison` have the same shape.
#[repr(C)]
struct RangeMode {
    range: Range,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

const _: () = assert!(size_of::<Range>() == 16);
const _: () = assert!(size_of::<Copy>() == 40);
const _: () = assert!(size_of::<RangeMode>() == 32);
const _: () = assert!(size_of::<WriteProtect>() == 24);

/// Computes `_IOWR(0xAA, number, size)`, or `_IOR` without the write bit.
const fn request(direction: u32, number: u32, size: usize) -> u32 {
    // The sizes are the four above: far below the 14 bits available.
    #[allow(clippy::cast_possible_truncation)]
    let size = size as u32;
    (direction << 30) | (size << 16) | (0xAA << 8) | number
}
const UFFDIO_WAKE: u32 = request(2, 0x02, size_of::<Range>());
const UFFDIO_COPY: u32 = request(3, 0x03, size_of::<Copy>());
const UFFDIO_ZEROPAGE: u32 = request(3, 0x04, size_of::<RangeMode>());
const UFFDIO_WRITEPROTECT: u32 = request(3, 0x06, size_of::<WriteProtect>());
const UFFDIO_CONTINUE: u32 = request(3, 0x07, size_of::<RangeMode>());

const COPY_MODE_WP: u64 = 1 << 1;
const CONTINUE_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;

/// Limit of retries while the kernel refuses a call because the address space is changing.
const BUSY_RETRIES_MAX: u32 = 1_000_000;

/// A userfaultfd for the guest view.
#[derive(Debug)]
pub struct Uffd {
    inner: userfaultfd::Uffd,
    /// Address and bytes of each.
    registered: Mutex<Vec<(usize, usize)>>,
}

impl Uffd {
    /// Creates a descriptor with the required features.
    ///
    /// # Errors
    ///
    /// See [`UffdError`].
    pub fn new() -> Result<Self, UffdError> {
        let wanted = REQUIRED_FEATURES.iter().fold(0, |all, (bit, _)| all | bit);
        let wanted = FeatureFlags::from_bits_retain(wanted | features::bits::THREAD_ID);
        match builder().require_features(wanted).create() {
            Ok(inner) => Ok(Self {
                inner: with_high_number(inner),
                registered: Mutex::default(),
            }),
            Err(error) => Err(match builder().create() {
                Err(_) => UffdError::Create(error),
                Ok(_) => UffdError::Lacks(features::missing()),
            }),
        }
    }

    /// Registers a range of the guest view for missing, minor and write-protection faults.
    ///
    /// # Errors
    ///
    /// Fails when the kernel refuses it.
    pub fn register(&self, start: *mut u8, bytes: usize) -> Result<(), UffdError> {
        /// `UFFDIO_REGISTER_MODE_MINOR`.
        const MINOR: u64 = 1 << 2;
        let mode = RegisterMode::MISSING | RegisterMode::WRITE_PROTECT;
        let mode = RegisterMode::from_bits_retain(mode.bits() | MINOR);
        let registered = self.inner.register_with_mode(start.cast(), bytes, mode);
        registered.map_err(|source| UffdError::Register { bytes, source })?;
        self.ranges().push((start.addr(), bytes));
        Ok(())
    }

    /// Returns whether CONTINUE can map a page write-protected (6.4 or newer). It is tried on a
    /// range that is not registered: a kernel that supports the mode looks for the range and
    /// returns ENOENT, an older one rejects the mode with EINVAL.
    #[must_use]
    pub fn can_continue_write_protected(&self) -> bool {
        self.finds_no_range(UFFDIO_CONTINUE, CONTINUE_MODE_WP)
    }

    /// Returns whether a call that the kernel accepts finds a range that is not registered missing.
    fn finds_no_range(&self, request: u32, mode: u64) -> bool {
        let Ok(probe) = fabric_host::Mapping::anonymous(PAGE_SIZE) else {
            return false;
        };
        let result = self.call_on_page(request, probe.as_ptr(), mode);
        result.is_err_and(|error| error.raw_os_error() == Some(libc::ENOENT))
    }

    /// Reads the pending faults, up to the buffer's size, and passes each to `serve`.
    ///
    /// # Errors
    ///
    /// Fails when the descriptor fails.
    pub fn read_faults(
        &self,
        buffer: &mut EventBuffer,
        mut serve: impl FnMut(Fault),
    ) -> io::Result<usize> {
        let mut count = 0;
        for event in self.inner.read_events(buffer).map_err(into_io)? {
            let event = event.map_err(into_io)?;
            // No other kind of event was requested.
            if let Event::Pagefault {
                kind,
                rw,
                addr,
                thread_id,
            } = event
            {
                serve(Fault {
                    address: addr.addr(),
                    write: rw == ReadWrite::Write,
                    write_protected: kind == FaultKind::WriteProtected,
                    thread: thread_id.as_raw().cast_unsigned(),
                });
            }
            count += 1;
        }
        Ok(count)
    }

    /// Fills a page of the guest view that has no bytes yet, maps it and wakes its waiters.
    ///
    /// # Errors
    ///
    /// EEXIST when the page has bytes, and the kernel's other errors.
    pub fn copy(&self, page: *mut u8, bytes: &PageBytes, protection: Protection) -> io::Result<()> {
        self.copy_run(page, std::slice::from_ref(bytes), protection)
    }

    /// Fills adjacent pages from `first` on, as [`Self::copy`] does, by one call.
    ///
    /// # Errors
    ///
    /// EEXIST when one of them has bytes, and the kernel's other errors; pages before that one are
    /// filled.
    pub fn copy_run(
        &self,
        first: *mut u8,
        pages: &[PageBytes],
        protection: Protection,
    ) -> io::Result<()> {
        let all = size_of_val(pages);
        let done = std::cell::Cell::new(0);
        self.while_busy(|uffd| {
            let rest = &pages.as_flattened()[done.get()..];
            let mut call = Copy {
                dst: (first.addr() + done.get()) as u64,
                src: rest.as_ptr().addr() as u64,
                len: rest.len() as u64,
                mode: if protection == Protection::WriteProtected {
                    COPY_MODE_WP
                } else {
                    0
                },
                copied: 0,
            };
            // SAFETY: layout asserted above; the source is borrowed bytes; the kernel rejects a
            // destination that is not registered.
            let result = unsafe { uffd.ioctl(UFFDIO_COPY, &raw mut call) };
            // An interrupted call returns how far it came, and is repeated for the rest.
            done.set(done.get() + usize::try_from(call.copied).unwrap_or(0));
            if done.get() == all { Ok(()) } else { result }
        })
    }

    /// Fills `count` pages from `first` on with zeroes, as [`Self::copy`] does. They are writable.
    /// Returns how many: fewer if the next one has bytes already.
    ///
    /// # Errors
    ///
    /// The kernel's errors; pages before the failing one are filled.
    pub fn zero(&self, first: *mut u8, count: usize) -> io::Result<usize> {
        let start = first.addr() as u64;
        let end = start + (count * PAGE_SIZE) as u64;
        let next = std::cell::Cell::new(start);
        let result = self.while_busy(|uffd| {
            let range = Range {
                start: next.get(),
                len: end - next.get(),
            };
            let mut call = RangeMode {
                range,
                mode: 0,
                done: 0,
            };
            // SAFETY: layout asserted above; the kernel rejects ranges that are not registered.
            let result = unsafe { uffd.ioctl(UFFDIO_ZEROPAGE, &raw mut call) };
            // An interrupted call returns how far it came, and is repeated for the rest.
            next.set(next.get() + u64::try_from(call.done).unwrap_or(0));
            if next.get() == end { Ok(()) } else { result }
        });
        match result {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Err(error),
            _ => Ok(usize::try_from(next.get() - start).unwrap_or(count * PAGE_SIZE) / PAGE_SIZE),
        }
    }

    /// Maps a page whose bytes are in the memfd and wakes its waiters.
    ///
    /// # Errors
    ///
    /// EFAULT when the page has no bytes, and the kernel's other errors.
    pub fn map_existing(&self, page: *mut u8, protection: Protection) -> io::Result<Mapped> {
        let mode = if protection == Protection::WriteProtected {
            CONTINUE_MODE_WP
        } else {
            0
        };
        let result = self.while_busy(|uffd| uffd.call_on_page(UFFDIO_CONTINUE, page, mode));
        match result {
            Ok(()) => Ok(Mapped::Now),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(Mapped::Already),
            Err(error) => Err(error),
        }
    }

    /// Maps `count` pages from `first` on whose bytes are in the memfd, and wakes their waiters.
    ///
    /// # Errors
    ///
    /// As for [`Self::map_existing`]; pages before the failing one are mapped.
    pub fn map_existing_run(
        &self,
        first: *mut u8,
        count: usize,
        protection: Protection,
    ) -> io::Result<()> {
        let mode = if protection == Protection::WriteProtected {
            CONTINUE_MODE_WP
        } else {
            0
        };
        let start = first.addr() as u64;
        let end = start + (count * PAGE_SIZE) as u64;
        let next = std::cell::Cell::new(start);
        while next.get() < end {
            let result = self.while_busy(|uffd| {
                let mut call = RangeMode {
                    range: Range {
                        start: next.get(),
                        len: end - next.get(),
                    },
                    mode,
                    done: 0,
                };
                // SAFETY: layout asserted above; the kernel rejects ranges that are not registered.
                let result = unsafe { uffd.ioctl(UFFDIO_CONTINUE, &raw mut call) };
                // An interrupted call returns how far it came, and is repeated for the rest.
                next.set(next.get() + u64::try_from(call.done).unwrap_or(0));
                if next.get() == end { Ok(()) } else { result }
            });
            match result {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    // This page is mapped already, but its waiters must be woken.
                    let page = first.wrapping_add(usize::try_from(next.get() - start).unwrap_or(0));
                    self.wake(page)?;
                    next.set(next.get() + PAGE_SIZE as u64);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Removes a page's write protection, if it is mapped, and wakes its waiters.
    ///
    /// # Errors
    ///
    /// The kernel's errors.
    pub fn allow_writes(&self, page: *mut u8) -> io::Result<()> {
        self.write_protect(page, 0)
    }

    /// Write-protects a page, if it is mapped. When this returns, no CPU can write it.
    ///
    /// # Errors
    ///
    /// The kernel's errors.
    pub fn forbid_writes(&self, page: *mut u8) -> io::Result<()> {
        self.write_protect(page, WRITEPROTECT_MODE_WP)
    }

    fn write_protect(&self, page: *mut u8, mode: u64) -> io::Result<()> {
        self.while_busy(|uffd| {
            let mut call = WriteProtect {
                range: range_of(page),
                mode,
            };
            // SAFETY: layout asserted above; the kernel rejects ranges that are not registered.
            unsafe { uffd.ioctl(UFFDIO_WRITEPROTECT, &raw mut call) }
        })
    }

    /// Wakes the waiters of a mapped page.
    ///
    /// # Errors
    ///
    /// The kernel's errors.
    pub fn wake(&self, page: *mut u8) -> io::Result<()> {
        let mut call = range_of(page);
        // SAFETY: layout asserted above.
        unsafe { self.ioctl(UFFDIO_WAKE, &raw mut call) }
    }

    /// Repeats a call that fails because the address space is changing.
    fn while_busy(&self, call: impl Fn(&Self) -> io::Result<()>) -> io::Result<()> {
        for _ in 0..BUSY_RETRIES_MAX {
            match call(self) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => std::hint::spin_loop(),
                result => return result,
            }
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    /// Makes one of the calls that take a [`RangeMode`].
    fn call_on_page(&self, request: u32, page: *mut u8, mode: u64) -> io::Result<()> {
        let mut call = RangeMode {
            range: range_of(page),
            mode,
            done: 0,
        };
        debug_assert_eq!(request >> 16 & 0x3fff, 32);
        // SAFETY: `request` has the size of this structure, whose layout is asserted above; the
        // kernel rejects ranges that are not registered.
        unsafe { self.ioctl(request, &raw mut call) }
    }

    /// # Safety
    ///
    /// `argument` must be the structure that `request` takes.
    unsafe fn ioctl<T>(&self, request: u32, argument: *mut T) -> io::Result<()> {
        // SAFETY: the descriptor is open; the caller guarantees that the argument is valid.
        let result = unsafe {
            libc::ioctl(
                self.inner.as_raw_fd(),
                libc::c_ulong::from(request),
                argument,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl AsRawFd for Uffd {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.as_raw_fd()
    }
}

/// Moves the descriptor to a high number, where one is free.
fn with_high_number(uffd: userfaultfd::Uffd) -> userfaultfd::Uffd {
    // SAFETY: the descriptor is open until this function returns.
    let low = unsafe { BorrowedFd::borrow_raw(uffd.as_raw_fd()) };
    match number::high(low) {
        // SAFETY: a duplicate of a userfaultfd, which nobody else has. The other one is closed.
        Some(high) => unsafe { userfaultfd::Uffd::from_raw_fd(high.into_raw_fd()) },
        None => uffd,
    }
}

fn range_of(page: *mut u8) -> Range {
    Range {
        start: page.addr() as u64,
        len: PAGE_SIZE as u64,
    }
}
