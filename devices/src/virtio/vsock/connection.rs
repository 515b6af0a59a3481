//! One connection between a port of the guest and a socket of the host.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::num::Wrapping;
use std::os::unix::net::UnixStream;

use super::packet::{Header, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};

/// Buffered bytes from the guest for a host that does not read. The guest knows the size and sends
/// no more than fits.
pub(super) const BUFFER_BYTES: u32 = 64 << 10;

/// The ports of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Ports {
    pub host: u32,
    pub guest: u32,
}

/// A connection, and what remains to be sent to the guest.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    /// The host has requested it, and the guest has not answered.
    asked: bool,
    /// The next packet without data for the guest: REQUEST or RESPONSE as the first packet, or
    /// RESET as the last one.
    answer: Option<u16>,
    /// A SHUTDOWN with these flags is to be sent.
    shutdown: u32,
    /// The host has closed its writing side.
    host_ended: bool,
    /// The host has closed its socket, so it reads nothing either.
    hung_up: bool,
    /// The host takes no more bytes; what it has sent before is still read.
    refuses: bool,
    /// The host may have sent data.
    readable: bool,
    /// Flags of the guest's SHUTDOWN.
    guest_ended: u32,
    /// The socket was shut down for writing.
    closed_to_host: bool,
    /// Bytes from the guest for the host.
    buffer: VecDeque<u8>,
    /// Bytes that have left the buffer, and the count last reported to the guest.
    forwarded: Wrapping<u32>,
    reported: Wrapping<u32>,
    /// The guest has requested the credit.
    asks_for_credit: bool,
    /// Bytes sent to the guest, how many have left its buffer, and that buffer's size.
    sent: Wrapping<u32>,
    guest_forwarded: Wrapping<u32>,
    guest_buffer: u32,
}

/// Whether a connection stays open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Open,
    Closed,
}

impl Connection {
    /// Creates a connection requested by a client of the host; the guest must be asked.
    pub fn asked_by_host(stream: UnixStream) -> Self {
        Self::new(stream, true, op::REQUEST)
    }

    /// Creates a connection requested by the guest, to a socket that accepts it.
    pub fn asked_by_guest(stream: UnixStream, request: &Header) -> Self {
        let mut connection = Self::new(stream, false, op::RESPONSE);
        connection.take_credit(request);
        connection
    }

    fn new(stream: UnixStream, asked: bool, answer: u16) -> Self {
        Self {
            stream,
            asked,
            answer: Some(answer),
            shutdown: 0,
            host_ended: false,
            hung_up: false,
            refuses: false,
            readable: true,
            guest_ended: 0,
            closed_to_host: false,
            buffer: VecDeque::new(),
            forwarded: Wrapping(0),
            reported: Wrapping(0),
            asks_for_credit: false,
            sent: Wrapping(0),
            guest_forwarded: Wrapping(0),
            guest_buffer: 0,
        }
    }

    fn take_credit(&mut self, header: &Header) {
        self.guest_buffer = header.buffer;
        self.guest_forwarded = Wrapping(header.forwarded);
    }

    /// How many bytes the guest has room for.
    fn credit(&self) -> u32 {
        let underway = (self.sent - self.guest_forwarded).0;
        self.guest_buffer.saturating_sub(underway)
    }

    /// Has the guest end this connection.
    pub fn reset(&mut self) {
        self.answer = Some(op::RESET);
    }

    /// The socket may be readable or writable.
    pub fn ready(&mut self, hung_up: bool) {
        self.readable = true;
        if hung_up && !self.hung_up {
            self.hung_up = true;
            if self.asked {
                // The client disconnected before the guest answered.
                self.reset();
            } else if self.host_ended {
                self.shutdown |= SHUTDOWN_RECEIVE;
            }
        }
        self.flush();
    }

