//! How long the WRITEs of a lane take, with one reading of the clock for those posted together.

use crate::IN_FLIGHT_MAX;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// When the WRITEs were posted that have not completed. They complete in the order of posting. No
/// allocation after creation.
#[derive(Debug)]
pub(super) struct WriteTimes {
    /// WRITEs that were posted together and are outstanding, and when; never without any.
    posted: VecDeque<(usize, Instant)>,
}

impl WriteTimes {
    pub(super) fn new() -> Self {
        Self {
            posted: VecDeque::with_capacity(IN_FLIGHT_MAX),
        }
    }

    /// Notes that WRITEs are being posted.
    pub(super) fn post(&mut self, count: usize, now: Instant) {
        if count > 0 {
            self.posted.push_back((count, now));
        }
    }

    /// Returns how long the oldest WRITE took, which has completed; `None` if none was posted.
    pub(super) fn complete(&mut self, now: Instant) -> Option<Duration> {
        let (left, posted_at) = self.posted.front_mut()?;
        let time = now.saturating_duration_since(*posted_at);
        *left -= 1;
        if *left == 0 {
            self.posted.pop_front();
        }
        Some(time)
    }

    /// Forgets what was posted on a lane that failed.
    pub(super) fn clear(&mut self) {
        self.posted.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_write_took_the_time_since_those_of_its_batch_were_posted() {
        let mut times = WriteTimes::new();
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        times.post(2, after(0));
        times.post(0, after(1));
        times.post(1, after(10));
        let took = [15, 20, 30, 40].map(|ms| times.complete(after(ms)));
        assert_eq!(
            took,
            [Some(15), Some(20), Some(20), None].map(|ms| ms.map(Duration::from_millis))
        );
        times.post(3, after(50));
        times.clear();
        times.post(1, after(60));
        assert_eq!(times.complete(after(61)), Some(Duration::from_millis(1)));
        assert_eq!(times.complete(after(62)), None);
    }

    #[test]
    fn as_many_batches_as_requests_fit_without_allocation() {
        let mut times = WriteTimes::new();
        let room = times.posted.capacity();
        for _ in 0..IN_FLIGHT_MAX {
            times.post(1, Instant::now());
        }
        assert_eq!(times.posted.capacity(), room);
    }
}
