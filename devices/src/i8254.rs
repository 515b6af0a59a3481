//! Channel 2 of an 8254 timer, whose output a kernel sees in port 0x61.
//!
//! A kernel that learns the rate of its TSC from no hypervisor counts it against this channel, and
//! waits for the output without a limit. Channels 0 and 1 are not there: nothing is interrupted.
//!
//! Intel 8254 Programmable Interval Timer, order number 231164. Port 0x61: Intel 8 Series chipset
//! datasheet, "NMI Status and Control Register".

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::bus::{BusDevice, read_bytes, write_bytes};

/// First port of the timer: three channels and the control word.
pub const I8254_PORT: u64 = 0x40;
/// Number of its ports.
pub const I8254_LEN: u64 = 4;
/// The port that starts channel 2 and shows its output.
pub const SPEAKER_PORT: u64 = 0x61;

/// Ticks a second.
const FREQUENCY: u128 = 1_193_182;

/// Offsets from the first port.
const CHANNEL_2: u64 = 2;
const CONTROL: u64 = 3;

/// Control word: bits 7:6 select a channel or the read-back command.
const SELECT_CHANNEL_2: u8 = 2;
const SELECT_READ_BACK: u8 = 3;
/// Read-back command: bits 5 and 4 are 0 for what is latched, bit 3 selects channel 2.
const READ_BACK_NO_COUNT: u8 = 1 << 5;
const READ_BACK_NO_STATUS: u8 = 1 << 4;
const READ_BACK_CHANNEL_2: u8 = 1 << 3;
/// Status: the output, and a count that was not written yet.
const STATUS_OUTPUT: u8 = 1 << 7;
const STATUS_NULL_COUNT: u8 = 1 << 6;
/// Control word and status: bits 5:0, which bytes are accessed, the mode and BCD.
const STATUS_SETTING: u8 = 0x3f;

/// Port 0x61: the channel counts.
const SPEAKER_GATE: u8 = 1 << 0;
/// Port 0x61: what can be written, the gate and the speaker's data.
const SPEAKER_WRITABLE: u8 = 0b11;
/// Port 0x61: changes with each refresh of the memory, which is 15 us.
const SPEAKER_REFRESH: u8 = 1 << 4;
/// Port 0x61: the output of channel 2.
const SPEAKER_OUTPUT: u8 = 1 << 5;
const REFRESH_TICKS: u128 = 18;

/// Which bytes of a count are written and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Low,
    High,
    /// The low byte, then the high one.
    Both,
}

/// How the channel counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Down from the count, once; the output is high from zero on. Modes 1, 4 and 5, whose outputs
    /// are pulses, count like it.
    Once,
    /// Down from the count, again and again; the output is low for the last tick.
    Rate,
    /// By two, twice for each count; the output is high for the first half.
    Square,
}

/// Channel 2. Times are those since the timer was created.
#[derive(Debug)]
struct Channel {
    access: Access,
    mode: Mode,
    /// The lower six bits of the control word.
    setting: u8,
    /// The count, 1 to 0x10000; none before the first is written.
    count: Option<u32>,
    /// The low byte of a count whose high byte is yet to be written.
    low_written: Option<u8>,
    /// Whether the next byte that is read is the high one.
    high_is_next: bool,
    /// Bytes of a latched count that were not read yet, the next one last.
    latched_count: Vec<u8>,
    latched_status: Option<u8>,
    /// Bits 1:0 of port 0x61.
    speaker: u8,
    /// How long it has counted before `since`.
    counted: Duration,
    /// Since when it counts; none while the gate is low.
    since: Option<Duration>,
}

impl Channel {
    const fn new() -> Self {
        Self {
            access: Access::Both,
            mode: Mode::Once,
            setting: 0x30,
            count: None,
            low_written: None,
            high_is_next: false,
            latched_count: Vec::new(),
            latched_status: None,
            speaker: 0,
            counted: Duration::ZERO,
            since: None,
        }
    }

    fn control(&mut self, word: u8, now: Duration) {
        match word >> 6 {
            SELECT_CHANNEL_2 if word & 0x30 == 0 => self.latch_count(now),
            SELECT_CHANNEL_2 => {
                self.access = match word >> 4 & 3 {
                    1 => Access::Low,
                    2 => Access::High,
                    _ => Access::Both,
                };
                self.mode = match word >> 1 & 7 {
                    2 | 6 => Mode::Rate,
                    3 | 7 => Mode::Square,
                    _ => Mode::Once,
                };
                self.setting = word & STATUS_SETTING;
                self.count = None;
                self.low_written = None;
                self.high_is_next = false;
                self.latched_count.clear();
                self.latched_status = None;
            }
            SELECT_READ_BACK if word & READ_BACK_CHANNEL_2 != 0 => {
                if word & READ_BACK_NO_COUNT == 0 {
                    self.latch_count(now);
                }
                if word & READ_BACK_NO_STATUS == 0 && self.latched_status.is_none() {
                    self.latched_status = Some(self.status(now));
                }
            }
            _ => {}
        }
    }

    /// Keeps the count for the next reads. A second command before them changes nothing.
    fn latch_count(&mut self, now: Duration) {
        if !self.latched_count.is_empty() {
            return;
        }
        let [low, high] = self.value(now).to_le_bytes();
        self.latched_count = match self.access {
            Access::Low => vec![low],
            Access::High => vec![high],
            Access::Both => vec![high, low],
        };
    }

