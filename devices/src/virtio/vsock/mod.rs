//! Sockets between guest and host (virtio 1.2, section 5.10), which need no network.
//!
//! The host's end are Unix sockets, by the convention of Firecracker. A client of the host connects
//! to the socket `PATH`, writes `CONNECT PORT` and a newline, and reads `OK` and a port before the
//! bytes of the guest program that listens on `PORT`. A guest program that connects to port `N` of
//! the host is connected to the socket `PATH_N`, on which a program of the host listens.

mod connection;
mod hub;
mod packet;

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use super::host_socket::{HostSocket, HostSocketError};
use super::{BrokenRing, Buffers, Ring, VirtioDevice, read_bytes_of};
use crate::lock;
use hub::Hub;
use packet::{HEADER_BYTES, Header};

/// The lowest address of a guest (section 5.10.4).
pub const VSOCK_CID_MIN: u32 = 3;
/// The highest address: one more is the wildcard.
pub const VSOCK_CID_MAX: u32 = u32::MAX - 1;

/// Queues: to the guest, from the guest, events.
const QUEUE_SIZES: [u16; 3] = [128, 128, 128];
const RECEIVE_QUEUE: usize = 0;
const SEND_QUEUE: usize = 1;

/// Limit of data in a packet, the same as Linux's.
const DATA_BYTES_MAX: usize = 64 << 10;

/// Packets in one direction before the other is served.
const PACKETS_AT_ONCE: usize = 32;

/// The socket device of a guest.
pub struct Vsock {
    config: [u8; 8],
    /// The hub's event descriptor, outside the lock.
    epoll: Arc<OwnedFd>,
    state: Mutex<State>,
}

struct State {
    hub: Hub,
    data: Vec<u8>,
}

impl fmt::Debug for Vsock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vsock")
            .field("cid", &u64::from_le_bytes(self.config))
            .finish_non_exhaustive()
    }
}

impl Vsock {
    /// Creates the device for the guest address `cid`, between [`VSOCK_CID_MIN`] and
    /// [`VSOCK_CID_MAX`], behind `socket`.
    ///
    /// # Errors
    ///
    /// Fails when the process is out of descriptors.
    pub fn new(cid: u32, socket: &HostSocket) -> Result<Self, HostSocketError> {
        let listener = socket.listener();
        let hub = listener.and_then(|listener| Hub::new(cid.into(), socket.path(), listener));
        let hub = hub.map_err(|source| socket.unusable(source))?;
        Ok(Self {
            config: u64::from(cid).to_le_bytes(),
            epoll: hub.epoll(),
            state: Mutex::new(State {
                hub,
                data: vec![0; DATA_BYTES_MAX],
            }),
        })
    }
}

impl State {
    /// Delivers packets to the guest.
    fn receive(&mut self, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        self.hub.take_events();
        let memory = ring.memory();
        for _ in 0..PACKETS_AT_ONCE {
            let Some(chain) = ring.next_chain()? else {
                return Ok(false);
            };
            let buffers = Buffers::of(&chain, memory);
            let writer = buffers.map(|buffers| buffers.to_driver);
            let room = writer.as_ref().map_or(0, |w| w.available_bytes());
            let (Some(mut writer), Some(room)) = (writer, room.checked_sub(HEADER_BYTES)) else {
                // The chain is too short for any packet.
                ring.used(chain.head_index(), 0)?;
                continue;
            };
            let room = room.min(DATA_BYTES_MAX);
            let Some((header, count)) = self.hub.next_packet(&mut self.data[..room]) else {
                ring.put_back(1);
                return Ok(false);
            };
            let written = writer
                .write_all(&header.to_bytes())
                .and_then(|()| writer.write_all(&self.data[..count]));
            // The room was computed above.
            let written = written.map_or(0, |()| HEADER_BYTES + count);
            ring.used(chain.head_index(), u32::try_from(written).unwrap_or(0))?;
        }
        Ok(true)
    }

    /// Handles packets of the guest.
    fn send(&mut self, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = ring.memory();
        for _ in 0..PACKETS_AT_ONCE {
            if !self.hub.has_room() {
                // All queues are served again when the guest has taken some.
                return Ok(false);
            }
            let Some(chain) = ring.next_chain()? else {
                return Ok(false);
            };
            match Buffers::of(&chain, memory) {
                Some(buffers) => self.take(buffers),
                // A page of the packet is lost, maybe with the connection that it is of, and a stream
                // has no holes.
                None => self.hub.reset_all(),
            }
            ring.used(chain.head_index(), 0)?;
        }
        Ok(true)
    }

    fn take(&mut self, mut buffers: Buffers<'_>) {
        let mut header = [0; HEADER_BYTES];
        if buffers.from_driver.read_exact(&mut header).is_err() {
            return;
        }
        let header = Header::from_bytes(&header);
        let there = buffers.from_driver.available_bytes();
        let length = usize::try_from(header.length).unwrap_or(usize::MAX);
        if length > there || length > self.data.len() {
            tracing::debug!(
                length,
                there,
                "the length of a guest's packet differs from its header"
            );
            return;
        }
        let data = &mut self.data[..length];
        if buffers.from_driver.read_exact(data).is_ok() {
            self.hub.take_packet(&header, data);
        }
    }
}

impl VirtioDevice for Vsock {
    fn name(&self) -> &str {
        "vsock"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_bytes_of(&self.config, offset, data);
    }

    fn serve(&self, queue: usize, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let mut state = lock(&self.state);
        match queue {
            RECEIVE_QUEUE => state.receive(ring),
            SEND_QUEUE => state.send(ring),
            // The address never changes, so there are no events.
            _ => Ok(false),
        }
    }

    fn reset(&self) {
        lock(&self.state).hub.clear();
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }
}

#[cfg(test)]
mod end_tests;
#[cfg(test)]
mod test_bed;
#[cfg(test)]
#[path = "tests.rs"]
mod tests;
