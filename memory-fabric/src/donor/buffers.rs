//! The budget of a donor for the buffers that its peers cause, all together: every connection is
//! charged with the most that it may occupy before a buffer of it exists, until all are gone.
//!
//! A connection has buffers from its first bytes on, for its handshake and its requests. The budget is
//! that of as many of these as there are places. A lease that is delegated is charged here as well, with
//! what its owner has shown, and is not delegated where that does not fit. Connections for pages have more, from a
//! budget of their own: a client that uses that up keeps no lease from being renewed. It is enough for
//! all places by TCP.

use super::session;
use super::{CONNECTIONS_MAX, CONTROL_SPARE, RESTING_MAX, WAITING_MAX};
use crate::transport::rdma::RdmaError;
use crate::transport::rdma::resources::{Quota, Share, Usage};
use crate::transport::resting::RESTING_BYTES;
use crate::transport::{tls, udp};
use crate::wire::{CONTROL_BYTES_MAX, TrafficClass};
use fabric_identity::presented::CHAIN_BYTES_MAX;
use std::sync::Arc;

/// Of a connection by TCP without TLS: a request and its answer.
const TCP_BYTES: usize = 4 * CONTROL_BYTES_MAX;

/// The most that a connection occupies before it is one for pages.
const CONNECTION_BYTES_MAX: usize = max(TCP_BYTES, max(tls::BUFFER_BYTES, udp::WAITING_BYTES));

/// The most that one occupies while it rests.
const RESTING_BYTES_MAX: usize = RESTING_BYTES + 2 * CHAIN_BYTES_MAX;

/// Limit of the bytes of all connections, without those of page traffic.
const CONNECTIONS_BYTES_MAX: u64 = (CONNECTIONS_MAX + CONTROL_SPARE + WAITING_MAX) as u64
    * CONNECTION_BYTES_MAX as u64
    + RESTING_MAX as u64 * RESTING_BYTES_MAX as u64;

/// Limit of the bytes for page traffic: what as many connections by TCP as there can be take. By UDP
/// each takes more.
pub(super) const PAGES_BYTES_MAX: u64 =
    CONNECTIONS_MAX as u64 * session::buffer_bytes(TrafficClass::Urgent) as u64;

const REMEDY: &str =
    "use another node, end VMs, or limit the connections of each member with --allow";

const fn max(one: usize, other: usize) -> usize {
    if one > other { one } else { other }
}

/// What a new connection is made of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Made {
    Tcp,
    Tls,
    Udp,
    /// It rests, and has given its buffers back. TLS and this node keep what the peer has shown.
    Resting {
        chain_bytes: usize,
    },
}

/// There is no room for the buffers of another connection.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the buffers of a connection take {asked} bytes, and {in_use} of {limit} bytes for connections of \
     this node are in use; {REMEDY}"
)]
pub(super) struct BuffersFull {
    asked: u64,
    in_use: u64,
    limit: u64,
}

/// The budget of a donor.
#[derive(Debug)]
pub(super) struct Buffers {
    connections: Arc<Quota>,
    pages: Arc<Quota>,
}

impl Buffers {
    /// Creates a budget with a limit of the bytes for page traffic.
    pub(super) fn new(pages_bytes_max: u64) -> Self {
        let quota = |what, limit| Quota::new(what, "this node", Some(limit), REMEDY);
        Self {
            connections: quota("bytes for connections", CONNECTIONS_BYTES_MAX),
            pages: quota("bytes for connections for pages", pages_bytes_max),
        }
    }

    /// Charges it with a new connection, until the result is dropped.
    ///
    /// # Errors
    ///
    /// [`BuffersFull`], when there are more connections than places.
    pub(super) fn take(&self, made: Made) -> Result<Share, BuffersFull> {
        let bytes = match made {
            Made::Tcp => TCP_BYTES,
            Made::Tls => tls::BUFFER_BYTES,
            Made::Udp => udp::WAITING_BYTES,
            Made::Resting { chain_bytes } => RESTING_BYTES + 2 * chain_bytes,
        };
        take(&self.connections, bytes)
    }

