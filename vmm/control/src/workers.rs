//! The threads that execute requests.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use tokio::sync::oneshot;

use super::protocol::{CONNECTIONS_MAX, Refusal, RefusalCode};
use super::route::{Answer, Route, Service, Work};

/// Stack size of a thread: answers are built on the heap.
const STACK_BYTES: usize = 256 << 10;

type Job = Box<dyn FnOnce() + Send>;

/// The threads. They stop when this is dropped, each after its current job.
#[derive(Debug)]
pub(super) struct Workers {
    looks: Sender<Job>,
    changes: Sender<Job>,
    /// Whether a change is in progress. Acquired by the thread that starts one, released when it is
    /// done.
    changing: Arc<AtomicBool>,
}

/// The exclusive right to change state, released on drop.
struct Turn(Arc<AtomicBool>);

impl Turn {
    fn take(changing: &Arc<AtomicBool>) -> Option<Self> {
        changing
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Self(Arc::clone(changing)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Workers {
    /// Starts this many threads for read-only requests, and one for changes if there are any.
    pub fn start(name: &str, lookers: usize, changes_something: bool) -> io::Result<Self> {
        let (looks, of_looks) = bounded(CONNECTIONS_MAX);
        let (changes, of_changes) = bounded(CONNECTIONS_MAX);
        for number in 0..lookers {
            spawn(format!("{name}-look-{number}"), of_looks.clone())?;
        }
        if changes_something {
            spawn(format!("{name}-change"), of_changes)?;
        }
        Ok(Self {
            looks,
            changes,
            changing: Arc::default(),
        })
    }

    /// Queues a request for execution, which continues even if its client disconnects.
    pub fn carry_out<S: Send + Sync + 'static>(
        &self,
        service: &Arc<Service<S>>,
        route: &'static Route<S>,
        body: Vec<u8>,
    ) -> Result<oneshot::Receiver<Answer>, Refusal> {
        let (queue, turn) = match route.work {
            Work::Look | Work::End => (&self.looks, None),
            Work::Change => {
                let turn = Turn::take(&self.changing).ok_or_else(|| {
                    let text = "another request that changes something is under way; try again";
                    Refusal::new(RefusalCode::Busy, text)
                })?;
                (&self.changes, Some(turn))
            }
        };
        let (sender, receiver) = oneshot::channel();
        let service = Arc::clone(service);
        let job = Box::new(move || {
            // The functions use atomics, and locks that protect single assignments, so a panic
            // leaves consistent state, and the thread continues.
            let attempt = AssertUnwindSafe(|| (route.answer)(&service.subject, &body));
            let answer = catch_unwind(attempt)
                .unwrap_or_else(|_| Err(Refusal::new(RefusalCode::Failed, "answering failed")));
            // Released before the answer is sent: the client may send its next request at once.
            drop(turn);
            // The client may have disconnected.
            let _ = sender.send(answer);
        });
        match queue.try_send(job) {
            Ok(()) => Ok(receiver),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => Err(Refusal::new(
                RefusalCode::Busy,
                "too much is asked at once; try again",
            )),
        }
    }
}

fn spawn(name: String, jobs: Receiver<Job>) -> io::Result<()> {
    let thread = std::thread::Builder::new()
        .name(name)
        .stack_size(STACK_BYTES);
    // The thread stops when the channel closes. It is not joined, since the end of a VM must not
    // depend on clients.
    thread.spawn(move || jobs.iter().for_each(|job| job()))?;
    Ok(())
}
