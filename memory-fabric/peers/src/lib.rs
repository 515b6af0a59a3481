//! Messages between the compute nodes of a VM, and the connections that carry them.
//!
//! Each node has one [`Peers`], which one thread uses: it never blocks, keeps the order of each
//! [`PeerLane`], and delivers each message once, also over connections that are restored.

pub mod codec;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod message;
pub mod ring;
pub mod tcp;

use std::os::fd::RawFd;
use std::time::Instant;

use fabric_coherence::Member;
use fabric_pages::page::PageBytes;

pub use message::{HomeMessage, PeerLane, PeerMessage};
pub use tcp::{
    Channel, Paths, PeerPath, PeerTransport, RdmaPeers, Secret, SecureStream, Security, Streams,
    TcpPeers, TcpPeersConfig,
};

/// Receives the messages of peers, with the page that travels beside a message.
pub type Receiver<'a> = dyn FnMut(Member, PeerMessage, Option<&PageBytes>) + 'a;

/// This node's connections to all other compute nodes.
pub trait Peers {
    /// Queues a message. The bytes of a page that travels beside it are copied before this
    /// returns. Never blocks: the protocol bounds how much can be outstanding.
    fn send(&mut self, to: Member, message: PeerMessage, bytes: Option<&PageBytes>);

    /// Sends what is queued, as far as the connections accept it.
    fn flush(&mut self);

    /// Passes on what has arrived, and returns whether anything had. `receiver` may not send; it
    /// collects what it has to answer.
    ///
    /// # Errors
    /// When a peer is lost, or sent what no correct peer sends.
    fn receive(&mut self, receiver: &mut Receiver<'_>) -> Result<bool, PeerError>;

    /// A descriptor that is readable when [`Self::receive`] or [`Self::flush`] has work.
    fn poll_fd(&self) -> RawFd;

    /// Prepares for sleeping until [`Self::poll_fd`] is readable, which without this call it may not
    /// become. Returns when [`Self::receive`] has to be called at the latest: for what is here
    /// already, for heartbeats and for deadlines.
    fn wake_by(&mut self) -> Option<Instant> {
        None
    }
}

/// A peer with which the VM cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The connection could not be restored in time.
    #[error("{peer} is lost: {reason}")]
    Lost {
        /// The peer.
        peer: Member,
        /// Why.
        reason: String,
    },
    /// The peer refused this node, or this node the peer.
    #[error("{peer} is no peer of this node: {reason}")]
    Refused {
        /// The peer.
        peer: Member,
        /// Why.
        reason: String,
    },
    /// A system call failed that does not fail for a reason of the network.
    #[error("connections between compute nodes cannot be watched")]
    System(#[source] std::io::Error),
    /// The peer sent what no correct peer sends.
    #[error("{peer} broke the protocol: {reason}")]
    Broken {
        /// The peer.
        peer: Member,
        /// How.
        reason: String,
    },
}