    /// Charges it with the page traffic of a class on a connection whose own buffers become larger by
    /// `lifted` bytes for it.
    ///
    /// # Errors
    ///
    /// [`BuffersFull`].
    pub(super) fn take_for_pages(
        &self,
        class: TrafficClass,
        lifted: usize,
    ) -> Result<Share, BuffersFull> {
        take(&self.pages, session::buffer_bytes(class) + lifted)
    }

    /// Returns how many bytes are charged, and the limit.
    pub(super) fn usage(&self) -> Usage {
        let (connections, pages) = (self.connections.usage(), self.pages.usage());
        let limit = connections.limit.zip(pages.limit);
        Usage {
            in_use: connections.in_use + pages.in_use,
            limit: limit.map(|(connections, pages)| connections + pages),
        }
    }
}

fn take(quota: &Arc<Quota>, bytes: usize) -> Result<Share, BuffersFull> {
    let asked = bytes as u64;
    quota.take_all(asked).map_err(|error| {
        let (in_use, limit) = match error {
            RdmaError::Exhausted { in_use, limit, .. } => (in_use, limit),
            // A quota fails for no other reason.
            _ => (0, 0),
        };
        BuffersFull {
            asked,
            in_use,
            limit,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "udp")]
    #[test]
    fn charges_are_those_of_the_documentation() {
        // docs/security.md, "Limits of a node".
        let of = |class, lifted: usize| -> usize { (session::buffer_bytes(class) + lifted) >> 10 };
        let made =
            [TCP_BYTES, tls::BUFFER_BYTES, udp::WAITING_BYTES].map(|bytes| bytes.div_ceil(1024));
        assert_eq!(made, [8, 225, 320]);
        assert_eq!(of(TrafficClass::Urgent, 0), 773_usize);
        assert_eq!(of(TrafficClass::Probe, 0), 1_541_usize);
        let by_udp = |class| of(class, udp::lifted_bytes(class));
        assert_eq!(by_udp(TrafficClass::Bulk), 4_549_usize);
        assert_eq!(by_udp(TrafficClass::Prefetch), 11_717_usize);
        let tenths_of_gib = |bytes: u64| (bytes * 10 + (1 << 29)) >> 30;
        assert_eq!(
            [RESTING_BYTES, RESTING_BYTES_MAX].map(|bytes| bytes >> 10),
            [2, 18]
        );
        assert_eq!(tenths_of_gib(CONNECTIONS_BYTES_MAX), 16);
        assert_eq!(tenths_of_gib(PAGES_BYTES_MAX), 23);
        assert_eq!(tenths_of_gib(CONNECTIONS_BYTES_MAX + PAGES_BYTES_MAX), 39);
    }

    #[test]
    fn all_places_fit_and_as_many_connections_for_pages_by_tcp() {
        let buffers = Buffers::new(PAGES_BYTES_MAX);
        let mut shares = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            let made = [Made::Tcp, Made::Tls, Made::Udp][shares.len() % 3];
            shares.push(buffers.take(made).expect("a place"));
            let pages = buffers.take_for_pages(TrafficClass::Bulk, 0);
            shares.push(pages.expect("room"));
        }
        for _ in 0..WAITING_MAX + CONTROL_SPARE {
            shares.push(buffers.take(Made::Udp).expect("a place"));
        }
        for _ in 0..RESTING_MAX {
            let chain_bytes = CHAIN_BYTES_MAX;
            let resting = buffers.take(Made::Resting { chain_bytes });
            shares.push(resting.expect("a place"));
        }
        let refused = buffers.take_for_pages(TrafficClass::Urgent, 0);
        let Usage { in_use, limit } = buffers.usage();
        assert!(in_use <= limit.expect("one"), "{in_use}");
        let text = refused.expect_err("full").to_string();
        let asked = session::buffer_bytes(TrafficClass::Urgent);
        assert_eq!(
            text,
            format!(
                "the buffers of a connection take {asked} bytes, and {PAGES_BYTES_MAX} of \
                 {PAGES_BYTES_MAX} bytes for connections of this node are in use; {REMEDY}"
            )
        );
        drop(shares);
        assert_eq!(buffers.usage().in_use, 0);
    }
}
