//! Tests of rate limits, on a clock of their own.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;

/// A clock that tests advance.
#[derive(Clone)]
pub(in crate::virtio) struct TestClock(Arc<Mutex<Instant>>);

impl TestClock {
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    pub fn advance(&self, by: Duration) {
        *self.0.lock().unwrap() += by;
    }

    pub fn limiter(&self, limits: RateLimits, lanes: usize) -> RateLimiter {
        let now = Arc::clone(&self.0);
        let clock = Box::new(move || *now.lock().unwrap());
        RateLimiter::with_clock("disk0", limits, lanes, clock).unwrap()
    }
}

pub(in crate::virtio) fn rate(per_second: u64) -> Option<Rate> {
    let once = 0;
    Some(Rate { per_second, once })
}

fn operations(per_second: u64) -> RateLimits {
    RateLimits {
        operations: rate(per_second),
        bytes: None,
    }
}

/// Begins requests of this size while they may begin; returns how many.
fn begun(limiter: &RateLimiter, lane: usize, bytes: u64) -> u64 {
    let mut count = 0;
    while limiter.may_begin(lane) {
        limiter.take(lane, 1, bytes);
        count += 1;
        assert!(count < 1_000_000, "nothing is limited");
    }
    count
}

fn armed_in(limiter: &RateLimiter) -> Duration {
    let left = rustix::time::timerfd_gettime(limiter.timer()).unwrap();
    let seconds = u64::try_from(left.it_value.tv_sec).unwrap();
    let nanos = u32::try_from(left.it_value.tv_nsec).unwrap();
    Duration::new(seconds, nanos)
}

#[test]
fn a_second_of_work_is_saved_and_then_the_rate_holds() {
    let clock = TestClock::new();
    let limiter = clock.limiter(operations(100), 1);
    assert_eq!(begun(&limiter, 0, 0), 100);
    assert_eq!(limiter.throttled(), 1);
    clock.advance(Duration::from_nanos(9_999_999));
    assert!(!limiter.may_begin(0), "not even one was earned");
    clock.advance(Duration::from_nanos(1));
    assert_eq!(begun(&limiter, 0, 0), 1);
    clock.advance(Duration::from_secs(3600));
    assert_eq!(begun(&limiter, 0, 0), 100);
    let steps = (0..1000).map(|_| {
        clock.advance(Duration::from_millis(3));
        begun(&limiter, 0, 0)
    });
    assert_eq!(steps.sum::<u64>(), 300);
}

#[test]
fn what_may_be_done_once_is_not_filled_again() {
    let clock = TestClock::new();
    let rate = Rate {
        per_second: 10,
        once: 25,
    };
    let limiter = clock.limiter(
        RateLimits {
            operations: Some(rate),
            bytes: None,
        },
        1,
    );
    assert_eq!(begun(&limiter, 0, 0), 35);
    clock.advance(Duration::from_secs(60));
    assert_eq!(begun(&limiter, 0, 0), 10);
}

#[test]
fn a_request_larger_than_the_bucket_begins_and_is_owed() {
    let clock = TestClock::new();
    let limits = RateLimits {
        bytes: rate(1000),
        operations: None,
    };
    let limiter = clock.limiter(limits, 1);
    assert_eq!(begun(&limiter, 0, 5000), 1);
    clock.advance(Duration::from_secs(4));
    assert!(!limiter.may_begin(0));
    clock.advance(Duration::from_millis(1));
    assert!(limiter.may_begin(0));
}

#[test]
fn the_tighter_limit_holds() {
    let clock = TestClock::new();
    let limits = RateLimits {
        bytes: rate(4096 * 10),
        operations: rate(1000),
    };
    let limiter = clock.limiter(limits, 1);
    assert_eq!(begun(&limiter, 0, 4096), 10);
    let limiter = clock.limiter(limits, 1);
    assert_eq!(begun(&limiter, 0, 1), 1000);
}

#[test]
fn directions_are_limited_by_themselves_and_share_a_timer_that_expires_first() {
    let clock = TestClock::new();
    let limiter = clock.limiter(operations(1), 2);
    assert_eq!(armed_in(&limiter), Duration::ZERO);
    assert!(limiter.may_begin(0));
    limiter.take(0, 8, 0);
    assert!(!limiter.may_begin(0));
    let far = armed_in(&limiter);
    assert!(far > Duration::from_secs(5), "{far:?}");
    assert_eq!(begun(&limiter, 1, 0), 1);
    let near = armed_in(&limiter);
    assert!(
        near <= Duration::from_secs(1) + Duration::from_nanos(1),
        "{near:?}"
    );
    // What is due later does not delay what is due first.
    assert!(!limiter.may_begin(0));
    assert!(armed_in(&limiter) <= near);
    // After it has expired it is set again, for what is still due.
    clock.advance(Duration::from_secs(2));
    limiter.has_expired();
    assert!(limiter.may_begin(1) && !limiter.may_begin(0));
    assert!(armed_in(&limiter) > Duration::from_secs(3));
}

#[test]
fn what_is_due_in_one_direction_is_not_delayed_by_the_other() {
    let clock = TestClock::new();
    let limiter = clock.limiter(operations(1), 2);
    limiter.take(0, 1, 0);
    assert!(!limiter.may_begin(0));
    limiter.take(1, 8, 0);
    // The first is due, and the thread, which serves the second, has not seen it yet.
    clock.advance(Duration::from_secs(2));
    assert!(!limiter.may_begin(1));
    let mut expiry = [rustix::event::PollFd::from_borrowed_fd(
        limiter.timer(),
        rustix::event::PollFlags::IN,
    )];
    let soon = rustix::event::Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    assert_eq!(rustix::event::poll(&mut expiry, Some(&soon)), Ok(1));
    limiter.has_expired();
    assert!(!limiter.may_begin(1));
    assert!(armed_in(&limiter) > Duration::from_secs(3));
}

proptest! {
    #[test]
    fn no_steps_of_time_and_sizes_give_more_than_the_rate(
        per_second in 1_u64..1 << 40,
        once in 0_u64..1 << 20,
        steps in proptest::collection::vec((0_u64..2_000_000_000, 0_u64..1 << 41), 1..200),
    ) {
        let clock = TestClock::new();
        let limits = RateLimits { bytes: Some(Rate { per_second, once }), operations: None };
        let limiter = clock.limiter(limits, 1);
        let (mut elapsed, mut taken, mut last) = (0_u128, 0_u128, 0_u128);
        for (nanos, bytes) in steps {
            clock.advance(Duration::from_nanos(nanos));
            elapsed += u128::from(nanos);
            if limiter.may_begin(0) {
                limiter.take(0, 1, bytes);
                last = bytes.into();
                taken += last;
            }
            let earned = elapsed * u128::from(per_second) / 1_000_000_000 + 1;
            let most = earned + u128::from(per_second) + u128::from(once) + last;
            prop_assert!(taken <= most, "{taken} of {most}");
        }
    }
}
