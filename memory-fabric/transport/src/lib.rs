//! How pages travel between nodes.
//!
//! [`PageTransport`] is completion-based: post a read or a write under a ticket, poll for
//! completions. One transport serves one donor and one thread; urgent faults and bulk have
//! transports of their own, so that a fault never queues behind bulk.

// Shared by tests of this crate and of those above it, under the name that both know.
#[cfg(test)]
extern crate self as fabric_transport;

mod choice;
pub mod control;
#[cfg(all(feature = "udp", any(test, feature = "fuzzing")))]
pub mod fuzzing;
mod kind;
pub mod measure;
pub mod path;
pub mod policy;
pub mod port;
pub mod rdma;
pub mod resting;
pub mod select;
pub mod stream;
pub mod tcp;
pub mod tls;
mod traffic;
#[cfg(feature = "udp")]
pub mod udp;
#[cfg(not(feature = "udp"))]
#[path = "udp_absent.rs"]
pub mod udp;
pub mod vacant;

pub use choice::Compression;
pub use kind::{PathKind, TransportKind};
pub use traffic::Traffic;

use fabric_pages::page::{PAGE_SHIFT, PageBytes};
use fabric_wire::RUN_PAGES_MAX;
use std::fmt;
use std::ops::RangeInclusive;
use std::os::fd::RawFd;
use std::time::Instant;

/// Most reads and writes outstanding on one transport. More would not go faster: 64 pages
/// cover the product of bandwidth and delay of 10 Gbit/s at 200 us.
pub const IN_FLIGHT_MAX: usize = 64;

/// Bytes of a page, as requests count them.
pub const PAGE_BYTES: u32 = 1 << PAGE_SHIFT;

/// Bytes that are accepted from a peer of which nothing is known: a handshake with its certificates, or
/// requests that have shown no lease.
pub const UNKNOWN_BYTES_MAX: usize = 64 << 10;

/// What the poster knows a request by.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Ticket(pub u32);

/// The end of a request.
#[derive(Debug)]
pub enum Completion<'a> {
    /// The page that was asked for; valid during the call.
    Read(Ticket, &'a PageBytes),
    /// The same of a transport to several donors, with the link of the one that sent the page.
    ReadFrom(usize, Ticket, &'a PageBytes),
    /// The run of pages that was asked for, one after the other; valid during the call.
    ReadRun(Ticket, &'a [u8]),
    /// The same of a transport to several donors, with the link of the one that sent the pages.
    ReadRunFrom(usize, Ticket, &'a [u8]),
    /// A run that does not come as it was asked for: a page of it may be lost. Who needs one of the
    /// pages asks for it alone.
    Unread(Ticket),
    /// The home has the page.
    Written(Ticket),
    /// The home has forgotten so many pages.
    Dropped(u32),
}

/// A transport that already has [`IN_FLIGHT_MAX`] requests: post again after a completion.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{IN_FLIGHT_MAX} requests are outstanding, which is the limit")]
pub struct Full;

/// What to wait for when there is nothing to do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Interest {
    /// The descriptor.
    pub fd: RawFd,
    /// Whether to wait until it takes more, too.
    pub writable: bool,
}

/// Moves pages between this node and one donor.
///
/// Called by one thread. A request survives a broken connection: it is sent again on the
/// next one, and completes once.
pub trait PageTransport: Send + fmt::Debug {
    /// Asks for the page at `offset` (bytes) of the lease.
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full>;

    /// Asks for `pages` pages from `offset` (bytes) of the lease on: 1 to
    /// [`RUN_PAGES_MAX`](fabric_wire::RUN_PAGES_MAX). They come as one answer.
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full>;

    /// Asks once more for what did not come as it was written: a page, or a run of so many. Where it
    /// can be had in several ways, all are tried before it completes.
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn post_reread(&mut self, ticket: Ticket, offset: u64, run: Option<u32>) -> Result<(), Full> {
        match run {
            Some(pages) => self.post_read_run(ticket, offset, pages),
            None => self.post_read(ticket, offset),
        }
    }

    /// The sizes, in bytes, that [`post_probe`](Self::post_probe) takes.
    fn probe_bytes(&self) -> RangeInclusive<u32> {
        PAGE_BYTES..=RUN_PAGES_MAX * PAGE_BYTES
    }

    /// Asks for `bytes` bytes from `offset` of the lease on, which begins a page, only to see how
    /// long that takes. They come as a run. A transport that can read no part of a page takes
    /// whole pages alone, and reads them as any others.
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn post_probe(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        self.post_read_run(ticket, offset, bytes.div_ceil(PAGE_BYTES))
    }

    /// Sends a page to be stored at `offset`. The bytes are taken before the call returns. No other
    /// write of this page is outstanding: they may take different ways.
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full>;

    /// Asks for `bytes` bytes from `offset` of the lease on, which come as a run. Both are multiples
    /// of [`PIECE_BYTES`](fabric_wire::PIECE_BYTES); at most
    /// [`PIECES_BYTES_MAX`](fabric_wire::PIECES_BYTES_MAX), and a page where runs are not read.
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn post_read_piece(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        unreachable!("{bytes} bytes at {offset} ({ticket:?}): only donors are asked for pieces")
    }

    /// Sends a piece of a page to be stored at `offset`, at most
    /// [`PIECE_BYTES_MAX`](fabric_wire::PIECE_BYTES_MAX), otherwise as
    /// [`post_write`](Self::post_write).
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn post_write_piece(&mut self, ticket: Ticket, offset: u64, piece: &[u8]) -> Result<(), Full> {
        let bytes = piece.len();
        unreachable!("{bytes} bytes at {offset} ({ticket:?}): only donors are sent pieces")
    }

    /// Makes the home drop `pages` pages from `offset` on, of which none has a write outstanding; what
    /// is written from then on is stored behind it. At most
    /// [`DROP_PAGES_MAX`](fabric_wire::DROP_PAGES_MAX).
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn post_drop(&mut self, offset: u64, pages: u32) -> Result<(), Full>;

    /// Sends what was posted, as far as possible without waiting.
    fn flush(&mut self);

    /// Gives every completion there is now to `complete`; does not wait.
    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>));

    /// Requests outstanding.
    fn in_flight(&self) -> usize;

    /// Whether there is no donor any more: every request is refused, though none is outstanding.
    fn is_vacant(&self) -> bool {
        false
    }

    /// To be called before sleeping until something is ready. False when something is there
    /// already, which [`poll`](Self::poll) gives.
    fn arm(&mut self) -> bool {
        true
    }

    /// When to [`poll`](Self::poll) at the latest, also while nothing is outstanding.
    fn wake_by(&mut self) -> Option<Instant> {
        None
    }

    /// What to wait for, where there is a connection.
    fn interests(&self, watch: &mut dyn FnMut(Interest));
}
