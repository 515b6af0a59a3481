//! How fast a transport is when nothing else uses it: the one way in which it is measured, to
//! choose at the start, while the guest runs, and for `ssi-hv bench transport`.

use super::{Completion, Full, IN_FLIGHT_MAX, PAGE_BYTES, PageSource, PageTransport, Ticket};
use fabric_host::Spin;
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_wire::RUN_PAGES_MAX;
use std::time::{Duration, Instant};

/// Bytes of a small request: a cache line, which is what perftest and others begin with.
pub const SMALL_BYTES: u32 = 64;

/// Round trips of each size in a calibration, if there is time for them.
const CALIBRATION_TRIPS: u64 = 64;
/// The fewest of which a median is taken, also without time: one that was disturbed does not count then.
const TRIPS_MIN: u64 = 3;
/// What a calibration streams, if there is time for it: 0.4 ms at 10 GB/s, 35 ms at 1 Gbit/s.
const CALIBRATION_STREAM_BYTES: u64 = 4 << 20;
/// The pieces of that: as many pages as the prefetcher asks for at once on most links.
const CALIBRATION_PIECE_BYTES: u64 = 32 * PAGE_SIZE as u64;
/// Pieces on their way at once.
const CALIBRATION_PIECES: usize = 4;

/// Why nothing was measured.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MeasureError {
    /// The connection broke, or was refused something.
    #[error("the connection failed: {0}")]
    Failed(String),
    /// There was no answer.
    #[error("no answer for {} ms", .0.as_millis())]
    Silent(Duration),
    /// What came was not what was asked for.
    #[error("{asked} bytes requested, {came} received")]
    Length {
        /// How many were asked for.
        asked: u32,
        /// How many came.
        came: usize,
    },
}

/// What a silence came to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Silence {
    /// All answers came: the connection can be measured anew.
    Ended,
    /// The connection is of no more use, and why.
    Failed(String),
    /// There is still no answer.
    Lasts,
}

/// How much is to be measured: it ends with what is reached first.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Requests.
    pub messages_max: u64,
    /// Time. At least one request is made, or three round trips, and those that were made are waited for.
    pub time_max: Duration,
    /// How long an answer is waited for.
    pub silence_max: Duration,
}

/// What was moved in which time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// Requests that were answered.
    pub messages: u64,
    /// Bytes that came or went.
    pub bytes: u64,
    /// From the first request to the last answer.
    pub time: Duration,
}

impl Rate {
    /// Bytes a second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        // Far below 2^52.
        #[allow(clippy::cast_precision_loss)]
        let bytes = self.bytes as f64;
        bytes / self.time.as_secs_f64().max(1e-9)
    }

    /// Requests a second.
    #[must_use]
    pub fn messages_per_second(&self) -> f64 {
        #[allow(clippy::cast_precision_loss)]
        let messages = self.messages as f64;
        messages / self.time.as_secs_f64().max(1e-9)
    }
}

/// What a calibration found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Median round trip of [`SMALL_BYTES`].
    pub small: Duration,
    /// Median round trip of a page.
    pub page: Duration,
    /// Bytes a second of runs of pages.
    pub stream_bytes_per_second: f64,
}

impl Measured {
    /// The better of both: what disturbs a measurement never makes a link faster.
    #[must_use]
    pub fn better_of(self, other: Self) -> Self {
        let (one, two) = (self.stream_bytes_per_second, other.stream_bytes_per_second);
        Self {
            small: self.small.min(other.small),
            page: self.page.min(other.page),
            stream_bytes_per_second: one.max(two),
        }
    }
}

/// Takes what came: its offset in the lease, and the bytes.
pub type Take<'a> = &'a mut dyn FnMut(u64, &[u8]);

/// A connection to be measured, with nothing else on it.
pub struct Gauge {
    transport: Box<dyn PageTransport>,
    /// Why the connection is of no more use, if it is not.
    failure: Box<dyn Fn() -> Option<String> + Send>,
    lease_bytes: u64,
    spin: Spin,
}

impl std::fmt::Debug for Gauge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gauge")
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}

impl Gauge {
    /// Measures `transport`, which leads to a lease of so many bytes. `failure` tells when it is
    /// of no more use.
    #[must_use]
    pub fn new(
        transport: Box<dyn PageTransport>,
        lease_bytes: u64,
        failure: Box<dyn Fn() -> Option<String> + Send>,
    ) -> Self {
        Self {
            transport,
            failure,
            lease_bytes,
            // Only its pauses are used: who measures does not sleep.
            spin: Spin::new(Duration::from_secs(1)),
        }
    }

    /// The sizes that can be asked for.
    #[must_use]
    pub fn takes(&self, bytes: u32) -> bool {
        self.transport.probe_bytes().contains(&bytes) && self.room(bytes) <= self.lease_bytes
    }

