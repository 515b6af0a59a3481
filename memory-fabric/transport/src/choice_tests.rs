//! Tests of the decision on simulated links.

use super::*;
use crate::PathKind;
use crate::select::Selection;
use fabric_pages::page::PAGE_SIZE;
use std::collections::VecDeque;

/// Pages before the first trial.
const FIRST_PAGES: u32 = Policy::of(Tier::FastTcp).compression_first_pages;

const MBIT: f64 = 1e6 / 8.0;

/// A link and its ends: pages cross the link one after the other, and are packed and unpacked one
/// after the other in parallel.
#[derive(Clone, Copy)]
struct Link {
    bytes_a_second: f64,
    /// Additional latency of a page, which does not delay the next one.
    delay_us: f64,
    /// Time of a page at the ends in any case.
    handling_us: f64,
    /// Time of packing and unpacking a page, as measured: 6 us and 1.4 us.
    packing_us: f64,
    /// Remaining fraction of a packed page.
    left: f64,
    /// Upper bound of random noise, relative to each time.
    noise: f64,
    /// Number of disturbances per millisecond.
    disturbed: f64,
}

/// Duration of a disturbance.
const DISTURBANCE_US: f64 = 3000.0;

impl Link {
    fn of(bytes_a_second: f64) -> Self {
        Self {
            bytes_a_second,
            delay_us: 30.0,
            handling_us: 4.0,
            packing_us: 7.4,
            left: 0.6,
            noise: 0.0,
            disturbed: 0.0,
        }
    }

    fn loopback() -> Self {
        Self {
            delay_us: 0.0,
            ..Self::of(4e9)
        }
    }

    /// Returns the time of a page at the ends and on the link, in microseconds.
    fn page_us(&self, packing: Packing) -> (f64, f64) {
        let packed = packing == Packing::Lz4;
        let bytes = PAGE_SIZE as f64 * if packed { self.left } else { 1.0 };
        let ends = self.handling_us + if packed { self.packing_us } else { 0.0 };
        (ends, bytes / self.bytes_a_second * 1e6)
    }
}

/// A connection with a constant number of outstanding requests.
struct Connection {
    choice: Choice,
    depth: usize,
    run: u32,
    link: Link,
    /// Microseconds since `began`.
    clock_us: f64,
    began: Instant,
    ends_free_us: f64,
    link_free_us: f64,
    last_answer_us: f64,
    outstanding: VecDeque<(f64, Part, f64)>,
    random: u64,
    compressed: u64,
    pages: u64,
    changes: u32,
}

impl Connection {
    fn new(class: TrafficClass, depth: usize, link: Link) -> Self {
        Self {
            choice: Choice::new(Compression::Auto, class),
            depth,
            run: if class == TrafficClass::Prefetch {
                32
            } else {
                1
            },
            link,
            clock_us: 0.0,
            began: Instant::now(),
            ends_free_us: 0.0,
            link_free_us: 0.0,
            last_answer_us: 0.0,
            outstanding: VecDeque::new(),
            random: 1,
            compressed: 0,
            pages: 0,
            changes: 0,
        }
    }

