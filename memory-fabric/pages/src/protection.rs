//! Whether the kernel keeps userfaultfd's write protection of shared memory, found by trying.
//!
//! Before Linux 6.2 (and 6.1.8 or so) whatever maps a page anew, such as page migration or
//! `mprotect`, takes the protection of its view, which allows writing (fixed by commit
//! 51d3d5eb74ff, "mm/userfaultfd: enable writenotify while userfaultfd-wp is enabled for a VMA"). A
//! write then goes unnoticed, and a page with new bytes counts as clean. Migration cannot be forced
//! without several NUMA nodes; `mprotect` takes the same way.

use crate::guest_memory::GuestMemory;
use crate::page::{PAGE_SIZE, PageIndex};
use crate::uffd::{EventBuffer, Protection, Uffd, UffdError};
use fabric_host::poll::poll_until;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a write may take until it is seen or done. Both take microseconds.
const PROBE_TIME_MAX: Duration = Duration::from_secs(2);

/// The only page of the memory that is tried.
const PAGE: PageIndex = PageIndex::new(0);

/// How much of userfaultfd's write protection is used, from less to more.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum WriteProtection {
    /// None: every page is mapped writable, and counts as dirty.
    None,
    /// A page that is mapped again is mapped writable: CONTINUE cannot protect (before Linux 6.4).
    OnlyByCopy,
    /// A page that was only read is protected, and stays clean until it is written.
    Full,
}

impl WriteProtection {
    /// What can be relied on: `kept` is the answer of [`is_kept`], and `continues` that of
    /// [`Uffd::can_continue_write_protected`]. After a probe that failed nothing is relied on.
    #[must_use]
    pub fn of(kept: &Result<bool, ProbeError>, continues: bool) -> Self {
        match (kept, continues) {
            (Ok(true), true) => Self::Full,
            (Ok(true), false) => Self::OnlyByCopy,
            (Ok(false) | Err(_), _) => Self::None,
        }
    }
}

/// Why it is not known whether write protection is kept.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// There is no userfaultfd.
    #[error(transparent)]
    Userfaultfd(#[from] UffdError),
    /// The kernel refused something.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
    /// The write neither faulted nor ended.
    #[error("a write to a protected page neither faulted nor ended within {} s", PROBE_TIME_MAX.as_secs())]
    Late,
}

/// Whether a page is still write-protected after it was mapped anew.
///
/// # Errors
///
/// See [`ProbeError`]; after [`PROBE_TIME_MAX`] at the latest.
pub fn is_kept() -> Result<bool, ProbeError> {
    is_kept_after(|memory, _| memory.map_anew(PAGE))
}

fn is_kept_after(
    disturb: impl FnOnce(&GuestMemory, &Uffd) -> io::Result<()>,
) -> Result<bool, ProbeError> {
    let system = |what| move |error| ProbeError::System(what, error);
    let memory = GuestMemory::new(PAGE_SIZE).map_err(system("create memory"))?;
    let memory = Arc::new(memory);
    let uffd = Uffd::new()?;
    let page = memory.guest_page(PAGE);
    uffd.register(page, PAGE_SIZE)?;
    uffd.copy(page, &[0; PAGE_SIZE], Protection::WriteProtected)
        .map_err(system("map a page write-protected"))?;
    disturb(&memory, &uffd).map_err(system("change the protection of a page"))?;
    let (ended, end) = io::pipe().map_err(system("create a pipe"))?;
    let writes = Arc::clone(&memory);
    let writer = std::thread::Builder::new().name("uffd-probe".into());
    let writer = writer.spawn(move || {
        writes.write_as_guest(PAGE);
        drop(end);
    });
    let writer = writer.map_err(system("start a thread"))?;
    let seen = is_write_seen(&uffd, ended.as_raw_fd());
    // Closing the descriptor wakes its waiters, so that the thread ends.
    drop(uffd);
    let _ = writer.join();
    seen
}

/// Waits until a write is seen by `uffd`, or has ended without.
fn is_write_seen(uffd: &Uffd, ended: RawFd) -> Result<bool, ProbeError> {
    let system = |what| move |error| ProbeError::System(what, error);
    let deadline = Instant::now() + PROBE_TIME_MAX;
    let mut buffer = EventBuffer::new(1);
    loop {
        let mut fds = [uffd.as_raw_fd(), ended].map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        poll_until(&mut fds, Some(deadline)).map_err(system("wait for a write"))?;
        // First: a write that is seen has not ended.
        let faults = uffd.read_faults(&mut buffer, |_| {});
        if faults.map_err(system("read from userfaultfd"))? > 0 {
            return Ok(true);
        }
        if fds[1].revents != 0 {
            return Ok(false);
        }
        if Instant::now() >= deadline {
            return Err(ProbeError::Late);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_relied_on_where_protection_is_lost_or_unknown() {
        for continues in [false, true] {
            for kept in [Ok(false), Err(ProbeError::Late)] {
                let found = WriteProtection::of(&kept, continues);
                assert_eq!(found, WriteProtection::None, "{kept:?}");
            }
        }
        let found = |continues| WriteProtection::of(&Ok(true), continues);
        assert_eq!(found(true), WriteProtection::Full);
        assert_eq!(found(false), WriteProtection::OnlyByCopy);
    }

    #[test]
    fn the_probe_ends_with_an_answer() {
        let kept = is_kept().expect("an answer");
        println!("write protection is kept: {kept}");
        // Whatever the kernel does when a page is mapped anew, it keeps what nothing disturbs.
        assert!(is_kept_after(|_, _| Ok(())).expect("an answer"));
    }

    #[test]
    fn a_write_that_is_not_seen_is_told_from_one_that_is() {
        // What migration does where protection is lost.
        let lose = |memory: &GuestMemory, uffd: &Uffd| uffd.allow_writes(memory.guest_page(PAGE));
        assert!(!is_kept_after(lose).expect("an answer"));
    }
}
