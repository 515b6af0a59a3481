//! Threads that use memory while another one disturbs them.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{ScopedJoinHandle, panicking, scope};

/// Raises a flag when it is dropped.
struct Raise<'a> {
    flag: &'a AtomicBool,
    /// Only by a panic.
    is_for_panics: bool,
}

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        if panicking() || !self.is_for_panics {
            self.flag.store(true, Ordering::Relaxed);
        }
    }
}

/// Runs `write` on so many threads, which are numbered, and `drive` beside them. The flag that all
/// get is raised when `drive` has ended, when all others have, and when one of them panics: then
/// all have to end. Returns what they returned.
///
/// # Panics
///
/// With the panic of a thread, once all have ended.
pub fn run_beside<T: Send, R: Send>(
    threads: usize,
    write: impl Fn(usize, &AtomicBool) -> T + Sync,
    drive: impl FnOnce(&AtomicBool) -> R + Send,
) -> (Vec<T>, R) {
    let flag = &AtomicBool::new(false);
    let write = &write;
    let raise = |is_for_panics| Raise {
        flag,
        is_for_panics,
    };
    let (written, driven) = scope(|scope| {
        let driver = scope.spawn(move || {
            let _raise = raise(false);
            drive(flag)
        });
        let writer = |thread| {
            scope.spawn(move || {
                let _raise = raise(true);
                write(thread, flag)
            })
        };
        let writers: Vec<_> = (0..threads).map(writer).collect();
        let ends = writers.into_iter().map(ScopedJoinHandle::join);
        let written: Vec<_> = ends.collect();
        flag.store(true, Ordering::Relaxed);
        (written, driver.join())
    });
    // What a thread found comes before what others say because it has ended.
    let written = written.into_iter();
    let written = written.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)));
    let written = written.collect();
    (written, driven.unwrap_or_else(|panic| resume_unwind(panic)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PATIENCE;
    use std::time::Instant;

    fn is_over(flag: &AtomicBool) -> bool {
        flag.load(Ordering::Relaxed)
    }

    /// A flag that is not raised is no hang.
    fn wait_for(flag: &AtomicBool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_over(flag) {
            assert!(Instant::now() < deadline, "nobody ends it");
            std::thread::yield_now();
        }
    }

    #[test]
    fn threads_end_with_the_one_beside_them_and_it_ends_with_them() {
        let (written, driven) = run_beside(3, |thread, ended| (wait_for(ended), thread).1, |_| 7);
        assert_eq!((written, driven), (vec![0, 1, 2], 7));
        let (written, ()) = run_beside(3, |thread, _| thread, wait_for);
        assert_eq!(written, [0, 1, 2]);
    }

    #[test]
    #[should_panic(expected = "page 5")]
    fn the_panic_of_a_thread_ends_all_and_is_that_of_the_test() {
        let write = |thread, ended: &AtomicBool| {
            assert_ne!(thread, 1, "page 5");
            wait_for(ended);
        };
        let drive = |ended: &AtomicBool| {
            wait_for(ended);
            assert!(!is_over(ended), "it did not get far");
        };
        run_beside(3, write, drive);
    }

    #[test]
    #[should_panic(expected = "nothing is hot")]
    fn the_panic_of_the_one_beside_them_does_too() {
        let drive = |ended: &AtomicBool| assert!(is_over(ended), "nothing is hot");
        run_beside(3, |_, ended| wait_for(ended), drive);
    }
}
