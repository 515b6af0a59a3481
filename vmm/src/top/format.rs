//! Formats numbers in few columns, with their unit, and never truncated.

use crate::config::PAGE_SIZE_BYTES;
use crate::size::ByteSize;

/// Formats a count or a rate in at most 6 columns.
pub(super) fn count(value: f64) -> String {
    let units = ["", "k", "M", "G", "T", "P", "E"];
    if value < 99_999.5 {
        return format!("{value:.0}");
    }
    let (mut value, mut unit) = (value, 0);
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if value < 9.995 {
        2
    } else {
        usize::from(value < 99.95)
    };
    format!("{value:.digits$}{}", units[unit])
}

/// Formats a counter like [`count`].
pub(super) fn number(value: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "a number to look at")]
    let value = value as f64;
    count(value)
}

/// Formats a time in microseconds in at most 8 columns.
pub(super) fn time(us: f64) -> String {
    if us < 999.95 {
        format!("{us:.1} us")
    } else if us < 999_950.0 {
        format!("{:.1} ms", us / 1e3)
    } else {
        format!("{} s", count(us / 1e6))
    }
}

/// Formats a size of memory.
pub(super) fn size(bytes: u64) -> String {
    ByteSize::from_bytes(bytes).rounded()
}

/// Formats a rate of pages per second in bytes.
pub(super) fn pages_a_second(pages: f64) -> String {
    let bytes = super::rates::whole(pages).saturating_mul(PAGE_SIZE_BYTES);
    format!("{}/s", size(bytes))
}

/// Formats a fraction.
pub(super) fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_whatever_they_are() {
        for (value, text) in [
            (0.0, "0"),
            (7.4, "7"),
            (99_999.0, "99999"),
            (100_000.0, "100k"),
            (1_234_567.0, "1.23M"),
            (12_345_678.0, "12.3M"),
            (999_499_999.0, "999M"),
            (999_600_000.0, "1.00G"),
        ] {
            assert_eq!(count(value), text);
        }
        assert!(number(u64::MAX).len() <= 6, "{}", number(u64::MAX));
        for (us, text) in [
            (0.0, "0.0 us"),
            (999.9, "999.9 us"),
            (1_000.0, "1.0 ms"),
            (999_940.0, "999.9 ms"),
            (1_500_000.0, "2 s"),
        ] {
            assert_eq!(time(us), text);
        }
        assert!(time(1e18).len() <= 8);
        assert_eq!(pages_a_second(256.0), "1 MiB/s");
        assert_eq!(percent(0.999), "100 %");
    }
}
