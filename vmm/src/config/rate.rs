//! Rate limits in the textual form of a device: `bytes-per-second=SIZE`, `operations-per-second=N`,
//! and what may be done once beyond them, `burst-bytes=SIZE` and `burst-operations=N`.

use std::fmt;

use devices::virtio::{Rate, RateLimits};

use crate::size::{ByteSize, ParseSizeError};

/// The options, for messages.
pub const OPTIONS: &str =
    "bytes-per-second=SIZE, operations-per-second=N, burst-bytes=SIZE, burst-operations=N";

const BYTES: &str = "bytes-per-second=";
const OPERATIONS: &str = "operations-per-second=";
const BURST_BYTES: &str = "burst-bytes=";
const BURST_OPERATIONS: &str = "burst-operations=";

/// Least limit of bytes: a disk has requests of up to 8 MiB, after which it then waits for two
/// minutes.
const BYTES_MIN: ByteSize = ByteSize::from_bytes(64 << 10);
/// Largest limit of bytes: more than any host has.
const BYTES_MAX: ByteSize = ByteSize::from_bytes(1 << 40);
/// Largest limit of operations.
const OPERATIONS_MAX: u64 = 1 << 32;

/// The limits of a device, as they are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateArg {
    /// Bytes per second.
    pub bytes: Option<ByteSize>,
    /// Requests or packets per second.
    pub operations: Option<u64>,
    /// Bytes that are allowed once beyond that.
    pub burst_bytes: Option<ByteSize>,
    /// Requests or packets that are allowed once beyond that.
    pub burst_operations: Option<u64>,
}

/// Why options are no limits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseRateError {
    /// An option is given twice.
    #[error("`{0}` is given twice; give it once")]
    Twice(&'static str),
    /// A size is malformed.
    #[error("{option}{source}")]
    Size {
        /// The option.
        option: &'static str,
        /// The problem.
        source: ParseSizeError,
    },
    /// A size is outside its range.
    #[error("{option}{given} is not from {min} to {max}")]
    SizeRange {
        /// The option.
        option: &'static str,
        /// What was given.
        given: ByteSize,
        /// The least.
        min: ByteSize,
        /// The most.
        max: ByteSize,
    },
    /// A number is malformed or outside its range.
    #[error("`{option}{given}` is not a number from 1 to {OPERATIONS_MAX}")]
    Number {
        /// The option.
        option: &'static str,
        /// What was given.
        given: String,
    },
    /// A burst without a limit that it exceeds.
    #[error("`{burst}` is beyond a limit that is not given; add {limit}, or remove it")]
    BurstAlone {
        /// The option.
        burst: &'static str,
        /// The other one.
        limit: &'static str,
    },
}

fn size(
    option: &'static str,
    given: &str,
    (min, max): (ByteSize, ByteSize),
) -> Result<ByteSize, ParseRateError> {
    let parsed: Result<ByteSize, _> = given.parse();
    let size = parsed.map_err(|source| ParseRateError::Size { option, source })?;
    if size < min || size > max {
        return Err(ParseRateError::SizeRange {
            option,
            given: size,
            min,
            max,
        });
    }
    Ok(size)
}

fn number(option: &'static str, given: &str) -> Result<u64, ParseRateError> {
    let number = given.parse().ok();
    number
        .filter(|number| (1..=OPERATIONS_MAX).contains(number))
        .ok_or_else(|| ParseRateError::Number {
            option,
            given: given.chars().take(80).collect(),
        })
}

fn once<T>(slot: &mut Option<T>, option: &'static str, value: T) -> Result<bool, ParseRateError> {
    match slot.replace(value) {
        None => Ok(true),
        Some(_) => Err(ParseRateError::Twice(option)),
    }
}

impl RateArg {
    /// Reads one option; returns false if it is none of these.
    pub(super) fn read(&mut self, option: &str) -> Result<bool, ParseRateError> {
        let of_burst = (ByteSize::from_bytes(1), BYTES_MAX);
        if let Some(given) = option.strip_prefix(BYTES) {
            let limit = size(BYTES, given, (BYTES_MIN, BYTES_MAX))?;
            once(&mut self.bytes, BYTES, limit)
        } else if let Some(given) = option.strip_prefix(OPERATIONS) {
            once(&mut self.operations, OPERATIONS, number(OPERATIONS, given)?)
        } else if let Some(given) = option.strip_prefix(BURST_BYTES) {
            let burst = size(BURST_BYTES, given, of_burst)?;
            once(&mut self.burst_bytes, BURST_BYTES, burst)
        } else if let Some(given) = option.strip_prefix(BURST_OPERATIONS) {
            let burst = number(BURST_OPERATIONS, given)?;
            once(&mut self.burst_operations, BURST_OPERATIONS, burst)
        } else {
            Ok(false)
        }
    }

