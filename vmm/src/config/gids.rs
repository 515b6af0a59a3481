//! Addresses of ports of RDMA devices (GIDs), as they are given: `ADDRESS[+ADDRESS]...`.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Limit of a list: a host has a few ports, with a few addresses each.
pub const GIDS_MAX: usize = 16;

/// A list of addresses: those of RoCE are IP addresses, and those of InfiniBand have the form of IPv6
/// addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidList(pub Vec<IpAddr>);

/// Why a text is no such list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseGidsError {
    /// A part is no address.
    #[error(
        "`{0}` is no address; write those of the ports, as `rdma link` and `ip address` or `show_gids` \
         show them, with + between them"
    )]
    Address(String),
    /// There are too many.
    #[error("`{count}` addresses are given, {GIDS_MAX} is the limit; name the ports that are used")]
    TooMany {
        /// How many.
        count: usize,
    },
}

impl FromStr for GidList {
    type Err = ParseGidsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let count = text.split('+').count();
        if count > GIDS_MAX {
            return Err(ParseGidsError::TooMany { count });
        }
        let address = |part: &str| {
            let wrong = |_| ParseGidsError::Address(part.chars().take(80).collect());
            part.parse().map_err(wrong)
        };
        text.split('+')
            .map(address)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl fmt::Display for GidList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, address) in self.0.iter().enumerate() {
            let plus = if at > 0 { "+" } else { "" };
            write!(f, "{plus}{address}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_addresses_and_few_of_them() {
        let text = "10.77.0.2+fe80::2:c903:1";
        let list: GidList = text.parse().expect("addresses");
        assert_eq!(list.to_string(), text);
        let many = vec!["10.0.0.1"; GIDS_MAX].join("+");
        assert_eq!(many.parse().map(|list: GidList| list.0.len()), Ok(GIDS_MAX));
        for (text, part) in [
            ("10.77.0.2,", "`10.77.0.2,` is no address"),
            ("10.77.0.2+", "`` is no address"),
            (
                &(many + "+10.0.0.1"),
                "17` addresses are given, 16 is the limit",
            ),
        ] {
            let error = text.parse::<GidList>().expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
