//! The threads that accept connections, and those that serve one each.

use super::open::{Arrival, Shared, TakenPlace};
use super::{DonorError, EXPIRY_CHECK_INTERVAL, thread};
use crate::control::{CONTROL_TIMEOUT, ControlError};
use crate::donor::buffers::Made;
use crate::donor::connection::{Connection, Controlling};
use crate::link::describe;
use crate::stream::{Closer, Stream};
use crate::transport::resting::Resting;
use crate::transport::udp::{Fingerprint, Listener};
use fabric_host::poll::poll_until;
use fabric_host::prefer_latency;
use fabric_identity::SharedCredentials;
use fabric_transport::tls::{HANDSHAKE_TIMEOUT, TlsError, TlsStream};
use socket2::SockRef;
use std::io;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a connection may be silent after it was accepted.
const SILENT_TIME_MAX: Duration = CONTROL_TIMEOUT;

/// Connections that are accepted before those that have become ready get their threads.
const ACCEPTED_AT_ONCE: usize = 64;

/// Accepts connections by TCP. It keeps them itself until their first bytes have come: clients
/// that only connect cost no thread.
pub(super) fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    if let Err(error) = listener.set_nonblocking(true) {
        tracing::error!(%error, "cannot accept connections");
        return;
    }
    loop {
        let silent = shared.silent();
        let first = [listener.as_raw_fd(), shared.ended.as_raw_fd()];
        let watched = first.into_iter().chain(silent.iter().map(|(_, fd)| *fd));
        let mut watched: Vec<_> = watched.map(readable).collect();
        let until = shared.silent_since().map(|since| since + SILENT_TIME_MAX);
        if let Err(error) = poll_until(&mut watched, until) {
            tracing::error!(%error, "cannot wait for connections");
            return;
        }
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        if watched[1].revents != 0 {
            // It is non-blocking, and another look at the connections follows.
            let _ = shared.ended.read();
        }
        for ((number, _), watched) in silent.iter().zip(&watched[2..]) {
            if watched.revents != 0 {
                hear(shared, *number);
            }
        }
        if watched[0].revents != 0 {
            accept_some(shared, listener);
        }
        if let Some(before) = Instant::now().checked_sub(SILENT_TIME_MAX) {
            shared.drop_silent(before);
        }
    }
}

const fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    }
}

fn accept_some(shared: &Arc<Shared>, listener: &TcpListener) {
    for _ in 0..ACCEPTED_AT_ONCE {
        match listener.accept() {
            Ok((stream, peer)) => {
                // Without a number it is closed here.
                let _number = shared.admit(peer, Closer::Tcp(stream.into()));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if shared.stopping.load(Ordering::SeqCst) => {
                tracing::debug!(%error, "no more connections");
                return;
            }
            Err(error) => {
                // Out of descriptors, or the peer disconnected: a pause lets others finish.
                shared.note_not_accepted(&error);
                std::thread::park_timeout(EXPIRY_CHECK_INTERVAL);
                return;
            }
        }
    }
}

/// Begins to serve a silent connection that seems to have something to read.
fn hear(shared: &Arc<Shared>, number: u64) {
    let Some((stream, peer)) = shared.handle(number) else {
        return;
    };
    let mut byte = [MaybeUninit::uninit()];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    match SockRef::from(&*stream).recv_with_flags(&mut byte, flags) {
        Ok(1..) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
        // The peer has closed it.
        Ok(0) | Err(_) => return shared.remove_silent(number),
    }
    let made = match shared.credentials {
        Some(_) => Made::Tls,
        None => Made::Tcp,
    };
    let Some(place) = shared.begin(number, peer, made) else {
        // It stays until a thread has ended.
        return;
    };
    let credentials = shared.credentials.clone();
    serve(shared, place, peer, move || {
        open(stream, credentials.as_ref())
    });
}

/// Sets up a connection by TCP, on its thread, so that a slow client delays no other.
fn open(
    stream: Arc<TcpStream>,
    credentials: Option<&Arc<SharedCredentials>>,
) -> io::Result<Stream> {
    let Some(shared) = credentials else {
        prefer_latency(&stream)?;
        return Ok(Stream::Tcp(stream));
    };
    let stream = TlsStream::accept(stream, shared)?;
    Ok(Stream::Tls(Box::new(stream)))
}

/// Listens on TCP. A port that the kernel chooses is one that is free for UDP as well.
pub(super) fn listen_on_tcp(listen: SocketAddr) -> io::Result<TcpListener> {
    /// Ports that are tried before one is taken for TCP alone.
    const TRIES: u32 = 16;
    for _ in 0..TRIES {
        let listener = TcpListener::bind(listen)?;
        if listen.port() != 0 || UdpSocket::bind(listener.local_addr()?).is_ok() {
            return Ok(listener);
        }
    }
    TcpListener::bind(listen)
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
            // Its first bytes have come. When it gets no thread, the VM asks again.
            let peer = arrival.peer;
            let Some(number) = shared.admit(peer, Closer::Udp(arrival.closer())) else {
                return false;
            };
            let Some(place) = shared.begin(number, peer, Made::Udp) else {
                shared.remove_silent(number);
                return false;
            };
            serve(&shared, place, peer, move || {
                let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
                arrival.accept(deadline).map(Stream::Udp)
            });
            true
        });
    })?);
    Ok(fingerprint)
}

