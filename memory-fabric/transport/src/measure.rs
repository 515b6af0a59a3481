//! Measures the speed of an otherwise idle transport: the same way for the choice at the start, at
//! run time, and for `ssi-hv bench transport`.

use super::{Completion, Full, IN_FLIGHT_MAX, PAGE_BYTES, PageTransport, Ticket};
use fabric_host::Spin;
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_wire::RUN_PAGES_MAX;
use std::time::{Duration, Instant};

/// Bytes of a small request: a cache line, the smallest size of tools such as perftest.
pub const SMALL_BYTES: u32 = 64;

/// Round trips of each size in a calibration, if time permits.
const CALIBRATION_TRIPS: u64 = 64;
/// Minimum of samples for a median, regardless of time: it tolerates one disturbed sample.
const TRIPS_MIN: u64 = 3;
/// Bytes of the stream in a calibration, if time permits: 0.4 ms at 10 GB/s, 35 ms at 1 Gbit/s.
const CALIBRATION_STREAM_BYTES: u64 = 4 << 20;
/// Piece of the stream: the prefetcher's request size on most links.
const CALIBRATION_PIECE_BYTES: u64 = 32 * PAGE_SIZE as u64;
/// Outstanding pieces.
const CALIBRATION_PIECES: usize = 4;

/// Why a measurement failed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MeasureError {
    /// The connection broke, or a request was refused.
    #[error("the connection failed: {0}")]
    Failed(String),
    /// No answer arrived in time.
    #[error("no answer for {} ms", .0.as_millis())]
    Silent(Duration),
    /// An answer had the wrong length.
    #[error("{asked} bytes requested, {came} received")]
    Length {
        /// Requested length.
        asked: u32,
        /// Received length.
        came: usize,
    },
}

/// Result of waiting for the end of a silence.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Silence {
    /// All answers arrived: the connection can be measured again.
    Ended,
    /// The connection failed, with the reason.
    Failed(String),
    /// No answer has arrived yet.
    Lasts,
}

/// Limits of a measurement, which ends at the first one reached.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Number of requests.
    pub messages_max: u64,
    /// Duration. At least one request is made, or three round trips, and all outstanding ones are
    /// awaited.
    pub time_max: Duration,
    /// Timeout of an answer.
    pub silence_max: Duration,
}

/// Result of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// Answered requests.
    pub messages: u64,
    /// Bytes transferred.
    pub bytes: u64,
    /// From the first request to the last answer.
    pub time: Duration,
}

impl Rate {
    /// Returns the rate in bytes per second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        // Far below 2^52.
        #[allow(clippy::cast_precision_loss)]
        let bytes = self.bytes as f64;
        bytes / self.time.as_secs_f64().max(1e-9)
    }

    /// Returns the rate in requests per second.
    #[must_use]
    pub fn messages_per_second(&self) -> f64 {
        #[allow(clippy::cast_precision_loss)]
        let messages = self.messages as f64;
        messages / self.time.as_secs_f64().max(1e-9)
    }
}

/// Result of a calibration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Median round trip of [`SMALL_BYTES`].
    pub small: Duration,
    /// Median round trip of a page.
    pub page: Duration,
    /// Bytes per second of runs of pages.
    pub stream_bytes_per_second: f64,
}

