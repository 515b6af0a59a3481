//! Frames over UDP, by QUIC (RFC 9000), for hosts between which only UDP passes.
//!
//! The protocol is `quinn-proto`'s, which does no I/O. Whoever uses a connection drives it, with a
//! socket of its own: the pager's thread sends the request and takes the answer out of the socket,
//! and no other thread is woken in between. So there is a connection for each class, as over TCP, and a
//! donor's connection has a thread and a socket as well: one that is connected to the VM, on the same
//! port as all the others (`listener`).
//!
//! Inside a connection frames are spread over streams (`streams`): what was lost holds up only the
//! frames of its own stream.
//!
//! All is encrypted. Whether the other end is the donor that was meant is only known where its
//! [`Fingerprint`] was given.

mod connection;
mod listener;
mod settings;
mod streams;

pub use connection::UdpCloser;
pub use connection::UdpStream;
pub use fabric_identity::{Fingerprint, FingerprintError};
pub use listener::{Arrival, Listener};
