//! Complete frames over a blocking stream, each with a deadline: for setting up connections, and
//! for all of a control connection.

use crate::kind::PathKind;
use crate::stream::{Carrier, Closer, Stream};
use crate::tls::{HANDSHAKE_TIMEOUT, Peer, TlsError};
use fabric_homes::NodeId;
use fabric_identity::{CertificateDer, Subject};
use fabric_wire::{
    CONTROL_BYTES_MAX, Ends, ErrorMessage, Frame, FrameKind, GrantError, HEADER_BYTES,
    PREFIX_BYTES, Refusal, Stamp, Token, TrafficClass, WireError, decode_message, encode_message,
};
use serde::{Serialize, de::DeserializeOwned};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout of establishing a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout of a peer for one control frame.
pub const CONTROL_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of each connection at the start of a VM, which one donor that is late would end. By QUIC it
/// is that of TCP's connection and of the handshake of TLS together, since no kernel answers for the
/// donor.
#[must_use]
pub const fn start_timeout(carrier: &Carrier) -> Duration {
    match carrier.kind() {
        PathKind::Udp => CONNECT_TIMEOUT.saturating_add(HANDSHAKE_TIMEOUT),
        _ => CONNECT_TIMEOUT,
    }
}

/// Longest wait of [`ControlStream::settle`]: several round trips and retransmissions, except across
/// continents. The caller serves nothing meanwhile.
const SETTLE_TIME_MAX: Duration = Duration::from_millis(200);

