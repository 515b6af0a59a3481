use proptest::prelude::*;

use super::*;

/// A time at which so many ticks have passed.
fn after(ticks: u64) -> Duration {
    Duration::from_nanos((ticks * 1_000_000_000).div_ceil(1_193_182))
}

fn with_count(mode: u8, count: u16) -> Channel {
    let mut channel = Channel::new();
    channel.write_speaker(SPEAKER_GATE, Duration::ZERO);
    channel.control(0xb0 | mode << 1, Duration::ZERO);
    for byte in count.to_le_bytes() {
        channel.write(byte, Duration::ZERO);
    }
    channel
}

fn read_both(channel: &mut Channel, now: Duration) -> u16 {
    u16::from_le_bytes([channel.read(now), channel.read(now)])
}

/// What Linux does in `pit_calibrate_tsc`: 10 ms are 11931 ticks.
#[test]
fn its_output_rises_when_the_count_is_over() {
    let channel = with_count(0, 11_931);
    assert_eq!(channel.read_speaker(Duration::ZERO) & SPEAKER_OUTPUT, 0);
    assert_eq!(channel.read_speaker(after(11_930)) & SPEAKER_OUTPUT, 0);
    assert_ne!(channel.read_speaker(after(11_931)) & SPEAKER_OUTPUT, 0);
    assert_ne!(channel.read_speaker(after(70_000)) & SPEAKER_OUTPUT, 0);
    assert_eq!(after(11_931).as_millis(), 9, "just less than 10 ms");
}

/// What Linux does in `quick_pit_calibrate`: it waits for each next high byte.
#[test]
fn its_count_goes_down_and_on_from_its_largest_value() {
    let mut channel = with_count(0, 0xffff);
    for (ticks, shown) in [
        (0, 0xffff),
        (1, 0xfffe),
        (0x100, 0xfeff),
        (0xffff, 0),
        (0x1_0000, 0xffff),
        (0x2_0005, 0xfffa),
    ] {
        assert_eq!(read_both(&mut channel, after(ticks)), shown, "{ticks:#x}");
    }
}

#[test]
fn it_counts_only_while_its_gate_is_high() {
    let mut channel = with_count(0, 100);
    channel.write_speaker(0, after(40));
    assert_eq!(read_both(&mut channel, after(90)), 60);
    channel.write_speaker(SPEAKER_GATE, after(1000));
    assert!(!channel.output(after(1059)));
    assert!(channel.output(after(1061)), "60 ticks, and the rounding");
    // A count that is written while the gate is low waits for it.
    channel.write_speaker(0, after(2000));
    channel.write(10, after(2000));
    channel.write(0, after(2000));
    assert_eq!(read_both(&mut channel, after(3000)), 10);
    assert!(!channel.output(after(3000)));
}

#[test]
fn the_periodic_modes_repeat_and_begin_again_with_the_gate() {
    let mut rate = with_count(2, 100);
    assert_eq!(read_both(&mut rate, after(230)), 70);
    assert!(rate.output(after(298)));
    assert!(!rate.output(after(299)));
    rate.write_speaker(0, after(310));
    rate.write_speaker(SPEAKER_GATE, after(400));
    assert_eq!(read_both(&mut rate, after(400)), 100);
    let mut square = with_count(3, 100);
    assert_eq!(read_both(&mut square, after(20)), 60);
    assert!(square.output(after(49)) && !square.output(after(50)));
    assert!(square.output(after(100)));
}

#[test]
fn a_count_of_zero_is_the_largest() {
    let channel = with_count(0, 0);
    assert!(!channel.output(after(0xffff)));
    assert!(channel.output(after(0x1_0000)));
}

#[test]
fn what_was_latched_is_read_once_and_status_before_count() {
    let mut channel = with_count(0, 1000);
    channel.control(0x80, after(10));
    channel.control(0x80, after(500));
    assert_eq!(read_both(&mut channel, after(600)), 990);
    assert_eq!(read_both(&mut channel, after(600)), 400);
    // Read-back of both: 0xc0, and the bit of the channel.
    channel.control(0xc8, after(700));
    assert_eq!(channel.read(after(2000)), 0x30);
    assert_eq!(read_both(&mut channel, after(2000)), 300);
    channel.control(0xe8, after(2000));
    assert_eq!(channel.read(after(2000)), STATUS_OUTPUT | 0x30);
    // Of another channel: nothing.
    channel.control(0xc2, after(2000));
    assert_eq!(read_both(&mut channel, after(2001)), 0xffff - 1000);
    // Without a count yet.
    channel.control(0xb6, after(2000));
    channel.control(0xe8, after(2000));
    let status = channel.read(after(2000));
    assert_eq!(status & !STATUS_OUTPUT, STATUS_NULL_COUNT | 0x36);
}

#[test]
fn one_byte_of_a_count_is_written_and_read_where_that_was_set() {
    let mut channel = Channel::new();
    channel.write_speaker(SPEAKER_GATE, Duration::ZERO);
    channel.control(0x90, Duration::ZERO);
    channel.write(200, Duration::ZERO);
    assert_eq!(channel.read(after(50)), 150);
    assert_eq!(channel.read(after(60)), 140);
    channel.control(0xa0, Duration::ZERO);
    channel.write(2, Duration::ZERO);
    assert_eq!(channel.read(after(0x101)), 0);
    assert!(channel.output(after(0x200)) && !channel.output(after(0x1ff)));
}

/// The ports of a real one, as Linux uses them, without a limit but that of the test.
#[test]
fn a_calibration_ends() {
    let timer = Arc::new(I8254::new());
    let speaker = timer.speaker();
    let mut byte = [0];
    speaker.read(0, &mut byte);
    speaker.write(0, &[(byte[0] & !2) | 1]);
    timer.write(3, &[0xb0]);
    timer.write(2, &[100]);
    timer.write(2, &[0]);
    let deadline = Instant::now() + Duration::from_secs(10);
    while byte[0] & SPEAKER_OUTPUT == 0 {
        assert!(Instant::now() < deadline, "84 us");
        speaker.read(0, &mut byte);
    }
}

proptest! {
    #[test]
    fn any_access_is_survived(accesses in prop::collection::vec((any::<bool>(), 0_u64..5, any::<u8>()), 0..200)) {
        let timer = Arc::new(I8254::new());
        let speaker = timer.speaker();
        for (writes, at, byte) in accesses {
            let (device, offset): (&dyn BusDevice, u64) =
                if at < 4 { (&*timer, at) } else { (&*speaker, 0) };
            if writes {
                device.write(offset, &[byte, byte]);
            } else {
                device.read(offset, &mut [byte, byte]);
            }
        }
    }
}
