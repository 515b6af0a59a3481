//! Establishing a connection: who both ends are.

use super::session::{Session, Step, Then};
use super::{INPUT_BYTES, OUTPUT_BYTES, Peer, RECORD_BYTES_MAX, TlsStream};
use crate::UNKNOWN_BYTES_MAX;
use fabric_host::poll::sleep_on;
use fabric_host::prefer_latency;
use fabric_identity::pinned::PinnedPeers;
use fabric_identity::presented::Presented;
use fabric_identity::{ExpectedNode, NAME, SharedCredentials};
use fabric_wire::{ErrorMessage, Frame, FrameKind, MAGIC, Refusal, encode_message};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::{AlertDescription, ClientConfig, Error, ServerConfig};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout of a handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a peer without TLS may take to read why it is refused.
const REFUSING_TIME_MAX: Duration = Duration::from_millis(500);

/// What a peer without TLS is told.
const REFUSAL: &str = "this node accepts only connections with certificates: give --credentials DIR, \
                       with a certificate that `ssi-hv pki` issued";

/// Why there is no connection under TLS.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TlsError {
    /// The peer does not use TLS.
    #[error(
        "it does not use certificates, and this end does; start `ssi-hv node` there with --credentials"
    )]
    Plain,
    /// A client does not use TLS. It was told so.
    #[error("the client does not use certificates")]
    PlainClient,
    /// The peer sent more than a handshake has.
    #[error(
        "it sent more than {UNKNOWN_BYTES_MAX} bytes during the TLS handshake, which is the limit"
    )]
    Long,
    /// The peer was silent.
    #[error("no TLS handshake within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Late,
    /// The peer ended the connection.
    #[error("it closed the connection during the TLS handshake")]
    Closed,
    /// The peer refuses.
    #[error(
        "it refuses this end's certificate (TLS alert {0:?}): it is missing, expired, revoked, of another \
         authority or of a wrong role; check it with `ssi-hv pki verify`, and see the log of the node"
    )]
    Refused(AlertDescription),
    /// The peer's certificate is not accepted.
    #[error("its certificate is not accepted: {0}")]
    Certificate(String),
    /// The protocol was violated, or the connection was tampered with.
    #[error("TLS failed: {0}")]
    Protocol(Error),
    /// The same, within QUIC.
    #[error("TLS failed: {0}")]
    Handshake(String),
    /// This end's credentials cannot be used.
    #[error("the credentials cannot be used: {0}")]
    Credentials(String),
}

/// Whether an alert says that the peer does not accept this end, rather than that something broke.
const fn refuses(alert: AlertDescription) -> bool {
    use AlertDescription as Alert;
    matches!(
        alert,
        Alert::NoCertificate
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::CertificateRequired
            | Alert::HandshakeFailure
            | Alert::DecryptError
            | Alert::InternalError
    )
}

impl From<Error> for TlsError {
    fn from(error: Error) -> Self {
        match error {
            Error::AlertReceived(alert) if refuses(alert) => Self::Refused(alert),
            Error::InvalidCertificate(why) => Self::Certificate(why.to_string()),
            Error::NoCertificatesPresented => Self::Certificate("it has none".to_owned()),
            Error::General(why) => Self::Certificate(why),
            other => Self::Protocol(other),
        }
    }
}

impl TlsError {
    /// Returns the failure of a handshake of QUIC that the peer ended with this alert.
    #[must_use]
    pub fn alerted(alert: u8) -> Self {
        Error::AlertReceived(alert.into()).into()
    }

    /// Returns the failure of a handshake of QUIC that this end found. `text` is what rustls printed.
    #[must_use]
    pub fn found(text: &str) -> Self {
        let none = Error::NoCertificatesPresented;
        if text == none.to_string() {
            return none.into();
        }
        for certificate in ["invalid peer certificate: ", "unexpected error: "] {
            if let Some(why) = text.strip_prefix(certificate) {
                return Self::Certificate(why.to_owned());
            }
        }
        Self::Handshake(text.to_owned())
    }
}

impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        let kind = match error {
            TlsError::Late => io::ErrorKind::TimedOut,
            TlsError::Closed => io::ErrorKind::UnexpectedEof,
            TlsError::Refused(_) | TlsError::Certificate(_) => io::ErrorKind::PermissionDenied,
            _ => io::ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}

fn unusable(why: impl ToString) -> io::Error {
    TlsError::Credentials(why.to_string()).into()
}

impl TlsStream {
    /// Makes a connection one to an expected node.
    ///
    /// # Errors
    ///
    /// Fails when the peer is not that node, and after [`HANDSHAKE_TIMEOUT`]. Whether the peer accepts
    /// this end shows at the first read.
    pub fn connect(socket: TcpStream, expected: &ExpectedNode) -> io::Result<Self> {
        let config = expected.client().map_err(unusable)?;
        Self::connect_with(socket, Arc::new(config))
    }

    /// Makes a connection one to the process of the same VM at this place.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn connect_pinned(
        socket: TcpStream,
        peers: &PinnedPeers,
        place: usize,
    ) -> io::Result<Self> {
        let config = peers.client(place);
        let config = config.ok_or_else(|| unusable(format!("there is no process {place}")))?;
        Self::connect_with(socket, config)
    }

    fn connect_with(socket: TcpStream, config: Arc<ClientConfig>) -> io::Result<Self> {
        let name = ServerName::try_from(NAME).map_err(unusable)?;
        let client = UnbufferedClientConnection::new(config, name).map_err(unusable)?;
        Self::establish(socket.into(), Session::Client(Box::new(client)))
    }

    /// Makes a connection one from a member of the cluster. A client that does not use TLS is told
    /// why it is refused.
    ///
    /// # Errors
    ///
    /// Fails when the peer is none, and after [`HANDSHAKE_TIMEOUT`].
    pub fn accept(
        socket: impl Into<Arc<TcpStream>>,
        credentials: &SharedCredentials,
    ) -> io::Result<Self> {
        Self::accept_with(socket.into(), credentials.server())
    }

    /// Makes a connection one from a process of the same VM before this one, and returns the place
    /// of that.
    ///
    /// # Errors
    ///
    /// As [`accept`](Self::accept).
    pub fn accept_pinned(socket: TcpStream, peers: &PinnedPeers) -> io::Result<(Self, usize)> {
        let stream = Self::accept_with(socket.into(), peers.server())?;
        let certificate = stream.peer.chain.first();
        let place = certificate.and_then(|certificate| peers.place_of(certificate));
        let none = || TlsError::Certificate("it is of no process of this VM".to_owned());
        Ok((stream, place.ok_or_else(none)?))
    }

    fn accept_with(socket: Arc<TcpStream>, config: Arc<ServerConfig>) -> io::Result<Self> {
        let server = UnbufferedServerConnection::new(config).map_err(unusable)?;
        Self::establish(socket, Session::Server(Box::new(server)))
    }

    fn establish(socket: Arc<TcpStream>, session: Session) -> io::Result<Self> {
        prefer_latency(&socket)?;
        socket.set_nonblocking(true)?;
        let is_server = matches!(session, Session::Server(_));
        let mut handshake = Handshake {
            socket,
            session,
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            received: 0,
            total: 0,
            output: vec![0; OUTPUT_BYTES].into_boxed_slice(),
            pending: 0..0,
            deadline: Instant::now() + HANDSHAKE_TIMEOUT,
            rest: Vec::with_capacity(RECORD_BYTES_MAX),
        };
        if let Err(error) = handshake.shake_hands() {
            let plain = error.get_ref().and_then(|cause| cause.downcast_ref());
            if is_server && matches!(plain, Some(TlsError::Plain)) {
                handshake.refuse_plain();
                return Err(TlsError::PlainClient.into());
            }
            return Err(error);
        }
        let chain = handshake.session.common().peer_certificates();
        let chain: Vec<_> = chain.unwrap_or_default().to_vec();
        let certificate = chain.first().ok_or(Error::NoCertificatesPresented);
        let presented = Presented::read(certificate.map_err(TlsError::from)?);
        let presented = presented.map_err(|why| TlsError::Certificate(why.to_string()))?;
        let Handshake {
            socket,
            session,
            input,
            received,
            output,
            rest,
            ..
        } = handshake;
        Ok(Self {
            socket,
            session,
            peer: Arc::new(Peer {
                subject: presented.subject,
                chain,
            }),
            input,
            received: 0..received,
            is_ready: received > 0 || !rest.is_empty(),
            rest,
            rest_read: 0,
            output,
            unsent: 0..0,
            gathered: Vec::with_capacity(super::BATCH_BYTES),
            closed: false,
            is_settled: false,
            failed: false,
            detached: false,
        })
    }
}

