//! A rule of a node's policy, as it is given: `ROLE/NAME[,bytes=SIZE][,leases=N][,connections=N]
//! [,pinned=SIZE][,cpus=N][,gids=ADDRESS+...]`.

use std::fmt;
use std::str::FromStr;

use fabric_identity::{HolderPattern, SubjectError};
use memory_fabric::donor::policy::{Amounts, Rule};
use memory_fabric::donor::pool::LEASES_MAX;

use super::gids::{GidList, ParseGidsError};
use crate::config::{CPUS_MAX, PAGE_SIZE_BYTES};
use crate::size::{ByteSize, ParseSizeError};

/// Limit of the rules of a node.
pub const RULES_MAX: u32 = 1024;

/// Least limit of connections: a VM has up to 8, and as many again while it reconnects.
const CONNECTIONS_MIN: u64 = 16;
/// A node has no more, with those that rest.
const CONNECTIONS_MAX: u64 =
    (memory_fabric::donor::CONNECTIONS_MAX + memory_fabric::donor::RESTING_MAX) as u64;

/// Which members of the cluster may use a node, and how much each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allow {
    /// The members.
    pub members: HolderPattern,
    /// Memory of their leases, and memory lent with vCPUs.
    pub bytes: Option<ByteSize>,
    /// How many leases.
    pub leases: Option<u64>,
    /// How many connections.
    pub connections: Option<u64>,
    /// Memory of leases that are used by RDMA.
    pub pinned: Option<ByteSize>,
    /// How many vCPUs.
    pub cpus: Option<u64>,
    /// Addresses that their ports for RDMA may have, beside those by which they are connected.
    pub gids: Option<GidList>,
}

/// Why a text is no such rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseAllowError {
    /// It names no members.
    #[error("{0}; write ROLE/NAME, or ROLE/PREFIX* for several members")]
    Members(SubjectError),
    /// An unknown option.
    #[error(
        "`{0}` is not an option of a rule; write ROLE/NAME[,bytes=SIZE][,leases=N][,connections=N][,pinned=SIZE][,cpus=N][,gids=ADDRESS+...]"
    )]
    Option(String),
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
    /// A size is not in whole pages.
    #[error("{option}{given} is not a multiple of the page size, {PAGE_SIZE_BYTES}, above 0")]
    Pages {
        /// The option.
        option: &'static str,
        /// What was given.
        given: ByteSize,
    },
    /// A number is outside its range.
    #[error("`{option}{given}` is not a number from {min} to {max}")]
    Range {
        /// The option.
        option: &'static str,
        /// What was given.
        given: String,
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// Addresses are malformed.
    #[error("gids={0}")]
    Gids(#[from] ParseGidsError),
    /// It is for operators.
    #[error("operators use no memory of nodes; remove the rule for {0}")]
    Operators(HolderPattern),
}

pub(super) const BYTES: &str = "bytes=";
pub(super) const LEASES: &str = "leases=";
pub(super) const CONNECTIONS: &str = "connections=";
pub(super) const PINNED: &str = "pinned=";
pub(super) const CPUS: &str = "cpus=";
pub(super) const GIDS: &str = "gids=";

fn size(option: &'static str, given: &str) -> Result<ByteSize, ParseAllowError> {
    let parsed: Result<ByteSize, _> = given.parse();
    let size = parsed.map_err(|source| ParseAllowError::Size { option, source })?;
    if size.bytes() == 0 || !size.is_multiple_of(PAGE_SIZE_BYTES) {
        return Err(ParseAllowError::Pages {
            option,
            given: size,
        });
    }
    Ok(size)
}

fn number(
    option: &'static str,
    given: &str,
    (min, max): (u64, u64),
) -> Result<u64, ParseAllowError> {
    let number = given.parse().ok();
    number
        .filter(|number| (min..=max).contains(number))
        .ok_or_else(|| ParseAllowError::Range {
            option,
            given: given.chars().take(80).collect(),
            min,
            max,
        })
}

fn once<T>(slot: &mut Option<T>, option: &'static str, value: T) -> Result<(), ParseAllowError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(ParseAllowError::Twice(option)),
    }
}

