//! Adapters of a test, with the faults of real ones: they read what is sent when it leaves, not when
//! it is posted, deliver late, fail, and refuse what has no receive request or is out of bounds.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::{
    NewRing, OFFER_BYTES, RECEIVES, REQUESTS, RING_BYTES, RingEvent, RingPort, RingWrite, Rings,
};

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RingFaults {
    /// Bytes after which an end breaks its connection, on average, and at most twice as many; 0 for
    /// never. Bytes, as how many WRITEs carry them depends on how busy the machine is.
    pub(crate) break_after: u64,
    /// One in so many WRITEs waits for a later event; 0 for none.
    pub(crate) delayed: u64,
    /// Ends cannot be made.
    pub(crate) no_device: bool,
    /// Nothing that is written arrives.
    pub(crate) is_silent: bool,
}

#[derive(Debug)]
struct End {
    ring: Vec<u8>,
    staged: Vec<u8>,
    /// The other end, when connected.
    other: Option<u64>,
    /// WRITEs on their way, oldest first.
    leaving: VecDeque<RingWrite>,
    events: VecDeque<RingEvent>,
    receives: usize,
    signal: Arc<OwnedFd>,
    is_armed: bool,
    /// Why the connection broke.
    broken: Option<&'static str>,
    /// Bytes until it breaks.
    left: u64,
}

#[derive(Debug)]
struct Network {
    ends: BTreeMap<u64, End>,
    next: u64,
    faults: RingFaults,
    random: u64,
    /// Connections that broke.
    breaks: u32,
}

/// All adapters of a test, which are one.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedRings(Arc<Mutex<Network>>);

