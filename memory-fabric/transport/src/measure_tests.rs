//! Tests of measurements, with a transport of known speed.

use super::slow::{Slow, slow};
use super::*;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const LONG: Duration = Duration::from_secs(20);

fn effort(messages_max: u64) -> Effort {
    Effort {
        messages_max,
        time_max: LONG,
        silence_max: LONG,
    }
}

#[test]
fn a_round_trip_takes_what_the_link_takes() {
    let latency = Duration::from_millis(2);
    let mut gauge = slow(latency);
    let mut times = Vec::new();
    let done = gauge.round_trips(
        4096,
        effort(10),
        &mut |time| times.push(time),
        &mut |_, _| {},
    );
    assert_eq!(done, Ok(()));
    assert_eq!(times.len(), 10);
    assert!(times.iter().all(|&time| time >= latency), "{times:?}");
}

#[test]
fn measuring_ends_with_its_time_and_a_silent_link_is_an_error() {
    let mut gauge = slow(Duration::from_millis(2));
    let began = Instant::now();
    let found = gauge.calibrate(Duration::from_millis(60), LONG);
    assert!(found.is_ok_and(|found| found.page >= Duration::from_millis(2)));
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "64 trips are 128 ms"
    );
    let mut gauge = slow(LONG);
    let silence = Duration::from_millis(30);
    assert_eq!(
        gauge.calibrate(silence, silence),
        Err(MeasureError::Silent(silence))
    );
}

#[test]
fn one_answer_that_is_late_is_not_taken_for_the_links_speed() {
    let late = Duration::from_millis(200);
    let mut gauge = Slow {
        late: (1, late),
        asked: Cell::new(true),
        ..Slow::new(Duration::ZERO, false)
    }
    .into_gauge();
    let found = gauge.calibrate(late / 10, LONG).expect("answers");
    assert!(found.small < late, "{found:?}");
}

#[test]
fn a_connection_that_gives_up_later_than_measuring_says_why() {
    let mut gauge = slow(LONG);
    let silence = Duration::from_millis(10);
    // It fails at the third query after that.
    let silent = Arc::new(AtomicBool::new(false));
    let (is_silent, asked) = (Arc::clone(&silent), AtomicUsize::new(0));
    gauge.failure = Box::new(move || {
        let ends = is_silent.load(Ordering::SeqCst) && asked.fetch_add(1, Ordering::SeqCst) >= 2;
        ends.then(|| "READ failed".to_owned())
    });
    assert_eq!(
        gauge.calibrate(silence, silence),
        Err(MeasureError::Silent(silence))
    );
    silent.store(true, Ordering::SeqCst);
    let failed = Silence::Failed("READ failed".to_owned());
    assert_eq!(gauge.wait_for_answers(LONG), failed);
    gauge.failure = Box::new(|| None);
    assert_eq!(gauge.wait_for_answers(silence), Silence::Lasts);
}

#[test]
fn a_stream_keeps_requests_outstanding() {
    let latency = Duration::from_millis(5);
    let slow = Slow::new(latency, false);
    let most = Arc::clone(&slow.most);
    let mut gauge = slow.into_gauge();
    let rate = gauge.stream(4096, 16, effort(64), &mut |_, _| {});
    let rate = rate.expect("a stream");
    assert_eq!((rate.messages, rate.bytes), (64, 64 * 4096));
    assert!(rate.time >= latency * 4, "{rate:?}");
    assert_eq!(most.load(Ordering::SeqCst), 16);
}

#[test]
fn an_answer_of_another_length_is_an_error() {
    let wrong = Err(MeasureError::Length {
        asked: 4096,
        came: 4095,
    });
    let mut gauge = Slow::gauge(Duration::ZERO, true);
    let trips = gauge.round_trips(4096, effort(1), &mut |_| {}, &mut |_, _| {});
    assert_eq!(trips, wrong);
    let mut gauge = Slow::gauge(Duration::ZERO, true);
    let stream = gauge.stream(4096, 2, effort(2), &mut |_, _| {});
    assert_eq!(stream.map(drop), wrong);
}

#[test]
fn a_transport_without_parts_of_pages_says_so() {
    let gauge = slow(Duration::ZERO);
    assert!(!gauge.takes(64) && gauge.takes(4096) && !gauge.takes(1 << 20));
    assert_eq!(gauge.nearest(64), 4096);
}
