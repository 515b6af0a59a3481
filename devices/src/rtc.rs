//! The wall clock of the PC: an MC146818 reduced to the time.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::bus::{BusDevice, read_bytes, write_bytes};

/// The index port; the data port follows it.
pub const CMOS_RTC_PORT: u64 = 0x70;
/// Number of ports: index and data.
pub const CMOS_RTC_LEN: u64 = 2;
/// The register with the century, for the FADT.
pub const RTC_CENTURY_REGISTER: u8 = 0x32;

/// Bit 7 of the index port masks non-maskable interrupts; the rest is the index.
const INDEX_MASK: u8 = 0x7f;
/// Register A: 32768 Hz time base.
const REGISTER_A: u8 = 0x26;
/// In register A: the time changes soon. While it is clear, a driver has 244 us to read all of it.
const UPDATE_IN_PROGRESS: u8 = 0x80;
/// How long before the end of a second it is set.
const UPDATE_TIME: Duration = Duration::from_micros(300);
/// Register B: 24-hour mode, numbers in BCD, no interrupts.
const REGISTER_B: u8 = 0x02;
/// Register D: the time is valid.
const REGISTER_D: u8 = 0x80;

/// The time since 1970-01-01 00:00:00 UTC.
type Clock = Box<dyn Fn() -> Duration + Send + Sync>;

/// A real-time clock with the host's time in UTC. It ignores all writes except to the index. Other
/// registers read as zero.
pub struct CmosRtc {
    index: Mutex<u8>,
    clock: Clock,
}

impl fmt::Debug for CmosRtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CmosRtc").finish_non_exhaustive()
    }
}

impl Default for CmosRtc {
    fn default() -> Self {
        Self::new()
    }
}

impl CmosRtc {
    /// Creates a clock that follows the host's.
    pub fn new() -> Self {
        Self::with_clock(Box::new(|| {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
        }))
    }

    fn with_clock(clock: Clock) -> Self {
        Self {
            index: Mutex::new(0),
            clock,
        }
    }

    fn register(&self, index: u8) -> u8 {
        let since = (self.clock)();
        let now = DateTime::from_unix(since.as_secs());
        match index {
            0x00 => bcd(now.second),
            0x02 => bcd(now.minute),
            0x04 => bcd(now.hour),
            0x06 => bcd(now.weekday + 1),
            0x07 => bcd(now.day),
            0x08 => bcd(now.month),
            0x09 => bcd(now.year % 100),
            0x0a if is_about_to_change(since) => REGISTER_A | UPDATE_IN_PROGRESS,
            0x0a => REGISTER_A,
            0x0b => REGISTER_B,
            0x0d => REGISTER_D,
            RTC_CENTURY_REGISTER => bcd(now.year / 100 % 100),
            _ => 0,
        }
    }
}

