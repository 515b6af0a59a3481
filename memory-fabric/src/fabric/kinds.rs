//! How pages travel, and how fast.

use std::time::Duration;

/// How pages travel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TransportKind {
    /// RDMA to donors where both ends have it, TCP to the others.
    Auto,
    /// Pages travel from and to donors by RDMA, or nothing starts.
    Rdma,
    /// TCP connections to `ssi-hv node`.
    Tcp,
    /// A slab in this process, without any donor.
    Loopback,
}

/// The class of a link by its measured latency.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Tier {
    /// A READ of a page takes at most [`RDMA_ROUND_TRIP_MAX`].
    Rdma,
    /// A round trip takes at most [`FAST_ROUND_TRIP_MAX`].
    FastTcp,
    /// It takes longer.
    Slow,
}

/// Longest round trip of a `fast-tcp` link: about what 10 Gbit/s Ethernet with one switch and
/// kernel TCP needs when the receiver has to be woken.
pub const FAST_ROUND_TRIP_MAX: Duration = Duration::from_micros(200);

/// Longest READ of a page over an `rdma` link: adapters take well below that through a switch or
/// two, SoftRoCE seldom does.
pub const RDMA_ROUND_TRIP_MAX: Duration = Duration::from_micros(100);

impl Tier {
    /// The tier of links of this kind with this round trip.
    #[must_use]
    pub fn of(path: PathKind, round_trip: Duration) -> Self {
        if path == PathKind::Rdma && round_trip <= RDMA_ROUND_TRIP_MAX {
            Self::Rdma
        } else if round_trip <= FAST_ROUND_TRIP_MAX {
            Self::FastTcp
        } else {
            Self::Slow
        }
    }

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::FastTcp => "fast-tcp",
            Self::Slow => "slow",
        }
    }
}

/// What pages of remote faults came by at the start.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PathKind {
    /// All memory is local.
    None,
    /// A slab in this process.
    Loopback,
    /// TCP, from every donor.
    Tcp,
    /// RDMA, from every donor.
    Rdma,
    /// RDMA from some donors, TCP from the others.
    Mixed,
}

impl PathKind {
    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Loopback => "loopback",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
            Self::Mixed => "mixed",
        }
    }
}