    /// The nearest size to `bytes` that can be asked for.
    fn nearest(&self, bytes: u64) -> u32 {
        let sizes = self.transport.probe_bytes();
        let bytes = bytes.min(self.lease_bytes);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        bytes.clamp(*sizes.start(), *sizes.end())
    }

    /// What a request takes in the lease: whole pages.
    fn room(&self, bytes: u32) -> u64 {
        u64::from(bytes).next_multiple_of(PAGE_SIZE as u64)
    }

    /// Where request `number` reads: one after the other, and from the beginning again.
    fn offset(&self, number: u64, bytes: u32) -> u64 {
        let room = self.room(bytes);
        number % (self.lease_bytes / room).max(1) * room
    }

    /// Makes one request after the other; each round trip goes to `record`.
    ///
    /// # Errors
    ///
    /// See [`MeasureError`].
    pub fn round_trips(
        &mut self,
        bytes: u32,
        effort: Effort,
        record: &mut dyn FnMut(Duration),
        take: Take<'_>,
    ) -> Result<(), MeasureError> {
        let began = Instant::now();
        for number in 0..effort.messages_max.max(1) {
            if number >= TRIPS_MIN && began.elapsed() >= effort.time_max {
                break;
            }
            let offset = self.offset(number, bytes);
            let posted_at = Instant::now();
            let posted = self.transport.post_probe(Ticket(0), offset, bytes);
            posted.expect("nothing else is outstanding");
            self.transport.flush();
            let mut came = None;
            while came.is_none() {
                self.transport.poll(&mut |completion| {
                    let length = bytes_of(&completion).map(<[u8]>::len);
                    came = Some((posted_at.elapsed(), length));
                    if let Some(bytes) = bytes_of(&completion) {
                        take(offset, bytes);
                    }
                });
                if came.is_none() {
                    self.wait(posted_at, effort.silence_max)?;
                }
            }
            let (time, length) = came.expect("it came");
            check_length(bytes, length)?;
            record(time);
        }
        Ok(())
    }

    /// Keeps up to `in_flight` requests outstanding.
    ///
    /// # Errors
    ///
    /// See [`MeasureError`].
    pub fn stream(
        &mut self,
        bytes: u32,
        in_flight: usize,
        effort: Effort,
        take: Take<'_>,
    ) -> Result<Rate, MeasureError> {
        let mut wrong = Ok(());
        let room = self.room(bytes);
        let slots = (self.lease_bytes / room).max(1);
        let offset = |number: u64| number % slots * room;
        let rate = self.pipeline(
            in_flight,
            effort,
            &mut |transport, number| {
                let slot = u32::try_from(number % slots).expect("a lease has fewer pages");
                transport.post_probe(Ticket(slot), offset(number), bytes)
            },
            &mut |completion| {
                let came = bytes_of(&completion);
                if wrong.is_ok() {
                    wrong = check_length(bytes, came.map(<[u8]>::len));
                }
                if let Completion::ReadRun(Ticket(slot), bytes) = completion {
                    take(u64::from(slot) * room, bytes);
                }
            },
        )?;
        wrong?;
        Ok(Rate {
            bytes: rate.messages * u64::from(bytes),
            ..rate
        })
    }

    /// Writes pages from the beginning of the lease on, as many as `effort` allows and the lease
    /// has; `content` gives each.
    ///
    /// # Errors
    ///
    /// See [`MeasureError`].
    pub fn fill(
        &mut self,
        effort: Effort,
        content: &mut dyn FnMut(u64, &mut PageBytes),
    ) -> Result<Rate, MeasureError> {
        let pages = self.lease_bytes / PAGE_SIZE as u64;
        let effort = Effort {
            messages_max: effort.messages_max.min(pages),
            ..effort
        };
        let mut page: Box<PageBytes> = Box::new([0; PAGE_SIZE]);
        let rate = self.pipeline(
            IN_FLIGHT_MAX,
            effort,
            &mut |transport, number| {
                let offset = number * PAGE_SIZE as u64;
                content(offset, &mut page);
                // SAFETY: the page lives longer than the call.
                let source = unsafe { PageSource::new(&raw const *page) };
                transport.post_write(Ticket(0), offset, source)
            },
            &mut |_| {},
        )?;
        Ok(Rate {
            bytes: rate.messages * PAGE_SIZE as u64,
            ..rate
        })
    }

