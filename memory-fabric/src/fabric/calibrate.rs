//! Finding out at the start how fast each way to a donor is, and choosing among them.

use super::{FabricConfig, FabricError, TransportKind};
use crate::control::CONTROL_TIMEOUT;
use crate::link::rdma::{RdmaLinkConfig, RdmaLinkError, registering_time};
use crate::link::{describe, probe};
use crate::slices::request_short_slices;
use crate::transport::PathKind;
use crate::transport::measure::{Gauge, MeasureError, Measured, Silence};
use crate::transport::rdma::LANE_STALL_TIMEOUT;
use crate::transport::select::{Reason, Selection};
use crossbeam_channel::{RecvTimeoutError, bounded};
use std::time::{Duration, Instant};

/// How long measuring takes altogether where answers come in time; what is shorter on fast links is
/// bounded by the number of requests. Making the connections, and registering memory for RDMA, come
/// on top.
const TIME_MAX: Duration = Duration::from_millis(200);
/// Minimum time for each path to each donor.
const TIME_MIN: Duration = Duration::from_millis(2);
/// Limit of attempts to measure a path whose answers come too late: the retransmission of a lost
/// packet and a busy host cause delays that are not the link's.
const ATTEMPTS_MAX: u32 = 3;
/// Longest wait for an answer by TCP or UDP in the last attempt: with many donors the time of each
/// is shorter than the round trip to a distant one.
const STREAM_SILENCE_MAX: Duration = Duration::from_secs(1);

/// What was found out about one donor.
pub(super) struct Calibration {
    /// Of connections by TCP, or by UDP in its place.
    pub streams: Option<Measured>,
    pub rdma: Option<Measured>,
    pub selection: Selection,
    pub reason: Reason,
    /// Why it is not read by RDMA, where that was tried.
    pub refusal: Option<RdmaLinkError>,
}

/// Measures every way that is allowed, and selects.
pub(super) fn calibrate(
    config: &FabricConfig,
    link: &RdmaLinkConfig,
) -> Result<Calibration, FabricError> {
    let kind = config.transport;
    let (on_streams, by_rdma) = match kind {
        TransportKind::Auto | TransportKind::Hybrid => (true, true),
        TransportKind::Rdma => (false, true),
        TransportKind::Tcp | TransportKind::Udp | TransportKind::Loopback => (true, false),
    };
    // It is set up over TCP, and a READ has no place for a checksum of ours.
    let possible = link.carrier.is_tcp() && !config.checksum;
    let by_rdma = by_rdma && (possible || kind != TransportKind::Auto);
    let ways = u32::try_from(config.donors.len().max(1)).unwrap_or(u32::MAX)
        * (u32::from(on_streams) + u32::from(by_rdma));
    let time = (TIME_MAX / ways).max(TIME_MIN);
    let streams = on_streams.then(|| measure_streams(link, time)).flatten();
    let mut refusal = None;
    let mut rdma = None;
    if by_rdma {
        match measure_rdma(link, time) {
            Ok(Ok(measured)) => rdma = Some(measured),
            Ok(Err(why)) if kind == TransportKind::Auto => {
                let address = link.address;
                refusal = Some(RdmaLinkError::Tried { address, why });
            }
            // The connections for pages are tried out when they are made.
            Ok(Err(why)) => tracing::debug!(node = %link.ends.donor, why, "RDMA was not measured"),
            Err(error) if kind != TransportKind::Auto => return Err(error.into()),
            Err(error) => refusal = Some(error),
        }
    }
    // The choice is for as long as the VM runs, so TCP has to be clearly faster twice.
    let carried = link.carrier.kind();
    let best = |rdma: Option<&Measured>| Selection::best(carried, streams.as_ref(), rdma);
    if kind == TransportKind::Auto && best(rdma.as_ref()).0.faults != PathKind::Rdma {
        rdma = rdma.map(|once| match measure_rdma(link, time) {
            Ok(Ok(again)) => once.better_of(again),
            _ => once,
        });
    }
    let (selection, reason) = match kind {
        TransportKind::Rdma => (Selection::RDMA, Reason::Asked),
        TransportKind::Hybrid => (Selection::HYBRID, Reason::Asked),
        TransportKind::Auto => best(rdma.as_ref()),
        TransportKind::Tcp | TransportKind::Udp | TransportKind::Loopback => {
            (Selection::all(carried), Reason::Asked)
        }
    };
    tracing::debug!(node = %link.ends.donor, ?streams, ?rdma, ?selection, "measured");
    Ok(Calibration {
        streams,
        rdma,
        selection,
        reason,
        refusal,
    })
}

