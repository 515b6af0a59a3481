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
    pub fn best(kind: PathKind, streams: Option<&Measured>, rdma: Option<&Measured>) -> Self {
        let Some(rdma) = rdma else {
            return Self::all(kind);
        };
        let Some(streams) = streams else {
            return Self::RDMA;
        };
        let (part, of) = FAULTS_TCP_SHARE;
        if streams.page * of <= rdma.page * part {
            return Self::all(kind);
        }
        if streams.stream_bytes_per_second >= rdma.stream_bytes_per_second * BULK_TCP_GAIN {
            return Self::HYBRID;
        }
        Self::RDMA
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
        Selection::best(PathKind::Tcp, Some(&tcp), Some(&rdma))
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
            assert_eq!(best(Some(&one), None), Selection::all(kind));
            assert_eq!(best(None, None), Selection::all(kind));
            assert_eq!(best(None, Some(&one)), Selection::RDMA);
        }
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