/// A connection that is not established yet.
struct Handshake {
    socket: Arc<TcpStream>,
    session: Session,
    input: Box<[u8]>,
    received: usize,
    /// All bytes that were received.
    total: usize,
    output: Box<[u8]>,
    /// The part of `output` to send.
    pending: std::ops::Range<usize>,
    deadline: Instant,
    /// Application data that came with the last message.
    rest: Vec<u8>,
}

impl Handshake {
    fn shake_hands(&mut self) -> io::Result<()> {
        let mut first = true;
        loop {
            let advanced = self.advance();
            // The peer learns the reason even if this end fails.
            self.send()?;
            advanced?;
            if !self.session.common().is_handshaking() {
                return Ok(());
            }
            self.receive()?;
            if first && self.input[0] == MAGIC[0] {
                return Err(TlsError::Plain.into());
            }
            first = false;
        }
    }

    /// Makes as many steps as the received bytes allow.
    fn advance(&mut self) -> io::Result<()> {
        let mut used = 0..0;
        let result = loop {
            let input = &mut self.input[..self.received];
            let rest = &mut self.rest;
            let mut take = |bytes: &[u8]| rest.extend_from_slice(bytes);
            let output = (&mut *self.output, &mut used);
            let advanced = self
                .session
                .advance(input, output, Then::Nothing, &mut take);
            self.input.copy_within(advanced.discard..self.received, 0);
            self.received -= advanced.discard;
            match advanced.step {
                Ok(Step::Advanced) if self.rest.is_empty() => {}
                Ok(Step::Advanced | Step::Idle) => break Ok(()),
                Ok(Step::Closed) => break Err(TlsError::Closed.into()),
                Err(error) => {
                    self.session.take_output((&mut *self.output, &mut used));
                    break Err(TlsError::from(error).into());
                }
            }
        };
        self.pending = used;
        result
    }

    fn send(&mut self) -> io::Result<()> {
        while !self.pending.is_empty() {
            match (&*self.socket).write(&self.output[self.pending.clone()]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.pending.start += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(libc::POLLOUT)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<()> {
        loop {
            match (&*self.socket).read(&mut self.input[self.received..]) {
                Ok(0) => return Err(TlsError::Closed.into()),
                Ok(count) => {
                    self.received += count;
                    self.total += count;
                    if self.total > UNKNOWN_BYTES_MAX {
                        return Err(TlsError::Long.into());
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(libc::POLLIN)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn wait(&self, events: libc::c_short) -> io::Result<()> {
        if Instant::now() >= self.deadline {
            return Err(TlsError::Late.into());
        }
        sleep_on(self.socket.as_raw_fd(), events, Some(self.deadline))
    }

    /// Sends a client without TLS the reason for which it is refused, in its protocol.
    fn refuse_plain(&mut self) {
        let message = ErrorMessage {
            refusal: Refusal::Malformed,
            text: REFUSAL.to_owned(),
        };
        let payload = encode_message(&message);
        let header = Frame::new(FrameKind::Error, 0, 0, true).encode(&payload);
        let frame = [header.as_slice(), &payload].concat();
        // Best effort: a new connection accepts as much at once.
        let _ = (&*self.socket).write(&frame);
        let _ = self.socket.shutdown(Shutdown::Write);
        // Closing a socket with unread data would reset the connection before the peer has read.
        self.deadline = Instant::now() + REFUSING_TIME_MAX;
        self.received = 0;
        while self.receive().is_ok() {
            self.received = 0;
        }
    }
}
