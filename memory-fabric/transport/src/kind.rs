//! How pages are to travel, and what they travel by.

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

/// What pages travel by: to one donor, or in a summary of all.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PathKind {
    /// In a summary: nothing, since all memory is local.
    None,
    /// A slab in this process.
    Loopback,
    /// TCP.
    Tcp,
    /// QUIC over UDP.
    Udp,
    /// RDMA.
    Rdma,
    /// In a summary: one of these from some donors, and another from others.
    Mixed,
}

impl PathKind {
    /// The summary of what is used with each donor.
    #[must_use]
    pub fn of_all(donors: impl IntoIterator<Item = Self>) -> Self {
        let mut donors = donors.into_iter();
        let Some(first) = donors.next() else {
            return Self::None;
        };
        if donors.all(|kind| kind == first) {
            first
        } else {
            Self::Mixed
        }
    }

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

#[cfg(test)]
mod tests {
    use super::PathKind::{self, Mixed, None, Rdma, Tcp};

    #[test]
    fn a_summary_names_what_all_donors_have_in_common() {
        let cases = [
            (&[][..], None),
            (&[Tcp], Tcp),
            (&[Rdma, Rdma], Rdma),
            (&[Rdma, Tcp, Rdma], Mixed),
        ];
        for (donors, wanted) in cases {
            assert_eq!(PathKind::of_all(donors.iter().copied()), wanted);
        }
    }
}