/// Why a control exchange failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// This build does not support the requested carrier.
    #[error("cannot connect to {0}")]
    LeftOut(SocketAddr, #[source] io::Error),
    /// No connection could be established.
    #[error("cannot connect to {0}; is `ssi-hv node` running there, and reachable?")]
    Connect(SocketAddr, #[source] io::Error),
    /// The peer is not the one that is wanted, or does not want this one.
    #[error("no authenticated connection to {0}")]
    Identity(SocketAddr, #[source] io::Error),
    /// The connection broke, or the peer was too slow.
    #[error("connection to {0} failed")]
    Stream(SocketAddr, #[source] io::Error),
    /// The peer violated the protocol.
    #[error("{0} does not keep to the protocol")]
    Protocol(SocketAddr, #[source] WireError),
    /// The donor granted a lease that was not requested.
    #[error("{0} does not lend what was asked")]
    Grant(SocketAddr, #[source] GrantError),
    /// The peer refused.
    #[error("{address} refuses: {text}")]
    Refused {
        /// The peer.
        address: SocketAddr,
        /// For programs.
        refusal: Refusal,
        /// For people.
        text: String,
    },
}

/// A blocking connection for complete frames.
#[derive(Debug)]
pub struct ControlStream {
    stream: Stream,
    peer: SocketAddr,
    /// What was received while it rested, and is read first.
    unread: Vec<u8>,
}

impl ControlStream {
    /// Connects to a donor by TCP.
    ///
    /// # Errors
    ///
    /// [`ControlError::Connect`], within [`CONNECT_TIMEOUT`].
    pub fn connect(peer: SocketAddr) -> Result<Self, ControlError> {
        Self::connect_by(peer, &Carrier::Tcp)
    }

    /// Connects to a donor.
    ///
    /// # Errors
    ///
    /// [`ControlError::Connect`], within [`CONNECT_TIMEOUT`], and [`ControlError::Identity`] when the
    /// peer is not the one that is wanted.
    pub fn connect_by(peer: SocketAddr, carrier: &Carrier) -> Result<Self, ControlError> {
        Self::connect_within(CONNECT_TIMEOUT, peer, carrier)
    }

    /// The same at the start of a VM, within [`start_timeout`].
    ///
    /// # Errors
    ///
    /// See [`connect_by`](Self::connect_by).
    pub fn connect_at_start(peer: SocketAddr, carrier: &Carrier) -> Result<Self, ControlError> {
        Self::connect_within(start_timeout(carrier), peer, carrier)
    }

    /// The same, with another timeout.
    ///
    /// # Errors
    ///
    /// See [`connect_by`](Self::connect_by).
    pub fn connect_within(
        timeout: Duration,
        peer: SocketAddr,
        carrier: &Carrier,
    ) -> Result<Self, ControlError> {
        let stream = Stream::connect(peer, carrier, timeout).map_err(|error| {
            if is_of_tls(&error) {
                return ControlError::Identity(peer, error);
            }
            match error.kind() {
                io::ErrorKind::Unsupported => ControlError::LeftOut(peer, error),
                _ => ControlError::Connect(peer, error),
            }
        })?;
        Ok(Self::accepted(stream, peer))
    }

    /// Wraps a connection that a peer opened.
    pub fn accepted(stream: Stream, peer: SocketAddr) -> Self {
        Self::woken(stream, peer, Vec::new())
    }

    /// Wraps a connection that rested. `unread` was received meanwhile.
    pub(crate) fn woken(stream: Stream, peer: SocketAddr, unread: Vec<u8>) -> Self {
        Self {
            stream,
            peer,
            unread,
        }
    }

    /// Returns whether the connection can [rest](crate::resting::Resting): it is by TCP, with or
    /// without TLS, and whatever was received on it has been read.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.unread.is_empty() && self.stream.is_quiet()
    }

    /// Sends a request and awaits the answer, which must be of kind `answer`.
    ///
    /// # Errors
    ///
    /// See [`ControlError`].
    pub fn call<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        kind: FrameKind,
        request: &Q,
        answer: FrameKind,
    ) -> Result<A, ControlError> {
        self.call_within(CONTROL_TIMEOUT, kind, request, answer)
    }

    /// The same, with another timeout for the answer.
    ///
    /// # Errors
    ///
    /// See [`ControlError`].
    pub fn call_within<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        timeout: Duration,
        kind: FrameKind,
        request: &Q,
        answer: FrameKind,
    ) -> Result<A, ControlError> {
        self.send(kind, request)?;
        let (frame, payload) = self.receive(timeout)?;
        if frame.kind != answer {
            return Err(ControlError::Protocol(
                self.peer,
                WireError::Unexpected(frame.kind),
            ));
        }
        // The connection is not driven until the next request.
        self.stream.acknowledge();
        self.decode(frame.kind, &payload)
    }

    /// Waits for a moment until all that was sent is acknowledged. Call it before the connection is
    /// left alone for long: over UDP, acknowledgements that come meanwhile are read late, count as
    /// long round trips, and delay the retransmission of the next requests by seconds.
    pub fn settle(&mut self) {
        self.stream.settle(Instant::now() + SETTLE_TIME_MAX);
    }

    /// Over UDP, waits for the next frame to come, and asks the peer for an acknowledgement after so
    /// long a silence: if its process was killed, [`receive`](Self::receive) learns so then. Kernels
    /// report that by themselves where connections are theirs; there this does nothing.
    pub fn ask_if_silent(&mut self, silence: Duration) {
        self.stream.ask_if_silent(Instant::now() + silence);
    }

    /// Sends one message.
    ///
    /// # Errors
    ///
    /// [`ControlError::Stream`], within [`CONTROL_TIMEOUT`].
    pub fn send<M: Serialize>(&mut self, kind: FrameKind, message: &M) -> Result<(), ControlError> {
        self.send_stamped(kind, message, Stamp::NONE)
    }

    /// Sends one message of a page connection.
    ///
    /// # Errors
    ///
    /// As for [`send`](Self::send).
    pub fn send_stamped<M: Serialize>(
        &mut self,
        kind: FrameKind,
        message: &M,
        stamp: Stamp,
    ) -> Result<(), ControlError> {
        let payload = encode_message(message);
        let frame = Frame::new(kind, 0, 0, true).with_stamp(stamp);
        let header = frame.encode(&payload);
        let frame = [header.as_slice(), &payload].concat();
        let deadline = Instant::now() + CONTROL_TIMEOUT;
        self.stream
            .write_all_by(&frame, deadline)
            .map_err(|error| self.broken(error))
    }

    /// Makes this a connection for pages of a lease.
    ///
    /// # Errors
    ///
    /// See [`ControlError`].
    pub fn attach(
        &mut self,
        token: Token,
        class: TrafficClass,
        ends: &Ends,
    ) -> Result<(), ControlError> {
        let request = ends.attach(token, class);
        self.send(FrameKind::Attach, &request)?;
        let (frame, _) = self.receive(CONTROL_TIMEOUT)?;
        self.check_answer(&frame, FrameKind::Attached, ends.donor, request.epoch)
    }

    /// Checks that an answer has this kind, comes from `donor`, and belongs to a request of epoch
    /// `asked`.
    ///
    /// # Errors
    ///
    /// [`ControlError::Protocol`].
    pub fn check_answer(
        &self,
        answer: &Frame,
        kind: FrameKind,
        donor: NodeId,
        asked: u64,
    ) -> Result<(), ControlError> {
        if answer.kind != kind {
            return Err(self.wrong(WireError::Unexpected(answer.kind)));
        }
        let signed = answer.check_answer(donor, asked);
        signed.map_err(|error| self.wrong(error))
    }

    /// Receives one frame within `timeout`. An `Error` frame becomes [`ControlError::Refused`].
    ///
    /// # Errors
    ///
    /// See [`ControlError`].
    pub fn receive(&mut self, timeout: Duration) -> Result<(Frame, Vec<u8>), ControlError> {
        let deadline = Instant::now() + timeout;
        let mut header = [0; HEADER_BYTES];
        // Headers of other versions may be shorter.
        let (prefix, rest) = header.split_at_mut(PREFIX_BYTES);
        self.read_exact_by(prefix, deadline)?;
        let known = Frame::check_prefix(prefix.try_into().expect("so many bytes"));
        known.map_err(|error| self.wrong(error))?;
        self.read_exact_by(rest, deadline)?;
        let frame = Frame::decode(&header).map_err(|error| self.wrong(error))?;
        if frame.length > CONTROL_BYTES_MAX {
            // Page frames are invalid here, and nothing is allocated for them.
            return Err(self.wrong(WireError::Unexpected(frame.kind)));
        }
        let mut payload = vec![0; frame.length];
        self.read_exact_by(&mut payload, deadline)?;
        frame
            .verify(&header, &payload)
            .map_err(|error| self.wrong(error))?;
        if frame.kind == FrameKind::Error {
            let message = ErrorMessage::decode(&payload).map_err(|error| self.wrong(error))?;
            let ErrorMessage { refusal, text } = message;
            return Err(ControlError::Refused {
                address: self.peer,
                refusal,
                text,
            });
        }
        Ok((frame, payload))
    }

    /// Decodes the payload of a frame from this connection.
    ///
    /// # Errors
    ///
    /// [`ControlError::Protocol`].
    pub fn decode<M: DeserializeOwned>(
        &self,
        kind: FrameKind,
        payload: &[u8],
    ) -> Result<M, ControlError> {
        decode_message(kind, payload).map_err(|error| self.wrong(error))
    }

    /// Returns the peer's address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns the local address of the connection.
    ///
    /// # Errors
    ///
    /// Fails when the connection has none any more.
    pub fn local(&self) -> Result<SocketAddr, ControlError> {
        self.stream.local().map_err(|error| self.broken(error))
    }

    /// Returns the connection itself, for pages.
    #[must_use]
    pub fn into_stream(self) -> Stream {
        self.stream
    }

    /// Returns the TCP connection itself.
    ///
    /// # Errors
    ///
    /// Fails when it is not TCP.
    pub fn into_tcp(self) -> Result<TcpStream, ControlError> {
        let peer = self.peer;
        let stream = self.stream.into_tcp();
        stream.map_err(|error| ControlError::Stream(peer, error))
    }

    /// Returns the socket of the TCP connection, with or without TLS, when nothing travels on it any
    /// more.
    ///
    /// # Errors
    ///
    /// Fails when it is not TCP.
    pub fn into_socket(self) -> Result<TcpStream, ControlError> {
        let peer = self.peer;
        let socket = self.stream.into_socket();
        socket.map_err(|error| ControlError::Stream(peer, error))
    }

    /// Returns whom the peer's certificate names, if it has shown one.
    #[must_use]
    pub fn identity(&self) -> Option<&Subject> {
        self.stream.peer().map(|peer| &peer.subject)
    }

    /// Returns the peer, if it has shown a certificate.
    #[must_use]
    pub fn member(&self) -> Option<&Arc<Peer>> {
        self.stream.peer()
    }

    /// Returns the certificate that the peer has shown, and those between it and the authority.
    #[must_use]
    pub fn chain(&self) -> Option<&[CertificateDer<'static>]> {
        self.stream.peer().map(|peer| peer.chain.as_slice())
    }

    /// Returns the socket of the TCP connection, with or without TLS, to wait for its end; `None`
    /// when it is not TCP.
    #[must_use]
    pub fn socket(&self) -> Option<&TcpStream> {
        match &self.stream {
            Stream::Tcp(stream) => Some(stream),
            Stream::Tls(stream) => Some(stream.socket()),
            Stream::Udp(_) => None,
        }
    }

    /// Returns what ends the connection from another thread.
    #[must_use]
    pub fn closer(&self) -> Closer {
        self.stream.closer()
    }

    /// Returns whether it is by UDP.
    #[must_use]
    pub fn is_udp(&self) -> bool {
        matches!(self.stream, Stream::Udp(_))
    }

    fn read_exact_by(&mut self, buffer: &mut [u8], deadline: Instant) -> Result<(), ControlError> {
        let mut filled = self.unread.len().min(buffer.len());
        buffer[..filled].copy_from_slice(&self.unread[..filled]);
        self.unread.drain(..filled);
        while filled < buffer.len() {
            match self.stream.read_by(&mut buffer[filled..], deadline) {
                Ok(0) => return Err(self.broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
        Ok(())
    }

    fn broken(&self, error: io::Error) -> ControlError {
        // A peer that refuses this end's certificate does so after the handshake.
        if is_of_tls(&error) {
            return ControlError::Identity(self.peer, error);
        }
        ControlError::Stream(self.peer, error)
    }

    fn wrong(&self, error: WireError) -> ControlError {
        ControlError::Protocol(self.peer, error)
    }
}

/// Whether an error is one of TLS, rather than of the connection under it.
#[must_use]
pub fn is_of_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|cause| cause.is::<TlsError>())
}
