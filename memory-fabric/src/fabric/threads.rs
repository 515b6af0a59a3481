//! The threads of the pager, and the end of guest memory after them.

use super::FabricError;
use crate::link::describe;
use crate::pager::{DRAIN_TIME_MAX, Shared};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use fabric_host::{ThreadClass, begin_class};
use std::convert::Infallible;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

/// The threads of the pager. Dropping them stops them, each after its current work, and ends all
/// access to the memory that they served.
pub(super) struct PagerThreads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// A clone of the sender is in each thread: the channel is disconnected when all have ended.
    running: Sender<Infallible>,
    ended: Receiver<Infallible>,
}

impl PagerThreads {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let (running, ended) = bounded(0);
        Self {
            shared: Arc::clone(shared),
            threads: Vec::new(),
            running,
            ended,
        }
    }

    /// Returns the state that they share.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), FabricError> {
        let running = self.running.clone();
        let run = move || {
            let _running = running;
            begin_class(ThreadClass::Pager);
            run();
        };
        let thread = Builder::new().name(name.into()).spawn(run);
        let failed = |error| FabricError::System("start a thread", error);
        self.threads.push(thread.map_err(failed)?);
        Ok(())
    }

    fn stop(&mut self) {
        self.shared.stop();
        // No thread needs the sender of this one.
        drop(std::mem::replace(&mut self.running, bounded(0).0));
        if self.ended.recv_timeout(DRAIN_TIME_MAX) == Err(RecvTimeoutError::Timeout) {
            // They are late by now, and one of them may sleep.
            self.shared.stop();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for PagerThreads {
    fn drop(&mut self) {
        self.stop();
        // What still waits for a page could continue with zeroes when userfaultfd is closed, which
        // happens at some later time: the shared state may be looked at after the end.
        if let Err(error) = self.shared.uffd.end(&self.shared.memory) {
            tracing::warn!(
                "guest memory stays accessible until the process ends: {}",
                describe(&error)
            );
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}
