//! The handshake of a connection, on a thread that may wait.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use fabric_host::prefer_latency;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use super::channel::{Channel, Security};
use super::config::TcpPeersConfig;
use super::hello::{
    HELLO_BYTES, Hello, MAGIC, Mismatch, NONCE_BYTES, PEER_VERSION, PREFIX_BYTES, PROOF_BYTES,
    Rdma, Side, Step, check_proof, decode_prefix, prefix, prove,
};
use super::upgrade::{Agreed, Upgrades};

/// Time limit of a handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the other end may take to read why it is refused.
const REFUSING_TIME_MAX: Duration = Duration::from_millis(500);

/// The first byte of a connection under TLS: the type of a record (RFC 8446, section 5.1).
const TLS_HANDSHAKE: u8 = 22;

/// Why two nodes are not connected.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The connection broke, or the handshake took too long.
    #[error("the connection failed: {0}")]
    Io(io::Error),
    /// One end does not accept the certificate of the other.
    #[error("{0}")]
    Identity(io::Error),
    /// The other end does not speak this protocol.
    #[error("the other end is no compute node")]
    NotAPeer,
    /// The other end speaks another version.
    #[error("this node speaks version {PEER_VERSION} of the peer protocol, the other version {0}")]
    Version(u16),
    /// This node refused the other one.
    #[error("the other node has {0}")]
    Mismatch(Mismatch),
    /// The other node refused this one.
    #[error("the other node refused this one, which has {0}")]
    Refused(Mismatch),
    /// RDMA is demanded, and not possible.
    #[error("RDMA is demanded, and not possible: {0}")]
    Rdma(String),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        // What the kernel refuses has no text of its own.
        let refused = [io::ErrorKind::PermissionDenied, io::ErrorKind::InvalidData];
        if error.get_ref().is_some() && refused.contains(&error.kind()) {
            return Self::Identity(error);
        }
        Self::Io(error)
    }
}

impl HandshakeError {
    /// Whether another attempt would end in the same way.
    pub(super) fn is_final(&self) -> bool {
        !matches!(self, Self::Io(_))
    }

    /// What to [`refuse`] the other end for, after [`accept`] failed.
    pub(super) fn refusal(&self) -> Option<Mismatch> {
        match self {
            Self::Mismatch(reason) => Some(*reason),
            Self::Version(_) => Some(Mismatch::Version),
            Self::Io(_) | Self::Identity(_) | Self::NotAPeer | Self::Refused(_) | Self::Rdma(_) => {
                None
            }
        }
    }
}

/// What this node says and proves.
#[derive(Debug)]
pub(super) struct Credentials {
    pub(super) vm: [u8; 16],
    pub(super) table: [u8; 32],
    pub(super) me: Member,
    pub(super) epoch: u32,
    pub(super) pages: u32,
    pub(super) key: hmac::Key,
    /// What connections are made secure with.
    pub(super) security: Option<Arc<dyn Security>>,
    /// What rings are made with; `None` for none.
    pub(super) upgrades: Option<Arc<Upgrades>>,
}

impl Credentials {
    pub(super) fn new(config: &TcpPeersConfig, key: hmac::Key) -> Self {
        Self {
            vm: config.vm,
            table: config.table(),
            me: config.me,
            epoch: config.epoch,
            pages: config.memory_pages,
            key,
            security: config.security.clone(),
            upgrades: None,
        }
    }

    fn hello(&self, to: u8) -> Result<Hello, HandshakeError> {
        let mut nonce = [0; NONCE_BYTES];
        let filled = SystemRandom::new().fill(&mut nonce);
        filled.map_err(|_| io::Error::other("the kernel gives no random numbers"))?;
        let upgrades = self.upgrades.as_ref();
        let choice = Member::at(to).zip(upgrades);
        Ok(Hello {
            vm: self.vm,
            table: self.table,
            from: self.me.place(),
            to,
            rdma: choice.map_or(Rdma::Absent, |(to, upgrades)| upgrades.choice(to)),
            epoch: self.epoch,
            pages: self.pages,
            nonce,
        })
    }
}

/// Why a socket is not a connection of which both ends are known; the socket too, when the other
/// end waits for the reason.
pub(super) type Unsecured = (HandshakeError, Option<TcpStream>);

/// Prepares a socket for a handshake.
fn prepare(socket: &TcpStream) -> io::Result<()> {
    prefer_latency(socket)?;
    socket.set_nonblocking(true)
}

/// Makes a connection to `peer` of a socket.
pub(super) fn secure_to(
    socket: TcpStream,
    credentials: &Credentials,
    peer: Member,
) -> Result<Channel, HandshakeError> {
    prepare(&socket)?;
    match &credentials.security {
        None => Ok(Channel::Plain(socket)),
        Some(security) => Ok(Channel::Secure(security.connect(socket, peer)?)),
    }
}

/// Makes a connection of a socket that was accepted. Returns whose it is, if that is known.
pub(super) fn secure_from(
    socket: TcpStream,
    credentials: &Credentials,
) -> Result<(Channel, Option<Member>), Unsecured> {
    let Some(security) = &credentials.security else {
        return match prepare(&socket) {
            Ok(()) => Ok((Channel::Plain(socket), None)),
            Err(error) => Err((error.into(), None)),
        };
    };
    let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
    let first = prepare(&socket).and_then(|()| Channel::first_byte(&socket, deadline));
    match first {
        // A node without certificates learns why in its own protocol.
        Ok(byte) if byte == MAGIC[0] => Err((
            HandshakeError::Mismatch(Mismatch::Certificates),
            Some(socket),
        )),
        Ok(_) => match security.accept(socket) {
            Ok((stream, peer)) => Ok((Channel::Secure(stream), Some(peer))),
            Err(error) => Err((error.into(), None)),
        },
        Err(error) => Err((error.into(), None)),
    }
}

