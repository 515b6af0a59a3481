//! Sizes in human-readable form: `512M`, `1.5G`, `768MiB`, `4096`.
//!
//! Units are powers of 1024. `MB` and similar units are refused, because readers do not agree on
//! whether they mean 1000 or 1024.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The forms that are accepted, as error messages name them.
const ACCEPTED_FORMS: &str = "write a size as 4096, 512M, 768MiB, 1.5G or 1T (powers of 1024)";

/// Limit of decimals in a fraction: 2^40 has 40 binary decimals, but sizes are not written more
/// exactly than this, and the arithmetic stays inside 128 bits.
const DECIMALS_MAX: usize = 12;

/// Units from the largest to the smallest, with their sizes in bytes.
const UNITS: [(&str, u64); 5] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];

/// A number of bytes.
///
/// Parses the accepted forms and prints the largest unit that represents the value exactly, so that
/// printing and parsing gives the same value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

impl ByteSize {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// Creates a size of `bytes`.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Creates a size of `mib` times 1024 * 1024 bytes.
    ///
    /// # Panics
    ///
    /// If the size does not fit in 64 bits; meant for constants.
    #[must_use]
    pub const fn from_mib(mib: u64) -> Self {
        match mib.checked_mul(1 << 20) {
            Some(bytes) => Self(bytes),
            None => panic!("size does not fit in 64 bits"),
        }
    }

    /// The number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Whether the size is a whole number of pieces of `unit` bytes.
    #[must_use]
    pub const fn is_multiple_of(self, unit: u64) -> bool {
        self.0.is_multiple_of(unit)
    }

