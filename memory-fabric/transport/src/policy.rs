//! What the pager does differently on fast and slow links: the tier of a link, and what follows.

use crate::PAGE_BYTES;
use crate::PathKind;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

/// The class of a link by its measured latency.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Tier {
    /// A READ of a page takes at most [`RDMA_ROUND_TRIP_MAX`].
    Rdma,
    /// A page takes at most [`FAST_ROUND_TRIP_MAX`], by RDMA or TCP.
    FastTcp,
    /// It takes longer.
    Slow,
}

/// Longest READ of a page over an `rdma` link: adapters take well below that through a switch or
/// two, SoftRoCE seldom does.
pub const RDMA_ROUND_TRIP_MAX: Duration = Duration::from_micros(100);

/// Longest round trip of a page over a `fast-tcp` link: about what 10 Gbit/s Ethernet with one
/// switch and kernel TCP needs when the receiver has to be woken.
pub const FAST_ROUND_TRIP_MAX: Duration = Duration::from_micros(200);

/// A tier, whether it is for RDMA only, and the longest round trip of a page. The first that fits
/// is taken.
const TIERS: [(Tier, bool, Duration); 3] = [
    (Tier::Rdma, true, RDMA_ROUND_TRIP_MAX),
    (Tier::FastTcp, false, FAST_ROUND_TRIP_MAX),
    (Tier::Slow, false, Duration::MAX),
];

/// How often in a row another tier has to be found before it is believed.
const FOUND_IN_A_ROW: u32 = 3;

impl Tier {
    /// The tier of a link on which a page takes so long by this kind.
    #[must_use]
    pub fn of(kind: PathKind, page: Duration) -> Self {
        let fits = |&&(_, rdma_only, most): &&(Self, bool, Duration)| {
            (kind == PathKind::Rdma || !rdma_only) && page <= most
        };
        TIERS.iter().find(fits).map_or(Self::Slow, |tier| tier.0)
    }

    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::FastTcp => "fast-tcp",
            Self::Slow => "slow",
        }
    }

    const fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Rdma,
            1 => Self::FastTcp,
            _ => Self::Slow,
        }
    }
}

/// Keeps a tier until it is clear that it is another one.
#[derive(Clone, Copy, Debug)]
pub struct Steady {
    tier: Tier,
    /// Another one, and how often in a row it was found.
    other: Option<(Tier, u32)>,
}

impl Steady {
    /// Begins with `tier`.
    #[must_use]
    pub fn new(tier: Tier) -> Self {
        Self { tier, other: None }
    }

    /// Takes in what a page took lately. Gives the tier when it is another one from now on: found
    /// three times in a row, and each time by a quarter beyond the boundary.
    pub fn observe(&mut self, kind: PathKind, page: Duration) -> Option<Tier> {
        let found = Tier::of(kind, page);
        let clear = match found.cmp(&self.tier) {
            std::cmp::Ordering::Equal => found,
            // The times of RDMA say nothing once there is none.
            _ if self.tier == Tier::Rdma && kind != PathKind::Rdma => found,
            std::cmp::Ordering::Greater => Tier::of(kind, page * 4 / 5).max(self.tier),
            std::cmp::Ordering::Less => Tier::of(kind, page * 5 / 4).min(self.tier),
        };
        if clear == self.tier {
            self.other = None;
            return None;
        }
        let count = match self.other {
            Some((tier, count)) if tier == clear => count + 1,
            _ => 1,
        };
        self.other = Some((clear, count));
        if count < FOUND_IN_A_ROW {
            return None;
        }
        *self = Self::new(clear);
        Some(clear)
    }
}

/// What the pager does on links of one tier. Eviction is the same on all: a quarter of the cache on
/// probation on slow links, with twice the reserve, cost a guest 1.7 times as many remote faults
/// (docs/bench.md).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Policy {
    /// The largest window of a stream that is fetched ahead, pages.
    pub window_pages: u32,
    /// Most pages in one request.
    pub run_pages: u32,
    /// Limit of prefetched pages in flight.
    pub in_flight_pages: u32,
    /// Pages before it is first tried whether compression pays.
    pub compression_first_pages: u32,
    /// The longest time between such trials.
    pub compression_rest_max: Duration,
}

