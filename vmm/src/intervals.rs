//! A thread that works in intervals.

use std::io;
use std::ops::ControlFlow;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};

/// Works at the end of each interval, until it is dropped or the work breaks.
#[derive(Debug)]
pub struct Intervals {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Intervals {
    /// Starts the thread. Dropping the result waits for work that is in progress.
    ///
    /// # Errors
    ///
    /// Fails when the host has no thread left.
    pub fn start(
        name: &str,
        interval: Duration,
        mut work: impl FnMut() -> ControlFlow<()> + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = bounded::<()>(0);
        let repeat = move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                if work().is_break() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread.spawn(repeat)?),
        })
    }
}

impl Drop for Intervals {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It has no result.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_repeated_until_it_breaks_or_nobody_wants_it() {
        let (done, works) = bounded(0);
        let limit = Duration::from_secs(60);
        let mut left = 3;
        let work = move || {
            left -= 1;
            // Nobody waits for more at the end.
            let _ = done.send(left);
            match left {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        let intervals = Intervals::start("test", Duration::from_millis(1), work);
        let intervals = intervals.expect("a thread");
        for left in [2, 1, 0] {
            assert_eq!(works.recv_timeout(limit), Ok(left));
        }
        // The thread has ended, and its end of the channel with it.
        let ended = works.recv_timeout(limit);
        assert_eq!(ended, Err(RecvTimeoutError::Disconnected));
        drop(intervals);

        let never = || -> ControlFlow<()> { panic!("before the first interval ends") };
        drop(Intervals::start("test", limit * 60, never).expect("a thread"));
    }
}
