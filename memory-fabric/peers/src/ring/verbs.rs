//! Ends of connections that an RDMA adapter makes.

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fabric_host::Mapping;
use fabric_verbs::RdmaError;
use fabric_verbs::batch::{Batch, Place};
use fabric_verbs::device::Device;
use fabric_verbs::memory::{Access, MemoryRegion, Paging, ProtectionDomain};
use fabric_verbs::pair::{Depths, QueuePair};
use fabric_verbs::queue::{CompletionQueue, Taken};
use fabric_verbs::settings::{INLINE_BYTES, Retries, Settings};

use super::offer::Offer;
use super::{
    NewRing, OFFER_BYTES, RECEIVES, REQUESTS, RING_BYTES, RingEvent, RingPort, RingWrite, Rings,
};

fn failed(error: RdmaError) -> io::Error {
    io::Error::other(error)
}

/// The adapters of this host.
#[derive(Debug)]
pub struct VerbsRings {
    settings: Settings,
}

impl VerbsRings {
    /// Uses the adapters that the settings name, and otherwise the one with the address by which a
    /// peer is reached.
    #[must_use]
    pub const fn new(settings: Settings) -> Self {
        Self { settings }
    }
}

/// Memory and queues of one end.
#[derive(Debug)]
struct End {
    // Drop order: once the queue pair is destroyed the adapter accesses none of the memory.
    pair: QueuePair,
    /// Where the peer writes. Nothing else is in this protection domain, so that the peer reaches
    /// nothing else.
    ring: Registered,
    /// What is sent, at the place where it comes in the peer's ring.
    staged: Registered,
    queue: Arc<CompletionQueue>,
    retries: Retries,
}

#[derive(Debug)]
struct Registered {
    region: MemoryRegion,
    memory: Arc<Mapping>,
}

impl Registered {
    fn new(domain: &Arc<ProtectionDomain>, access: Access) -> Result<Self, RdmaError> {
        let memory = Mapping::anonymous(RING_BYTES);
        let memory = memory.map_err(|error| RdmaError::System("map memory", error))?;
        let memory = Arc::new(memory);
        let region = MemoryRegion::register(domain, &memory, access, Paging::Pinned)?;
        Ok(Self { region, memory })
    }
}

impl Rings for VerbsRings {
    fn prepare(&self, local: IpAddr, remote: IpAddr, peer: &str) -> io::Result<Box<dyn NewRing>> {
        let end = End::new(&self.settings, local, peer).map_err(failed)?;
        let allowed = self.settings.peers.clone();
        Ok(Box::new(NewEnd {
            end,
            remote,
            allowed,
        }))
    }
}

impl End {
    fn new(settings: &Settings, local: IpAddr, peer: &str) -> Result<Self, RdmaError> {
        let (device, route) = Device::for_peer(settings, local)?;
        let domain = ProtectionDomain::new(&device)?;
        let queue = CompletionQueue::with_events(&device, REQUESTS + RECEIVES)?;
        let depths = Depths {
            requests: REQUESTS,
            receives: RECEIVES,
            inline_bytes: settings.inline_bytes.unwrap_or(INLINE_BYTES),
        };
        let access = Access::RemoteWrite;
        let mut pair = QueuePair::with_depths(&domain, &queue, &route, depths, access, peer)?;
        pair.post_receives(RECEIVES)?;
        Ok(Self {
            pair,
            ring: Registered::new(&domain, access)?,
            staged: Registered::new(&domain, Access::Local)?,
            queue,
            retries: settings.retries,
        })
    }
}

/// One end whose peer is not known yet.
#[derive(Debug)]
struct NewEnd {
    end: End,
    /// The peer's address on the connection over which offers travel.
    remote: IpAddr,
    /// Other ports that it may have.
    allowed: Vec<IpAddr>,
}

impl NewRing for NewEnd {
    fn offer(&self) -> [u8; OFFER_BYTES] {
        let End { pair, ring, .. } = &self.end;
        let offer = Offer {
            endpoint: pair.endpoint(),
            key: ring.region.remote_key(),
            address: ring.memory.as_ptr().addr() as u64,
        };
        offer.encode()
    }

    fn connect(self: Box<Self>, offer: &[u8; OFFER_BYTES]) -> io::Result<Box<dyn RingPort>> {
        let offer = Offer::decode(offer).map_err(io::Error::other)?;
        let Self {
            mut end,
            remote,
            allowed,
        } = *self;
        let checked = offer.endpoint.check_port(remote, &allowed);
        checked.map_err(failed)?;
        let connected = end.pair.connect(&offer.endpoint, end.retries);
        connected.map_err(failed)?;
        Ok(Box::new(VerbsPort {
            end,
            address: offer.address,
            batch: Batch::new(REQUESTS, offer.key),
            taken: Taken::new(),
        }))
    }
}

/// One end of a connection.
#[derive(Debug)]
struct VerbsPort {
    end: End,
    /// The address of the peer's ring.
    address: u64,
    batch: Batch,
    taken: Taken,
}

impl RingPort for VerbsPort {
    fn stage(&mut self, offset: usize, bytes: &[u8]) {
        self.end.staged.memory.write(offset, bytes);
    }

    fn post(&mut self, writes: &[RingWrite]) -> io::Result<()> {
        for write in writes {
            let staged = &self.end.staged;
            let place = Place {
                address: staged.memory.at(write.offset, write.bytes).addr() as u64,
                bytes: u32::try_from(write.bytes).expect("no more than the ring"),
                key: staged.region.local_key(),
            };
            let remote = self.address + write.offset as u64;
            self.batch.write_notifying(0, remote, place, write.value);
        }
        self.end.pair.post_writes(&mut self.batch).map_err(failed)
    }

    fn poll(&mut self) -> io::Result<Option<RingEvent>> {
        self.end.queue.poll(&mut self.taken).map_err(failed)?;
        let Some(done) = self.taken.next() else {
            return Ok(None);
        };
        if !done.is_success() {
            return Err(failed(RdmaError::Completion {
                verb: "WRITE",
                on: self.end.pair.on().to_owned(),
                status: done.status_text(),
                code: done.status,
                vendor: done.vendor,
            }));
        }
        Ok(Some(match done.notified {
            Some(value) => {
                self.end.pair.post_receives(1).map_err(failed)?;
                RingEvent::Notified(value)
            }
            None => RingEvent::Sent,
        }))
    }

    fn copy(&self, offset: usize, bytes: &mut [u8]) {
        self.end.ring.memory.read(offset, bytes);
    }

    fn arm(&mut self) -> io::Result<()> {
        self.end.queue.arm().map_err(failed)
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        let events = self.end.queue.events();
        events.expect("a queue with events")
    }
}
