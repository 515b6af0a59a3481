//! The connections of a lease, of which there is one of each kind.

use super::Lease;
use crate::stream::Closer;
use crate::wire::TrafficClass;
use fabric_host::lock;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a connection of a VM is for. There is one of each kind at the most.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum SessionKind {
    /// Pages.
    Pages(TrafficClass),
    /// It lives as long as an RDMA connection.
    Rdma(TrafficClass),
}

#[derive(Debug, Default)]
pub(super) struct Sessions {
    table: Mutex<Table>,
    /// A connection or the registration of memory has ended.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    /// Whether the lease has ended.
    ended: bool,
    /// Whether a queue pair for write-backs could not be ended, so that it may write at any time.
    late_writes: bool,
    active: HashMap<SessionKind, Closer>,
    /// Registrations of the lease's memory that are being ended.
    deregistrations: u32,
}

impl Sessions {
    pub(super) fn begin_deregistration(&self) {
        lock(&self.table).deregistrations += 1;
    }

    pub(super) fn end_deregistration(&self) {
        lock(&self.table).deregistrations -= 1;
        self.changed.notify_all();
    }

    /// Shuts down the connections of some kinds.
    pub(super) fn shut_down(&self, wanted: impl Fn(SessionKind) -> bool) {
        for (kind, stream) in &lock(&self.table).active {
            if wanted(*kind) {
                stream.close();
            }
        }
    }

    /// Waits for `timeout` until `goes_on` is false. The second value says whether that was in vain.
    fn wait_while<'a>(
        &self,
        table: MutexGuard<'a, Table>,
        timeout: Duration,
        goes_on: impl Fn(&mut Table) -> bool,
    ) -> (MutexGuard<'a, Table>, bool) {
        let (table, waited) = self
            .changed
            .wait_timeout_while(table, timeout, goes_on)
            .unwrap_or_else(PoisonError::into_inner);
        (table, waited.timed_out())
    }
}

impl Lease {
    /// Makes `stream` the lease's connection of a kind. One that was there before is shut
    /// down, and has served its last request when this returns: so nothing that was sent on
    /// it can take effect after what is sent on the new one.
    pub(crate) fn begin_session(
        &self,
        kind: SessionKind,
        stream: Closer,
        timeout: Duration,
    ) -> io::Result<()> {
        let table = lock(&self.sessions.table);
        if let Some(previous) = table.active.get(&kind) {
            previous.close();
        }
        let busy = |table: &mut Table| table.active.contains_key(&kind);
        let (mut table, timed_out) = self.sessions.wait_while(table, timeout, busy);
        if timed_out {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if table.ended {
            return Err(io::ErrorKind::NotConnected.into());
        }
        table.active.insert(kind, stream);
        Ok(())
    }

    /// The connection of a kind has served its last request. It gives up its reference to the
    /// lease first: when the last connection has ended, none of them keeps memory lent.
    pub(crate) fn end_session(self: Arc<Self>, kind: SessionKind) {
        let sessions = Arc::clone(&self.sessions);
        drop(self);
        lock(&sessions.table).active.remove(&kind);
        sessions.changed.notify_all();
    }

    /// Begins its end: shuts its connections down and deregisters its memory.
    pub(in crate::donor::pool) fn close(self: &Arc<Self>) {
        lock(&self.sessions.table).ended = true;
        // None begins any more.
        self.sessions.shut_down(|_| true);
        if let Some(region) = self.export.end() {
            self.deregister(region);
        }
    }

    /// Whether its connections and registrations have ended.
    pub(in crate::donor::pool) fn has_closed(&self) -> bool {
        self.has_closed_by(Instant::now())
    }

    /// Waits until its connections and registrations have ended. False when one has not at the
    /// deadline; it may still use the memory then.
    pub(in crate::donor::pool) fn has_closed_by(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let open = |table: &mut Table| !table.active.is_empty() || table.deregistrations > 0;
        let table = lock(&self.sessions.table);
        let (mut table, _) = self.sessions.wait_while(table, left, open);
        !open(&mut table)
    }

    /// Ends the lease's RDMA connection for write-backs, if there is one. When this returns its
    /// queue pair is gone, so that no WRITE, however late, changes the lease any more.
    ///
    /// # Errors
    ///
    /// When it does not end within `timeout`, or was not ended in order: then it may still write.
    pub(crate) fn fence_writes(&self, timeout: Duration) -> io::Result<()> {
        let kind = SessionKind::Rdma(TrafficClass::Bulk);
        let table = lock(&self.sessions.table);
        if let Some(session) = table.active.get(&kind) {
            // Its thread waits for nothing else, and takes the pair away before it says so.
            session.close();
        }
        let busy = |table: &mut Table| table.active.contains_key(&kind);
        let (table, timed_out) = self.sessions.wait_while(table, timeout, busy);
        if timed_out {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if table.late_writes {
            return Err(io::Error::other("a queue pair could not be ended"));
        }
        Ok(())
    }

    /// Notes that a queue pair for write-backs could not be ended and may still write, so that every
    /// later fence fails. To be called before its session counts as ended.
    pub(crate) fn expect_late_writes(&self) {
        lock(&self.sessions.table).late_writes = true;
    }
}
