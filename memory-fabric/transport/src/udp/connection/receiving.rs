//! The receive path: from the socket through the protocol to whole frames.

use super::{BATCH, BATCHES_MAX, CLOSED, DATAGRAM_BUFFER_BYTES, Driver, Failure, stream_id};
use crate::tls::TlsError;
use crate::udp::streams::STREAMS;
use bytes::BytesMut;
use fabric_wire::RENEWAL_INTERVAL_MAX;
use quinn_proto::{
    ConnectionError, DatagramEvent, Event, ReadError, StreamEvent, StreamId, TransportErrorCode,
};
use quinn_udp::{RecvMeta, UdpSockRef};
use std::io::{self, IoSliceMut};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

impl Driver {
    /// Passes received datagrams to the protocol, and extracts frames.
    pub(super) fn receive(&mut self) {
        let mut is_refused = false;
        for _ in 0..BATCHES_MAX {
            let mut metas = [RecvMeta::default(); BATCH];
            let mut input = std::mem::take(&mut self.input);
            let batch = input.len() / DATAGRAM_BUFFER_BYTES;
            let mut parts = input.chunks_mut(DATAGRAM_BUFFER_BYTES);
            let mut buffers: [IoSliceMut<'_>; BATCH] =
                std::array::from_fn(|_| IoSliceMut::new(parts.next().unwrap_or_default()));
            let socket = UdpSockRef::from(&*self.socket);
            let received = self
                .udp
                .recv(socket, &mut buffers[..batch], &mut metas[..batch]);
            let count = match &received {
                Ok(count) => *count,
                Err(_) => 0,
            };
            if count > 0 {
                self.refused_since = None;
            }
            for (buffer, meta) in input.chunks(DATAGRAM_BUFFER_BYTES).zip(&metas[..count]) {
                let stride = meta.stride.max(1);
                for datagram in buffer[..meta.len].chunks(stride) {
                    self.handle(datagram);
                }
            }
            self.input = input;
            match received {
                Ok(count) if count < batch => break,
                Ok(_) => {}
                // The socket reports it before the datagrams that came earlier.
                Err(error) if is_refusal(&error) => is_refused = true,
                Err(_) => break,
            }
        }
        self.take_events();
        self.gather();
        if is_refused {
            self.note_refusal();
        }
    }

    /// Notes an error of sending. What the peer sent before its port had no listener comes first: its
    /// last answer, and that it closed the connection.
    pub(super) fn note_send_error(&mut self, error: &io::Error) {
        if is_refusal(error) {
            self.receive();
            self.note_refusal();
        }
    }

    /// The host of the peer refuses a datagram; anybody who guesses a port can say so. A VM that believes
    /// it connects again. A donor asks the VM first: its memory is at stake.
    pub(super) fn note_refusal(&mut self) {
        let may_be_forged =
            self.connected && self.connection.side().is_server() && !self.believes_refusals;
        let now = Instant::now();
        match self.refused_since {
            None if may_be_forged => {
                self.refused_since = Some(now);
                self.connection.ping();
            }
            Some(since) if may_be_forged && now - since < REFUSED_TIME => {}
            _ => self.fail_refused(),
        }
    }

    fn fail_refused(&mut self) {
        let text = "no process listens on that UDP port".to_owned();
        self.fail(io::ErrorKind::ConnectionRefused, text);
    }

    fn handle(&mut self, datagram: &[u8]) {
        let (now, mut response) = (Instant::now(), Vec::new());
        let datagram = BytesMut::from(datagram);
        let event = self
            .endpoint
            .handle(now, self.peer, None, None, datagram, &mut response);
        match event {
            Some(DatagramEvent::ConnectionEvent(handle, event)) if handle == self.handle => {
                self.connection.handle_event(event);
            }
            Some(DatagramEvent::NewConnection(incoming)) => self.endpoint.ignore(incoming),
            Some(DatagramEvent::Response(transmit)) => {
                let _ = self.socket.send(&response[..transmit.size]);
            }
            Some(DatagramEvent::ConnectionEvent(..)) | None => {}
        }
    }

    pub(super) fn take_events(&mut self) {
        loop {
            while let Some(event) = self.connection.poll_endpoint_events() {
                let answer = self.endpoint.handle_event(self.handle, event);
                if let Some(answer) = answer {
                    self.connection.handle_event(answer);
                }
            }
            let Some(event) = self.connection.poll() else {
                return;
            };
            match event {
                Event::Connected => self.connected = true,
                Event::ConnectionLost { reason } => self.lost(&reason),
                Event::Stream(StreamEvent::Opened { dir }) => {
                    while let Some(id) = self.connection.streams().accept(dir) {
                        self.note_readable(id);
                    }
                }
                Event::Stream(StreamEvent::Readable { id }) => self.note_readable(id),
                Event::Stream(StreamEvent::Writable { .. }) => self.writable = true,
                _ => {}
            }
        }
    }

    fn note_readable(&mut self, id: StreamId) {
        let number = usize::try_from(id.index()).unwrap_or(usize::MAX);
        if let Some(readable) = self.readable.get_mut(number) {
            *readable = true;
        }
    }

    fn lost(&mut self, reason: &ConnectionError) {
        if let Some(error) = of_tls(reason) {
            self.failed.get_or_insert(Failure::Tls(error));
            return;
        }
        let kind = match reason {
            ConnectionError::ApplicationClosed(close) if close.error_code == CLOSED => {
                io::ErrorKind::UnexpectedEof
            }
            ConnectionError::TimedOut => io::ErrorKind::TimedOut,
            ConnectionError::TransportError(_) | ConnectionError::VersionMismatch => {
                io::ErrorKind::InvalidData
            }
            _ => io::ErrorKind::ConnectionReset,
        };
        self.fail(kind, reason.to_string());
    }

    /// Moves received data from the streams to the inbox while there is room.
    fn gather(&mut self) {
        for number in 0..STREAMS {
            if !self.readable[number] {
                continue;
            }
            let mut failure = None;
            let mut stream = self.connection.recv_stream(stream_id(number));
            // A stream that is not open has no data.
            let Ok(mut chunks) = stream.read(true) else {
                self.readable[number] = false;
                continue;
            };
            while self.inbox.has_room(number) {
                match chunks.next(self.inbox.room()) {
                    Ok(Some(chunk)) => {
                        self.inbox.push(number, &chunk.bytes);
                        continue;
                    }
                    Ok(None) => failure = Some("the peer ended a stream".to_owned()),
                    Err(ReadError::Blocked) => {}
                    Err(error) => failure = Some(error.to_string()),
                }
                self.readable[number] = false;
                break;
            }
            // Its window updates are sent with the next packet.
            let _ = chunks.finalize();
            if let Some(text) = failure {
                self.fail(io::ErrorKind::ConnectionReset, text);
            }
        }
    }
}

/// How long a donor asks a VM whose host refuses datagrams: an idle VM answers with its next renewal.
const REFUSED_TIME: Duration = RENEWAL_INTERVAL_MAX.saturating_add(Duration::from_secs(1));

/// Returns whether an error of the socket means that the peer's port has no listener. Other errors are
/// transient, or detected by silence.
fn is_refusal(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

/// Codes of failed handshakes; the last byte is the TLS alert (RFC 9001, section 4.8).
const CRYPTO_ERRORS: RangeInclusive<u64> = 0x100..=0x1ff;

/// Returns the failure of a handshake: one end does not accept the other.
fn of_tls(reason: &ConnectionError) -> Option<TlsError> {
    let alert = |code: TransportErrorCode| {
        let code = u64::from(code);
        let alert = u8::try_from(code & 0xff).ok()?;
        CRYPTO_ERRORS.contains(&code).then_some(alert)
    };
    match reason {
        ConnectionError::TransportError(error) => {
            alert(error.code).map(|_| TlsError::found(&error.reason))
        }
        ConnectionError::ConnectionClosed(close) => alert(close.error_code).map(TlsError::alerted),
        _ => None,
    }
}
