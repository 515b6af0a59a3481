//! Sealed pages: a page is encrypted and authenticated before it leaves the compute node, so that a
//! donor or a network can withhold it, but can neither read, forge, swap nor roll it back.
//!
//! - [`VmKey`] seals and opens: AES-256-GCM (NIST SP 800-38D), with random keys that never leave the
//!   process. Each write-back has a number, which is its nonce.
//! - [`SealTable`] has the number and the tag of what a donor holds of each page: 24 bytes of local
//!   memory for a page that was written back. A page opens only with the number and the tag of its
//!   last write-back, so an older version fails as any other forgery does.
//! - [`SealedTransport`] is a [`PageTransport`](fabric_transport::PageTransport) around that of a
//!   donor, or of the copies on several donors. The pager does not know of it.
//!
//! Nothing changes on the wire, and a page keeps its size, so that TCP, QUIC and RDMA carry sealed
//! pages as any others.

mod key;
mod table;
mod transport;

pub use key::{KeyError, NotGenuine, Place, Seal, VmKey};
pub use table::SealTable;
pub use transport::{Fault, Judge, LinkSeal, SealStats, SealedTransport, VERDICTS_MAX, Verdict};
