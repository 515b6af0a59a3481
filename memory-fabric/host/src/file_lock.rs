//! Locks of whole files and directories (flock(2)), with a deadline.

use std::fs::File;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

/// Delay between attempts: the kernel's own wait has no deadline, and the end of a lock is not
/// reported.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(10);

/// Locks a file exclusively until it is closed. Waits up to `limit` for another holder.
///
/// # Errors
///
/// `WouldBlock` if another process still holds the lock; other errors if the file system has no
/// such locks.
pub fn lock_file(file: &File, limit: Duration) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let Err(error) = rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) else {
            return Ok(());
        };
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock if Instant::now() < deadline => {
                thread::sleep(ATTEMPT_INTERVAL);
            }
            _ => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_waited_for_but_not_for_ever() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let (first, second) = (open(), open());
        lock_file(&first, Duration::ZERO).unwrap();
        let error = lock_file(&second, ATTEMPT_INTERVAL * 2).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        thread::scope(|scope| {
            let waits = scope.spawn(|| lock_file(&second, Duration::from_secs(60)));
            drop(first);
            waits.join().unwrap().unwrap();
        });
    }
}