    fn write(&mut self, byte: u8, now: Duration) {
        let count = match (self.access, self.low_written.take()) {
            (Access::Low, _) => u16::from(byte),
            (Access::High, _) => u16::from(byte) << 8,
            (Access::Both, Some(low)) => u16::from_le_bytes([low, byte]),
            (Access::Both, None) => {
                self.low_written = Some(byte);
                return;
            }
        };
        self.count = Some(if count == 0 { 0x1_0000 } else { count.into() });
        self.restart(now);
    }

    fn read(&mut self, now: Duration) -> u8 {
        if let Some(status) = self.latched_status.take() {
            return status;
        }
        if let Some(byte) = self.latched_count.pop() {
            return byte;
        }
        let [low, high] = self.value(now).to_le_bytes();
        match self.access {
            Access::Low => low,
            Access::High => high,
            Access::Both => {
                self.high_is_next = !self.high_is_next;
                if self.high_is_next { low } else { high }
            }
        }
    }

    fn write_speaker(&mut self, byte: u8, now: Duration) {
        let had_gate = self.speaker & SPEAKER_GATE != 0;
        self.speaker = byte & SPEAKER_WRITABLE;
        match (had_gate, byte & SPEAKER_GATE != 0) {
            (true, false) => {
                self.counted = self.time(now);
                self.since = None;
            }
            // The periodic modes begin again.
            (false, true) if self.mode != Mode::Once => self.restart(now),
            (false, true) => self.since = Some(now),
            _ => {}
        }
    }

    fn read_speaker(&self, now: Duration) -> u8 {
        let output = if self.output(now) { SPEAKER_OUTPUT } else { 0 };
        let refresh = match ticks(now) / REFRESH_TICKS % 2 {
            0 => 0,
            _ => SPEAKER_REFRESH,
        };
        self.speaker | output | refresh
    }

    fn restart(&mut self, now: Duration) {
        self.counted = Duration::ZERO;
        self.since = (self.speaker & SPEAKER_GATE != 0).then_some(now);
    }

    /// How long it has counted.
    fn time(&self, now: Duration) -> Duration {
        let running = self.since.map(|since| now.saturating_sub(since));
        self.counted.saturating_add(running.unwrap_or_default())
    }

    /// The count and the ticks since it was written, which are 0 without a count.
    fn progress(&self, now: Duration) -> (u128, u128) {
        match self.count {
            Some(count) => (count.into(), ticks(self.time(now))),
            None => (0x1_0000, 0),
        }
    }

    /// What the counter shows.
    fn value(&self, now: Duration) -> u16 {
        let (count, ticks) = self.progress(now);
        let left = match self.mode {
            // It goes on from 0xffff.
            Mode::Once => 0x1_0000 + count - ticks % 0x1_0000,
            Mode::Rate => count - ticks % count,
            Mode::Square => count - ticks * 2 % count,
        };
        u16::try_from(left & 0xffff).unwrap_or(0)
    }

    fn output(&self, now: Duration) -> bool {
        let (count, ticks) = self.progress(now);
        match self.mode {
            Mode::Once => self.count.is_some() && ticks >= count,
            Mode::Rate => ticks % count != count - 1,
            Mode::Square => ticks % count < count.div_ceil(2),
        }
    }

    fn status(&self, now: Duration) -> u8 {
        let output = if self.output(now) { STATUS_OUTPUT } else { 0 };
        let null = match self.count {
            Some(_) => 0,
            None => STATUS_NULL_COUNT,
        };
        output | null | self.setting
    }
}

/// Ticks in `time`.
const fn ticks(time: Duration) -> u128 {
    time.as_nanos() * FREQUENCY / 1_000_000_000
}

/// The timer. Binary counts only: a count in BCD is taken as binary.
#[derive(Debug)]
pub struct I8254 {
    channel: Mutex<Channel>,
    created: Instant,
}

impl I8254 {
    /// Creates a timer that counts nothing.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "its time starts when it is made"
    )]
    pub fn new() -> Self {
        Self {
            channel: Mutex::new(Channel::new()),
            created: Instant::now(),
        }
    }

    /// Returns the device of port 0x61.
    #[must_use]
    pub fn speaker(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(SpeakerPort(Arc::clone(self)))
    }
}

impl BusDevice for I8254 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut channel = crate::lock(&self.channel);
        read_bytes(offset, data, |at| match at {
            CHANNEL_2 => channel.read(self.created.elapsed()),
            _ => 0xff,
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut channel = crate::lock(&self.channel);
        write_bytes(offset, data, |at, byte| match at {
            CHANNEL_2 => channel.write(byte, self.created.elapsed()),
            CONTROL => channel.control(byte, self.created.elapsed()),
            _ => {}
        });
    }
}

/// Port 0x61 of a timer.
#[derive(Debug)]
struct SpeakerPort(Arc<I8254>);

impl BusDevice for SpeakerPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let channel = crate::lock(&self.0.channel);
        read_bytes(offset, data, |at| match at {
            0 => channel.read_speaker(self.0.created.elapsed()),
            _ => 0xff,
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut channel = crate::lock(&self.0.channel);
        write_bytes(offset, data, |at, byte| {
            if at == 0 {
                channel.write_speaker(byte, self.0.created.elapsed());
            }
        });
    }
}

#[cfg(test)]
mod tests;
