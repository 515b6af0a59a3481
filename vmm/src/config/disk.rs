//! A disk in textual form: `path=FILE[,readonly][,raw]`, and its rate limits.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::rate::{self, ParseRateError, RateArg};
use super::text::serde_as_text;

/// A disk of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskArg {
    /// A raw image or a block device.
    pub path: PathBuf,
    /// Whether the guest can only read it.
    pub read_only: bool,
    /// Whether it is raw even if it begins like an image in another format.
    pub raw: bool,
    /// How much it does per second.
    pub rate: RateArg,
}

/// Why a text is not a disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseDiskError {
    /// It names no file.
    #[error("`{text}` names no file; write path=FILE[,readonly][,raw]")]
    NoPath {
        /// What was given.
        text: String,
    },
    /// An unknown option follows the file.
    #[error(
        "`{option}` is not an option of a disk; write path=FILE[,readonly][,raw], FILE without a comma, and then \
         any of {}",
        rate::OPTIONS
    )]
    Option {
        /// The unknown part.
        option: String,
    },
    /// A rate limit is invalid.
    #[error(transparent)]
    Rate(#[from] ParseRateError),
}

impl FromStr for DiskArg {
    type Err = ParseDiskError;

    /// The prefix `path=` is optional.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(',');
        let path = parts.next().unwrap_or_default();
        let path = path.strip_prefix("path=").unwrap_or(path);
        if path.is_empty() {
            return Err(ParseDiskError::NoPath { text: text.into() });
        }
        let (mut read_only, mut raw) = (false, false);
        let mut rate = RateArg::default();
        for option in parts {
            if rate.read(option)? {
                continue;
            }
            match option {
                "readonly" => read_only = true,
                "raw" => raw = true,
                _ => {
                    return Err(ParseDiskError::Option {
                        option: option.into(),
                    });
                }
            }
        }
        rate.check()?;
        Ok(Self {
            path: path.into(),
            read_only,
            raw,
            rate,
        })
    }
}

impl fmt::Display for DiskArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let read_only = if self.read_only { ",readonly" } else { "" };
        let raw = if self.raw { ",raw" } else { "" };
        write!(
            f,
            "path={}{read_only}{raw}{}",
            self.path.display(),
            self.rate
        )
    }
}

serde_as_text!(DiskArg);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn disk(text: &str) -> (String, bool) {
        let disk: DiskArg = text.parse().expect(text);
        (disk.path.display().to_string(), disk.read_only)
    }

    #[test]
    fn a_disk_is_a_file_and_may_be_read_only() {
        assert_eq!(disk("path=a.img"), ("a.img".into(), false));
        assert_eq!(disk("path=/x/a.img,readonly"), ("/x/a.img".into(), true));
        assert_eq!(disk("/dev/sdb"), ("/dev/sdb".into(), false));
        assert_eq!(disk("path=path=x"), ("path=x".into(), false));
    }

    #[test]
    fn other_options_and_no_file_are_refused() {
        let refused = |text: &str| text.parse::<DiskArg>().expect_err(text).to_string();
        for text in ["", "path=", ",readonly", "path=,readonly"] {
            assert!(refused(text).contains("names no file"), "{text}");
        }
        assert!(refused("a.img,readonyl").contains("`readonyl` is not an option"));
        assert!(refused("a.img,").contains("`` is not an option"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,60}") {
            let _ = text.parse::<DiskArg>();
        }

        #[test]
        fn what_is_printed_is_read_as_the_same_disk(
            path in "[^,]{1,20}",
            read_only: bool,
            raw: bool,
        ) {
            let disk = DiskArg { path: path.into(), read_only, raw, rate: RateArg::default() };
            prop_assert_eq!(disk.to_string().parse(), Ok(disk));
        }
    }
}
