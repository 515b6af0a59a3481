//! Network cards (virtio 1.2, section 5.1), each on a tap of the host.
//!
//! Packets are copied through buffers of the device: a tap reads and writes whole packets, and no
//! guest page may be pinned by host I/O. Each packet has a header through which both sides offload
//! checksums and segmentation.

mod mac;
mod tap;
mod tap_faults;

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use fabric_host::Seldom;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
};
use virtio_queue::Writer;

pub use mac::{MacAddress, ParseMacError};
pub use tap::{TAP_NAME_BYTES_MAX, Tap, TapError};

use super::{BrokenRing, Buffers, RateLimiter, Ring, VirtioDevice, read_bytes_of};
use crate::lock;
use tap::HEADER_BYTES;
use tap_faults::ReportedFaults;

const RECEIVE_QUEUE: usize = 0;
const SEND_QUEUE: usize = 1;
/// Queues: to the guest, from the guest.
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// The largest packet: the header, and a maximal IP packet with its addresses and a VLAN tag.
const PACKET_BYTES_MAX: usize = HEADER_BYTES + 18 + 65535;
/// The shortest packet that is sent: Ethernet addresses and type.
const PACKET_BYTES_MIN: usize = HEADER_BYTES + 14;
/// Offset of the number of chains in the header (section 5.1.6).
const NUM_BUFFERS_OFFSET: usize = 10;

/// Limit of chains per packet. Linux offers buffers of 1,526 bytes or more, so that 44 hold the
/// largest packet.
const CHAINS_A_PACKET_MAX: usize = 64;

/// Packets in one direction before the guest is notified and the other direction is served.
const PACKETS_AT_ONCE: usize = 32;

/// Offload features in both directions.
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
    faults: ReportedFaults,
    /// A driver can start the device again and again.
    starts: Seldom,
    /// Its directions are the queues.
    limiter: Option<Arc<RateLimiter>>,
}

struct State {
    /// A packet may span several chains.
    mergeable: bool,
    /// Length of the packet in `incoming` that waits for chains, or 0.
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

/// The outcome of delivering a packet to the guest.
#[derive(Debug, PartialEq, Eq)]
enum Delivery {
    /// It is in the guest's memory.
    Done,
    /// The guest has no room for it now.
    Later,
    /// It does not fit into the guest's chains.
    Dropped,
}

impl Net {
    /// Creates the card with this number, from 0.
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
            faults: ReportedFaults::default(),
            starts: Seldom::notices(),
            limiter: None,
        }
    }

    /// Limits its rate, in each direction by itself.
    #[must_use]
    pub fn limited(self, limiter: Arc<RateLimiter>) -> Self {
        Self {
            limiter: Some(limiter),
            ..self
        }
    }

    fn may_begin(&self, queue: usize) -> bool {
        let limiter = self.limiter.as_ref();
        limiter.is_none_or(|limiter| limiter.may_begin(queue))
    }

    /// Counts a packet against the limits.
    fn count(&self, queue: usize, bytes: usize) {
        if let Some(limiter) = &self.limiter {
            let bytes = u64::try_from(bytes.saturating_sub(HEADER_BYTES)).unwrap_or(u64::MAX);
            limiter.take(queue, 1, bytes);
        }
    }

    /// Delivers packets of the host to the guest.
    fn receive(&self, state: &mut State, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        for _ in 0..PACKETS_AT_ONCE {
            if state.waiting == 0 {
                state.waiting = match self.tap.receive(&mut state.incoming) {
                    Ok(bytes) if bytes >= HEADER_BYTES => bytes,
                    Ok(_) => return Ok(false),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                    Err(error) => {
                        // An error of a deleted tap is reported by one event; it must be read here.
                        self.failed(&error);
                        return Ok(false);
                    }
                };
            }
            if !self.may_begin(RECEIVE_QUEUE) {
                // The tap keeps those behind it, and drops them when it is full.
                return Ok(false);
            }
            match deliver(state, ring)? {
                Delivery::Done => {
                    self.count(RECEIVE_QUEUE, state.waiting);
                    state.waiting = 0;
                }
                Delivery::Later => return Ok(false),
                Delivery::Dropped => {
                    tracing::debug!(
                        bytes = state.waiting,
                        "a packet does not fit into the guest's chains"
                    );
                    state.waiting = 0;
                }
            }
        }
        Ok(true)
    }

    /// Sends packets of the guest to the host.
    fn send(&self, state: &mut State, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = ring.memory();
        for _ in 0..PACKETS_AT_ONCE {
            let Some(chain) = ring.next_chain()? else {
                return Ok(false);
            };
            if !self.may_begin(SEND_QUEUE) {
                ring.put_back(1);
                return Ok(false);
            }
            let mut bytes = 0;
            if let Some(packet) =
                Buffers::of(&chain, memory).and_then(|buffers| copied(buffers, &mut state.outgoing))
            {
                bytes = packet.len();
                match self.tap.send(packet) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        // It is sent when the tap has room, which is an event.
                        ring.put_back(1);
                        return Ok(false);
                    }
                    Err(error) => self.failed(&error),
                }
            }
            self.count(SEND_QUEUE, bytes);
            ring.used(chain.head_index(), 0)?;
        }
        Ok(true)
    }

    /// Handles an error of the tap: the packet is lost, and the first error of its kind is
    /// reported.
    fn failed(&self, error: &io::Error) {
        match self.faults.first(error, &self.name, self.tap.name()) {
            Some(text) => tracing::warn!("{text}"),
            None => tracing::debug!(%error, name = self.name, "a packet is lost"),
        }
    }
}

/// Copies the packet of a chain to `buffer`; `None` when it is not valid.
fn copied<'a>(mut chain: Buffers<'_>, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let bytes = chain.from_driver.available_bytes();
    if !(PACKET_BYTES_MIN..=buffer.len()).contains(&bytes) {
        tracing::debug!(bytes, "a packet of the guest has an invalid size");
        return None;
    }
    let packet = &mut buffer[..bytes];
    chain.from_driver.read_exact(packet).ok()?;
    Some(packet)
}

/// Writes the waiting packet into chains.
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
        // A chain outside the guest's memory has no room and is returned empty.
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
            // The room was computed above.
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

/// The host's offloads for a driver with these features, as TUN_F_* bits.
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
        if let Err(error) = self.tap.set_offloads(offloads(features))
            && self.starts.pass(Instant::now()).is_some()
        {
            tracing::warn!(
                "the tap {} does not offload checksums to the guest: {error}",
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
        // If creating fails, starting the device fails in the same way and reports it.
        let _ = self.tap.set_offloads(0);
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tap.as_fd())
    }

    fn timer(&self) -> Option<BorrowedFd<'_>> {
        self.limiter.as_ref().map(|limiter| limiter.timer())
    }

    fn timer_expired(&self) {
        if let Some(limiter) = &self.limiter {
            limiter.has_expired();
        }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl Net {
    /// Card number 1 on one end of a socket pair that preserves packets, as a tap does, and the
    /// other end, which is the host's network.
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
