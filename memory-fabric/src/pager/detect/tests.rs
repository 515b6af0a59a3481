//! Tests of pattern detection, with sequences of touches.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

/// Replays a sequence of touches. Ordered pages arrive at once; the touch of each is observed
/// unless it is mapped along with the one before. Returns the ordered pages, and the number of
/// touches of remote pages.
fn play(accesses: impl IntoIterator<Item = (u32, u32)>) -> (HashSet<u32>, usize) {
    let mut detector = Detector::new();
    let mut ordered = HashSet::new();
    let mut mapped = HashSet::new();
    let mut misses = 0;
    for (source, page) in accesses {
        if !mapped.insert(page) {
            continue;
        }
        misses += usize::from(!ordered.contains(&page));
        if let Some(order) = detector.observe(source, page) {
            assert!(order.count >= 1 && order.count <= WINDOW_MAX, "{order:?}");
            for step in 0..order.count {
                let page = i64::from(order.first) + i64::from(order.stride) * i64::from(step);
                if let Ok(page) = u32::try_from(page) {
                    ordered.insert(page);
                }
            }
        }
    }
    (ordered, misses)
}

#[test]
fn a_sequential_reader_misses_only_its_first_pages() {
    let (ordered, misses) = play((1000..9000).map(|page| (1, page)));
    assert!(misses <= 3, "{misses}");
    assert!(
        ordered.len() < 8000 + WINDOW_MAX as usize,
        "all but the last window is used"
    );
}

#[test]
fn a_reader_whose_next_pages_are_mapped_along_is_still_followed() {
    for stride in [1_i64, 4, -1, -7, 1000] {
        let mut detector = Detector::new();
        let at = |step: u32| u32::try_from(5_000_000 + i64::from(step) * stride).expect("positive");
        let (mut step, mut ordered, mut chain) = (0, 0, 1);
        for touch in 0..200 {
            if touch > 10 {
                // Nothing was missed: there is always a page ordered ahead.
                assert!(
                    ordered > step,
                    "stride {stride}: touch {touch} of {step}, {ordered}"
                );
                let found = detector.stride_to(at(step));
                assert_eq!(found.map(i64::from), Some(stride), "touch {touch}");
            }
            if let Some(order) = detector.observe(1, at(step)) {
                assert_eq!(i64::from(order.stride), stride);
                let to_first = (i64::from(order.first) - i64::from(at(step))) / stride;
                ordered = step + u32::try_from(to_first).expect("ahead") + order.count - 1;
                chain = order.chain;
            }
            step += chain.min(ordered.saturating_sub(step)).max(1);
        }
        assert!(step > 1000, "stride {stride}: windows grew: {step}");
        assert_eq!(chain, CHAIN_MAX, "stride {stride}");
        assert_eq!(detector.stride_to(10), None);
    }
}

#[test]
fn strides_up_and_down_short_and_long_are_found() {
    for stride in [2_i64, 7, 31, 33, 1000, -1, -3, -500] {
        let start = 1_000_000_i64;
        let pages = (0..400).map(|step| u32::try_from(start + step * stride).expect("positive"));
        let (_, misses) = play(pages.map(|page| (1, page)));
        assert!(misses <= 8, "stride {stride}: {misses}");
    }
}

#[test]
fn interleaved_streams_of_one_thread_do_not_disturb_each_other() {
    let accesses = (0..1000_u32).flat_map(|step| {
        [
            (1, 10_000 + step),
            (1, 10_100_000 + step * 3),
            (1, 500_000 - step),
        ]
    });
    let (_, misses) = play(accesses);
    assert!(misses <= 24, "{misses}");
}

#[test]
fn close_streams_of_two_threads_are_told_apart() {
    let accesses = (0..500_u32).flat_map(|step| [(1, 1000 + step * 40), (2, 1016 + step * 40)]);
    let (_, misses) = play(accesses);
    assert!(misses <= 20, "{misses}");
}

/// Accesses by the threads of a pool of workers, in any order.
fn by_workers(pages: impl Iterator<Item = u32>, workers: u32) -> impl Iterator<Item = (u32, u32)> {
    let mut random = 11_u32;
    pages.map(move |page| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (100 + (random >> 16) % workers, page)
    })
}

