//! By what pages travel to one donor: decided by what was measured.

use super::measure::Measured;

/// RDMA is taken for faults unless a page by TCP takes at most 3 / 4 of its time: it needs no
/// processor of the donor's, and what little TCP may be ahead is noise.
const FAULTS_TCP_SHARE: (u32, u32) = (3, 4);

/// Pages that nobody waits for go the same way as faults, unless TCP carries at least 4 / 3 as many
/// bytes a second.
const BULK_TCP_GAIN: f64 = 4.0 / 3.0;

/// What goes by RDMA. What does not goes by TCP.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Selection {
    /// Pages that vCPUs wait for.
    pub faults_by_rdma: bool,
    /// Pages that nobody waits for yet.
    pub bulk_by_rdma: bool,
}

impl Selection {
    /// Everything by TCP.
    pub const TCP: Self = Self {
        faults_by_rdma: false,
        bulk_by_rdma: false,
    };
    /// All that can go by RDMA does.
    pub const RDMA: Self = Self {
        faults_by_rdma: true,
        bulk_by_rdma: true,
    };
    /// Faults by RDMA, and all else by TCP.
    pub const HYBRID: Self = Self {
        faults_by_rdma: true,
        bulk_by_rdma: false,
    };

    /// The best of what was measured. Without a measurement of TCP, RDMA is the better one; without
    /// one of RDMA there is none.
    #[must_use]
    pub fn best(tcp: Option<&Measured>, rdma: Option<&Measured>) -> Self {
        let Some(rdma) = rdma else {
            return Self::TCP;
        };
        let Some(tcp) = tcp else {
            return Self::RDMA;
        };
        let (part, of) = FAULTS_TCP_SHARE;
        if tcp.page * of <= rdma.page * part {
            return Self::TCP;
        }
        if tcp.stream_bytes_per_second >= rdma.stream_bytes_per_second * BULK_TCP_GAIN {
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
        Selection::best(Some(&tcp), Some(&rdma))
    }

    #[test]
    fn what_is_faster_is_taken_and_rdma_when_it_is_a_draw() {
        assert_eq!(best((30, 3e9), (6, 10e9)), Selection::RDMA);
        assert_eq!(best((100, 3e9), (100, 3e9)), Selection::RDMA);
        // The boundary of faults: TCP has to take three quarters at the most.
        assert_eq!(best((76, 3e9), (100, 3e9)), Selection::RDMA);
        assert_eq!(best((75, 3e9), (100, 3e9)), Selection::TCP);
        // And that of the rest.
        assert_eq!(best((100, 3.9e9), (100, 3e9)), Selection::RDMA);
        assert_eq!(best((100, 4e9), (100, 3e9)), Selection::HYBRID);
    }

    #[test]
    fn what_was_not_measured_is_not_compared() {
        let one = measured(100, 1e9);
        assert_eq!(Selection::best(Some(&one), None), Selection::TCP);
        assert_eq!(Selection::best(None, None), Selection::TCP);
        assert_eq!(Selection::best(None, Some(&one)), Selection::RDMA);
    }

    proptest! {
        #[test]
        fn noise_of_a_tenth_does_not_change_what_is_clear(
            page in 1000_u64..1_000_000, wobble in 90_u64..=110, stream in 1e6..1e10_f64,
        ) {
            // RDMA at half the time and twice the rate of TCP, and the other way round.
            let noisy = page * wobble / 100;
            prop_assert_eq!(best((noisy, stream), (page / 2, stream * 2.0)), Selection::RDMA);
            prop_assert_eq!(best((noisy / 2, stream), (page, stream * 2.0)), Selection::TCP);
        }
    }
}