    /// The sum, or the largest size when it does not fit.
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, or zero when `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The size rounded down to one decimal of its largest unit, for people: `3.7 GiB`.
    #[must_use]
    pub fn rounded(self) -> String {
        let (name, unit) = self.largest_unit();
        let tenths = u128::from(self.0) * 10 / u128::from(unit);
        match (tenths / 10, tenths % 10) {
            (whole, 0) => format!("{whole} {name}"),
            (whole, tenth) => format!("{whole}.{tenth} {name}"),
        }
    }

    fn largest_unit(self) -> (&'static str, u64) {
        UNITS
            .into_iter()
            .find(|(_, unit)| self.0 >= *unit)
            .unwrap_or(("B", 1))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = u128::from(self.0);
        for (name, unit) in UNITS {
            let unit = u128::from(unit);
            if bytes < unit || bytes * 100 % unit != 0 {
                continue;
            }
            let hundredths = bytes * 100 / unit;
            let (whole, part) = (hundredths / 100, hundredths % 100);
            let text = match (part, part % 10) {
                (0, _) => format!("{whole} {name}"),
                (_, 0) => format!("{whole}.{} {name}", part / 10),
                _ => format!("{whole}.{part:02} {name}"),
            };
            return f.pad(&text);
        }
        f.pad("0 B")
    }
}

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseSizeError {
    /// Not a number with a known unit.
    #[error("`{text}` is not a size; {ACCEPTED_FORMS}")]
    Malformed {
        /// The text.
        text: String,
    },
    /// The fraction is not a whole number of bytes.
    #[error("`{text}` is not a whole number of bytes; {ACCEPTED_FORMS}")]
    NotWholeBytes {
        /// The text.
        text: String,
    },
    /// The value exceeds 64 bits.
    #[error("`{text}` is too large; the limit is {} bytes", u64::MAX)]
    TooLarge {
        /// The text.
        text: String,
    },
}

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || ParseSizeError::Malformed { text: text.into() };
        let too_large = || ParseSizeError::TooLarge { text: text.into() };

        let trimmed = text.trim();
        let number_end = trimmed
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(trimmed.len());
        let (number, suffix) = trimmed.split_at(number_end);
        let unit = unit_of(suffix.trim_start()).ok_or_else(malformed)?;

        let (whole, decimals) = match number.split_once('.') {
            Some((whole, decimals)) => (whole, decimals),
            None => (number, "0"),
        };
        if whole.is_empty() || decimals.is_empty() || decimals.contains('.') {
            return Err(malformed());
        }
        let decimals = match decimals.trim_end_matches('0') {
            "" => "0",
            kept if kept.len() > DECIMALS_MAX => return Err(malformed()),
            kept => kept,
        };
        // Only digits are left, so parsing fails only for a number that is too long.
        let whole: u128 = whole.parse().map_err(|_| too_large())?;
        let part: u128 = decimals.parse().map_err(|_| malformed())?;
        let scale = decimals.bytes().fold(1_u128, |scale, _| scale * 10);
        if !(part * unit).is_multiple_of(scale) {
            return Err(ParseSizeError::NotWholeBytes { text: text.into() });
        }
        whole
            .checked_mul(unit)
            .and_then(|bytes| bytes.checked_add(part * unit / scale))
            .and_then(|bytes| u64::try_from(bytes).ok())
            .map(Self)
            .ok_or_else(too_large)
    }
}

/// The bytes of a unit: `M`, `MiB`, in either case; nothing and `B` are bytes.
fn unit_of(suffix: &str) -> Option<u128> {
    let lower = suffix.to_ascii_lowercase();
    UNITS
        .into_iter()
        .find(|(name, _)| {
            let name = name.to_ascii_lowercase();
            lower == name || lower == name[..1]
        })
        .map(|(_, unit)| u128::from(unit))
        .or(lower.is_empty().then_some(1))
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeVisitor;

        impl Visitor<'_> for SizeVisitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"512M\", \"1.5G\" or 4096")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes)
                    .map(ByteSize)
                    .map_err(|_| E::custom(format_args!("`{bytes}` is less than 0 bytes")))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(SizeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> Result<u64, ParseSizeError> {
        text.parse::<ByteSize>().map(ByteSize::bytes)
    }

    #[test]
    fn the_usual_forms_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("4k", 4096),
            ("512M", 512 << 20),
            ("768MiB", 768 << 20),
            ("1G", 1 << 30),
            ("1.5G", 3 << 29),
            ("1.50 GiB", 3 << 29),
            (" 2T ", 2 << 40),
            ("0.25g", 1 << 28),
        ] {
            assert_eq!(parsed(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn other_forms_are_refused_with_the_value_and_what_is_accepted() {
        for text in [
            "", "G", "1..5G", "1.G", ".5G", "-1G", "1MB", "1 Gig", "0x10", "1e3", "1,5G",
        ] {
            let error = parsed(text).expect_err(text);
            let message = error.to_string();
            assert!(message.contains(&format!("`{text}`")), "{message}");
            assert!(message.contains("512M"), "{message}");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }

    #[test]
    fn a_fraction_of_a_byte_is_refused() {
        assert!(matches!(
            parsed("0.3K"),
            Err(ParseSizeError::NotWholeBytes { .. })
        ));
        assert!(matches!(
            parsed("1.5"),
            Err(ParseSizeError::NotWholeBytes { .. })
        ));
    }

    #[test]
    fn more_than_64_bits_is_refused() {
        assert_eq!(parsed("18446744073709551615"), Ok(u64::MAX));
        for text in [
            "18446744073709551616",
            "16777216T",
            "99999999999999999999999999999999999999999T",
        ] {
            assert!(
                matches!(parsed(text), Err(ParseSizeError::TooLarge { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn the_largest_exact_unit_is_printed() {
        for (bytes, text) in [
            (0, "0 B"),
            (1, "1 B"),
            (4096, "4 KiB"),
            (256 << 20, "256 MiB"),
            (3 << 29, "1.5 GiB"),
            (5 << 28, "1.25 GiB"),
            ((1 << 30) + 4096, "1048580 KiB"),
            (1 << 40, "1 TiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
        assert_eq!(ByteSize(3_999_999_999).rounded(), "3.7 GiB");
        assert_eq!(ByteSize(2 << 30).rounded(), "2 GiB");
        assert_eq!(ByteSize(0).rounded(), "0 B");
    }

    #[test]
    fn a_file_gives_a_size_as_text_or_as_bytes() {
        #[derive(Debug, Deserialize)]
        struct File {
            memory: ByteSize,
        }
        let text: File = toml::from_str("memory = '1.5G'").expect("a size as text");
        assert_eq!(text.memory.bytes(), 3 << 29);
        let bytes: File = toml::from_str("memory = 4096").expect("a size in bytes");
        assert_eq!(bytes.memory.bytes(), 4096);
        let negative = toml::from_str::<File>("memory = -1").expect_err("less than 0");
        assert!(negative.message().contains("`-1`"), "{negative}");
        assert!(toml::from_str::<File>("memory = true").is_err());
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_as_the_same_size(bytes: u64) {
            let size = ByteSize(bytes);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn whole_units_are_read_exactly(count in 0_u64..1 << 20, unit in 0_usize..5) {
            let (name, bytes) = UNITS[unit];
            let expected = Ok(ByteSize(count * bytes));
            prop_assert_eq!(format!("{count}{name}").parse(), expected.clone());
            prop_assert_eq!(format!("{count}{}", &name[..1]).parse(), expected);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,40}") {
            let _ = text.parse::<ByteSize>();
        }

        #[test]
        fn no_number_makes_the_parser_panic(text in "[0-9]{0,45}\\.?[0-9]{0,30}[KMGTB]?") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
