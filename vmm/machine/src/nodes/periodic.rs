//! What a node that is not the primary does from time to time: it reports to the primary, and compares
//! its clock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ssi_hv_nodes::{Link, Message};

use super::compare::{Answered, ClockSample, Comparison, Now};
use super::{NodeFacts, Reporter};
use crate::lifecycle::shared::Shared;
use crate::sys::time_stamp;

/// Time between two reports.
const INTERVAL: Duration = Duration::from_secs(1);

fn now() -> Now {
    Now {
        time: Instant::now(),
        ticks: time_stamp(),
    }
}

/// The comparison with the primary's clock, which two threads carry on.
#[derive(Debug, Default)]
pub(super) struct Clock(Mutex<(Comparison, Option<ClockSample>)>);

impl Clock {
    fn lock(&self) -> MutexGuard<'_, (Comparison, Option<ClockSample>)> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a comparison, unless one is in progress or the primary does not read.
    fn begin(&self, primary: &Link) {
        let mut state = self.lock();
        let (comparison, _) = &mut *state;
        if let Some(number) = comparison.begin(now())
            && !primary.send_if_read(&Message::ClockAsk { number })
        {
            comparison.give_up();
        }
    }

    /// The primary has answered. Returns false if nobody asked.
    pub fn answered(&self, number: u32, ticks: u64, primary: &Link) -> bool {
        let now = now();
        let mut state = self.lock();
        let (comparison, newest) = &mut *state;
        match comparison.answered(number, ticks, now) {
            Answered::Unasked => return false,
            Answered::Ask(number) => {
                if !primary.send_if_read(&Message::ClockAsk { number }) {
                    comparison.give_up();
                }
            }
            Answered::Done(sample) => *newest = Some(sample),
        }
        true
    }
}

/// What the main thread of a node does once in a second.
#[derive(Debug)]
pub(super) struct Periodic {
    pub shared: Arc<Shared>,
    pub primary: Arc<Link>,
    pub clock: Arc<Clock>,
    reporter: Box<dyn Reporter>,
    next: Instant,
}

impl Periodic {
    pub fn new(shared: Arc<Shared>, primary: Arc<Link>, reporter: Box<dyn Reporter>) -> Self {
        Self {
            shared,
            primary,
            clock: Arc::default(),
            reporter,
            next: Instant::now(),
        }
    }

    /// The time until it is due.
    pub fn left(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    pub fn run_if_due(&mut self) {
        if !self.left().is_zero() {
            return;
        }
        self.next = Instant::now() + INTERVAL;
        // While the primary does not read, the next report has all that this one would have.
        self.primary.send_if_read(&self.report());
        self.clock.begin(&self.primary);
    }

    /// The last report, after the end of all vCPUs.
    pub fn report_at_end(&self) {
        self.primary.send(&self.report());
    }

    fn report(&self) -> Message {
        let clock = self.clock.lock().1;
        let facts = NodeFacts {
            vcpus: self.shared.vcpu_threads(),
            clock,
        };
        Message::Report(self.reporter.report(&facts))
    }
}