impl SimulatedRings {
    pub(crate) fn new(faults: RingFaults, seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Network {
            ends: BTreeMap::new(),
            next: 1,
            faults,
            random: seed | 1,
            breaks: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Network> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections that broke, other than by [`Self::break_all`].
    pub(crate) fn breaks(&self) -> u32 {
        self.lock().breaks
    }

    /// Ends that exist.
    pub(crate) fn ends(&self) -> usize {
        self.lock().ends.len()
    }

    /// Breaks all connections.
    pub(crate) fn break_all(&self) {
        let mut network = self.lock();
        let ends: Vec<u64> = network.ends.keys().copied().collect();
        for end in ends {
            network.fail(end, "link down");
        }
    }

    /// Two connected ends.
    pub(crate) fn pair(&self) -> [Box<dyn RingPort>; 2] {
        let local = IpAddr::from([127, 0, 0, 1]);
        let one = self.prepare(local, local, "one").expect("a device");
        let other = self.prepare(local, local, "other").expect("a device");
        let offers = [one.offer(), other.offer()];
        let one = one.connect(&offers[1]).expect("connected");
        [one, other.connect(&offers[0]).expect("connected")]
    }
}

impl Network {
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn end(&mut self, id: u64) -> &mut End {
        self.ends.get_mut(&id).expect("an end that exists")
    }

    fn report(&mut self, id: u64, event: RingEvent) {
        let end = self.end(id);
        end.events.push_back(event);
        end.ring_bell();
    }

    fn fail(&mut self, id: u64, why: &'static str) {
        let other = self.end(id).other;
        for id in [Some(id), other].into_iter().flatten() {
            if let Some(end) = self.ends.get_mut(&id) {
                end.broken.get_or_insert(why);
                end.ring_bell();
            }
        }
    }

    /// Delivers what is on its way from an end.
    fn deliver(&mut self, id: u64) {
        loop {
            let is_silent = self.faults.is_silent;
            let end = self.end(id);
            if end.broken.is_some() || is_silent {
                return;
            }
            let Some(write) = end.leaving.pop_front() else {
                return;
            };
            let Some(left) = end.left.checked_sub(write.bytes as u64) else {
                self.breaks += 1;
                self.fail(id, "transport retry counter exceeded");
                return;
            };
            end.left = left;
            let range = write.offset..write.offset + write.bytes;
            let bytes = end.staged[range.clone()].to_vec();
            let Some(other) = end.other.filter(|other| self.ends.contains_key(other)) else {
                self.fail(id, "transport retry counter exceeded");
                return;
            };
            let peer = self.end(other);
            if peer.receives == 0 {
                self.fail(id, "RNR retry counter exceeded");
                return;
            }
            peer.receives -= 1;
            peer.ring[range].copy_from_slice(&bytes);
            self.report(other, RingEvent::Notified(write.value));
            self.report(id, RingEvent::Sent);
        }
    }
}

impl End {
    fn ring_bell(&mut self) {
        if std::mem::take(&mut self.is_armed) {
            let _ = rustix::io::write(&self.signal, &1_u64.to_ne_bytes());
        }
    }
}

impl Rings for SimulatedRings {
    fn prepare(&self, _: IpAddr, _: IpAddr, _: &str) -> io::Result<Box<dyn NewRing>> {
        let mut network = self.lock();
        if network.faults.no_device {
            return Err(io::Error::other("this host has no RDMA device"));
        }
        let id = network.next;
        network.next += 1;
        let left = match network.faults.break_after {
            0 => u64::MAX,
            // The probe of a new connection gets through.
            mean => 64 + network.random() % (2 * mean),
        };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let signal = Arc::new(eventfd(0, flags)?);
        let end = End {
            ring: vec![0; RING_BYTES],
            staged: vec![0; RING_BYTES],
            other: None,
            leaving: VecDeque::new(),
            events: VecDeque::new(),
            receives: RECEIVES,
            signal: Arc::clone(&signal),
            is_armed: false,
            broken: None,
            left,
        };
        network.ends.insert(id, end);
        drop(network);
        Ok(Box::new(SimulatedPort {
            network: self.clone(),
            id,
            signal,
        }))
    }
}

#[derive(Debug)]
struct SimulatedPort {
    network: SimulatedRings,
    id: u64,
    signal: Arc<OwnedFd>,
}

impl NewRing for SimulatedPort {
    fn offer(&self) -> [u8; OFFER_BYTES] {
        let mut offer = [0; OFFER_BYTES];
        offer[..8].copy_from_slice(&self.id.to_le_bytes());
        offer
    }

    fn connect(self: Box<Self>, offer: &[u8; OFFER_BYTES]) -> io::Result<Box<dyn RingPort>> {
        let other = u64::from_le_bytes(offer[..8].try_into().expect("8 bytes"));
        self.network.lock().end(self.id).other = Some(other);
        Ok(self)
    }
}

impl RingPort for SimulatedPort {
    fn stage(&mut self, offset: usize, bytes: &[u8]) {
        let mut network = self.network.lock();
        let end = network.end(self.id);
        end.staged[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn post(&mut self, writes: &[RingWrite]) -> io::Result<()> {
        let mut network = self.network.lock();
        for write in writes {
            assert!(write.offset + write.bytes <= RING_BYTES, "{write:?}");
            network.end(self.id).leaving.push_back(*write);
        }
        let sent = |event: &&RingEvent| **event == RingEvent::Sent;
        let end = network.end(self.id);
        let outstanding = end.leaving.len() + end.events.iter().filter(sent).count();
        assert!(outstanding <= REQUESTS, "{outstanding} requests");
        let delayed = network.faults.delayed;
        if delayed == 0 || !network.random().is_multiple_of(delayed) {
            network.deliver(self.id);
        }
        Ok(())
    }

    fn poll(&mut self) -> io::Result<Option<RingEvent>> {
        let mut network = self.network.lock();
        if network.random().is_multiple_of(4) {
            network.deliver(self.id);
        }
        let end = network.end(self.id);
        if let Some(event) = end.events.pop_front() {
            if let RingEvent::Notified(_) = event {
                end.receives += 1;
            }
            return Ok(Some(event));
        }
        match end.broken {
            Some(why) => Err(io::Error::other(why)),
            None => Ok(None),
        }
    }

    fn copy(&self, offset: usize, bytes: &mut [u8]) {
        let mut network = self.network.lock();
        let end = network.end(self.id);
        bytes.copy_from_slice(&end.ring[offset..offset + bytes.len()]);
    }

    fn arm(&mut self) -> io::Result<()> {
        let mut network = self.network.lock();
        let end = network.end(self.id);
        let mut count = [0; 8];
        // Fails when it was not signalled.
        let _ = rustix::io::read(&end.signal, &mut count);
        end.is_armed = true;
        network.deliver(self.id);
        Ok(())
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}

impl Drop for SimulatedPort {
    fn drop(&mut self) {
        let mut network = self.network.lock();
        network.ends.remove(&self.id);
    }
}
