//! Frames over UDP with QUIC (RFC 9000), for hosts that can only exchange UDP.
//!
//! The protocol is `quinn-proto`'s, which does no I/O. The user of a connection drives it with its
//! own socket: the pager's thread sends the request and receives the answer from the socket,
//! without waking another thread. Therefore each class has a connection, as over TCP, and a donor's
//! connection also has a thread and a socket: one that is connected to the VM, on the same port as
//! all others (`listener`).
//!
//! Inside a connection frames are spread over streams (`streams`), so that a loss delays only the
//! frames of its own stream.
//!
//! All traffic is encrypted. With credentials both ends are members of the cluster, as over TCP.
//! Without, the donor is authenticated only if its [`Fingerprint`] was given, and the VM never.

mod connection;
mod listener;
mod settings;
pub(crate) mod streams;

pub use connection::{UdpCloser, UdpStream, WAITING_BYTES, lifted_bytes};
pub use fabric_identity::{Fingerprint, FingerprintError};
pub use listener::{Arrival, Listener};
pub use settings::Expected;
