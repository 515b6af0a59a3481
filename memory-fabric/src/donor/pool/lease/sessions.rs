//! The connections of a lease, at most one of each kind.

use super::Lease;
use crate::stream::Closer;
use crate::transport::rdma::ProtectionDomain;
use crate::wire::TrafficClass;
use fabric_host::lock;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The purpose of a VM's connection. A lease has at most one of each kind.
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
    /// Signalled when a connection or a registration of memory has ended.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    /// Whether the lease has ended.
    ended: bool,
    /// The domains of queue pairs for write-backs that could not be destroyed, so that they may still
    /// write.
    late_writes: Vec<Arc<ProtectionDomain>>,
    active: HashMap<SessionKind, Closer>,
    /// The newest epoch on connections of each kind so far.
    epochs: HashMap<SessionKind, u64>,
    /// Registrations of the lease's memory that are being ended.
    deregistrations: u32,
}

/// Why a connection is not accepted for the lease.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionRefused {
    #[error("the previous connection does not end")]
    Busy(#[source] io::Error),
    #[error("it is of epoch {epoch}, which is older than {newest}, the newest here")]
    StaleEpoch { epoch: u64, newest: u64 },
}

impl Table {
    fn check_epoch(&self, kind: SessionKind, epoch: u64) -> Result<(), SessionRefused> {
        match self.epochs.get(&kind) {
            Some(&newest) if epoch < newest => Err(SessionRefused::StaleEpoch { epoch, newest }),
            _ => Ok(()),
        }
    }

    fn note_epoch(&mut self, kind: SessionKind, epoch: u64) {
        let newest = self.epochs.entry(kind).or_insert(epoch);
        *newest = epoch.max(*newest);
    }
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

    /// Waits until `keep_waiting` returns false, or up to `timeout`. The second value says whether
    /// the wait timed out.
    fn wait_while<'a>(
        &self,
        table: MutexGuard<'a, Table>,
        timeout: Duration,
        keep_waiting: impl Fn(&mut Table) -> bool,
    ) -> (MutexGuard<'a, Table>, bool) {
        let (table, waited) = self
            .changed
            .wait_timeout_while(table, timeout, keep_waiting)
            .unwrap_or_else(PoisonError::into_inner);
        (table, waited.timed_out())
    }
}

impl Lease {
    /// Makes `stream` the lease's connection of a kind. A previous one is shut down, and has served
    /// its last request when this returns: so nothing that was sent on it can take effect after
    /// requests on the new one.
    ///
    /// A VM knows the newest epoch of its requests when it makes the next connection. A connection
    /// of an older epoch is therefore one that the VM abandoned and the network delayed, or that of
    /// a node which lost its part in the VM; it replaces none.
    pub(crate) fn begin_session(
        &self,
        kind: SessionKind,
        stream: Closer,
        epoch: u64,
        timeout: Duration,
    ) -> Result<(), SessionRefused> {
        let busy = |error: io::ErrorKind| Err(SessionRefused::Busy(error.into()));
        let table = lock(&self.sessions.table);
        table.check_epoch(kind, epoch)?;
        if let Some(previous) = table.active.get(&kind) {
            previous.close();
        }
        let exists = |table: &mut Table| table.active.contains_key(&kind);
        let (mut table, timed_out) = self.sessions.wait_while(table, timeout, exists);
        if timed_out {
            return busy(io::ErrorKind::TimedOut);
        }
        if table.ended {
            return busy(io::ErrorKind::NotConnected);
        }
        // The previous connection may have carried newer requests until now.
        table.check_epoch(kind, epoch)?;
        table.note_epoch(kind, epoch);
        table.active.insert(kind, stream);
        Ok(())
    }

    /// Ends the connection of a kind after its last request. Its reference to the lease is dropped
    /// first, so that no connection keeps memory lent when the last one has ended. `newest` is the
    /// newest epoch of a request on the connection.
    pub(crate) fn end_session(self: Arc<Self>, kind: SessionKind, newest: u64) {
        let sessions = Arc::clone(&self.sessions);
        drop(self);
        let mut table = lock(&sessions.table);
        table.active.remove(&kind);
        table.note_epoch(kind, newest);
        drop(table);
        sessions.changed.notify_all();
    }

    /// Returns whether its end has started.
    pub(super) fn has_ended(&self) -> bool {
        lock(&self.sessions.table).ended
    }

    /// Starts its end: shuts its connections down and deregisters its memory.
    pub(in crate::donor::pool) fn close(self: &Arc<Self>) {
        lock(&self.sessions.table).ended = true;
        self.end_delegation();
        // No new connections are accepted.
        self.sessions.shut_down(|_| true);
        if let Some(region) = self.export.end() {
            self.deregister(region);
        } else if self.export.is_held() {
            self.keep_lent();
        }
    }

    /// Returns whether its connections and registrations have ended.
    pub(in crate::donor::pool) fn has_closed(&self) -> bool {
        self.has_closed_by(Instant::now())
    }

    /// Waits until its connections and registrations have ended. Returns false if one has not at
    /// the deadline; it may then still use the memory.
    pub(in crate::donor::pool) fn has_closed_by(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let open = |table: &mut Table| !table.active.is_empty() || table.deregistrations > 0;
        let table = lock(&self.sessions.table);
        let (mut table, _) = self.sessions.wait_while(table, left, open);
        !open(&mut table)
    }

    /// Ends the lease's RDMA connection for write-backs, if there is one. When this returns its
    /// queue pair is destroyed, so that no delayed WRITE can change the lease.
    ///
    /// # Errors
    ///
    /// Fails when it does not end within `timeout`, or destroying the queue pair failed: it may
    /// then still write.
    pub(crate) fn fence_writes(&self, timeout: Duration) -> io::Result<()> {
        let kind = SessionKind::Rdma(TrafficClass::Bulk);
        let table = lock(&self.sessions.table);
        if let Some(session) = table.active.get(&kind) {
            // Its thread only waits for this, and destroys the queue pair before it ends the
            // session.
            session.close();
        }
        let busy = |table: &mut Table| table.active.contains_key(&kind);
        let (table, timed_out) = self.sessions.wait_while(table, timeout, busy);
        if timed_out {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let domains = table.late_writes.clone();
        drop(table);
        if domains.iter().any(|domain| domain.may_be_accessed()) {
            return Err(io::Error::other("a queue pair could not be ended"));
        }
        Ok(())
    }

    /// Records that destroying a queue pair of this domain for write-backs failed, so that later fences
    /// fail while it may write. Call it before its session counts as ended.
    pub(crate) fn expect_late_writes(&self, domain: Arc<ProtectionDomain>) {
        lock(&self.sessions.table).late_writes.push(domain);
    }
}