    /// Returns a random number from 0 to 1.
    fn random(&mut self) -> f64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 40) as f64 / f64::from(1 << 24)
    }

    fn noise(&mut self) -> f64 {
        1.0 + self.link.noise * self.random()
    }

    fn post(&mut self) {
        let (packing, part) = self.choice.next(self.run);
        let (ends, link) = self.link.page_us(packing);
        let (mut ends, link) = (ends * self.noise(), link * self.noise());
        if self.random() < self.link.disturbed * (ends + link) / 1e3 {
            ends += DISTURBANCE_US;
        }
        self.ends_free_us = self.ends_free_us.max(self.clock_us) + ends * f64::from(self.run);
        self.link_free_us = self.link_free_us.max(self.ends_free_us) + link * f64::from(self.run);
        let answer = self.link_free_us + self.link.delay_us;
        self.outstanding.push_back((self.clock_us, part, answer));
        self.pages += u64::from(self.run);
        if packing == Packing::Lz4 {
            self.compressed += u64::from(self.run);
        }
    }

    fn pass(&mut self, pages: u64) -> &mut Self {
        let until = self.pages + pages;
        while self.pages < until {
            while self.outstanding.len() < self.depth {
                self.post();
            }
            let (posted, part, answer) = self.outstanding.pop_front().expect("just posted");
            self.clock_us = self.clock_us.max(answer);
            let took = self.clock_us - posted.max(self.last_answer_us);
            self.last_answer_us = self.clock_us;
            self.choice.answered(part, self.run);
            let at = |us: f64| Duration::from_secs_f64(us * 1e-6);
            let now = self.began + at(self.clock_us);
            self.changes += u32::from(self.choice.measured(at(took), now));
        }
        self
    }

    fn is_compressing(&self) -> bool {
        self.choice.is_compressing()
    }
}

const ALL: [(TrafficClass, usize); 4] = [
    (TrafficClass::Urgent, 1),
    (TrafficClass::Urgent, 8),
    (TrafficClass::Bulk, 64),
    (TrafficClass::Prefetch, 8),
];

#[test]
fn on_loopback_and_at_25_gbit_it_stays_off_and_hardly_a_page_is_compressed() {
    for link in [Link::loopback(), Link::of(25_000.0 * MBIT)] {
        for (class, depth) in ALL {
            let mut connection = Connection::new(class, depth, link);
            connection.pass(1_000_000);
            assert!(!connection.is_compressing(), "{class:?}, {depth} at once");
            let (compressed, pages) = (connection.compressed, connection.pages);
            assert!(
                compressed > 0 && compressed * 30 < pages,
                "{compressed} of {pages}, {class:?}, {depth} at once"
            );
        }
    }
}

#[test]
fn a_fast_link_is_tried_ever_more_seldom() {
    let mut connection = Connection::new(TrafficClass::Urgent, 1, Link::loopback());
    connection.pass(10_000_000);
    let trial = u64::from(block_pages(TrafficClass::Urgent) * BLOCKS / 2);
    // 8 s of pages, each of which takes 5 us.
    assert!(
        connection.compressed < 20 * trial,
        "{}",
        connection.compressed
    );
}

#[test]
fn at_100_mbit_it_is_on_after_the_first_trial() {
    for (class, depth) in ALL {
        let mut connection = Connection::new(class, depth, Link::of(100.0 * MBIT));
        let trial = u64::from(FIRST_PAGES + block_pages(class) * BLOCKS);
        connection.pass(trial + 3 * depth as u64 * 32);
        assert!(connection.is_compressing(), "{class:?}, {depth} at once");
        connection.pass(200_000);
        assert!(connection.is_compressing(), "{class:?}, {depth} at once");
        assert_eq!(connection.changes, 1);
    }
}

#[test]
fn at_1_gbit_it_is_on_wherever_requests_queue() {
    let link = Link::of(1000.0 * MBIT);
    for (class, depth) in ALL.into_iter().filter(|&(_, depth)| depth > 1) {
        let mut connection = Connection::new(class, depth, link);
        connection.pass(100_000);
        assert!(connection.is_compressing(), "{class:?}, {depth} at once");
    }
}

#[test]
fn pages_that_do_not_get_smaller_are_left_alone_on_any_link() {
    for mbit in [100.0, 1000.0, 10_000.0] {
        let link = Link {
            left: 1.0,
            packing_us: 0.8,
            ..Link::of(mbit * MBIT)
        };
        for (class, depth) in ALL {
            let mut connection = Connection::new(class, depth, link);
            connection.pass(200_000);
            assert!(!connection.is_compressing(), "{class:?} at {mbit} Mbit/s");
        }
    }
}

#[test]
fn a_slow_processor_on_a_fast_link_does_not_compress() {
    let link = Link {
        packing_us: 150.0,
        ..Link::of(1000.0 * MBIT)
    };
    for (class, depth) in ALL {
        let mut connection = Connection::new(class, depth, link);
        connection.pass(200_000);
        assert!(!connection.is_compressing(), "{class:?}, {depth} at once");
    }
}

