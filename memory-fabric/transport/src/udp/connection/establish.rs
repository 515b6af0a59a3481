//! Establishing a connection, from either end.

use super::{Datagrams, Driver, UdpStream, WAITING_INBOX_BYTES};
use crate::tls::{CertificateDer, Peer, TlsError};
use crate::udp::settings::{self, Expected};
use crate::udp::streams::STREAMS;
use fabric_identity::NAME;
use fabric_identity::presented::Presented;
use quinn_proto::{
    Connection, ConnectionHandle, DatagramEvent, Dir, Endpoint, EndpointConfig, ServerConfig,
};
use quinn_udp::{UdpSockRef, UdpSocketState};
use rustls::ClientConfig;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Attempts to connect before the last, which has all the time that is left: a donor that is starved of
/// processor time answers each packet late. In each of them several packets may be lost.
const FIRST_ATTEMPTS: [Duration; 3] = [
    Duration::from_millis(600),
    Duration::from_millis(600),
    Duration::from_millis(800),
];

impl UdpStream {
    /// Connects to an expected donor.
    ///
    /// # Errors
    ///
    /// Fails when the connection is not established before `deadline`, or the peer is another one.
    /// Whether the peer accepts this end shows at the first read.
    pub fn connect(peer: SocketAddr, expected: &Expected, deadline: Instant) -> io::Result<Self> {
        let tls = settings::client_tls(expected)?;
        let mut stream = Self::connect_with(peer, tls, deadline)?;
        if matches!(expected, Expected::Node(_)) {
            stream.note_member()?;
        }
        Ok(stream)
    }

    /// Connects with this configuration of TLS.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect).
    pub fn connect_with(
        peer: SocketAddr,
        tls: ClientConfig,
        deadline: Instant,
    ) -> io::Result<Self> {
        let config = settings::client(tls)?;
        for time in FIRST_ATTEMPTS {
            let until = deadline.min(Instant::now() + time);
            match Self::attempt(peer, config.clone(), until) {
                // A handshake that was corrupted in transit does not recover.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::TimedOut | io::ErrorKind::ConnectionReset
                    ) && Instant::now() < deadline => {}
                other => return other,
            }
        }
        Self::attempt(peer, config, deadline)
    }

    fn attempt(
        peer: SocketAddr,
        config: quinn_proto::ClientConfig,
        deadline: Instant,
    ) -> io::Result<Self> {
        let any: SocketAddr = match peer {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let socket = UdpSocket::bind(any)?;
        socket.connect(peer)?;
        let udp = UdpSocketState::new(UdpSockRef::from(&socket))?;
        let mut endpoint = Endpoint::new(settings::endpoint(), None, !udp.may_fragment(), None);
        let (handle, connection) = endpoint
            .connect(Instant::now(), config, peer, NAME)
            .map_err(io::Error::other)?;
        let ended = Arc::default();
        let socket = Arc::new(socket);
        let driver = Driver::new(socket, udp, ended, peer, endpoint, handle, connection);
        let mut stream = Self::from(driver);
        stream.enlarge_buffers();
        stream.shake_hands(deadline)?;
        for _ in 0..STREAMS {
            let opened = stream.connection.streams().open(Dir::Bi);
            opened.ok_or_else(|| io::Error::other("the peer allows too few streams"))?;
        }
        Ok(stream)
    }

    /// Creates the donor's end of a connection from its first datagrams. With `of_member`, the peer
    /// has to show a certificate of the cluster.
    pub(in crate::udp) fn accept(
        (socket, ended): (Arc<UdpSocket>, Arc<AtomicBool>),
        peer: SocketAddr,
        config: &Arc<EndpointConfig>,
        server: &Arc<ServerConfig>,
        of_member: bool,
        first: Datagrams,
        deadline: Instant,
    ) -> io::Result<Self> {
        let udp = UdpSocketState::new(UdpSockRef::from(&*socket))?;
        let server = Some(Arc::clone(server));
        let mut endpoint = Endpoint::new(Arc::clone(config), server, !udp.may_fragment(), None);
        let (now, mut response) = (Instant::now(), Vec::new());
        let mut accepted: Option<(ConnectionHandle, Connection)> = None;
        for datagram in first {
            let event = endpoint.handle(now, peer, None, None, datagram, &mut response);
            match (event, &mut accepted) {
                (Some(DatagramEvent::NewConnection(incoming)), None) => {
                    match endpoint.accept(incoming, now, &mut response, None) {
                        Ok(connection) => accepted = Some(connection),
                        Err(error) => return Err(io::Error::other(error.cause)),
                    }
                }
                (Some(DatagramEvent::NewConnection(incoming)), Some(_)) => {
                    endpoint.ignore(incoming);
                }
                (Some(DatagramEvent::ConnectionEvent(_, event)), Some((_, connection))) => {
                    connection.handle_event(event);
                }
                _ => {}
            }
        }
        let (handle, connection) =
            accepted.ok_or_else(|| io::Error::other("no connection was asked for"))?;
        let driver = Driver::new(socket, udp, ended, peer, endpoint, handle, connection);
        let mut stream = Self::from(driver);
        stream.inbox.set_limit(WAITING_INBOX_BYTES);
        stream.shake_hands(deadline)?;
        if of_member {
            stream.note_member()?;
        }
        Ok(stream)
    }
}

impl Driver {
    fn shake_hands(&mut self, deadline: Instant) -> io::Result<()> {
        loop {
            self.poll_io()?;
            if self.connected {
                return Ok(());
            }
            self.wait(Some(deadline))?;
        }
    }

    /// Notes whom the peer's certificate names. It was verified in the handshake.
    fn note_member(&mut self) -> io::Result<()> {
        let shown = self.connection.crypto_session().peer_identity();
        let chain = shown.and_then(|shown| shown.downcast::<Vec<CertificateDer<'static>>>().ok());
        let chain = chain.map(|chain| *chain).unwrap_or_default();
        let refused = |why: String| io::Error::from(TlsError::Certificate(why));
        let certificate = chain.first();
        let certificate = certificate.ok_or_else(|| refused("it has none".to_owned()))?;
        let presented = Presented::read(certificate).map_err(|why| refused(why.to_string()))?;
        let subject = presented.subject;
        self.member = Some(Arc::new(Peer { subject, chain }));
        Ok(())
    }
}
