//! How pages travel.

/// How pages travel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TransportKind {
    /// What is measured to be best to each donor: RDMA where both ends have it, TCP, or both; and
    /// UDP where only that passes.
    Auto,
    /// Pages travel from and to donors by RDMA, or nothing starts.
    Rdma,
    /// Pages that vCPUs wait for are read by RDMA, or nothing starts. All else goes by TCP.
    Hybrid,
    /// TCP connections to `ssi-hv node`.
    Tcp,
    /// The same by QUIC over UDP.
    Udp,
    /// A slab in this process, without any donor.
    Loopback,
}

impl TransportKind {
    /// How many nodes lend to a VM with so many donors.
    #[must_use]
    pub fn lenders(self, donors: usize) -> usize {
        match self {
            Self::Loopback => 1,
            _ => donors,
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
    /// QUIC over UDP, from every donor.
    Udp,
    /// RDMA, from every donor.
    Rdma,
    /// By one of these from some donors, and by another from others.
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
            Self::Udp => "udp",
            Self::Rdma => "rdma",
            Self::Mixed => "mixed",
        }
    }
}
