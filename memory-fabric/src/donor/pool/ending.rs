//! The end of leases. An ending lease leaves the table at once. It is closed, and its counters are
//! added to the totals, when no user is left; this may wait for verbs, which can hang.

use super::{Closing, Lease, Pool, sum};
use crate::wire::{LeaseStatus, Token};
use fabric_host::lock;
use fabric_identity::Holder;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Pool {
    /// Ends a lease: closes its connections, and releases its memory when no user is left. Waits
    /// for that, but with a limit, since a verb may hang.
    pub fn end(&self, token: &Token) -> Option<LeaseStatus> {
        let now = Instant::now();
        let lease = self.begin_end(now, |lease| lease.token == *token).pop()?;
        lease.has_closed_by(now + self.closing_time_max);
        let status = lease.status();
        self.account_ended(lease);
        Some(status)
    }

    /// Ends a lease as [`end`](Self::end) does, without waiting: [`end_expired`](Self::end_expired)
    /// releases its memory.
    pub(in crate::donor) fn end_soon(&self, token: &Token) -> Option<LeaseStatus> {
        let lease = self.begin_end(Instant::now(), |lease| lease.token == *token);
        lease.first().map(|lease| lease.status())
    }

    /// Ends every lease that was not renewed in time; returns the names of their VMs. Does not
    /// wait, so that a lease that hangs delays no other.
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
                self.account_ended(lease);
            }
        }
        vms
    }

    /// Lets every lease last longer by a time in which this process did not run.
    pub fn postpone_ends(&self, by: Duration) {
        let table = lock(&self.table);
        table
            .active
            .values()
            .for_each(|lease| lease.postpone_end(by));
    }

    /// Ends the lease whose VM seems to have ended first, of those that are `wanted`, for another one that
    /// needs more than is left: none, if all of them together have fewer than the `missing` bytes. Waits
    /// as [`end`](Self::end) does. Returns whether there was one.
    pub(super) fn end_forsaken(&self, missing: u64, wanted: impl Fn(&Lease) -> bool) -> bool {
        let now = Instant::now();
        let (mut first, mut bytes): (Option<(Instant, Token)>, _) = (None, 0);
        let table = lock(&self.table);
        for lease in table.active.values().filter(|lease| wanted(lease)) {
            if let Some(since) = lease.forsaken_since(now) {
                bytes += lease.bytes();
                if first.is_none_or(|(before, _)| since < before) {
                    first = Some((since, lease.token));
                }
            }
        }
        drop(table);
        let Some((_, token)) = first.filter(|_| bytes >= missing) else {
            return false;
        };
        let is_it = |lease: &Lease| lease.token == token && lease.is_forsaken(now);
        // None if its VM has just come back.
        for lease in self.begin_end(now, is_it) {
            self.expired.increment();
            tracing::info!(
                vm = lease.vm,
                bytes = lease.bytes(),
                "its VM has closed its connection and not come back; another VM gets the memory"
            );
            lease.has_closed_by(now + self.closing_time_max);
            self.account_ended(lease);
        }
        true
    }

    /// Ends the leases of a member, and waits as [`end`](Self::end) does. Returns how many they were,
    /// and their bytes.
    pub fn end_of(&self, holder: &Holder) -> (usize, u64) {
        self.end_of_members(|owner| owner == holder)
    }

    /// Ends the leases of the members that are `wanted`, like [`end_of`](Self::end_of).
    pub(in crate::donor) fn end_of_members(
        &self,
        wanted: impl Fn(&Holder) -> bool,
    ) -> (usize, u64) {
        let now = Instant::now();
        let is_owner = |lease: &Lease| {
            let owner = lease.owner.as_ref();
            owner.is_some_and(|owner| wanted(&owner.holder))
        };
        // One that is being made under former rules is in the table after that.
        let lending = lock(&self.lending);
        let ended = self.begin_end(now, is_owner);
        drop(lending);
        let totals = (ended.len(), ended.iter().map(|lease| lease.bytes()).sum());
        for lease in ended {
            lease.has_closed_by(now + self.closing_time_max);
            self.account_ended(lease);
        }
        totals
    }

    /// Ends every lease, and waits as [`end`](Self::end) does.
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
            self.account_ended(lease);
        }
    }

    /// Starts the end of leases without waiting. From now on they cannot be found.
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

    /// Adds the counters of an ended lease to the totals, and stops watching it. Remaining users
    /// keep its memory alive.
    fn account_ended(&self, lease: Arc<Lease>) {
        let closed = lease.has_closed();
        let closing = {
            let mut table = lock(&self.table);
            let ours = |closing: &Closing| Arc::ptr_eq(&closing.lease, &lease);
            let Some(index) = table.closing.iter().position(ours) else {
                // Another thread did it first.
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
        // Outside the lock: the last reference unmaps the memory.
        drop((closing, lease));
    }
}