#[test]
fn a_link_that_changes_is_measured_again() {
    for (class, depth) in ALL {
        let mut connection = Connection::new(class, depth, Link::loopback());
        connection.pass(100_000);
        assert!(!connection.is_compressing());
        connection.link = Link::of(100.0 * MBIT);
        connection.pass(100_000);
        assert!(connection.is_compressing(), "{class:?}, {depth} at once");
        connection.link = Link::loopback();
        connection.pass(3_000_000);
        assert!(!connection.is_compressing(), "{class:?}, {depth} at once");
        assert_eq!(connection.changes, 2);
    }
}

#[test]
fn noise_changes_little_where_it_matters_and_flaps_nowhere() {
    for (mbit, wanted) in [
        (100.0, Some(true)),
        (1000.0, None),
        (2000.0, None),
        (4000.0, None),
        (40_000.0, Some(false)),
    ] {
        for (class, depth) in ALL {
            let link = Link {
                noise: 0.5,
                ..Link::of(mbit * MBIT)
            };
            let mut connection = Connection::new(class, depth, link);
            connection.pass(2_000_000);
            let (changes, trials) = (connection.changes, 2_000_000 / (17 * 256));
            assert!(
                changes < 20,
                "{changes} changes at {mbit} Mbit/s, {class:?}"
            );
            assert!(changes * 20 < trials);
            if let Some(wanted) = wanted {
                assert_eq!(connection.is_compressing(), wanted, "{class:?} at {mbit}");
            }
        }
    }
}

#[test]
fn on_busy_processors_it_stays_off_on_loopback_and_goes_on_on_a_slow_link() {
    for disturbed in [0.01, 0.1, 1.0, 3.0] {
        for (class, depth) in ALL {
            let link = Link {
                disturbed,
                ..Link::loopback()
            };
            let mut connection = Connection::new(class, depth, link);
            connection.pass(500_000);
            let (compressed, pages) = (connection.compressed, connection.pages);
            assert!(
                compressed * 20 < pages,
                "{compressed} of {pages} on loopback, {class:?}, {disturbed}"
            );
        }
    }
    for (disturbed, least) in [(0.01, 0.9), (0.1, 0.9), (0.3, 0.5)] {
        let link = Link {
            disturbed,
            ..Link::of(100.0 * MBIT)
        };
        for (class, depth) in ALL {
            let mut connection = Connection::new(class, depth, link);
            connection.pass(500_000);
            let part = connection.compressed as f64 / connection.pages as f64;
            assert!(
                part > least,
                "{part} at 100 Mbit/s, {class:?}, {disturbed}, {} changes",
                connection.changes
            );
        }
    }
}

#[test]
fn answers_of_different_blocks_at_once_tell_nothing() {
    let mut choice = Choice::new(Compression::Auto, TrafficClass::Urgent);
    let mut now = Instant::now();
    let mut answer = |choice: &mut Choice, parts: &[Part], micros: u64| {
        let took = Duration::from_micros(micros);
        now += took;
        for &part in parts {
            choice.answered(part, 1);
        }
        choice.measured(took, now);
    };
    for _ in 0..FIRST_PAGES {
        let (_, part) = choice.next(1);
        answer(&mut choice, &[part], 100);
    }
    assert!(choice.trial.is_some());
    // Compressed pages seem to take no time at all, but always arrive together with plain ones.
    let mut parts = Vec::new();
    while choice
        .trial
        .as_ref()
        .is_some_and(|trial| trial.posted < 256)
    {
        parts.push(choice.next(1).1);
    }
    for (first, second) in (0..128).zip(128..) {
        answer(&mut choice, &[parts[first], parts[second]], 100);
    }
    assert!(choice.trial.is_none(), "the trial is over");
    assert!(!choice.is_compressing());
}