/// Serves a connection on a separate thread after `open` has set it up.
fn serve(
    shared: &Arc<Shared>,
    place: TakenPlace,
    peer: SocketAddr,
    open: impl FnOnce() -> io::Result<Stream> + Send + 'static,
) {
    let serving = Arc::clone(shared);
    let started = thread("donor-conn", move || {
        let served = match open().and_then(|stream| known(&serving, &place, stream)) {
            Ok((stream, delegate)) => {
                let connection = Connection {
                    served: &serving.served,
                    peer,
                    place: &place,
                };
                connection.serve(stream, delegate)
            }
            Err(error) => {
                serving.note_refused(peer, &error);
                Err(ControlError::Stream(peer, error))
            }
        };
        let served = match served {
            Ok(None) => Ok(()),
            Ok(Some(controlling)) => rest(&serving, place, controlling),
            Err(error) => Err(error),
        };
        note_ended(peer, served);
    });
    if let Err(error) = started {
        // Its place was dropped with the closure.
        shared.note_not_served(peer, &error);
    }
}

/// Notes who is at the other end; a process is returned with the fingerprint by which its member has
/// delegated to it.
fn known(
    shared: &Shared,
    place: &TakenPlace,
    stream: Stream,
) -> io::Result<(Stream, Option<fabric_identity::Fingerprint>)> {
    let delegate = shared.delegate(&stream);
    let noted = place.note_peer(&stream, delegate.is_some());
    noted.map_err(|why| io::Error::from(TlsError::Certificate(why)))?;
    Ok((stream, delegate))
}

/// Gives a control connection to the thread that serves those that rest, or keeps it on this one.
fn rest(
    shared: &Arc<Shared>,
    mut place: TakenPlace,
    controlling: Controlling,
) -> Result<(), ControlError> {
    let chain = controlling.control.chain().unwrap_or_default();
    let chain_bytes = chain.iter().map(|one| one.len()).sum();
    if controlling.control.is_quiet() && place.rest(chain_bytes) {
        let Controlling { control, of } = controlling;
        let connection = Resting::of(control)?;
        // Boxed, as those that rest, so that many at once take no large part of the heap.
        shared.rest.add(Box::new(Arrival {
            place,
            connection,
            of,
        }));
        return Ok(());
    }
    let connection = Connection {
        served: &shared.served,
        peer: place.peer(),
        place: &place,
    };
    connection.keep(controlling, None)
}

/// Serves a control connection that rested on a separate thread.
/// Its next request has `timeout`, if a part of it has come.
pub(super) fn serve_woken(
    shared: &Arc<Shared>,
    place: TakenPlace,
    controlling: Controlling,
    timeout: Option<Duration>,
) {
    let peer = place.peer();
    let serving = Arc::clone(shared);
    let started = thread("donor-conn", move || {
        let connection = Connection {
            served: &serving.served,
            peer,
            place: &place,
        };
        note_ended(peer, connection.keep(controlling, timeout));
    });
    if let Err(error) = started {
        shared.note_not_served(peer, &error);
    }
}

fn note_ended(peer: SocketAddr, served: Result<(), ControlError>) {
    if let Err(error) = served {
        tracing::debug!(%peer, error = describe(&error), "connection ended");
    }
}

#[cfg(test)]
#[path = "accept_tests.rs"]
mod tests;
