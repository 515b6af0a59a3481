//! Network cards (virtio 1.2, section 5.1), each on a tap of the host.
//!
//! Packets are copied through buffers of the device: a tap takes and gives them as a whole, and no
//! page of the guest must be pinned by I/O of the host. Each has a header, in which both sides
//! leave checksums and the cutting of large packets to the other.

mod mac;
mod tap;
mod trouble;

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
};
use virtio_queue::Writer;

pub use mac::{MacAddress, ParseMacError};
pub use tap::{TAP_NAME_BYTES_MAX, Tap, TapError};

use super::{BrokenRing, Buffers, Ring, VirtioDevice, read_bytes_of};
use crate::lock;
use tap::HEADER_BYTES;
use trouble::Told;

const RECEIVE_QUEUE: usize = 0;
/// To the guest, from the guest.
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// The largest packet: the header, and what one of the largest IP packets needs with its
/// addresses and a VLAN tag.
const PACKET_BYTES_MAX: usize = HEADER_BYTES + 18 + 65535;
/// The shortest packet that is worth sending: the addresses and the type of Ethernet.
const PACKET_BYTES_MIN: usize = HEADER_BYTES + 14;
/// Where the header says over how many chains a packet goes (section 5.1.6).
const NUM_BUFFERS_OFFSET: usize = 10;

/// Most chains over which one packet goes. Linux offers at least 1,526 bytes in each, so that 44
/// take the largest packet.
const CHAINS_A_PACKET_MAX: usize = 64;

/// Packets that are taken or given before the guest is told, and the other direction has its
/// turn.
const PACKETS_AT_ONCE: usize = 32;

/// What the driver may leave to the host, and the host to the driver.
const OFFLOADS: u64 = (1 << VIRTIO_NET_F_CSUM)
    | (1 << VIRTIO_NET_F_HOST_TSO4)
    | (1 << VIRTIO_NET_F_HOST_TSO6)
    | (1 << VIRTIO_NET_F_GUEST_CSUM)
    | (1 << VIRTIO_NET_F_GUEST_TSO4)
    | (1 << VIRTIO_NET_F_GUEST_TSO6);

/// A network card of the guest.
pub struct Net {
    tap: Tap,
    name: String,
    mac: MacAddress,
    state: Mutex<State>,
    told: Told,
}

struct State {
    /// A packet goes over as many chains as it needs.
    mergeable: bool,
    /// A packet from the host that waits for chains: so many bytes of `incoming`, or none.
    waiting: usize,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Net")
            .field("name", &self.name)
            .field("tap", &self.tap)
            .field("mac", &self.mac)
            .finish_non_exhaustive()
    }
}

/// What became of a packet that was to go to the guest.
#[derive(Debug, PartialEq, Eq)]
enum Delivery {
    /// It is in the guest's memory.
    Done,
    /// The guest has no room for it now.
    Later,
    /// The guest has no room for such a packet.
    Dropped,
}

impl Net {
    /// The card with this number, from 0 on.
    pub fn new(number: usize, tap: Tap, mac: MacAddress) -> Self {
        Self {
            tap,
            name: format!("net{number}"),
            mac,
            state: Mutex::new(State {
                mergeable: false,
                waiting: 0,
                incoming: vec![0; PACKET_BYTES_MAX],
                outgoing: vec![0; PACKET_BYTES_MAX],
            }),
            told: Told::default(),
        }
    }

    /// Gives packets of the host to the guest.
    fn receive(&self, state: &mut State, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        for _ in 0..PACKETS_AT_ONCE {
            if state.waiting == 0 {
                state.waiting = match self.tap.receive(&mut state.incoming) {
                    Ok(bytes) if bytes >= HEADER_BYTES => bytes,
                    Ok(_) => return Ok(false),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                    Err(error) => {
                        // A tap that is gone is one event, and gives no more of them.
                        self.failed(&error);
                        return Ok(false);
                    }
                };
            }
            match deliver(state, ring)? {
                Delivery::Done => state.waiting = 0,
                Delivery::Later => return Ok(false),
                Delivery::Dropped => {
                    tracing::debug!(bytes = state.waiting, "a packet finds no room in the guest");
                    state.waiting = 0;
                }
            }
        }
        Ok(true)
    }

    /// Gives packets of the guest to the host.
    fn send(&self, state: &mut State, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = ring.memory();
        for _ in 0..PACKETS_AT_ONCE {
            let Some(chain) = ring.next_chain()? else {
                return Ok(false);
            };
            if let Some(packet) =
                Buffers::of(&chain, memory).and_then(|buffers| copied(buffers, &mut state.outgoing))
            {
                match self.tap.send(packet) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        // It is sent when the tap has room again, which is an event.
                        ring.put_back(1);
                        return Ok(false);
                    }
                    Err(error) => self.failed(&error),
                }
            }
            ring.used(chain.head_index(), 0)?;
        }
        Ok(true)
    }

    /// The tap gives an error. A packet is lost, as packets may be; that more are is told once.
    fn failed(&self, error: &io::Error) {
        match self.told.first(error, &self.name, self.tap.name()) {
            Some(text) => tracing::warn!("{text}"),
            None => tracing::debug!(%error, name = self.name, "a packet is lost"),
        }
    }
}

