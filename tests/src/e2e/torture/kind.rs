//! What rounds differ in: how pages travel, and how many copies of each donors have.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::fault::End;

/// How pages travel in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PageTransport {
    /// TCP.
    Tcp,
    /// UDP, by QUIC.
    Udp,
    /// RDMA over SoftRoCE.
    Rdma,
}

impl PageTransport {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Rdma];

    /// The value of `--transport`.
    pub(super) fn flag(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Rdma => "rdma",
        }
    }
}

/// How many copies of each page donors have in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replicas {
    /// One, on one donor.
    #[value(name = "1")]
    One,
    /// Two, on two of three donors, one of which can be lost.
    #[value(name = "2")]
    Two,
}

impl Replicas {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::One, Self::Two];
}

/// The kind of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Kind {
    pub transport: PageTransport,
    pub replicas: Replicas,
}

impl Kind {
    /// Every transport with every number of copies. The number changes after each transport has
    /// had its turn.
    pub fn all(transports: &[PageTransport], replicas: &[Replicas]) -> Vec<Self> {
        let of = |&replicas: &Replicas| {
            let kinds = transports.iter().map(move |&transport| Self {
                transport,
                replicas,
            });
            kinds.collect::<Vec<_>>()
        };
        replicas.iter().flat_map(of).collect()
    }

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        match (self.transport, self.replicas) {
            (transport, Replicas::One) => transport.flag(),
            (PageTransport::Tcp, Replicas::Two) => "tcp x2",
            (PageTransport::Udp, Replicas::Two) => "udp x2",
            (PageTransport::Rdma, Replicas::Two) => "rdma x2",
        }
    }

    /// The donors that the VM has at its start.
    pub fn donors(self) -> u16 {
        match self.replicas {
            Replicas::One => 1,
            // So that there is room for the copies of one that is lost or drained.
            Replicas::Two => 3,
        }
    }
}

/// Returns the place of a round's kind among so many, and how the round ends. Each kind has each
/// end within as many turns as there are ends.
pub(super) fn turn(round: usize, kinds: usize) -> (usize, End) {
    let kinds = kinds.max(1);
    let (kind, turn) = (round % kinds, round / kinds);
    (kind, End::ALL[(kind + turn) % End::ALL.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_all_pairs_with_different_names() {
        let kinds = Kind::all(&PageTransport::ALL, &Replicas::ALL);
        assert_eq!(kinds.len(), 6);
        let mut names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
        assert_eq!(names[..4], ["tcp", "udp", "rdma", "tcp x2"]);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 6);
        let one = Kind::all(&[PageTransport::Udp], &[Replicas::Two]);
        assert_eq!(one.len(), 1);
        assert_eq!((one[0].name(), one[0].donors()), ("udp x2", 3));
    }

    #[test]
    fn every_kind_meets_every_end() {
        for kinds in 1..=6 {
            let mut met: Vec<_> = (0..kinds * End::ALL.len())
                .map(|round| turn(round, kinds))
                .collect();
            met.sort_unstable();
            met.dedup();
            assert_eq!(met.len(), kinds * End::ALL.len(), "{kinds} kinds");
        }
    }
}
