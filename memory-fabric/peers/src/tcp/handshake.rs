//! The handshake of a connection, on a thread that may wait.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use super::config::TcpPeersConfig;
use super::hello::{
    HELLO_BYTES, Hello, Mismatch, NONCE_BYTES, PEER_VERSION, PREFIX_BYTES, PROOF_BYTES, Side, Step,
    check_proof, decode_prefix, prefix, prove,
};

/// Time limit of a handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why two nodes are not connected.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The connection broke, or the handshake took too long.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
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
            Self::Io(_) | Self::NotAPeer | Self::Refused(_) => None,
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
        }
    }

    fn hello(&self, to: u8) -> Result<Hello, HandshakeError> {
        let mut nonce = [0; NONCE_BYTES];
        let filled = SystemRandom::new().fill(&mut nonce);
        filled.map_err(|_| io::Error::other("the kernel gives no random numbers"))?;
        Ok(Hello {
            vm: self.vm,
            table: self.table,
            from: self.me.place(),
            to,
            epoch: self.epoch,
            pages: self.pages,
            nonce,
        })
    }
}

/// A connection during its handshake.
struct Opening<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> Opening<'a> {
    fn new(stream: &'a TcpStream) -> Result<Self, HandshakeError> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(false)?;
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        Ok(Self { stream, deadline })
    }

    fn time_left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(left)
    }

    fn read<const BYTES: usize>(&mut self) -> io::Result<[u8; BYTES]> {
        let mut bytes = [0; BYTES];
        let mut filled = 0;
        while filled < BYTES {
            self.stream.set_read_timeout(Some(self.time_left()?))?;
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }

    /// Sends a step. It is short enough to fit into the socket's buffer.
    fn write(&mut self, step: Step, parts: &[&[u8]]) -> io::Result<()> {
        self.stream.set_write_timeout(Some(self.time_left()?))?;
        let bytes = [&[prefix(step).as_slice()], parts].concat().concat();
        self.stream.write_all(&bytes)
    }

    /// Reads a prefix; returns whether it is that of `step`, and not of a refusal.
    fn expect(&mut self, step: Step) -> Result<(), HandshakeError> {
        let prefix = self.read::<PREFIX_BYTES>()?;
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
    stream: &TcpStream,
    credentials: &Credentials,
    peer: Member,
) -> Result<(), HandshakeError> {
    let mut opening = Opening::new(stream)?;
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
    opening.expect(Step::Welcome)
}

/// Accepts a connection of a member before this one; returns which. If an error has a
/// [`refusal`](HandshakeError::refusal), the other end waits for it.
pub(super) fn accept(
    stream: &TcpStream,
    credentials: &Credentials,
) -> Result<Member, HandshakeError> {
    let mut opening = Opening::new(stream)?;
    opening.expect(Step::Hello)?;
    let theirs = Hello::decode(&opening.read::<HELLO_BYTES>()?);
    let mine = credentials.hello(theirs.from)?;
    let fits = theirs.check(&mine, |member| member < credentials.me);
    let peer = fits.map_err(HandshakeError::Mismatch)?;
    let key = &credentials.key;
    let proof = prove(key, Side::Accepting, &theirs, &mine);
    opening.write(Step::Hello, &[&mine.encode(), &proof])?;
    opening.expect(Step::Proof)?;
    let proof = opening.read::<PROOF_BYTES>()?;
    let proven = check_proof(key, Side::Connecting, &theirs, &mine, &proof);
    proven.map_err(HandshakeError::Mismatch)?;
    opening.write(Step::Welcome, &[])?;
    Ok(peer)
}

/// Sends the other end why [`accept`] failed.
pub(super) fn refuse(stream: &TcpStream, reason: Mismatch) {
    if let Ok(mut opening) = Opening::new(stream) {
        opening.refuse(reason);
    }
}
