//! The pipes that carry signs of life to the nodes.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Longest interval between two signs of life.
const INTERVAL_MAX: Duration = Duration::from_secs(1);
/// Minimum number of signs of life in the duration of a lease.
const BEATS_IN_LEASE: u32 = 4;

/// Sends signs of life until it is dropped or stopped.
#[derive(Debug)]
pub struct Heartbeat {
    pipes: Arc<Mutex<Vec<File>>>,
    /// Disconnected to stop the thread.
    _stop: Sender<()>,
}

fn lock(pipes: &Mutex<Vec<File>>) -> MutexGuard<'_, Vec<File>> {
    pipes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heartbeat {
    /// Starts the thread, for nodes whose leases have at least this duration.
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
                        // Best effort: a full or closed pipe belongs to a node that does not read
                        // it.
                        let _ = pipe.write(b"\n");
                    }
                }
            })?;
        Ok(Self { pipes, _stop: stop })
    }

    /// Adds the pipe of another node.
    pub fn add(&self, pipe: OwnedFd) -> io::Result<()> {
        // Only this end becomes non-blocking.
        rustix::io::ioctl_fionbio(&pipe, true)?;
        lock(&self.pipes).push(File::from(pipe));
        Ok(())
    }

    /// Closes all pipes, which ends the nodes.
    pub fn stop(&self) {
        lock(&self.pipes).clear();
    }
}