/// A connection during its handshake.
pub(super) struct Opening<'a> {
    stream: &'a mut Channel,
    deadline: Instant,
    /// Whether the other end began as TLS does.
    came_with_tls: bool,
}

impl<'a> Opening<'a> {
    fn new(stream: &'a mut Channel) -> Self {
        Self::until(stream, Instant::now() + HANDSHAKE_TIMEOUT)
    }

    pub(super) fn until(stream: &'a mut Channel, deadline: Instant) -> Self {
        Self {
            stream,
            deadline,
            came_with_tls: false,
        }
    }

    pub(super) fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact_by(bytes, self.deadline)
    }

    pub(super) fn read<const BYTES: usize>(&mut self) -> io::Result<[u8; BYTES]> {
        let mut bytes = [0; BYTES];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Sends a step. It is short enough to fit into the socket's buffer.
    pub(super) fn write(&mut self, step: Step, parts: &[&[u8]]) -> io::Result<()> {
        let bytes = [&[prefix(step).as_slice()], parts].concat().concat();
        self.stream.write_all_by(&bytes, self.deadline)
    }

    /// Reads a prefix; returns whether it is that of `step`, and not of a refusal.
    pub(super) fn expect(&mut self, step: Step) -> Result<(), HandshakeError> {
        let prefix = self.read::<PREFIX_BYTES>()?;
        self.came_with_tls = prefix[0] == TLS_HANDSHAKE;
        let (version, found) = decode_prefix(prefix).ok_or(HandshakeError::NotAPeer)?;
        if version != PEER_VERSION {
            return Err(HandshakeError::Version(version));
        }
        if found == Step::Refusal as u16 {
            let [reason] = self.read()?;
            let reason = Mismatch::new(reason).ok_or(HandshakeError::NotAPeer)?;
            return Err(HandshakeError::Refused(reason));
        }
        if found == step as u16 {
            Ok(())
        } else {
            Err(HandshakeError::NotAPeer)
        }
    }

    /// Sends the reason before the connection ends.
    fn refuse(&mut self, reason: Mismatch) {
        // The other end may be gone; the reason is known here as well.
        let _ = self.write(Step::Refusal, &[&[reason as u8]]);
    }
}

/// Connects to `peer`.
pub(super) fn connect(
    stream: &mut Channel,
    credentials: &Credentials,
    peer: Member,
) -> Result<Agreed, HandshakeError> {
    let mut opening = Opening::new(stream);
    let mine = credentials.hello(peer.place())?;
    opening.write(Step::Hello, &[&mine.encode()])?;
    opening.expect(Step::Hello)?;
    let theirs = Hello::decode(&opening.read::<HELLO_BYTES>()?);
    let proof = opening.read::<PROOF_BYTES>()?;
    let key = &credentials.key;
    let fits = theirs.check(&mine, |member| member == peer);
    let fits = fits.and_then(|_| check_proof(key, Side::Accepting, &mine, &theirs, &proof));
    fits.map_err(|reason| {
        opening.refuse(reason);
        HandshakeError::Mismatch(reason)
    })?;
    let proof = prove(key, Side::Connecting, &mine, &theirs);
    opening.write(Step::Proof, &[&proof])?;
    opening.expect(Step::Welcome)?;
    Ok(agreed(&mine, &theirs))
}

fn agreed(mine: &Hello, theirs: &Hello) -> Agreed {
    Agreed {
        rdma: mine.rdma.is_agreed(theirs.rdma),
        mine: mine.nonce,
        theirs: theirs.nonce,
    }
}

/// Accepts a connection of a member before this one, which has to be `known` if that is given;
/// returns which. If an error has a [`refusal`](HandshakeError::refusal), the other end waits for
/// it.
pub(super) fn accept(
    stream: &mut Channel,
    credentials: &Credentials,
    known: Option<Member>,
) -> Result<(Member, Agreed), HandshakeError> {
    let mut opening = Opening::new(stream);
    opening.expect(Step::Hello).map_err(|error| match error {
        HandshakeError::NotAPeer if opening.came_with_tls => {
            HandshakeError::Mismatch(Mismatch::Certificates)
        }
        error => error,
    })?;
    let theirs = Hello::decode(&opening.read::<HELLO_BYTES>()?);
    let mine = credentials.hello(theirs.from)?;
    let fits = theirs.check(&mine, |member| {
        member < credentials.me && known.is_none_or(|known| known == member)
    });
    let peer = fits.map_err(HandshakeError::Mismatch)?;
    let key = &credentials.key;
    let proof = prove(key, Side::Accepting, &theirs, &mine);
    opening.write(Step::Hello, &[&mine.encode(), &proof])?;
    opening.expect(Step::Proof)?;
    let proof = opening.read::<PROOF_BYTES>()?;
    let proven = check_proof(key, Side::Connecting, &theirs, &mine, &proof);
    proven.map_err(HandshakeError::Mismatch)?;
    opening.write(Step::Welcome, &[])?;
    Ok((peer, agreed(&mine, &theirs)))
}

/// Sends the other end why [`accept`] failed.
pub(super) fn refuse(stream: &mut Channel, reason: Mismatch) {
    Opening::new(stream).refuse(reason);
    if let Channel::Plain(_) = stream {
        // Closing a socket with unread data, which one of the other kind sends, would reset the
        // connection before the other end has read the reason.
        stream.drain(Instant::now() + REFUSING_TIME_MAX);
    }
}