impl BusDevice for CmosRtc {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let index = *crate::lock(&self.index);
        read_bytes(offset, data, |at| match at {
            1 => self.register(index),
            // The index port is write-only.
            _ => 0xff,
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut index = crate::lock(&self.index);
        write_bytes(offset, data, |at, byte| {
            if at == 0 {
                *index = byte & INDEX_MASK;
            }
        });
    }
}

fn is_about_to_change(since: Duration) -> bool {
    let of_second = Duration::from_nanos(since.subsec_nanos().into());
    of_second + UPDATE_TIME >= Duration::from_secs(1)
}

/// A number below 100 in binary-coded decimal.
fn bcd(number: u64) -> u8 {
    let number = u8::try_from(number % 100).unwrap_or(0);
    ((number / 10) << 4) | (number % 10)
}

/// A time in UTC, in the proleptic Gregorian calendar. Weekday 0 is Sunday; day and month
/// count from 1.
#[derive(Debug, PartialEq, Eq)]
struct DateTime {
    year: u64,
    month: u64,
    day: u64,
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl DateTime {
    /// From seconds since 1970. Days are counted in years that begin in March, so that the leap
    /// day comes last, and in eras of 400 years, after which the calendar repeats.
    fn from_unix(seconds: u64) -> Self {
        const SECONDS_A_DAY: u64 = 86_400;
        const DAYS_AN_ERA: u64 = 146_097;
        /// Days from 0000-03-01 to 1970-01-01.
        const DAYS_TO_1970: u64 = 719_468;

        let days_since_1970 = seconds / SECONDS_A_DAY;
        let second_of_day = seconds % SECONDS_A_DAY;
        let days = days_since_1970 + DAYS_TO_1970;
        let (era, day_of_era) = (days / DAYS_AN_ERA, days % DAYS_AN_ERA);
        // Remove the leap days: one in 4 years, none in 100, one in 400.
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // Months from March have 31, 30, 31, 30, 31 days, repeating: 153 days in five months.
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let (month, next_year) = match month_from_march {
            0..=9 => (month_from_march + 3, 0),
            _ => (month_from_march - 9, 1),
        };
        Self {
            year: era * 400 + year_of_era + next_year,
            month,
            day,
            // 1970-01-01 was a Thursday.
            weekday: (days_since_1970 + 4) % 7,
            hour: second_of_day / 3_600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(rtc: &CmosRtc, index: u8) -> u8 {
        rtc.write(0, &[index]);
        let mut data = [0];
        rtc.read(1, &mut data);
        data[0]
    }

    #[test]
    fn the_time_is_given_in_bcd() {
        // 2024-02-29 23:59:58 UTC, a Thursday.
        let rtc = CmosRtc::with_clock(Box::new(|| Duration::from_secs(1_709_251_198)));
        assert_eq!(read(&rtc, 0x00), 0x58);
        assert_eq!(read(&rtc, 0x02), 0x59);
        assert_eq!(read(&rtc, 0x04), 0x23);
        assert_eq!(read(&rtc, 0x06), 5);
        assert_eq!(read(&rtc, 0x07), 0x29);
        assert_eq!(read(&rtc, 0x08), 0x02);
        assert_eq!(read(&rtc, 0x09), 0x24);
        assert_eq!(read(&rtc, RTC_CENTURY_REGISTER), 0x20);
        assert_eq!(
            read(&rtc, 0x80 | 0x0d),
            REGISTER_D,
            "the NMI bit is no index"
        );
    }

    #[test]
    fn a_change_is_announced_while_a_driver_might_read_half_of_it() {
        let at = |micros| {
            let rtc = CmosRtc::with_clock(Box::new(move || Duration::from_micros(micros)));
            read(&rtc, 0x0a)
        };
        for micros in [0, 500_000, 999_699] {
            assert_eq!(at(micros), REGISTER_A, "{micros}");
        }
        for micros in [999_700, 999_999] {
            assert_eq!(at(micros), REGISTER_A | UPDATE_IN_PROGRESS, "{micros}");
        }
    }

    #[test]
    fn dates_around_leap_days_and_centuries_are_right() {
        let date = |seconds| {
            let t = DateTime::from_unix(seconds);
            (t.year, t.month, t.day)
        };
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(951_782_399), (2000, 2, 28));
        assert_eq!(date(951_782_400), (2000, 2, 29));
        assert_eq!(date(951_868_800), (2000, 3, 1));
        assert_eq!(date(4_107_542_399), (2100, 2, 28));
        assert_eq!(date(4_107_542_400), (2100, 3, 1));
        assert_eq!(date(1_735_689_599), (2024, 12, 31));
    }

    proptest! {
        #[test]
        fn any_access_at_any_time_is_survived(
            offset: u64,
            data: Vec<u8>,
            index: u8,
            now: u64,
        ) {
            let rtc = CmosRtc::with_clock(Box::new(move || Duration::from_nanos(now)));
            rtc.write(0, &[index]);
            rtc.write(offset >> 1, &data);
            rtc.read(offset >> 1, &mut data.clone());
            rtc.read(1, &mut [0]);
        }

        #[test]
        fn dates_follow_each_other(days in 0u64..200_000) {
            let today = DateTime::from_unix(days * 86_400);
            let tomorrow = DateTime::from_unix((days + 1) * 86_400);
            let next_day = tomorrow.year == today.year
                && tomorrow.month == today.month
                && tomorrow.day == today.day + 1;
            let next_month = tomorrow.day == 1
                && (today.day >= 28 && today.day <= 31)
                && ((tomorrow.year == today.year && tomorrow.month == today.month + 1)
                    || (tomorrow.year == today.year + 1
                        && tomorrow.month == 1
                        && today.month == 12));
            prop_assert!(next_day || next_month, "{:?} {:?}", today, tomorrow);
        }
    }
}