    /// Handles a packet of the guest. `host_port` is for the answer to a client of the host.
    pub fn take(&mut self, header: &Header, data: &[u8], host_port: u32) -> Next {
        self.take_credit(header);
        match header.op {
            op::RESET => return Next::Closed,
            op::RESPONSE if self.asked => {
                self.asked = false;
                self.buffer.extend(format!("OK {host_port}\n").bytes());
                // These bytes are the device's and not the guest's.
                self.forwarded -= u32::try_from(self.buffer.len()).unwrap_or(0);
                self.reported = self.forwarded;
            }
            op::DATA if !self.asked => {
                let room = usize::try_from(BUFFER_BYTES).unwrap_or(0);
                let fits = data.len() <= room.saturating_sub(self.buffer.len());
                if !fits || self.guest_ended & SHUTDOWN_SEND != 0 {
                    self.reset();
                }
                if self.refuses {
                    // As if the host had taken them: the guest has not seen its end yet.
                    self.forwarded += header.length;
                } else if fits {
                    self.buffer.extend(data);
                }
            }
            op::SHUTDOWN => self.guest_ended |= header.flags & (SHUTDOWN_RECEIVE | SHUTDOWN_SEND),
            op::CREDIT_REQUEST => self.asks_for_credit = true,
            op::CREDIT_UPDATE => {}
            _ => self.reset(),
        }
        self.flush();
        Next::Open
    }

    /// Whether the guest, which has closed this connection, has sent bytes that the host has yet to take.
    pub fn lingers(&self) -> bool {
        self.guest_ended & SHUTDOWN_SEND != 0 && !self.buffer.is_empty()
    }

    /// Writes to the host as much as it accepts.
    fn flush(&mut self) {
        while !self.buffer.is_empty() {
            let (first, _) = self.buffer.as_slices();
            match self.stream.write(first) {
                Ok(count) => {
                    self.buffer.drain(..count);
                    self.forwarded += u32::try_from(count).unwrap_or(0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.forwarded += u32::try_from(self.buffer.len()).unwrap_or(0);
                    self.buffer.clear();
                    self.refuses = true;
                    self.shutdown |= SHUTDOWN_RECEIVE;
                }
            }
        }
        if self.guest_ended == SHUTDOWN_SEND | SHUTDOWN_RECEIVE {
            // Neither end sends: the reset reports to the guest that all data was delivered.
            self.reset();
        } else if self.guest_ended & SHUTDOWN_SEND != 0 && !self.closed_to_host {
            self.closed_to_host = true;
            // An error means that it is closed already.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// The next packet for the guest: its header, without addresses, and how many bytes of `data`
    /// it carries.
    pub fn next_packet(&mut self, data: &mut [u8]) -> Option<(Header, usize, Next)> {
        let mut header = Header::default();
        let mut count = 0;
        let mut next = Next::Open;
        if let Some(answer) = self.answer.take() {
            header.op = answer;
            if answer == op::RESET {
                next = Next::Closed;
            }
        } else if self.asked {
            return None;
        } else if let Some(bytes) = self.read(data) {
            header.op = op::DATA;
            header.length = u32::try_from(bytes).unwrap_or(0);
            self.sent += header.length;
            count = bytes;
        } else if self.answer.take().is_some() {
            // Reading has failed.
            header.op = op::RESET;
            next = Next::Closed;
        } else if self.shutdown != 0 {
            header.op = op::SHUTDOWN;
            header.flags = std::mem::take(&mut self.shutdown);
        } else if self.asks_for_credit || (self.forwarded - self.reported).0 >= BUFFER_BYTES / 2 {
            header.op = op::CREDIT_UPDATE;
        } else {
            return None;
        }
        self.asks_for_credit = false;
        self.reported = self.forwarded;
        header.buffer = BUFFER_BYTES;
        header.forwarded = self.forwarded.0;
        Some((header, count, next))
    }

    /// Reads from the host as much as the guest has room for.
    fn read(&mut self, data: &mut [u8]) -> Option<usize> {
        let deaf = self.guest_ended & SHUTDOWN_RECEIVE != 0;
        let credit = usize::try_from(self.credit()).unwrap_or(usize::MAX);
        let room = credit.min(data.len());
        if !self.readable || self.host_ended || deaf || room == 0 {
            return None;
        }
        loop {
            match self.stream.read(&mut data[..room]) {
                Ok(0) => {
                    self.host_ended = true;
                    self.shutdown |= SHUTDOWN_SEND;
                    if self.hung_up {
                        self.shutdown |= SHUTDOWN_RECEIVE;
                    }
                    return None;
                }
                Ok(count) => return Some(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.readable = false;
                    if error.kind() != io::ErrorKind::WouldBlock {
                        self.reset();
                    }
                    return None;
                }
            }
        }
    }
}