impl Measured {
    /// Returns the better values of both: disturbances never make a link faster.
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

/// Receives the data of an answer: its offset in the lease, and the bytes.
pub type Take<'a> = &'a mut dyn FnMut(u64, &[u8]);

/// An otherwise idle connection to measure.
pub struct Gauge {
    transport: Box<dyn PageTransport>,
    /// Returns the reason if the connection has failed.
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
    /// Creates a gauge for `transport`, which serves a lease of this many bytes. `failure` returns
    /// the reason if the transport has failed.
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
            // Used only for its pauses: a measurement does not sleep.
            spin: Spin::new(Duration::from_secs(1)),
        }
    }

    /// Returns whether requests of this size are possible.
    #[must_use]
    pub fn takes(&self, bytes: u32) -> bool {
        self.transport.probe_bytes().contains(&bytes) && self.room(bytes) <= self.lease_bytes
    }

    /// Returns the possible size nearest to `bytes`.
    fn nearest(&self, bytes: u64) -> u32 {
        let sizes = self.transport.probe_bytes();
        let bytes = bytes.min(self.lease_bytes);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        bytes.clamp(*sizes.start(), *sizes.end())
    }

    /// Returns the space of a request in the lease: whole pages.
    fn room(&self, bytes: u32) -> u64 {
        u64::from(bytes).next_multiple_of(PAGE_SIZE as u64)
    }

    /// Returns the offset of request `number`: consecutive, and wrapping at the end of the lease.
    fn offset(&self, number: u64, bytes: u32) -> u64 {
        let room = self.room(bytes);
        number % (self.lease_bytes / room).max(1) * room
    }

    /// Makes one request at a time, and passes each round trip to `record`.
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

    /// Writes pages from the beginning of the lease on, limited by `effort` and the size of the
    /// lease; `content` returns each page.
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
                transport.post_write(Ticket(0), offset, &page)
            },
            &mut |_| {},
        )?;
        Ok(Rate {
            bytes: rate.messages * PAGE_SIZE as u64,
            ..rate
        })
    }

    /// Writes one page at a time, from the beginning of the lease on, and passes each duration to
    /// `record`; `content` returns each page.
    ///
    /// # Errors
    ///
    /// See [`MeasureError`].
    pub fn write_trips(
        &mut self,
        effort: Effort,
        record: &mut dyn FnMut(Duration),
        content: &mut dyn FnMut(u64, &mut PageBytes),
    ) -> Result<(), MeasureError> {
        let began = Instant::now();
        let mut page: Box<PageBytes> = Box::new([0; PAGE_SIZE]);
        for number in 0..effort.messages_max.max(1) {
            if number >= TRIPS_MIN && began.elapsed() >= effort.time_max {
                break;
            }
            let offset = self.offset(number, PAGE_BYTES);
            content(offset, &mut page);
            let posted_at = Instant::now();
            if self.transport.post_write(Ticket(0), offset, &page).is_err() {
                let what = "it takes no such request".to_owned();
                return Err(MeasureError::Failed(what));
            }
            self.transport.flush();
            let mut done = None;
            while done.is_none() {
                self.transport
                    .poll(&mut |_| done = Some(posted_at.elapsed()));
                if done.is_none() {
                    self.wait(posted_at, effort.silence_max)?;
                }
            }
            record(done.expect("it completed"));
        }
        Ok(())
    }

    /// Posts numbered requests with a limit of outstanding ones, and counts completions.
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

    /// Pauses once; fails if the silence since `since` is too long.
    fn wait(&self, since: Instant, silence_max: Duration) -> Result<(), MeasureError> {
        if let Some(why) = (self.failure)() {
            return Err(MeasureError::Failed(why));
        }
        if since.elapsed() >= silence_max {
            return Err(MeasureError::Silent(silence_max));
        }
        self.spin.keeps_polling(Duration::ZERO);
        Ok(())
    }

    /// Waits up to `patience` for the end of a silence: an adapter repeats lost requests for a long
    /// time before it fails.
    pub fn wait_for_answers(&mut self, patience: Duration) -> Silence {
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

    /// Measures small and page-sized round trips and the stream, in about `time_max` in total
    /// unless answers take longer.
    ///
    /// # Errors
    ///
    /// See [`MeasureError`]; an answer is too late after `silence_max`.
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

    /// Returns the median round trip of a page, in about `time_max` unless answers take longer.
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
        Completion::Read(_, page) | Completion::ReadFrom(_, _, page) => Some(page.as_slice()),
        Completion::ReadRun(_, bytes) | Completion::ReadRunFrom(_, _, bytes) => Some(bytes),
        Completion::Unread(_) | Completion::Written(_) | Completion::Dropped(_) => None,
    }
}

/// Checks that an answer has the requested length, in whole pages where required.
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
