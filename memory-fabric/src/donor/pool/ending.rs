//! The end of leases. A lease that ends leaves the table at once. It is closed, and its counts are
//! added up, when nothing uses it any more; that waits for verbs, which may hang.

use super::{Closing, Lease, Pool, sum};
use crate::wire::{LeaseStatus, Token};
use fabric_host::lock;
use std::sync::Arc;
use std::time::Instant;

impl Pool {
    /// Ends a lease: its connections close, and its memory is freed as soon as nothing uses it.
    /// Waits for that, but no longer than a verb that hangs may take.
    pub fn end(&self, token: &Token) -> Option<LeaseStatus> {
        let now = Instant::now();
        let lease = self.begin_end(now, |lease| lease.token == *token).pop()?;
        lease.has_closed_by(now + self.closing_time_max);
        let status = lease.status();
        self.settle(lease);
        Some(status)
    }

    /// Ends every lease that was not renewed in time; gives the names of their VMs. Waits for
    /// nothing, so that what hangs in one lease delays the end of no other.
    pub fn end_expired(&self, now: Instant) -> Vec<String> {
        let expired = self.begin_end(now, |lease| lease.ends_at() <= now);
        let vms = expired.iter().map(|lease| lease.vm.clone()).collect();
        self.expired.add(expired.len() as u64);
        drop(expired);
        let closing: Vec<_> = lock(&self.table)
            .closing
            .iter()
            .map(|closing| (Arc::clone(&closing.lease), closing.until))
            .collect();
        for (lease, until) in closing {
            if lease.has_closed() || until <= now {
                self.settle(lease);
            }
        }
        vms
    }

    /// Ends every lease, and waits as for one.
    pub fn end_all(&self) {
        let now = Instant::now();
        self.begin_end(now, |_| true);
        let table = lock(&self.table);
        let closing: Vec<_> = table
            .closing
            .iter()
            .map(|one| &one.lease)
            .cloned()
            .collect();
        drop(table);
        for lease in closing {
            lease.has_closed_by(now + self.closing_time_max);
            self.settle(lease);
        }
    }

    /// Ends leases without waiting. From now on nobody finds them.
    fn begin_end(&self, now: Instant, wanted: impl Fn(&Lease) -> bool) -> Vec<Arc<Lease>> {
        let until = now + self.closing_time_max;
        let mut table = lock(&self.table);
        let ended = table.active.extract_if(|_, lease| wanted(lease));
        let ended: Vec<_> = ended.map(|(_, lease)| lease).collect();
        table.closing.extend(ended.iter().map(|lease| Closing {
            lease: Arc::clone(lease),
            until,
        }));
        drop(table);
        for lease in &ended {
            lease.close();
        }
        ended
    }

    /// Adds up what an ended lease counted, and watches it no longer. Whatever still uses its
    /// memory keeps it.
    fn settle(&self, lease: Arc<Lease>) {
        let closed = lease.has_closed();
        let closing = {
            let mut table = lock(&self.table);
            let ours = |closing: &Closing| Arc::ptr_eq(&closing.lease, &lease);
            let Some(index) = table.closing.iter().position(ours) else {
                // Another thread was first.
                return;
            };
            table.past = sum(table.past, lease.status());
            table.closing.swap_remove(index)
        };
        if !closed {
            tracing::warn!(
                vm = lease.vm,
                bytes = lease.bytes(),
                "a connection does not end, or memory is still registered for RDMA: perhaps a verb \
                 hangs; the memory of the lease stays lent until it returns"
            );
        }
        // Outside the lock: the last of the two unmaps the memory.
        drop((closing, lease));
    }
}
