//! MAC addresses of network cards.

use std::fmt;
use std::str::FromStr;

/// The MAC address of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MacAddress([u8; 6]);

/// Why a text is not the address of a network card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseMacError {
    /// The format is wrong.
    #[error(
        "`{text}` is not an address of a network card; write six bytes as in 02:00:00:12:34:56"
    )]
    Form {
        /// The text.
        text: String,
    },
    /// It is a multicast address, or zero.
    #[error(
        "`{text}` is not the address of one network card: its first byte has to be even, and not all \
         may be zero; use one that begins with 02"
    )]
    NotOne {
        /// The text.
        text: String,
    },
}

impl MacAddress {
    /// The bytes, in transmission order.
    pub fn bytes(&self) -> [u8; 6] {
        self.0
    }

    /// Derives an address that is stable for these parts and unlikely for others. It is marked as
    /// locally administered (IEEE 802, bit 1 of the first byte).
    pub fn derived_from(parts: &[&[u8]]) -> Self {
        // FNV-1a, 64 bits (draft-eastlake-fnv), with a zero between parts as a separator.
        let bytes = parts.iter().flat_map(|part| part.iter().chain(&[0]));
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
        let [a, b, c, d, e, ..] = hash.to_le_bytes();
        Self([2, a, b, c, d, e])
    }
}

impl FromStr for MacAddress {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let form = || ParseMacError::Form { text: text.into() };
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(form)?;
            let hex = part.bytes().all(|digit| digit.is_ascii_hexdigit());
            if part.len() != 2 || !hex {
                return Err(form());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| form())?;
        }
        if parts.next().is_some() {
            return Err(form());
        }
        if bytes[0] & 1 != 0 || bytes == [0; 6] {
            return Err(ParseMacError::NotOne { text: text.into() });
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_address_of_one_card_is_read() {
        let address: MacAddress = "02:00:0a:FF:34:56".parse().unwrap();
        assert_eq!(address.bytes(), [2, 0, 10, 255, 0x34, 0x56]);
        assert_eq!(address.to_string(), "02:00:0a:ff:34:56");
    }

    #[test]
    fn other_texts_are_refused() {
        let refused = |text: &str| text.parse::<MacAddress>().unwrap_err();
        for text in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "02-00-00-00-00-01",
            "+2:00:00:00:00:01",
        ] {
            assert!(
                matches!(refused(text), ParseMacError::Form { .. }),
                "{text}"
            );
        }
        for text in [
            "00:00:00:00:00:00",
            "ff:ff:ff:ff:ff:ff",
            "01:00:5e:00:00:01",
        ] {
            assert!(
                matches!(refused(text), ParseMacError::NotOne { .. }),
                "{text}"
            );
        }
    }

    #[test]
    fn derived_addresses_are_stable_differ_and_are_of_one_card() {
        let of = |parts: &[&str]| {
            let parts: Vec<_> = parts.iter().map(|part| part.as_bytes()).collect();
            MacAddress::derived_from(&parts)
        };
        assert_eq!(of(&["host", "tap0"]), of(&["host", "tap0"]));
        let others = [of(&["host", "tap1"]), of(&["hos", "ttap0"]), of(&["tap0"])];
        assert!(!others.contains(&of(&["host", "tap0"])));
        assert_eq!(of(&["host", "tap0"]).bytes()[0], 2);
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,30}") {
            let _ = text.parse::<MacAddress>();
        }

        #[test]
        fn what_is_printed_is_read_as_the_same(parts in proptest::collection::vec(any::<u8>(), 0..9)) {
            let address = MacAddress::derived_from(&[&parts]);
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }
    }
}