/// By tier. Windows cover the product of bandwidth and delay: of 100 Gbit/s at 20 us, of 10 Gbit/s
/// at 400 us, and of 10 Gbit/s at 800 us or 1 Gbit/s at 8 ms.
const POLICIES: [Policy; 3] = [
    Policy {
        window_pages: 64,
        run_pages: 32,
        in_flight_pages: 256,
        compression_first_pages: 1024,
        compression_rest_max: Duration::from_secs(8),
    },
    Policy {
        window_pages: 128,
        run_pages: 32,
        in_flight_pages: 256,
        compression_first_pages: 256,
        compression_rest_max: Duration::from_secs(8),
    },
    Policy {
        window_pages: 256,
        run_pages: 64,
        in_flight_pages: 512,
        compression_first_pages: 64,
        compression_rest_max: Duration::from_secs(4),
    },
];

/// What is on its way unasked may take a link so long: a fault on the last of it waits for all.
const IN_FLIGHT_TIME_MAX: Duration = Duration::from_millis(20);
/// But so many pages may be in any case.
const IN_FLIGHT_PAGES_MIN: u32 = 32;

impl Policy {
    /// Of a tier.
    #[must_use]
    pub const fn of(tier: Tier) -> Self {
        POLICIES[tier as usize]
    }
}

/// The policy of a link, or of all: written when the link is measured, read by the pager's threads.
#[derive(Debug)]
pub struct PolicyCell {
    // Both are relaxed: no other data is published by them.
    tier: AtomicU8,
    in_flight_pages: AtomicU32,
}

impl PolicyCell {
    /// The policy of `tier`.
    #[must_use]
    pub fn new(tier: Tier) -> Self {
        Self {
            tier: AtomicU8::new(tier as u8),
            in_flight_pages: AtomicU32::new(u32::MAX),
        }
    }

    /// From now on the policy is that of `tier`.
    pub fn set_tier(&self, tier: Tier) {
        self.tier.store(tier as u8, Ordering::Relaxed);
    }

    /// The link carries so many bytes a second.
    pub fn set_stream(&self, bytes_per_second: f64) {
        let bytes = bytes_per_second * IN_FLIGHT_TIME_MAX.as_secs_f64();
        // Saturates, and is not negative.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let pages = (bytes / f64::from(PAGE_BYTES)) as u32;
        self.in_flight_pages
            .store(pages.max(IN_FLIGHT_PAGES_MIN), Ordering::Relaxed);
    }

    /// Shows the same as another.
    pub fn copy(&self, other: &Self) {
        self.set_tier(other.tier());
        let pages = other.in_flight_pages.load(Ordering::Relaxed);
        self.in_flight_pages.store(pages, Ordering::Relaxed);
    }

    /// The tier now.
    #[must_use]
    pub fn tier(&self) -> Tier {
        Tier::from_number(self.tier.load(Ordering::Relaxed))
    }

