//! The threads that carry out what is asked.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use tokio::sync::oneshot;

use super::protocol::{CONNECTIONS_MAX, Refusal, RefusalCode};
use super::route::{Answer, Route, Service, Work};

/// Stack of such a thread: answers are made on the heap.
const STACK_BYTES: usize = 256 << 10;

type Job = Box<dyn FnOnce() + Send>;

/// The threads. They end when this is dropped, each after what it is at.
#[derive(Debug)]
pub(super) struct Workers {
    looks: Sender<Job>,
    changes: Sender<Job>,
    /// Whether something is being changed. Acquired by the one who may, released when it is done.
    changing: Arc<AtomicBool>,
}

/// The right to change something, until it is dropped.
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
    /// Starts so many threads for what only looks, and one for changes where there are any.
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

    /// Has a request carried out. Whether its client is still there does not matter from here on.
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
            // What it looks at are atomics and locks that are taken for single assignments, so
            // that a panic leaves nothing half done; the thread goes on.
            let attempt = AssertUnwindSafe(|| (route.answer)(&service.subject, &body));
            let answer = catch_unwind(attempt)
                .unwrap_or_else(|_| Err(Refusal::new(RefusalCode::Failed, "answering failed")));
            // Before the answer: who has got it may send the next request at once.
            drop(turn);
            // Nobody may be there any more to take it.
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
    // Ends with the channel; nobody waits for it, since the end of a VM must not depend on clients.
    thread.spawn(move || jobs.iter().for_each(|job| job()))?;
    Ok(())
}
