//! Connections that the node ends.

use super::Shared;
use fabric_transport::tls::Peer;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

impl Shared {
    /// Breaks all connections. Returns how many these are.
    pub(in super::super) fn break_all(&self) -> usize {
        let open = self.open();
        open.registered
            .values()
            .map(|one| one.closer.close())
            .count()
    }

    /// Ends what the peers that `why` names have here, for the reason that it returns: their
    /// connections are closed. Returns how many these are. One that shows who it is meanwhile is not
    /// among them.
    pub(in super::super) fn end(&self, why: impl Fn(&Peer) -> Option<String>) -> usize {
        let open = self.open();
        let known = open.registered.iter();
        let known =
            known.filter_map(|(&number, one)| Some((number, Arc::clone(one.peer.as_ref()?))));
        let known: Vec<(u64, Arc<Peer>)> = known.collect();
        drop(open);
        // Without the lock: thousands of certificates take seconds to verify.
        let ends = known.into_iter();
        let ends = ends.filter_map(|(number, peer)| Some((number, why(&peer)?, peer)));
        let ends: Vec<_> = ends.collect();
        let open = self.open();
        let ended = ends.iter().filter_map(|(number, why, peer)| {
            let one = open.registered.get(number)?;
            let is_same = one.peer.as_ref().is_some_and(|now| Arc::ptr_eq(now, peer));
            is_same.then(|| one.end(why))
        });
        ended.count()
    }

    /// Closes the connections of peers whose certificates have expired since they were accepted.
    pub(in super::super) fn close_expired(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        for connection in self.open().registered.values_mut() {
            if let Some(peer) = &connection.peer
                && connection.not_after < now
            {
                tracing::warn!(peer = %peer.subject, "a connection is closed: its certificate has expired");
                connection.end("the VM's certificate has expired, and the node ended its vCPUs");
                // Once.
                connection.not_after = i64::MAX;
            }
        }
    }
}
