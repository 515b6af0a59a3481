//! A transport with a known speed, for tests of this crate and of dependent ones.

use fabric_pages::page::PageBytes;
use fabric_transport::measure::Gauge;
use fabric_transport::{Completion, Full, Interest, PAGE_BYTES, PageTransport, Ticket};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Answers each request with zeroes after this latency, one at a time.
#[derive(Debug)]
pub struct Slow {
    pub latency: Duration,
    /// This many requests take this long instead, and at least until `in_flight` was called: so the
    /// silence is detected even if the host stalls.
    pub late: (u32, Duration),
    pub asked: Cell<bool>,
    pub posted: VecDeque<(Ticket, u32, Instant)>,
    /// Most requests that were outstanding at once.
    pub most: Arc<AtomicUsize>,
    /// Answers with one byte less.
    pub short: bool,
    pub zeroes: Vec<u8>,
}

impl Slow {
    pub fn gauge(latency: Duration, short: bool) -> Gauge {
        Self::new(latency, short).into_gauge()
    }

    pub fn new(latency: Duration, short: bool) -> Self {
        Self {
            latency,
            late: (0, Duration::ZERO),
            asked: Cell::new(false),
            posted: VecDeque::new(),
            most: Arc::default(),
            short,
            zeroes: vec![0; 1 << 20],
        }
    }

    fn is_answered(&self, after: Duration) -> bool {
        let (requests, time) = self.late;
        if requests > 0 {
            after >= time && self.asked.get()
        } else {
            after >= self.latency
        }
    }

    pub fn into_gauge(self) -> Gauge {
        Gauge::new(Box::new(self), 1 << 20, Box::new(|| None))
    }
}

/// Creates a gauge with a constant latency.
pub fn slow(latency: Duration) -> Gauge {
    Slow::gauge(latency, false)
}

impl PageTransport for Slow {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post_read_run(ticket, offset, 1)
    }

    fn post_read_run(&mut self, ticket: Ticket, _: u64, pages: u32) -> Result<(), Full> {
        let bytes = pages * PAGE_BYTES;
        self.posted.push_back((ticket, bytes, Instant::now()));
        self.most.fetch_max(self.posted.len(), Ordering::SeqCst);
        Ok(())
    }

    fn post_write(&mut self, _: Ticket, _: u64, _: &PageBytes) -> Result<(), Full> {
        Err(Full)
    }

    fn post_drop(&mut self, _: u64, _: u32) -> Result<(), Full> {
        Err(Full)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        while let Some(&(ticket, bytes, at)) = self.posted.front()
            && self.is_answered(at.elapsed())
        {
            self.posted.pop_front();
            self.asked.set(false);
            self.late.0 = self.late.0.saturating_sub(1);
            let bytes = bytes as usize - usize::from(self.short);
            complete(Completion::ReadRun(ticket, &self.zeroes[..bytes]));
        }
    }

    fn in_flight(&self) -> usize {
        self.asked.set(true);
        self.posted.len()
    }

    fn interests(&self, _: &mut dyn FnMut(Interest)) {}
}
