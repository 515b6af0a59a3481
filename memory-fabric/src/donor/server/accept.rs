//! The threads that accept connections, and those that serve one each.

use super::open::{Registered, Shared};
use super::{DonorError, EXPIRY_CHECK_INTERVAL, thread};
use crate::control::{CONNECT_TIMEOUT, ControlError};
use crate::donor::CONNECTIONS_MAX;
use crate::donor::connection::Connection;
use crate::link::describe;
use crate::stream::{Closer, Stream};
use crate::transport::udp::{Fingerprint, Listener};
use fabric_host::lock;
use fabric_identity::SharedCredentials;
use fabric_transport::tls::{TlsError, TlsStream};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Instant;

pub(super) fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    loop {
        let accepted = listener.accept();
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, or the peer disconnected: a pause lets others finish.
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::park_timeout(EXPIRY_CHECK_INTERVAL);
                continue;
            }
        };
        let Ok(registered) = stream.try_clone() else {
            continue;
        };
        let credentials = shared.credentials.clone();
        begin(shared, peer, Closer::Tcp(registered), move || {
            let Some(credentials) = credentials else {
                stream.set_nodelay(true)?;
                return Ok(Stream::Tcp(stream));
            };
            // On the thread of the connection, so that a slow client delays nobody else.
            let accept = || {
                let stream = TlsStream::accept(stream, &credentials)?;
                Ok(Stream::Tls(Box::new(stream)))
            };
            confirmed(Some(&credentials), accept)
        });
    }
}

/// Accepts a connection, and checks its peer again if the credentials were replaced meanwhile, maybe
/// because this peer was revoked.
fn confirmed(
    credentials: Option<&Arc<SharedCredentials>>,
    accept: impl FnOnce() -> io::Result<Stream>,
) -> io::Result<Stream> {
    let before = credentials.map(|shared| shared.current());
    let stream = accept()?;
    if let (Some(shared), Some(before), Some(peer)) = (credentials, before, stream.peer()) {
        let now = shared.current();
        if !Arc::ptr_eq(&before, &now) {
            let confirmed = now.confirm(&peer.chain);
            confirmed.map_err(|why| io::Error::from(TlsError::Certificate(why)))?;
        }
    }
    Ok(stream)
}

/// Listens on UDP too, on the same port. Without it VMs can still use TCP.
pub(super) fn listen_on_udp(
    shared: &Arc<Shared>,
    address: SocketAddr,
    threads: &mut Vec<JoinHandle<()>>,
) -> Result<Option<Fingerprint>, DonorError> {
    let listener = match Listener::bind(address, shared.credentials.as_ref()) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%address, %error, "cannot listen on UDP; VMs can come by TCP alone");
            return Ok(None);
        }
    };
    let fingerprint = listener.fingerprint();
    let shared = Arc::clone(shared);
    threads.push(thread("donor-udp", move || {
        listener.run(&shared.stopping, &mut |arrival| {
            let (peer, closer) = (arrival.peer, Closer::Udp(arrival.closer()));
            let credentials = shared.credentials.clone();
            begin(&shared, peer, closer, move || {
                let deadline = Instant::now() + CONNECT_TIMEOUT;
                let accept = || Ok(Stream::Udp(Box::new(arrival.accept(deadline)?)));
                confirmed(credentials.as_ref(), accept)
            });
        });
    })?);
    Ok(fingerprint)
}

/// Serves a connection on a separate thread after `open` has set it up.
fn begin(
    shared: &Arc<Shared>,
    peer: SocketAddr,
    registered: Closer,
    open: impl FnOnce() -> io::Result<Stream> + Send + 'static,
) {
    // Relaxed: the ids only need to be unique.
    let number = shared.next_connection.fetch_add(1, Ordering::Relaxed);
    let count = {
        let mut connections = lock(&shared.connections);
        let registered = Registered {
            closer: registered,
            peer: None,
            not_after: i64::MAX,
        };
        connections.insert(number, registered);
        connections.len()
    };
    if shared.credentials.is_some() && count > CONNECTIONS_MAX {
        // A handshake would cost more than the connection is worth.
        tracing::info!(%peer, count, "connection refused: {CONNECTIONS_MAX} is the limit");
        if let Some(registered) = lock(&shared.connections).remove(&number) {
            registered.closer.close();
        }
        return;
    }
    let serving = Arc::clone(shared);
    let started = thread("donor-conn", move || {
        let mut connection = Connection {
            served: &serving.served,
            peer,
        };
        let served = match open() {
            Ok(stream) => {
                serving.note_peer(number, &stream);
                connection.serve(stream, count)
            }
            Err(error) => {
                // The peer learns little about why it is refused, so this node has to say it.
                if serving.credentials.is_some() {
                    tracing::info!(%peer, %error, "connection refused");
                }
                Err(ControlError::Stream(peer, error))
            }
        };
        if let Err(error) = served {
            tracing::debug!(%peer, error = describe(&error), "connection ended");
        }
        lock(&serving.connections).remove(&number);
    });
    if let Err(error) = started {
        tracing::warn!(%peer, error = describe(&error), "connection refused");
        lock(&shared.connections).remove(&number);
    }
}