    /// Compares the options with each other, when all have been read.
    pub(super) fn check(&self) -> Result<(), ParseRateError> {
        let alone = |burst, limit| Err(ParseRateError::BurstAlone { burst, limit });
        if self.burst_bytes.is_some() && self.bytes.is_none() {
            return alone(BURST_BYTES, BYTES);
        }
        if self.burst_operations.is_some() && self.operations.is_none() {
            return alone(BURST_OPERATIONS, OPERATIONS);
        }
        Ok(())
    }

    /// Returns the limits of the device.
    #[must_use]
    pub fn limits(&self) -> RateLimits {
        let rate = |per_second: Option<u64>, once: Option<u64>| {
            per_second.map(|per_second| Rate {
                per_second,
                once: once.unwrap_or(0),
            })
        };
        RateLimits {
            bytes: rate(
                self.bytes.map(ByteSize::bytes),
                self.burst_bytes.map(ByteSize::bytes),
            ),
            operations: rate(self.operations, self.burst_operations),
        }
    }
}

impl fmt::Display for RateArg {
    /// With a comma before each option.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut say = |option: &str, value: Option<String>| match value {
            Some(value) => write!(f, ",{option}{value}"),
            None => Ok(()),
        };
        say(BYTES, self.bytes.map(|size| size.to_string()))?;
        say(OPERATIONS, self.operations.map(|count| count.to_string()))?;
        say(BURST_BYTES, self.burst_bytes.map(|size| size.to_string()))?;
        say(
            BURST_OPERATIONS,
            self.burst_operations.map(|count| count.to_string()),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::disk::DiskArg;
    use crate::config::net::NetArg;

    #[test]
    fn a_device_has_limits_and_prints_them() {
        let text = "path=a.img,readonly,bytes-per-second=8 MiB,operations-per-second=500,\
                    burst-bytes=64 MiB,burst-operations=9";
        let disk: DiskArg = text.parse().expect("a disk");
        assert_eq!(disk.to_string(), text);
        assert_eq!(
            disk.rate.limits(),
            RateLimits {
                bytes: Some(Rate {
                    per_second: 8 << 20,
                    once: 64 << 20
                }),
                operations: Some(Rate {
                    per_second: 500,
                    once: 9
                }),
            }
        );
        let net: NetArg = "tap=t,operations-per-second=7".parse().expect("a card");
        assert_eq!(net.to_string().parse(), Ok(net.clone()));
        assert_eq!(
            net.rate.limits().operations.map(|rate| rate.per_second),
            Some(7)
        );
        let plain: DiskArg = "a.img".parse().expect("a disk");
        assert!(plain.rate.limits().is_empty());
    }

    #[test]
    fn limits_outside_their_range_twice_or_of_nothing_are_refused() {
        for (option, part) in [
            ("bytes-per-second=x", "`x`"),
            (
                "bytes-per-second=4K",
                "bytes-per-second=4 KiB is not from 64 KiB to 1 TiB",
            ),
            ("bytes-per-second=2T", "to 1 TiB"),
            (
                "operations-per-second=0",
                "`operations-per-second=0` is not a number from 1 to",
            ),
            ("operations-per-second=-1", "is not a number"),
            ("operations-per-second=1,operations-per-second=1", "twice"),
            ("burst-bytes=1M", "add bytes-per-second="),
            (
                "burst-operations=1,bytes-per-second=1M",
                "add operations-per-second=",
            ),
            (
                "bytes-per-minute=1M",
                "`bytes-per-minute=1M` is not an option",
            ),
        ] {
            let error = format!("a.img,{option}")
                .parse::<DiskArg>()
                .expect_err(option);
            assert!(error.to_string().contains(part), "{error}");
            let error = format!("tap=t,{option}")
                .parse::<NetArg>()
                .expect_err(option);
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
