//! What a node that is not the primary does from time to time: it reports to the primary, compares its
//! clock, and corrects it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ssi_hv_nodes::{Link, Message};

use super::compare::{Answered, ClockSample, Comparison, Now};
use super::time::{Correction, HostCounter};
use super::{NodeFacts, Reporter};
use crate::lifecycle::shared::Shared;

/// Time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two comparisons when the rate is known.
const COMPARE_INTERVAL: Duration = Duration::from_millis(250);
/// Time between the first two comparisons: the next are each twice as far apart as the last ones.
const FIRST_INTERVAL: Duration = Duration::from_millis(5);

/// A time that does not come.
const NEVER: Duration = Duration::from_secs(1 << 32);

#[derive(Debug, Default)]
struct Compared {
    comparison: Comparison,
    newest: Option<ClockSample>,
    /// The newest, until it is taken.
    fresh: Option<ClockSample>,
}

/// The comparison with the primary's clock, which two threads carry on.
#[derive(Debug)]
pub(super) struct Clock {
    counter: HostCounter,
    compared: Mutex<Compared>,
}

impl Clock {
    fn lock(&self) -> MutexGuard<'_, Compared> {
        // Each change is one call.
        self.compared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Now {
        Now {
            time: Instant::now(),
            ticks: self.counter.now(),
        }
    }

    /// Begins a comparison, unless one is in progress or the primary does not read.
    fn begin(&self, primary: &Link) {
        let mut compared = self.lock();
        if let Some(number) = compared.comparison.begin(self.now())
            && !primary.send_if_read(&Message::ClockAsk { number })
        {
            compared.comparison.give_up();
        }
    }

    /// The primary has answered.
    pub fn answered(&self, number: u32, ticks: u64, primary: &Link) -> Answered {
        let now = self.now();
        let mut compared = self.lock();
        let answered = compared.comparison.answered(number, ticks, now);
        match answered {
            Answered::Unasked => {}
            Answered::Ask(number) => {
                if !primary.send_if_read(&Message::ClockAsk { number }) {
                    compared.comparison.give_up();
                }
            }
            Answered::Done(sample) => {
                compared.newest = Some(sample);
                compared.fresh = Some(sample);
            }
        }
        answered
    }
}

/// What the main thread of a node does from time to time.
#[derive(Debug)]
pub(super) struct Periodic {
    pub shared: Arc<Shared>,
    pub primary: Arc<Link>,
    pub clock: Arc<Clock>,
    reporter: Box<dyn Reporter>,
    correction: Correction,
    /// When to report.
    report_at: Instant,
    /// When to compare the clock, and how long to wait after that.
    compare_at: Instant,
    compare_interval: Duration,
    /// When to correct the clock.
    correct_at: Instant,
}

impl Periodic {
    pub fn new(
        shared: &Arc<Shared>,
        primary: &Arc<Link>,
        reporter: Box<dyn Reporter>,
        correction: Correction,
    ) -> Self {
        let now = Instant::now();
        Self {
            shared: Arc::clone(shared),
            primary: Arc::clone(primary),
            clock: Arc::new(Clock {
                counter: correction.counter(),
                compared: Mutex::default(),
            }),
            reporter,
            correction,
            report_at: now,
            compare_at: now,
            compare_interval: FIRST_INTERVAL,
            correct_at: now + NEVER,
        }
    }

    /// The time until something is due.
    pub fn left(&self) -> Duration {
        let next = self.report_at.min(self.compare_at).min(self.correct_at);
        next.saturating_duration_since(Instant::now())
    }

    pub fn run_if_due(&mut self) {
        let fresh = self.clock.lock().fresh.take();
        if let Some(sample) = fresh
            && self.correction.compared(&sample)
        {
            // A rate has changed: it is not known well.
            self.compare_interval = FIRST_INTERVAL;
        }
        if fresh.is_some() || is_due(self.correct_at) {
            match self.correction.correct() {
                Ok(wait) => self.correct_at = Instant::now() + wait.min(NEVER),
                Err(error) => {
                    self.correct_at = Instant::now() + NEVER;
                    self.shared.control.end(Err(error));
                }
            }
        }
        if is_due(self.compare_at) {
            self.compare_at = Instant::now() + self.compare_interval;
            self.compare_interval = (self.compare_interval * 2).min(COMPARE_INTERVAL);
            self.clock.begin(&self.primary);
        }
        if is_due(self.report_at) {
            self.report_at = Instant::now() + REPORT_INTERVAL;
            // While the primary does not read, the next report has all that this one would have.
            self.primary.send_if_read(&self.report());
        }
    }

    /// The last report, after the end of all vCPUs.
    pub fn report_at_end(&self) {
        let time = self.correction.facts();
        tracing::debug!(?time, "time compared with the primary's");
        self.primary.send(&self.report());
    }

    fn report(&self) -> Message {
        let clock = self.clock.lock().newest;
        let facts = NodeFacts {
            vcpus: self.shared.vcpu_threads(),
            clock,
            time: self.correction.facts(),
        };
        Message::Report(self.reporter.report(&facts))
    }
}

fn is_due(at: Instant) -> bool {
    at <= Instant::now()
}
