//! How long WRITEs take.

use super::*;

/// Long enough to differ from what the machine needs for a request.
const MOMENT: Duration = Duration::from_millis(20);

/// Lets time pass, which is what is measured.
fn pass() {
    let begun = Instant::now();
    while begun.elapsed() < MOMENT {
        std::hint::spin_loop();
    }
}

#[test]
fn a_write_takes_from_its_posting_to_its_completion_and_a_read_is_not_counted() {
    let mut bed = Bed::new(TrafficClass::Bulk);
    let lane = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&lane);
    let begun = Instant::now();
    bed.write(3, 0x33);
    pass();
    bed.read(5);
    bed.write(4, 0x44);
    lane.hand().complete = 3;
    assert_eq!(bed.stats.write.summary().count, 0, "none has completed");
    bed.poll();
    let all = begun.elapsed();
    assert_eq!(bed.written, [3, 4]);
    let times = bed.stats.write.summary();
    assert_eq!(times.count, 2, "the READ is none of them");
    assert!(times.max >= MOMENT && times.max <= all, "{times:?}");
    assert!(times.p50 < times.max, "the second one took less: {times:?}");
}

#[test]
fn writes_that_a_failed_lane_left_to_tcp_count_neither_then_nor_for_the_next_lane() {
    let mut bed = Bed::new(TrafficClass::Bulk);
    let lane = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&lane);
    for number in 0..3 {
        bed.write(number, 0x11);
    }
    {
        let mut hand = lane.hand();
        hand.complete = 1;
        hand.fails = true;
    }
    bed.poll_until(|bed| bed.written.len() == 3);
    let first = bed.stats.write.summary();
    assert_eq!(first.count, 1, "two went over TCP");
    pass();
    let next = HeldLane::new(IN_FLIGHT_MAX);
    bed.give(&next);
    bed.poll_until(|bed| bed.transport.in_flight() == 0);
    bed.poll();
    let begun = Instant::now();
    bed.write(9, 0x22);
    assert_eq!(next.hand().posted.len(), 1, "the next lane is in use");
    next.hand().complete = 1;
    bed.poll();
    let took = begun.elapsed();
    let times = bed.stats.write.summary();
    assert_eq!(times.count, 2);
    assert!(times.max <= took.max(first.max), "{times:?}, {took:?}");
}