impl FromStr for Allow {
    type Err = ParseAllowError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(',');
        let members: Result<HolderPattern, _> = parts.next().unwrap_or_default().parse();
        let mut rule = Self {
            members: members.map_err(ParseAllowError::Members)?,
            bytes: None,
            leases: None,
            connections: None,
            pinned: None,
            cpus: None,
            gids: None,
        };
        if rule.members.to_string().starts_with("operator/") {
            return Err(ParseAllowError::Operators(rule.members));
        }
        for option in parts {
            if let Some(given) = option.strip_prefix(BYTES) {
                once(&mut rule.bytes, BYTES, size(BYTES, given)?)?;
            } else if let Some(given) = option.strip_prefix(LEASES) {
                let count = number(LEASES, given, (1, LEASES_MAX as u64))?;
                once(&mut rule.leases, LEASES, count)?;
            } else if let Some(given) = option.strip_prefix(CONNECTIONS) {
                let count = number(CONNECTIONS, given, (CONNECTIONS_MIN, CONNECTIONS_MAX))?;
                once(&mut rule.connections, CONNECTIONS, count)?;
            } else if let Some(given) = option.strip_prefix(PINNED) {
                once(&mut rule.pinned, PINNED, size(PINNED, given)?)?;
            } else if let Some(given) = option.strip_prefix(CPUS) {
                // 0: memory alone.
                let count = number(CPUS, given, (0, CPUS_MAX.into()))?;
                once(&mut rule.cpus, CPUS, count)?;
            } else if let Some(given) = option.strip_prefix(GIDS) {
                once(&mut rule.gids, GIDS, given.parse()?)?;
            } else {
                return Err(ParseAllowError::Option(option.chars().take(80).collect()));
            }
        }
        Ok(rule)
    }
}

impl fmt::Display for Allow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.members.fmt(f)?;
        let mut say = |option: &str, value: Option<String>| match value {
            Some(value) => write!(f, ",{option}{value}"),
            None => Ok(()),
        };
        say(BYTES, self.bytes.map(|size| size.to_string()))?;
        say(LEASES, self.leases.map(|count| count.to_string()))?;
        say(CONNECTIONS, self.connections.map(|count| count.to_string()))?;
        say(PINNED, self.pinned.map(|size| size.to_string()))?;
        say(CPUS, self.cpus.map(|count| count.to_string()))?;
        say(GIDS, self.gids.as_ref().map(GidList::to_string))
    }
}

impl From<&Allow> for Rule {
    fn from(allow: &Allow) -> Self {
        Self {
            members: allow.members.clone(),
            limits: Amounts {
                bytes: allow.bytes.map(ByteSize::bytes),
                leases: allow.leases,
                connections: allow.connections,
                pinned_bytes: allow.pinned.map(ByteSize::bytes),
                cpus: allow.cpus,
            },
            gids: allow
                .gids
                .as_ref()
                .map_or_else(Vec::new, |list| list.0.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_members_and_limits() {
        let text = "vm/web-*,bytes=4 GiB,leases=2,connections=32,pinned=1 GiB,cpus=4,gids=10.78.0.2+fe80::1";
        let rule: Allow = text.parse().expect("a rule");
        assert_eq!(rule.to_string(), text);
        let limits = Rule::from(&rule).limits;
        assert_eq!((limits.bytes, limits.leases), (Some(4 << 30), Some(2)));
        assert_eq!(limits.connections, Some(32));
        assert_eq!(limits.pinned_bytes, Some(1 << 30));
        assert_eq!(limits.cpus, Some(4));
        let address = |text: &str| text.parse::<std::net::IpAddr>().expect("an address");
        let gids = ["10.78.0.2", "fe80::1"].map(address);
        assert_eq!(Rule::from(&rule).gids, gids);
        let refused = |text: &str| text.parse::<Allow>().expect_err(text).to_string();
        for (text, part) in [
            ("web", "ROLE/PREFIX*"),
            ("operator/eve", "operators use no memory"),
            ("vm/a,size=1G", "`size=1G` is not an option"),
            ("vm/a,bytes=1G,bytes=2G", "`bytes=` is given twice"),
            ("vm/a,bytes=x", "`x`"),
            ("vm/a,pinned=1000", "multiple of the page size"),
            ("vm/a,bytes=0", "above 0"),
            ("vm/a,cpus=255", "from 0 to 254"),
            ("vm/a,gids=host", "gids=`host` is no address"),
            ("vm/a,gids=", "gids=`` is no address"),
            ("vm/a,leases=0", "from 1 to 32768"),
            ("vm/a,connections=15", "from 16 to 35840"),
            ("vm/a,leases=-1", "`leases=-1` is not a number"),
        ] {
            assert!(refused(text).contains(part), "{text}: {}", refused(text));
        }
    }
}
