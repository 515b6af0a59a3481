//! The open connections of a donor, and what its threads share.

use crate::donor::connection::Served;
use crate::stream::{Closer, Stream};
use fabric_host::lock;
use fabric_identity::SharedCredentials;
use fabric_identity::presented::Presented;
use fabric_transport::tls::Peer;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// State that the threads of a donor share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) served: Served,
    pub(super) credentials: Option<Arc<SharedCredentials>>,
    pub(super) stopping: AtomicBool,
    /// Open connections by id.
    pub(super) connections: Mutex<HashMap<u64, Registered>>,
    /// The next id.
    pub(super) next_connection: AtomicU64,
}

/// An open connection.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) closer: Closer,
    /// Who the peer is, once it has shown that.
    pub(super) peer: Option<Peer>,
    /// The last second of the validity of its certificate, since 1970.
    pub(super) not_after: i64,
}

impl Shared {
    /// Closes the connections of peers whose certificates have expired since they were accepted.
    pub(super) fn close_expired(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        for connection in lock(&self.connections).values_mut() {
            if let Some(peer) = &connection.peer
                && connection.not_after < now
            {
                tracing::warn!(peer = %peer.subject, "a connection is closed: its certificate has expired");
                connection.closer.close();
                // Once.
                connection.not_after = i64::MAX;
            }
        }
    }

    /// Notes what the peer of a connection has shown.
    pub(super) fn note_peer(&self, number: u64, stream: &Stream) {
        if let Some(peer) = stream.peer()
            && let Some(registered) = lock(&self.connections).get_mut(&number)
        {
            let certificate = peer.chain.first();
            let presented = certificate.and_then(|one| Presented::read(one).ok());
            // It was read before, when the connection was made.
            registered.not_after = presented.map_or(i64::MIN, |presented| presented.not_after);
            registered.peer = Some(peer.clone());
        }
    }
}
