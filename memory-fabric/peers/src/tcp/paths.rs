//! How messages travel to each peer, for threads that report it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use fabric_coherence::Member;
use fabric_coherence::members::MEMBERS_MAX;
use fabric_host::metrics::Histogram;

/// What carries the messages to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerTransport {
    /// TCP alone.
    Tcp,
    /// TCP, encrypted and authenticated.
    SecureTcp,
    /// Rings that are written by RDMA.
    Rdma,
}

impl PeerTransport {
    const ALL: [Self; 3] = [Self::Tcp, Self::SecureTcp, Self::Rdma];
}

/// How messages travel to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerPath {
    /// The peer.
    pub peer: Member,
    /// What the newest connection is made of.
    pub transport: PeerTransport,
    /// Connections made so far.
    pub connections: u32,
}

#[derive(Debug, Default)]
struct Line {
    /// One more than the place in [`PeerTransport::ALL`]; 0 before the first connection.
    transport: AtomicU8,
    connections: AtomicU32,
}

/// How messages travel to all peers. One thread changes it, when a connection is made; any may read.
#[derive(Debug, Default)]
pub struct Paths {
    lines: [Line; MEMBERS_MAX],
    /// From posting an RDMA WRITE to a ring until its completion, to all peers together.
    pub ring_writes: Arc<Histogram>,
}

impl Paths {
    /// A connection to `peer` is made.
    pub(super) fn note(&self, peer: Member, transport: PeerTransport) {
        let line = &self.lines[peer.index()];
        // Relaxed, here and below: the values order no other memory accesses.
        line.transport.store(transport as u8 + 1, Ordering::Relaxed);
        let count = line.connections.load(Ordering::Relaxed);
        line.connections
            .store(count.saturating_add(1), Ordering::Relaxed);
    }

    /// How messages travel to each peer to which there was a connection.
    pub fn now(&self) -> impl Iterator<Item = PeerPath> {
        (0_u8..).zip(&self.lines).filter_map(|(place, line)| {
            let transport = usize::from(line.transport.load(Ordering::Relaxed));
            Some(PeerPath {
                peer: Member::at(place)?,
                transport: *PeerTransport::ALL.get(transport.checked_sub(1)?)?,
                connections: line.connections.load(Ordering::Relaxed),
            })
        })
    }
}
