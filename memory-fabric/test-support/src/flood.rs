//! Clients that take a node's places and send nothing of use.

use crate::PATIENCE;
use fabric_identity::NAME;
use quinn_proto::crypto::rustls::QuicClientConfig;
use quinn_proto::{ClientConfig, DatagramEvent, Endpoint, EndpointConfig};
use rustls::version::TLS13;
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a client waits for the answer to its first packet.
const ANSWER_TIME_MAX: Duration = Duration::from_millis(500);

/// Opens a connection by TCP, on which nothing is sent.
pub fn silent(node: SocketAddr, from: Ipv4Addr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    // The kernel repeats what finds its queue full.
    socket.connect_timeout(&node.into(), PATIENCE)?;
    Ok(socket.into())
}

/// A client of QUIC that begins handshakes.
pub struct Handshakes {
    config: ClientConfig,
}

impl Handshakes {
    /// # Panics
    /// Panics when TLS cannot be configured.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "a fixture")]
    pub fn new() -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .expect("it has this version")
            // No certificate is ever looked at.
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"ssi-hv".to_vec()];
        let quic = QuicClientConfig::try_from(tls).expect("it has the ciphers");
        Self {
            config: ClientConfig::new(Arc::new(quic)),
        }
    }

    /// Begins a handshake, proves the address to the node, and never answers what the node sends then.
    /// Returns whether the node asked for that proof.
    pub fn begin(&self, node: SocketAddr, from: Ipv4Addr) -> io::Result<(UdpSocket, bool)> {
        let socket = UdpSocket::bind((from, 0))?;
        socket.connect(node)?;
        socket.set_read_timeout(Some(ANSWER_TIME_MAX))?;
        let mut endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), None, true, None);
        let (handle, mut connection) = endpoint
            .connect(Instant::now(), self.config.clone(), node, NAME)
            .map_err(io::Error::other)?;
        let mut packet = Vec::new();
        let mut send = |connection: &mut quinn_proto::Connection| -> io::Result<()> {
            packet.clear();
            if let Some(transmit) = connection.poll_transmit(Instant::now(), 1, &mut packet) {
                socket.send(&packet[..transmit.size])?;
            }
            Ok(())
        };
        send(&mut connection)?;
        let mut answer = [0; 2048];
        let Ok(count) = socket.recv(&mut answer) else {
            return Ok((socket, false));
        };
        let (answer, mut response) = (answer[..count].into(), Vec::new());
        let event = endpoint.handle(Instant::now(), node, None, None, answer, &mut response);
        if let Some(DatagramEvent::ConnectionEvent(to, event)) = event
            && to == handle
        {
            connection.handle_event(event);
        }
        send(&mut connection)?;
        Ok((socket, true))
    }
}