    /// The policy now.
    #[must_use]
    pub fn policy(&self) -> Policy {
        let policy = Policy::of(self.tier());
        let in_flight_pages = self.in_flight_pages.load(Ordering::Relaxed);
        let in_flight_pages = policy.in_flight_pages.min(in_flight_pages);
        Policy {
            in_flight_pages,
            // At least two requests, so that the link is not idle in between.
            run_pages: policy.run_pages.min(in_flight_pages / 2),
            ..policy
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IN_FLIGHT_MAX;
    use fabric_wire::RUN_PAGES_MAX;
    use proptest::prelude::*;

    const NS: Duration = Duration::from_nanos(1);

    #[test]
    fn tiers_begin_and_end_at_their_boundaries() {
        for (most, tier, next) in [
            (RDMA_ROUND_TRIP_MAX, Tier::Rdma, Tier::FastTcp),
            (FAST_ROUND_TRIP_MAX, Tier::FastTcp, Tier::Slow),
        ] {
            assert_eq!(Tier::of(PathKind::Rdma, most), tier);
            assert_eq!(Tier::of(PathKind::Rdma, most + NS), next);
        }
        assert_eq!(
            Tier::of(PathKind::Tcp, NS),
            Tier::FastTcp,
            "TCP, however fast"
        );
        assert_eq!(Tier::of(PathKind::Tcp, FAST_ROUND_TRIP_MAX), Tier::FastTcp);
        assert_eq!(
            Tier::of(PathKind::Tcp, FAST_ROUND_TRIP_MAX + NS),
            Tier::Slow
        );
        assert_eq!(Tier::of(PathKind::Tcp, Duration::MAX), Tier::Slow);
        for tier in [Tier::Rdma, Tier::FastTcp, Tier::Slow] {
            assert_eq!(Tier::from_number(tier as u8), tier);
        }
    }

    #[test]
    fn a_tier_changes_when_another_was_found_three_times() {
        let us = Duration::from_micros;
        let mut steady = Steady::new(Tier::FastTcp);
        assert_eq!(steady.observe(PathKind::Tcp, us(300)), None);
        assert_eq!(steady.observe(PathKind::Tcp, us(300)), None);
        assert_eq!(steady.observe(PathKind::Tcp, us(150)), None, "begins anew");
        assert_eq!(steady.observe(PathKind::Tcp, us(300)), None);
        assert_eq!(steady.observe(PathKind::Tcp, us(300)), None);
        assert_eq!(steady.observe(PathKind::Tcp, us(300)), Some(Tier::Slow));
        for _ in 0..2 {
            assert_eq!(steady.observe(PathKind::Tcp, us(100)), None);
        }
        assert_eq!(steady.observe(PathKind::Tcp, us(100)), Some(Tier::FastTcp));
    }

    #[test]
    fn a_link_that_lost_rdma_is_no_rdma_link_however_fast() {
        let mut steady = Steady::new(Tier::Rdma);
        let found = [0; 3].map(|_| steady.observe(PathKind::Tcp, Duration::from_micros(90)));
        assert_eq!(found, [None, None, Some(Tier::FastTcp)]);
        let found = [0; 3].map(|_| steady.observe(PathKind::Rdma, Duration::from_micros(70)));
        assert_eq!(found, [None, None, Some(Tier::Rdma)]);
    }

    proptest! {
        #[test]
        fn noise_around_a_boundary_flips_nothing(
            times in prop::collection::vec(161_u64..249, 1..200), slow: bool,
        ) {
            let tier = if slow { Tier::Slow } else { Tier::FastTcp };
            let mut steady = Steady::new(tier);
            for us in times {
                prop_assert_eq!(steady.observe(PathKind::Tcp, Duration::from_micros(us)), None);
            }
        }
    }

    #[test]
    fn no_two_tiers_agree_and_slower_ones_fetch_further_ahead_and_compress_sooner() {
        let [rdma, fast, slow] = POLICIES;
        assert!(rdma.window_pages < fast.window_pages && fast.window_pages < slow.window_pages);
        assert!(rdma.compression_first_pages > fast.compression_first_pages);
        assert!(fast.compression_first_pages > slow.compression_first_pages);
        assert!(fast.run_pages < slow.run_pages && fast.in_flight_pages < slow.in_flight_pages);
        assert!(fast.compression_rest_max > slow.compression_rest_max);
    }

    #[test]
    fn policies_stay_within_what_transports_take() {
        for policy in POLICIES {
            assert!(policy.run_pages <= RUN_PAGES_MAX);
            assert!(
                policy.in_flight_pages <= 8 * RUN_PAGES_MAX,
                "room for READs"
            );
            assert!((policy.in_flight_pages / policy.run_pages) as usize <= IN_FLIGHT_MAX);
        }
    }

    #[test]
    fn a_narrow_link_has_little_on_its_way() {
        let cell = PolicyCell::new(Tier::Slow);
        assert_eq!(cell.policy(), Policy::of(Tier::Slow));
        // 50 Mbit/s: 30 pages in 20 ms.
        cell.set_stream(50e6 / 8.0);
        let policy = cell.policy();
        assert_eq!((policy.in_flight_pages, policy.run_pages), (32, 16));
        cell.set_stream(1e9 / 8.0);
        assert_eq!(cell.policy().in_flight_pages, 512);
        cell.set_stream(f64::INFINITY);
        assert_eq!(cell.policy(), Policy::of(Tier::Slow));
        cell.set_tier(Tier::FastTcp);
        assert_eq!(cell.policy(), Policy::of(Tier::FastTcp));
    }
}