/// On a thread of its own, for its short turns.
fn measure_streams(link: &RdmaLinkConfig, time: Duration) -> Option<Measured> {
    let measured = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            request_short_slices();
            let mut gauge = probe::stream(link).map_err(|error| describe(&error))?;
            measure(&mut gauge, time, STREAM_SILENCE_MAX)
        });
        thread.join()
    });
    let measured = measured.unwrap_or_else(|_| Err("the thread panicked".to_owned()));
    // The link itself is kept by others, who say what is wrong with it.
    measured
        .inspect_err(|why| tracing::debug!(node = %link.ends.donor, why, "TCP was not measured"))
        .ok()
}

/// On a thread that is left behind when a verb hangs. Inside, why there is a connection and no
/// measurement.
fn measure_rdma(
    link: &RdmaLinkConfig,
    time: Duration,
) -> Result<Result<Measured, String>, RdmaLinkError> {
    let (give, measured) = bounded(1);
    let config = link.clone();
    std::thread::Builder::new()
        .name(format!("measure-{}", link.ends.donor.0))
        .spawn(move || {
            request_short_slices();
            let found = probe::rdma(&config).map(|mut gauge| measure(&mut gauge, time, time));
            // The waiter may have timed out.
            let _ = give.send(found);
        })
        .map_err(RdmaLinkError::Thread)?;
    let after = registering_time(link.bytes)
        + CONTROL_TIMEOUT
        + LANE_STALL_TIMEOUT
        + ATTEMPTS_MAX * 2 * time;
    let address = link.address;
    let late = RdmaLinkError::Late { address, after };
    match measured.recv_timeout(after) {
        Ok(found) => found,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Err(late),
    }
}

/// Measures again after a silence that ended; in the last attempt a silence of up to `patience`
/// counts as an answer. A silence that does not end lasts until the connection fails and reports
/// why, since a connection retries for longer than a measurement takes.
fn measure(gauge: &mut Gauge, time: Duration, patience: Duration) -> Result<Measured, String> {
    let until = Instant::now() + LANE_STALL_TIMEOUT;
    let mut attempts = 0;
    loop {
        attempts += 1;
        let is_last = attempts == ATTEMPTS_MAX;
        let silence = if is_last { patience.max(time) } else { time };
        let error = match gauge.calibrate(time, silence) {
            Ok(measured) => return Ok(measured),
            Err(error) => error,
        };
        if !matches!(error, MeasureError::Silent(_)) {
            return Err(error.to_string());
        }
        match gauge.wait_for_answers(until.saturating_duration_since(Instant::now())) {
            Silence::Failed(why) => return Err(why),
            Silence::Ended if !is_last => {}
            Silence::Ended | Silence::Lasts => return Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slow::{Slow, slow};

    /// A gauge that answers at once, except the first requests, which take `time`.
    fn hesitant(requests: u32, time: Duration) -> Gauge {
        Slow {
            late: (requests, time),
            ..Slow::new(Duration::ZERO, false)
        }
        .into_gauge()
    }

    const TIME: Duration = Duration::from_millis(50);

    #[test]
    fn a_silence_that_ends_is_measured_again() {
        for silences in 0..ATTEMPTS_MAX {
            let mut gauge = hesitant(silences, 2 * TIME);
            let found = measure(&mut gauge, TIME, TIME).expect("an answer within the time");
            assert!(found.page < TIME, "{silences} silences: {found:?}");
        }
        let why = measure(&mut hesitant(ATTEMPTS_MAX, 2 * TIME), TIME, TIME);
        assert_eq!(why, Err(MeasureError::Silent(TIME).to_string()));
    }

    #[test]
    fn a_way_that_is_slow_every_time_is_measured_as_that() {
        let patience = Duration::from_secs(20);
        let found = measure(&mut slow(2 * TIME), TIME, patience).expect("an answer in time");
        assert!(found.page >= 2 * TIME, "{found:?}");
    }
}