    /// Posts numbered requests, with some outstanding, and counts what completes.
    fn pipeline(
        &mut self,
        in_flight: usize,
        effort: Effort,
        post: &mut dyn FnMut(&mut dyn PageTransport, u64) -> Result<(), Full>,
        completed: &mut dyn FnMut(Completion<'_>),
    ) -> Result<Rate, MeasureError> {
        let began = Instant::now();
        let (mut posted, mut done) = (0, 0);
        let mut progress = began;
        loop {
            let mut wanted = posted < effort.messages_max.max(1)
                && (posted == 0 || began.elapsed() < effort.time_max);
            if !wanted && done == posted {
                break;
            }
            let before = posted;
            while wanted && posted - done < in_flight.max(1) as u64 {
                match post(self.transport.as_mut(), posted) {
                    Ok(()) => posted += 1,
                    Err(Full) if posted == done => {
                        let what = "it takes no such request".to_owned();
                        return Err(MeasureError::Failed(what));
                    }
                    Err(Full) => break,
                }
                wanted = posted < effort.messages_max;
            }
            if posted > before {
                self.transport.flush();
            }
            let before = done;
            self.transport.poll(&mut |completion| {
                done += 1;
                completed(completion);
            });
            if done > before {
                progress = Instant::now();
            } else {
                self.wait(progress, effort.silence_max)?;
            }
        }
        Ok(Rate {
            messages: done,
            bytes: 0,
            time: progress - began,
        })
    }

    /// A pause while nothing has come since `since`.
    fn wait(&self, since: Instant, silence_max: Duration) -> Result<(), MeasureError> {
        if let Some(why) = (self.failure)() {
            return Err(MeasureError::Failed(why));
        }
        if since.elapsed() >= silence_max {
            return Err(MeasureError::Silent(silence_max));
        }
        self.spin.goes_on(Duration::ZERO);
        Ok(())
    }

    /// Waits for the end of a silence, for `patience` at the most: an adapter sends again what was
    /// lost, and tries for long before it gives up.
    pub fn outlast_silence(&mut self, patience: Duration) -> Silence {
        let since = Instant::now();
        while self.transport.in_flight() > 0 {
            match self.wait(since, patience) {
                Ok(()) => self.transport.poll(&mut |_| {}),
                Err(MeasureError::Failed(why)) => return Silence::Failed(why),
                Err(MeasureError::Silent(_) | MeasureError::Length { .. }) => {
                    return Silence::Lasts;
                }
            }
        }
        Silence::Ended
    }

    /// Measures small and page-sized round trips and the stream, in about `time_max` altogether
    /// unless answers take longer.
    ///
    /// # Errors
    ///
    /// See [`MeasureError`]; an answer that takes longer than `silence_max` is none.
    pub fn calibrate(
        &mut self,
        time_max: Duration,
        silence_max: Duration,
    ) -> Result<Measured, MeasureError> {
        let trips = Effort {
            messages_max: CALIBRATION_TRIPS,
            time_max: time_max / 4,
            silence_max,
        };
        let small = self.median(SMALL_BYTES.into(), trips)?;
        let page = self.median(PAGE_BYTES.into(), trips)?;
        let piece = self.nearest(CALIBRATION_PIECE_BYTES);
        let effort = Effort {
            messages_max: CALIBRATION_STREAM_BYTES / u64::from(piece.max(1)),
            time_max: time_max / 4,
            silence_max,
        };
        let rate = self.stream(piece, CALIBRATION_PIECES, effort, &mut |_, _| {})?;
        Ok(Measured {
            small,
            page,
            stream_bytes_per_second: rate.bytes_per_second(),
        })
    }

    /// The median round trip of a page, in about `time_max` unless answers take longer.
    ///
    /// # Errors
    ///
    /// See [`MeasureError`].
    pub fn page_round_trip(&mut self, time_max: Duration) -> Result<Duration, MeasureError> {
        let effort = Effort {
            messages_max: CALIBRATION_TRIPS,
            time_max,
            silence_max: time_max.saturating_mul(8),
        };
        self.median(PAGE_BYTES.into(), effort)
    }

    fn median(&mut self, bytes: u64, effort: Effort) -> Result<Duration, MeasureError> {
        let bytes = self.nearest(bytes);
        let mut times = Vec::new();
        self.round_trips(bytes, effort, &mut |time| times.push(time), &mut |_, _| {})?;
        times.sort_unstable();
        Ok(times[times.len() / 2])
    }
}

fn bytes_of<'a>(completion: &Completion<'a>) -> Option<&'a [u8]> {
    match completion {
        Completion::Read(_, page) => Some(page.as_slice()),
        Completion::ReadRun(_, bytes) => Some(bytes),
        Completion::Written(_) | Completion::Dropped(_) => None,
    }
}

/// What came is what was asked for, in whole pages where it had to be.
fn check_length(asked: u32, came: Option<usize>) -> Result<(), MeasureError> {
    let came = came.unwrap_or(0);
    let pages = (asked as usize).next_multiple_of(PAGE_SIZE);
    if came == asked as usize || came == pages && pages <= RUN_PAGES_MAX as usize * PAGE_SIZE {
        return Ok(());
    }
    Err(MeasureError::Length { asked, came })
}

#[cfg(test)]
mod slow;
#[cfg(test)]
#[path = "measure_tests.rs"]
mod tests;
