//! The console of virtio (virtio 1.2, section 5.3), with one port: `/dev/hvc0` of Linux.
//!
//! Its other end is a Unix socket of the host. One client at a time is connected; others wait until
//! it has disconnected. The guest's output is taken at once, even without a client, since drivers
//! busy-wait for that. The newest part of it is kept for a slow or later client.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Mutex;

use rustix::event::{Timespec, epoll};
use rustix::net::{RecvFlags, recv};
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use super::host_socket::{HostSocket, HostSocketError};
use super::{BrokenRing, Buffers, Ring, VirtioDevice};
use crate::lock;

/// Queues: to the guest, from the guest.
const QUEUE_SIZES: [u16; 2] = [128, 128];
const RECEIVE_QUEUE: usize = 0;

/// How much of the guest's newest output is kept for a client.
pub const CONSOLE_KEPT_BYTES_MAX: usize = 64 << 10;
/// Bytes that are copied at once.
const BATCH_BYTES: usize = 4096;
/// Chains served in one direction before the other is served.
const CHAINS_AT_ONCE: usize = 32;

/// Events read at once; there are two descriptors.
const EVENTS_AT_ONCE: usize = 4;

/// A console of the guest, in addition to its serial port.
pub struct Console {
    epoll: OwnedFd,
    state: Mutex<State>,
}

struct State {
    listener: UnixListener,
    client: Option<Client>,
    /// Output of the guest that the client's kernel has not accepted yet.
    kept: VecDeque<u8>,
}

struct Client {
    stream: UnixStream,
    /// The client has closed its writing side, and everything it wrote was read.
    ended: bool,
    /// The client has closed its reading side.
    gone: bool,
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").finish_non_exhaustive()
    }
}

impl Console {
    /// Creates a console behind `socket`.
    ///
    /// # Errors
    ///
    /// Fails when the process is out of descriptors.
    pub fn new(socket: &HostSocket) -> Result<Self, HostSocketError> {
        let made = || -> io::Result<Self> {
            let listener = socket.listener()?;
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let data = epoll::EventData::new_u64(0);
            epoll::add(&epoll, &listener, data, epoll::EventFlags::IN)?;
            let state = State {
                listener,
                client: None,
                kept: VecDeque::new(),
            };
            Ok(Self {
                epoll,
                state: Mutex::new(state),
            })
        };
        made().map_err(|source| socket.unusable(source))
    }

    /// Handles events of the sockets: a new client, or room for output.
    fn attend(&self, state: &mut State) {
        loop {
            let mut events = [MaybeUninit::uninit(); EVENTS_AT_ONCE];
            // Failures are ignored: the sockets are examined below in any case.
            let events = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default()));
            let events = events.map_or_else(|_| &[][..], |(events, _)| &*events);
            let over = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            let over = |event: &epoll::Event| {
                let flags = event.flags;
                flags.intersects(over)
            };
            if let Some(client) = &mut state.client {
                client.gone |= events.iter().any(over);
            }
            if state.client.is_none() && !self.accept(state) {
                return;
            }
            state.flush();
            state.look_for_end();
            if !state.client_is_over() {
                return;
            }
            state.client = None;
        }
    }

    /// Accepts the client that has waited longest; false when there is none.
    fn accept(&self, state: &mut State) -> bool {
        let accepted = || -> io::Result<Client> {
            let (stream, _) = state.listener.accept()?;
            stream.set_nonblocking(true)?;
            let all = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
            // Closing the descriptor removes it from the epoll.
            epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(1), all)?;
            Ok(Client {
                stream,
                ended: false,
                gone: false,
            })
        };
        state.client = accepted().ok();
        state.client.is_some()
    }

    /// Copies the client's input to the guest.
    fn receive(&self, state: &mut State, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = ring.memory();
        for _ in 0..CHAINS_AT_ONCE {
            if state.client.is_none() {
                return Ok(false);
            }
            let Some(chain) = ring.next_chain()? else {
                state.look_for_end();
                if state.client_is_over() {
                    // Another may wait for it.
                    self.attend(state);
                }
                return Ok(false);
            };
            let writer = Buffers::of(&chain, memory).map(|buffers| buffers.to_driver);
            let Some(mut writer) = writer.filter(|w| w.available_bytes() > 0) else {
                // The chain has no writable room.
                ring.used(chain.head_index(), 0)?;
                continue;
            };
            let mut bytes = [0; BATCH_BYTES];
            let room = writer.available_bytes().min(bytes.len());
            let Some(count) = state.typed(&mut bytes[..room]) else {
                ring.put_back(1);
                if !state.client_is_over() {
                    return Ok(false);
                }
                // The next client may have input already.
                self.attend(state);
                return Ok(state.client.is_some());
            };
            // The room was computed above.
            let written = writer.write_all(&bytes[..count]).map_or(0, |()| count);
            ring.used(chain.head_index(), u32::try_from(written).unwrap_or(0))?;
        }
        Ok(true)
    }
}

