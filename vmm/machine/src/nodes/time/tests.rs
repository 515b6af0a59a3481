use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits {
    step_back: 200_000,
    deviation: 2_000_000_000,
};

fn estimate(difference: u64, error_max: u64) -> Estimate {
    Estimate {
        difference,
        error_max: error_max + 7,
        least: error_max,
    }
}

#[test]
fn a_deviation_of_a_sixteenth_of_the_round_trip_stays() {
    let rate = 1 << 20;
    assert_eq!(
        plan(estimate(1000, 800), 900, rate, LIMITS),
        Plan::Wait(100 << 12),
        "until an eighth of it at the fastest change"
    );
    assert_eq!(
        plan(estimate(1000, 800), 899, rate, LIMITS),
        Plan::Step(101)
    );
    assert_eq!(
        plan(estimate(899, 800), 1000, rate, LIMITS),
        Plan::Step(-101)
    );
    assert_eq!(plan(estimate(5, 0), 5, 0, LIMITS), Plan::Wait(0));
}

#[test]
fn a_step_back_is_limited_and_a_jump_is_no_drift() {
    let is_set = 3_000_000_000;
    assert_eq!(
        plan(estimate(is_set - 1_000_000, 10), is_set, 1, LIMITS),
        Plan::Step(-200_000)
    );
    assert_eq!(
        plan(estimate(is_set + 1_000_000, 10), is_set, 1, LIMITS),
        Plan::Step(1_000_000)
    );
    for deviation in [2_000_000_018_i64, -2_000_000_018, i64::MIN, i64::MAX] {
        let estimate = estimate(is_set.wrapping_add_signed(deviation), 10);
        assert_eq!(plan(estimate, is_set, 1, LIMITS), Plan::TooFar(deviation));
    }
}

/// Ticks of one-way delays: most are near the shortest.
fn delay() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 8_000..10_000_u64, 1 => 8_000..400_000_u64]
}

/// An exchange that begins at `at`, with a counter that is ahead by `exact`.
fn exchange(at: u64, (there, back): (u64, u64), exact: impl Fn(u64) -> i64) -> ClockSample {
    let answer = (at + there).wrapping_add_signed(exact(at + there));
    let middle = at + (there + back) / 2;
    ClockSample {
        at: middle,
        difference: answer.wrapping_sub(middle),
        error_max: (there + back).div_ceil(2),
        round_trip: Duration::ZERO,
    }
}

proptest! {
    /// A node whose counter drifts, corrected as planned after comparisons of 8 exchanges each.
    #[test]
    fn no_message_arrives_before_it_was_sent(
        ppm in -100..=100_i64,
        delays in prop::collection::vec(prop::array::uniform8((delay(), delay())), 30..90),
    ) {
        let exact = |at: u64| i64::try_from(at).unwrap() * ppm / 1_000_000;
        let (mut estimator, mut at, mut is_set) = (Estimator::default(), 0, None);
        for (count, comparison) in delays.into_iter().enumerate() {
            let mut best: Option<ClockSample> = None;
            for (there, back) in comparison {
                let found = exchange(at, (there, back), exact);
                at += there + back;
                let better = best.filter(|best| best.error_max <= found.error_max);
                best = Some(better.unwrap_or(found));
            }
            prop_assert!(!estimator.add(&best.unwrap()));
            let until = at + 500_000_000;
            while at < until {
                let estimate = estimator.at(at).unwrap();
                let set = is_set.get_or_insert(estimate.difference);
                let wait = match plan(estimate, *set, estimator.rate_max(), LIMITS) {
                    Plan::Wait(ticks) => ticks.max(10_000_000),
                    Plan::Step(step) => {
                        *set = set.wrapping_add_signed(step);
                        10_000_000
                    }
                    Plan::TooFar(deviation) => panic!("{deviation}"),
                };
                at = until.min(at.saturating_add(wait));
                // Just before the next correction, once the rate is known.
                let ahead = set.cast_signed().wrapping_sub(exact(at));
                prop_assert!(count < 8 || ahead.abs() < 8_000, "{ahead} ahead at {count}");
            }
        }
    }
}

#[test]
fn the_facts_are_what_was_estimated_and_corrected() {
    // A tick is a nanosecond. The primary is an hour ahead.
    let hour = 3_600_000_000_000_u64;
    let counter = HostCounter::default().with_rates(2_000_000, 2_100_000, true);
    let counter = counter.unwrap();
    let time = NodeTime::of_node(counter.clone(), 0).unwrap();
    let mut correction = Correction::new(Arc::new(time), 1_000_000, &[]);
    let unknown = TimeFacts {
        scales: true,
        ..TimeFacts::default()
    };
    assert_eq!(correction.facts(), unknown);
    let mut compare = |more: u64| {
        let sample = ClockSample {
            at: counter.now(),
            difference: hour + more,
            error_max: 100,
            round_trip: Duration::ZERO,
        };
        correction.compared(&sample);
        correction.correct().unwrap();
        correction.facts()
    };
    let is_near = |found: i64, expected: i64| found.abs_diff(expected) < 1000;
    let first = compare(0);
    let offset = hour.cast_signed();
    assert!(is_near(first.offset_ns.unwrap(), offset), "{first:?}");
    assert_eq!((first.corrections, first.corrected_ns), (0, 0));
    assert_eq!(first.rate_ppm, None, "one comparison limits no rate");
    // No rate is that fast: what was found before no longer counts.
    let forth = compare(200_000_000);
    assert!(is_near(forth.offset_ns.unwrap(), offset + 200_000_000));
    assert!(is_near(forth.corrected_ns, 200_000_000), "{forth:?}");
    assert_eq!(forth.corrections, 1);
    // A step back is no longer than 100 us at once; the rest is an error.
    let back = compare(0);
    assert!(is_near(back.corrected_ns, 199_900_000), "{back:?}");
    assert_eq!(back.corrections, 2);
    assert!(
        back.error_max.unwrap() >= Duration::from_micros(199_800),
        "{back:?}"
    );
    let (rate, error) = compare(0).rate_ppm.expect("two comparisons that agree");
    assert!(rate.abs() <= error, "{rate} by {error}");
}
