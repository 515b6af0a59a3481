//! A network card in textual form: `tap=NAME[,mac=MAC]`, and its rate limits.

use std::fmt;
use std::str::FromStr;

use devices::virtio::{MacAddress, ParseMacError};

use super::rate::{self, ParseRateError, RateArg};
use super::text::serde_as_text;

/// A network card of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetArg {
    /// The host's tap.
    pub tap: String,
    /// Its address; by default derived from host and tap.
    pub mac: Option<MacAddress>,
    /// How much it sends, and how much it receives, per second.
    pub rate: RateArg,
}

/// Why a text is not a network card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseNetError {
    /// It does not name a tap.
    #[error("`{text}` names no tap; write tap=NAME[,mac=MAC]")]
    NoTap {
        /// What was given.
        text: String,
    },
    /// An unknown or repeated option follows.
    #[error(
        "`{option}` is not an option of a network card, or not twice; write tap=NAME[,mac=MAC], and then \
         any of {}",
        rate::OPTIONS
    )]
    Option {
        /// The invalid part.
        option: String,
    },
    /// The address is invalid.
    #[error(transparent)]
    Mac(#[from] ParseMacError),
    /// A rate limit is invalid.
    #[error(transparent)]
    Rate(#[from] ParseRateError),
}

impl FromStr for NetArg {
    type Err = ParseNetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(',');
        let tap = parts.next().and_then(|part| part.strip_prefix("tap="));
        let tap = tap.filter(|name| !name.is_empty());
        let tap = tap.ok_or_else(|| ParseNetError::NoTap { text: text.into() })?;
        let mut mac = None;
        let mut rate = RateArg::default();
        for option in parts {
            if rate.read(option)? {
                continue;
            }
            let unknown = || ParseNetError::Option {
                option: option.into(),
            };
            let address = option.strip_prefix("mac=").ok_or_else(unknown)?;
            if mac.replace(address.parse()?).is_some() {
                return Err(unknown());
            }
        }
        rate.check()?;
        Ok(Self {
            tap: tap.into(),
            mac,
            rate,
        })
    }
}

impl fmt::Display for NetArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tap={}", self.tap)?;
        if let Some(mac) = self.mac {
            write!(f, ",mac={mac}")?;
        }
        self.rate.fmt(f)
    }
}

serde_as_text!(NetArg);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_card_is_a_tap_and_may_have_an_address() {
        let card: NetArg = "tap=tap0".parse().expect("a card");
        assert_eq!((card.tap.as_str(), card.mac), ("tap0", None));
        let card: NetArg = "tap=br-1.a,mac=02:00:00:00:00:0A".parse().expect("a card");
        assert_eq!(card.to_string(), "tap=br-1.a,mac=02:00:00:00:00:0a");
    }

    #[test]
    fn other_options_and_no_tap_are_refused() {
        let refused = |text: &str| text.parse::<NetArg>().expect_err(text).to_string();
        for text in ["", "tap0", "tap=", "mac=02:00:00:00:00:01", "user"] {
            assert!(refused(text).contains("names no tap"), "{text}");
        }
        assert!(refused("tap=a,mtu=9000").contains("`mtu=9000` is not an option"));
        assert!(refused("tap=a,mac=02:00").contains("not an address of a network card"));
        assert!(refused("tap=a,mac=ff:ff:ff:ff:ff:ff").contains("not the address of one"));
        let twice = "tap=a,mac=02:00:00:00:00:01,mac=02:00:00:00:00:02";
        assert!(refused(twice).contains("not twice"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,60}") {
            let _ = text.parse::<NetArg>();
        }

        #[test]
        fn what_is_printed_is_read_as_the_same_card(tap in "[^,]{1,20}", with_mac: bool) {
            let mac = with_mac.then(|| MacAddress::derived_from(&[tap.as_bytes()]));
            let card = NetArg { tap, mac, rate: RateArg::default() };
            prop_assert_eq!(card.to_string().parse(), Ok(card));
        }
    }
}
