//! The choice of a path to one donor, by its measurements.

use super::PathKind;
use super::measure::Measured;

/// RDMA is taken for faults unless a page by TCP takes at most 3 / 4 of its time: it needs no
/// processor of the donor's, and what little TCP may be ahead is noise.
const FAULTS_TCP_SHARE: (u32, u32) = (3, 4);

/// Bulk pages use the path of faults, unless TCP carries at least 4 / 3 as many bytes per second.
const BULK_TCP_GAIN: f64 = 4.0 / 3.0;

/// The paths to and from a donor.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Selection {
    /// Pages that vCPUs wait for.
    pub faults: PathKind,
    /// Prefetched pages, and write-backs.
    pub bulk: PathKind,
}

/// Why a path was chosen.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Reason {
    /// `--transport` named it.
    #[default]
    Asked,
    /// There is no RDMA connection.
    NoRdma,
    /// Nothing but RDMA was measured.
    OnlyRdma,
    /// A page takes much less time without RDMA.
    FasterPages,
    /// RDMA is better for faults, and carries much fewer bytes.
    MoreBytes,
    /// RDMA is better, or nearly as good.
    Rdma,
}

impl Reason {
    /// The reason in words, with the limits of the choice.
    #[must_use]
    pub fn text(self) -> String {
        let (part, of) = FAULTS_TCP_SHARE;
        match self {
            Self::Asked => "asked for by --transport".to_owned(),
            Self::NoRdma => "there is no RDMA connection".to_owned(),
            Self::OnlyRdma => "only RDMA could be measured".to_owned(),
            Self::FasterPages => {
                format!("without RDMA a page takes at most {part}/{of} of the time")
            }
            Self::MoreBytes => {
                "RDMA for faults; TCP carries at least 4/3 of the bytes per second".to_owned()
            }
            Self::Rdma => format!(
                "without RDMA a page takes more than {part}/{of} of the time, and less than 4/3 of \
                 the bytes per second are carried"
            ),
        }
    }
}

impl Selection {
    /// All that can go by RDMA does.
    pub const RDMA: Self = Self::all(PathKind::Rdma);
    /// Faults by RDMA, and all else by TCP.
    pub const HYBRID: Self = Self {
        faults: PathKind::Rdma,
        bulk: PathKind::Tcp,
    };

    /// Everything by one.
    #[must_use]
    pub const fn all(kind: PathKind) -> Self {
        Self {
            faults: kind,
            bulk: kind,
        }
    }

    /// The best of what was measured on streams of a kind, and by RDMA. Without a measurement of
    /// the streams, RDMA is the better one; without one of RDMA there is none.
    #[must_use]
    pub fn best(
        kind: PathKind,
        streams: Option<&Measured>,
        rdma: Option<&Measured>,
    ) -> (Self, Reason) {
        let Some(rdma) = rdma else {
            return (Self::all(kind), Reason::NoRdma);
        };
        let Some(streams) = streams else {
            return (Self::RDMA, Reason::OnlyRdma);
        };
        let (part, of) = FAULTS_TCP_SHARE;
        if streams.page * of <= rdma.page * part {
            return (Self::all(kind), Reason::FasterPages);
        }
        if streams.stream_bytes_per_second >= rdma.stream_bytes_per_second * BULK_TCP_GAIN {
            return (Self::HYBRID, Reason::MoreBytes);
        }
        (Self::RDMA, Reason::Rdma)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn measured(page_us: u64, stream_bytes_per_second: f64) -> Measured {
        Measured {
            small: Duration::from_micros(page_us / 2),
            page: Duration::from_micros(page_us),
            stream_bytes_per_second,
        }
    }

    fn best(tcp: (u64, f64), rdma: (u64, f64)) -> Selection {
        let (tcp, rdma) = (measured(tcp.0, tcp.1), measured(rdma.0, rdma.1));
        Selection::best(PathKind::Tcp, Some(&tcp), Some(&rdma)).0
    }

    #[test]
    fn what_is_faster_is_taken_and_rdma_when_it_is_a_draw() {
        assert_eq!(best((30, 3e9), (6, 10e9)), Selection::RDMA);
        assert_eq!(best((100, 3e9), (100, 3e9)), Selection::RDMA);
        // The boundary of faults: TCP may take at most three quarters.
        assert_eq!(best((76, 3e9), (100, 3e9)), Selection::RDMA);
        assert_eq!(best((75, 3e9), (100, 3e9)), Selection::all(PathKind::Tcp));
        // And that of the rest.
        assert_eq!(best((100, 3.9e9), (100, 3e9)), Selection::RDMA);
        assert_eq!(best((100, 4e9), (100, 3e9)), Selection::HYBRID);
    }

    #[test]
    fn what_was_not_measured_is_not_compared() {
        let one = measured(100, 1e9);
        for kind in [PathKind::Tcp, PathKind::Udp] {
            let best = |streams, rdma| Selection::best(kind, streams, rdma);
            let streams = (Selection::all(kind), Reason::NoRdma);
            assert_eq!(best(Some(&one), None), streams);
            assert_eq!(best(None, None), streams);
            assert_eq!(best(None, Some(&one)), (Selection::RDMA, Reason::OnlyRdma));
        }
    }

    #[test]
    fn the_reason_is_that_of_the_choice() {
        let reason = |tcp: (u64, f64), rdma: (u64, f64)| {
            let (tcp, rdma) = (measured(tcp.0, tcp.1), measured(rdma.0, rdma.1));
            Selection::best(PathKind::Tcp, Some(&tcp), Some(&rdma)).1
        };
        assert_eq!(reason((30, 3e9), (6, 10e9)), Reason::Rdma);
        assert_eq!(reason((75, 3e9), (100, 3e9)), Reason::FasterPages);
        assert_eq!(reason((100, 4e9), (100, 3e9)), Reason::MoreBytes);
        let text = Reason::FasterPages.text();
        assert!(text.contains("3/4"), "{text}");
        let text = Reason::MoreBytes.text();
        assert!(text.contains("4/3"), "{text}");
    }

    proptest! {
        #[test]
        fn noise_of_a_tenth_does_not_change_what_is_clear(
            page in 1000_u64..1_000_000, wobble in 90_u64..=110, stream in 1e6..1e10_f64,
        ) {
            // RDMA at half the time and twice the rate of TCP, and the other way round.
            let noisy = page * wobble / 100;
            prop_assert_eq!(best((noisy, stream), (page / 2, stream * 2.0)), Selection::RDMA);
            prop_assert_eq!(best((noisy / 2, stream), (page, stream * 2.0)), Selection::all(PathKind::Tcp));
        }
    }
}