#[test]
fn a_trial_that_is_interrupted_is_forgotten() {
    let mut connection = Connection::new(TrafficClass::Urgent, 1, Link::of(100.0 * MBIT));
    connection.pass(u64::from(FIRST_PAGES) + 200);
    assert!(connection.choice.trial.is_some());
    connection.choice.interrupted();
    connection.outstanding.clear();
    connection.pass(100);
    assert!(connection.choice.trial.is_none() && !connection.is_compressing());
    connection.pass(1000);
    assert!(connection.is_compressing());
}

#[test]
fn what_was_set_is_done() {
    for (setting, wanted) in [
        (Compression::On, Packing::Lz4),
        (Compression::Off, Packing::Plain),
    ] {
        let mut connection = Connection::new(TrafficClass::Bulk, 64, Link::of(100.0 * MBIT));
        connection.choice = Choice::new(setting, TrafficClass::Bulk);
        for _ in 0..10 {
            connection.pass(1000);
            assert_eq!(connection.choice.next(1).0, wanted);
        }
        assert_eq!(connection.changes, 0);
    }
}

/// Returns a link of this tier.
fn path_of(tier: Tier) -> Arc<PathStats> {
    let (selection, us) = match tier {
        Tier::Rdma => (Selection::RDMA, 50),
        Tier::FastTcp => (Selection::all(PathKind::Tcp), 150),
        Tier::Slow => (Selection::all(PathKind::Tcp), 900),
    };
    let latency = Duration::from_micros(us);
    let path = PathStats::new(selection, (PathKind::Tcp, None), None, latency);
    assert_eq!(path.tier(), tier);
    Arc::new(path)
}

fn following(path: &Arc<PathStats>) -> Choice {
    let mut choice = Choice::new(Compression::Auto, TrafficClass::Urgent);
    choice.follow(Arc::clone(path));
    choice
}

/// Answers pages until the first trial, at most so many; returns how many.
fn pages_before_a_trial(choice: &mut Choice, most: u32) -> u32 {
    let now = Instant::now();
    for pages in 0..most {
        if choice.trial.is_some() {
            return pages;
        }
        let (_, part) = choice.next(1);
        choice.answered(part, 1);
        choice.measured(Duration::from_micros(10), now);
    }
    most
}

#[test]
fn the_slower_the_tier_the_sooner_compression_is_tried() {
    for (tier, pages) in [(Tier::Rdma, 1024), (Tier::FastTcp, 256), (Tier::Slow, 64)] {
        let mut choice = following(&path_of(tier));
        assert_eq!(pages_before_a_trial(&mut choice, 5000), pages, "{tier:?}");
    }
}

#[test]
fn a_link_that_becomes_slow_is_tried_at_once_and_one_that_becomes_fast_later() {
    let path = path_of(Tier::FastTcp);
    let mut choice = following(&path);
    assert_eq!(pages_before_a_trial(&mut choice, 100), 100, "not yet");
    path.set_tier(Tier::Slow);
    assert_eq!(pages_before_a_trial(&mut choice, 100), 1);
    let path = path_of(Tier::Slow);
    let mut choice = following(&path);
    assert_eq!(pages_before_a_trial(&mut choice, 60), 60, "not yet");
    path.set_tier(Tier::Rdma);
    assert_eq!(pages_before_a_trial(&mut choice, 5000), 1024 - 60);
}

#[test]
fn trials_that_change_nothing_are_repeated_sooner_on_slow_links() {
    let now = Instant::now();
    for (tier, seconds) in [(Tier::Rdma, 8), (Tier::FastTcp, 8), (Tier::Slow, 4)] {
        let path = path_of(tier);
        let mut choice = following(&path);
        for _ in 0..10 {
            choice.conclude(false, now);
        }
        assert_eq!(choice.rest, Duration::from_secs(seconds), "{tier:?}");
        path.set_tier(Tier::Slow);
        choice.conclude(false, now);
        assert_eq!(choice.rest, Duration::from_secs(4), "{tier:?}, slow now");
    }
}
