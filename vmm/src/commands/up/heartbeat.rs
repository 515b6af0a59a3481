//! The pipes by which nodes know that somebody still wants them.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The longest time between two signs of life.
const INTERVAL_MAX: Duration = Duration::from_secs(1);
/// How many of them a node gets in the time of its lease, at the least.
const BEATS_IN_LEASE: u32 = 4;

/// Gives signs of life, until it is dropped or stopped.
#[derive(Debug)]
pub struct Heartbeat {
    pipes: Arc<Mutex<Vec<File>>>,
    /// Disconnected to have the thread end.
    _stop: Sender<()>,
}

fn lock(pipes: &Mutex<Vec<File>>) -> MutexGuard<'_, Vec<File>> {
    pipes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heartbeat {
    /// Begins, for nodes whose leases are this long at the least.
    pub fn start(lease_min: Duration) -> io::Result<Self> {
        let interval = (lease_min / BEATS_IN_LEASE).min(INTERVAL_MAX);
        let (stop, stopped) = mpsc::channel();
        let pipes = Arc::<Mutex<Vec<File>>>::default();
        let beaten = Arc::clone(&pipes);
        thread::Builder::new()
            .name("heartbeat".into())
            .spawn(move || {
                while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                    for mut pipe in lock(&beaten).iter() {
                        // One that is full or closed is of a node that does not listen.
                        let _ = pipe.write(b"\n");
                    }
                }
            })?;
        Ok(Self { pipes, _stop: stop })
    }

    /// From now on the reader of this pipe gets them too.
    pub fn add(&self, pipe: OwnedFd) -> io::Result<()> {
        // Only this end becomes non-blocking.
        rustix::io::ioctl_fionbio(&pipe, true)?;
        lock(&self.pipes).push(File::from(pipe));
        Ok(())
    }

    /// Closes all pipes, at which the nodes end.
    pub fn stop(&self) {
        lock(&self.pipes).clear();
    }
}
