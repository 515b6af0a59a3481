//! The threads of a device, for tests: each with an event loop, as in the machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use event_manager::{EventManager, SubscriberOps};

use super::{MmioTransport, QueueServer};

/// Exceeds the duration of every condition that a test waits for.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Waits until a condition holds.
pub(crate) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(
            Instant::now() < deadline,
            "{what} took longer than {LIMIT:?}"
        );
        thread::yield_now();
    }
}

/// Threads that serve a device until this is dropped.
pub(crate) struct ServerThreads {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl ServerThreads {
    /// Starts this many threads.
    pub fn start(transport: &Arc<MmioTransport>, count: usize) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let start = |_| {
            let mut manager = EventManager::<QueueServer>::new().unwrap();
            manager.add_subscriber(QueueServer::new(Arc::clone(transport)));
            let ended = Arc::clone(&ended);
            thread::spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    manager.run_with_timeout(10).unwrap();
                }
            })
        };
        Self {
            threads: (0..count).map(start).collect(),
            ended,
        }
    }
}

impl Drop for ServerThreads {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let result = thread.join();
            assert!(result.is_ok() || thread::panicking(), "a thread panicked");
        }
    }
}