#[test]
fn a_reader_whose_faults_come_from_changing_threads_is_followed() {
    for workers in [2, 8, 1000] {
        let (_, misses) = play(by_workers(1000..9000, workers));
        assert!(misses <= 4, "{workers} workers: {misses}");
    }
    // No thread is seen twice.
    let (_, misses) = play((0..8000).map(|step| (step + 1, 1000 + step)));
    assert!(misses <= 4, "{misses}");
    // No thread is known.
    let (_, misses) = play((1000..9000).map(|page| (UNKNOWN, page)));
    assert!(misses <= 4, "{misses}");
}

#[test]
fn strides_of_changing_threads_are_found() {
    for stride in [2_i64, 7, 33, 1000, -1, -3, -500] {
        let pages = (0..400_i64).map(|step| 1_000_000 + step * stride);
        let pages = pages.map(|page| u32::try_from(page).expect("positive"));
        let (_, misses) = play(by_workers(pages, 8));
        assert!(misses <= 8, "stride {stride}: {misses}");
    }
}

#[test]
fn interleaved_streams_of_changing_threads_do_not_disturb_each_other() {
    let pages =
        (0..1000_u32).flat_map(|step| [10_000 + step, 10_100_000 + step * 3, 500_000 - step]);
    let (_, misses) = play(by_workers(pages, 8));
    assert!(misses <= 24, "{misses}");
}

#[test]
fn neighbours_that_disturb_each_other_by_address_are_told_apart_by_thread() {
    // Within reach of each other, and in step: by address alone there is no stride.
    let accesses = (0..400_u32).flat_map(|step| [(1, 1000 + step * 3), (2, 1016 + step * 3)]);
    let (_, misses) = play(accesses);
    assert!(misses <= 12, "{misses}");
}

#[test]
fn the_majority_decides_in_spite_of_noise() {
    let mut random = 7_u32;
    let accesses = (0..2000_u32).flat_map(|step| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let noise = (step % 5 == 4).then_some((1, 3_000_000 + (random >> 8)));
        [Some((1, step * 4)), noise].into_iter().flatten()
    });
    let (_, misses) = play(accesses);
    // The noise itself is 400 misses.
    assert!(misses <= 400 + 40, "{misses}");
}

#[test]
fn waste_shrinks_the_windows_and_use_lets_them_grow_again() {
    let mut detector = Detector::new();
    let (mut used, mut wasted) = (0, 0);
    let longest = |detector: &mut Detector, from: u32| {
        let orders = (from..from + 1000).filter_map(|page| detector.observe(1, page));
        orders.map(|order| order.count).max()
    };
    assert!(longest(&mut detector, 0) >= Some(WINDOW_MAX / 2));
    for _ in 0..10 {
        wasted += REVIEW_PAGES;
        detector.review(used, wasted);
    }
    assert!(longest(&mut detector, 100_000) <= Some(WINDOW_MIN));
    for _ in 0..10 {
        used += REVIEW_PAGES;
        detector.review(used, wasted);
    }
    assert!(longest(&mut detector, 200_000) >= Some(WINDOW_MAX / 2));
}

#[test]
fn the_links_limit_the_windows() {
    let mut detector = Detector::new();
    let longest = |detector: &mut Detector, from: u32| {
        let orders = (from..from + 2000).filter_map(|page| detector.observe(1, page));
        orders.map(|order| order.count).max().expect("orders")
    };
    for (limit, from) in [(64, 0), (256, 100_000), (128, 200_000)] {
        detector.limit_windows(limit);
        let longest = longest(&mut detector, from);
        assert!(
            longest > limit / 4 && longest <= limit,
            "{limit}: {longest}"
        );
    }
    // Waste takes precedence over the limit of the links.
    detector.review(0, REVIEW_PAGES);
    detector.limit_windows(256);
    assert!(longest(&mut detector, 300_000) <= 64);
}

proptest! {
    #[test]
    fn random_touches_order_next_to_nothing(seed: u64) {
        let mut random = seed | 1;
        let accesses = (0..5000).map(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (u32::try_from(random >> 60).expect("4 bits"), u32::try_from(random >> 8 & 0xffff).expect("16 bits"))
        });
        let (ordered, _) = play(accesses);
        prop_assert!(ordered.len() < 100, "{} pages ordered", ordered.len());
    }

    #[test]
    fn any_stride_and_any_start_stay_in_range(start: u32, stride in -100_000_i64..100_000) {
        let mut detector = Detector::new();
        for step in 0..40 {
            let Ok(page) = u32::try_from(i64::from(start) + step * stride) else { break };
            if let Some(order) = detector.observe(0, page) {
                prop_assert_eq!(i64::from(order.stride), stride);
                prop_assert_eq!((i64::from(order.first) - i64::from(page)) % stride, 0);
            }
        }
    }
}
