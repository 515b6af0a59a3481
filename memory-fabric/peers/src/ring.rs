//! A stream of bytes over RDMA, in place of that of a TCP connection.
//!
//! Each end has registered memory for what it receives: a *ring* of [`RING_BYTES`]. The other end
//! WRITEs the bytes of frames straight into it, behind those before, and each WRITE notifies with
//! its length. What was read is room again when the reader has returned it as *credit*, by a WRITE
//! without bytes. So no end writes over what is unread, or notifies without a receive request: the
//! numbers of both are bounded.
//!
//! A stream has the promises of a TCP connection, and no others: bytes arrive in order, once, until
//! it breaks. The sequence numbers of [`crate::tcp`] continue what broke, on a ring that is new: a
//! late WRITE of an earlier connection has no place to go.
//!
//! What is in the ring can be changed by its writer at any time. So it is copied before it is
//! looked at.
//!
//! - [`RingPort`] is what an adapter does for one end; [`verbs`] is the real one;
//! - [`RingStream`] has the rules and no adapter; nothing in them depends on its clock, which only
//!   measures how long WRITEs take.

mod closer;
mod credit;
mod offer;
#[cfg(test)]
pub(crate) mod simulated;
mod stream;
#[cfg(test)]
mod tests;
pub mod verbs;

use std::fmt::Debug;
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

pub(crate) use closer::Closer;
pub use offer::OFFER_BYTES;
pub(crate) use stream::{RingStream, is_offence, offence};

/// Bytes of a ring: 60 pages with their frames.
pub const RING_BYTES: usize = 256 << 10;

/// Most WRITEs with bytes that the reader has not returned.
pub(crate) const NOTES_MAX: usize = 128;

/// WRITEs after which a reader returns what it has read.
pub(crate) const CREDIT_NOTES: usize = NOTES_MAX / 4;

/// Bytes after which it does.
pub(crate) const CREDIT_BYTES: usize = RING_BYTES / 4;

/// Most credits that one end has sent and the other not taken. Each returns [`CREDIT_NOTES`] of the
/// [`NOTES_MAX`] WRITEs, or [`CREDIT_BYTES`] of the ring, of which the writer has no more.
pub(crate) const CREDITS_MAX: usize = NOTES_MAX / CREDIT_NOTES + RING_BYTES / CREDIT_BYTES;

/// Receive requests of an end: it always has one for each WRITE that the other may send.
pub const RECEIVES: usize = NOTES_MAX + CREDITS_MAX;

/// Requests of an end: WRITEs with bytes, and credits.
pub const REQUESTS: usize = NOTES_MAX + CREDITS_MAX;

/// A WRITE of some of the bytes that were [staged](RingPort::stage), to the same place in the ring
/// of the other end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RingWrite {
    /// Where in the ring.
    pub offset: usize,
    /// How many bytes.
    pub bytes: usize,
    /// What the other end is notified with.
    pub value: u32,
}

/// What an adapter reports.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RingEvent {
    /// The oldest WRITE has completed: its bytes are not needed any more.
    Sent,
    /// The other end's next WRITE is in the ring; this is its value.
    Notified(u32),
}

/// What an adapter does for one end of a connection. No call waits. After an error the connection
/// is of no more use.
pub trait RingPort: Debug + Send {
    /// Stores bytes to be sent. No posted WRITE of the same bytes may be outstanding.
    fn stage(&mut self, offset: usize, bytes: &[u8]);

    /// Posts WRITEs, of which no more than [`REQUESTS`] may be outstanding.
    ///
    /// # Errors
    /// When the connection broke.
    fn post(&mut self, writes: &[RingWrite]) -> io::Result<()>;

    /// Returns the next event. There is a new receive request for one that was notified.
    ///
    /// # Errors
    /// When the connection broke.
    fn poll(&mut self) -> io::Result<Option<RingEvent>>;

    /// Copies bytes of this end's ring.
    fn copy(&self, offset: usize, bytes: &mut [u8]);

    /// Makes the descriptor readable at the next event, and unreadable until then. An event before
    /// the call may not be reported: the caller polls once more.
    ///
    /// # Errors
    /// When the connection broke.
    fn arm(&mut self) -> io::Result<()>;

    /// The descriptor.
    fn event_fd(&self) -> BorrowedFd<'_>;
}

/// One end of a connection whose other end is not known yet.
pub trait NewRing: Debug + Send {
    /// What the other end has to know.
    fn offer(&self) -> [u8; OFFER_BYTES];

    /// Connects to the end with this offer.
    ///
    /// # Errors
    /// When the offer makes no sense, or the adapter fails.
    fn connect(self: Box<Self>, offer: &[u8; OFFER_BYTES]) -> io::Result<Box<dyn RingPort>>;
}

/// Makes ends of connections.
pub trait Rings: Debug + Send + Sync {
    /// Makes one for the peer that is at `remote` and is reached from `local`. May take time.
    ///
    /// # Errors
    /// When no adapter of this host has that address, or it fails.
    fn prepare(&self, local: IpAddr, remote: IpAddr, peer: &str) -> io::Result<Box<dyn NewRing>>;
}