impl State {
    /// Whether the client will send nothing more and there is nothing to send to it.
    fn client_is_over(&self) -> bool {
        self.client.as_ref().is_some_and(|c| c.ended && c.gone)
    }

    /// Notes that a client which has gone left nothing unread. Its input is read only where the guest
    /// has room for it.
    fn look_for_end(&mut self) {
        let Some(client) = self.client.as_mut().filter(|client| client.gone) else {
            return;
        };
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recv(&client.stream, &mut [0], flags) {
            Ok((0, _)) => client.ended = true,
            Ok(_) => {}
            Err(error) if is_later(&io::Error::from(error)) => {}
            Err(_) => client.ended = true,
        }
    }

    /// Reads the client's input; `None` when there is none now.
    fn typed(&mut self, bytes: &mut [u8]) -> Option<usize> {
        let client = self.client.as_mut().filter(|client| !client.ended)?;
        match client.stream.read(bytes) {
            Ok(0) => client.ended = true,
            Ok(count) => return Some(count),
            Err(error) if is_later(&error) => {}
            Err(_) => (client.ended, client.gone) = (true, true),
        }
        None
    }

    /// Appends output of the guest, and keeps the newest.
    fn keep(&mut self, bytes: &[u8]) {
        self.kept.extend(bytes);
        let oldest = self.kept.len().saturating_sub(CONSOLE_KEPT_BYTES_MAX);
        self.kept.drain(..oldest);
    }

    /// Sends kept output to the client, as far as it accepts it.
    fn flush(&mut self) {
        let Some(client) = self.client.as_mut() else {
            return;
        };
        while !client.gone && !self.kept.is_empty() {
            let (first, _) = self.kept.as_slices();
            match client.stream.write(first) {
                Ok(count) => drop(self.kept.drain(..count)),
                Err(error) if is_later(&error) => return,
                Err(_) => client.gone = true,
            }
        }
    }

    /// Takes output of the guest.
    fn send(&mut self, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = ring.memory();
        for _ in 0..CHAINS_AT_ONCE {
            let Some(chain) = ring.next_chain()? else {
                return Ok(false);
            };
            let reader = Buffers::of(&chain, memory).map(|buffers| buffers.from_driver);
            // A chain may claim gigabytes; only what can be kept is read.
            let mut left = CONSOLE_KEPT_BYTES_MAX;
            if let Some(mut reader) = reader {
                let mut bytes = [0; BATCH_BYTES];
                while let Ok(count @ 1..) = reader.read(&mut bytes[..left.min(BATCH_BYTES)]) {
                    self.keep(&bytes[..count]);
                    left -= count;
                }
            }
            ring.used(chain.head_index(), 0)?;
        }
        Ok(true)
    }
}

/// Whether the error only means that there is nothing now.
fn is_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

impl VirtioDevice for Console {
    fn name(&self) -> &str {
        "console"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn serve(&self, queue: usize, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let mut state = lock(&self.state);
        if queue == RECEIVE_QUEUE {
            self.attend(&mut state);
            return self.receive(&mut state, ring);
        }
        // Events stay for the other queue, which is served for them: input is read there.
        let more = state.send(ring);
        state.flush();
        more
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }
}

#[cfg(test)]
#[path = "console_tests.rs"]
mod tests;