/// The packet of a chain, in `buffer`; `None` when it can be none.
fn copied<'a>(mut chain: Buffers<'_>, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let bytes = chain.from_driver.available_bytes();
    if !(PACKET_BYTES_MIN..=buffer.len()).contains(&bytes) {
        tracing::debug!(bytes, "a packet of the guest has no size that packets have");
        return None;
    }
    let packet = &mut buffer[..bytes];
    chain.from_driver.read_exact(packet).ok()?;
    Some(packet)
}

/// Writes the packet that waits into chains.
fn deliver(state: &mut State, ring: &mut Ring<'_>) -> Result<Delivery, BrokenRing> {
    let memory = ring.memory();
    let chains_max = if state.mergeable {
        CHAINS_A_PACKET_MAX
    } else {
        1
    };
    let mut chains: Vec<(u16, Option<Writer<'_>>)> = Vec::new();
    let mut room = 0;
    while room < state.waiting {
        let count = u16::try_from(chains.len()).unwrap_or(u16::MAX);
        if chains.len() == chains_max {
            ring.put_back(count);
            return Ok(Delivery::Dropped);
        }
        let Some(chain) = ring.next_chain()? else {
            ring.put_back(count);
            return Ok(Delivery::Later);
        };
        // A chain that is not in memory has no room, and goes back with nothing in it.
        let writer = Buffers::of(&chain, memory).map(|buffers| buffers.to_driver);
        room += writer.as_ref().map_or(0, Writer::available_bytes);
        chains.push((chain.head_index(), writer));
    }
    let count = u16::try_from(chains.len()).unwrap_or(u16::MAX);
    let packet = &mut state.incoming[..state.waiting];
    packet[NUM_BUFFERS_OFFSET..HEADER_BYTES].copy_from_slice(&count.to_le_bytes());
    let mut rest = &packet[..];
    let mut used = Vec::with_capacity(chains.len());
    for (head, writer) in chains {
        let mut written = 0;
        if let Some(mut writer) = writer {
            let (now, later) = rest.split_at(writer.available_bytes().min(rest.len()));
            // It was counted above, so it has the room.
            if writer.write_all(now).is_ok() {
                written = u32::try_from(now.len()).unwrap_or(0);
            }
            rest = later;
        }
        used.push((head, written));
    }
    ring.used_together(&used)?;
    Ok(Delivery::Done)
}

/// What the host may leave to a driver with these features, as bits TUN_F_*.
fn offloads(features: u64) -> libc::c_uint {
    let has = |bit: u32| features & (1 << bit) != 0;
    if !has(VIRTIO_NET_F_GUEST_CSUM) {
        return 0;
    }
    let of = |bit, flag| if has(bit) { flag } else { 0 };
    libc::TUN_F_CSUM
        | of(VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4)
        | of(VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6)
}

impl VirtioDevice for Net {
    fn name(&self) -> &str {
        &self.name
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        OFFLOADS | (1 << VIRTIO_NET_F_MAC) | (1 << VIRTIO_NET_F_MRG_RXBUF)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_bytes_of(&self.mac.bytes(), offset, data);
    }

    fn start(&self, features: u64) {
        let mut state = lock(&self.state);
        state.mergeable = features & (1 << VIRTIO_NET_F_MRG_RXBUF) != 0;
        if let Err(error) = self.tap.set_offloads(offloads(features)) {
            tracing::warn!(
                "the tap {} does not leave checksums to the guest: {error}",
                self.tap.name()
            );
        }
    }

    fn serve(&self, queue: usize, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let mut state = lock(&self.state);
        if queue == RECEIVE_QUEUE {
            self.receive(&mut state, ring)
        } else {
            self.send(&mut state, ring)
        }
    }

    fn reset(&self) {
        lock(&self.state).waiting = 0;
        // Where that fails, starting fails in the same way, and tells.
        let _ = self.tap.set_offloads(0);
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tap.as_fd())
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl Net {
    /// The card with number 1 on one end of a pair of sockets that keeps packets apart, as a tap
    /// does; and the other end, which is the host's network.
    pub(crate) fn on_sockets() -> (Self, std::os::unix::net::UnixDatagram) {
        let (host, cable) = std::os::unix::net::UnixDatagram::pair().unwrap();
        host.set_nonblocking(true).unwrap();
        cable.set_nonblocking(true).unwrap();
        let tap = Tap::of(std::os::fd::OwnedFd::from(cable).into());
        let mac = "02:00:00:12:34:56".parse().unwrap();
        (Self::new(1, tap, mac), host)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
