//! The end of WRITEs by RDMA, before pages come another way.

use super::{Lease, SessionKind};
use crate::wire::TrafficClass;
use fabric_host::lock;
use std::io;
use std::sync::PoisonError;
use std::time::Duration;

impl Lease {
    /// Ends the lease's RDMA connection for write-backs, if there is one. When this returns its
    /// queue pair is gone, so that no WRITE, however late, changes the lease any more.
    ///
    /// # Errors
    ///
    /// When it does not end within `timeout`, or was not ended in order: then it may still write.
    pub(crate) fn fence_writes(&self, timeout: Duration) -> io::Result<()> {
        let kind = SessionKind::Rdma(TrafficClass::Bulk);
        let sessions = lock(&self.sessions);
        if let Some(session) = sessions.active.get(&kind) {
            // Its thread waits for nothing else, and takes the pair away before it says so.
            session.close();
        }
        let (sessions, waited) = self
            .session_ended
            .wait_timeout_while(sessions, timeout, |sessions| {
                sessions.active.contains_key(&kind)
            })
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if sessions.late_writes {
            return Err(io::Error::other("a queue pair could not be ended"));
        }
        Ok(())
    }

    /// Notes that a queue pair for write-backs could not be ended and may still write, so that every
    /// later fence fails. To be called before its session counts as ended.
    pub(crate) fn expect_late_writes(&self) {
        lock(&self.sessions).late_writes = true;
    }
}
