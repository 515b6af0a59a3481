//! Samples the counts of faults, for the report's chart over time.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memory_fabric::stats::{Histogram, PagerStats};

use crate::report::{Distribution, Distributions, FaultCounts, Timeline};

/// Initial length of an interval.
const INTERVAL: Duration = Duration::from_millis(250);

/// Samples the counts of faults on a separate thread.
#[derive(Debug)]
pub struct Sampler {
    ended: Arc<(Mutex<bool>, Condvar)>,
    thread: JoinHandle<Timeline>,
}

impl Sampler {
    /// Starts sampling.
    pub fn start(stats: Arc<PagerStats>) -> io::Result<Self> {
        let ended = Arc::new((Mutex::new(false), Condvar::new()));
        let of_thread = Arc::clone(&ended);
        let thread = std::thread::Builder::new()
            .name("timeline".into())
            .spawn(move || sample(&stats, &of_thread))?;
        Ok(Self { ended, thread })
    }

    /// Stops sampling, and returns the samples.
    pub fn finish(self) -> Option<Timeline> {
        let (ended, changed) = &*self.ended;
        *ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
        self.thread.join().ok()
    }
}

fn sample(stats: &PagerStats, (ended, changed): &(Mutex<bool>, Condvar)) -> Timeline {
    let mut timeline = Timeline::new(INTERVAL.as_secs_f64());
    let (mut before, mut interval) = (FaultCounts::default(), INTERVAL);
    let mut next = Instant::now() + interval;
    loop {
        let wait = next.saturating_duration_since(Instant::now());
        let (over, _) = changed
            .wait_timeout_while(
                ended.lock().unwrap_or_else(PoisonError::into_inner),
                wait,
                |ended| !*ended,
            )
            .unwrap_or_else(PoisonError::into_inner);
        let over = *over;
        let now = counts(stats);
        if timeline.push(now.since(before)) {
            interval *= 2;
        }
        if over {
            return timeline;
        }
        before = now;
        next += interval;
    }
}

fn counts(stats: &PagerStats) -> FaultCounts {
    let count = |histogram: &Histogram| histogram.counts().map(|(_, count)| count).sum();
    FaultCounts {
        remote: count(&stats.remote),
        zero: count(&stats.zero),
        minor: count(&stats.minor),
        write_protect: count(&stats.write_protect),
    }
}

/// Returns the distributions of fault latencies.
pub fn distributions(stats: &PagerStats) -> Distributions {
    Distributions {
        remote: distribution(&stats.remote),
        zero: distribution(&stats.zero),
        minor: distribution(&stats.minor),
        write_protect: distribution(&stats.write_protect),
    }
}

/// Converts one histogram.
pub fn distribution(histogram: &Histogram) -> Distribution {
    let counts = histogram.counts();
    counts
        .map(|(up_to, count)| (up_to.as_secs_f64() * 1e6, count))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_counted_until_the_end() {
        let stats = Arc::new(PagerStats::default());
        let sampler = Sampler::start(Arc::clone(&stats)).expect("a thread");
        stats.remote.record(Duration::from_micros(10));
        stats.zero.record(Duration::from_micros(1));
        let timeline = sampler.finish().expect("what was counted");
        let all = timeline
            .intervals
            .iter()
            .fold(FaultCounts::default(), |a, b| a.plus(*b));
        assert_eq!((all.remote, all.zero, all.minor), (1, 1, 0));
        let distributions = distributions(&stats);
        assert_eq!(distributions.remote.len(), 1);
        assert_eq!(distributions.remote[0].1, 1);
        assert!((10.0..10.5).contains(&distributions.remote[0].0));
    }
}
