//! A node that runs vCPUs of a VM, as it is named:
//! `HOST:PORT,cpus=N[,memory=SIZE][,name=NAME][,from=start|ready]`.

use std::fmt;
use std::str::FromStr;

use devices::BootEvent;
use fabric_identity::{Name, SubjectError};
use memory_fabric::compute::COMPUTE_NODES_MAX;

use super::CPUS_MAX;
use super::address::{HostPort, ParseAddressError};
use super::text::serde_as_text;
use crate::size::{ByteSize, ParseSizeError};

/// Most nodes beside the primary.
pub const NODES_MAX: usize = COMPUTE_NODES_MAX - 1;

/// A node, how many vCPUs of the VM it runs, and what memory it lends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeArg {
    /// Its address.
    pub address: HostPort,
    /// How many vCPUs.
    pub cpus: u8,
    /// How much memory it lends; `None` for all of the guest's.
    pub memory: Option<ByteSize>,
    /// Its name in the certificate of the cluster's authority.
    pub name: Option<Name>,
    /// Since when its vCPUs are there.
    pub from: CpusFrom,
}

/// Since when the vCPUs of a node are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpusFrom {
    /// Since the start of the guest.
    Start,
    /// Since the guest runs its first program: until then they are on the primary.
    #[default]
    Init,
    /// Since the guest has reported that it has booted: until then they are on the primary.
    Ready,
}

impl CpusFrom {
    /// Returns whether it is the default, which files do not have.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// What has to happen in the guest before its vCPUs go to the node.
    #[must_use]
    pub const fn event(self) -> Option<BootEvent> {
        match self {
            Self::Start => None,
            Self::Init => Some(BootEvent::Init),
            Self::Ready => Some(BootEvent::Ready),
        }
    }
}

impl fmt::Display for CpusFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Init => "init",
            Self::Ready => "ready",
        })
    }
}

impl FromStr for CpusFrom {
    type Err = ParseNodeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "start" => Ok(Self::Start),
            "init" => Ok(Self::Init),
            "ready" => Ok(Self::Ready),
            given => Err(ParseNodeError::From {
                given: given.to_owned(),
            }),
        }
    }
}

/// Why a text names no such node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseNodeError {
    /// The address is malformed.
    #[error(transparent)]
    Address(#[from] ParseAddressError),
    /// An unknown option follows the address.
    #[error(
        "`{option}` is not an option of a node; write HOST:PORT,cpus=N[,memory=SIZE][,name=NAME][,from=start|ready]"
    )]
    Option {
        /// The unknown part.
        option: String,
    },
    /// The number of vCPUs is missing, or given more than once.
    #[error(
        "`{text}` needs the number of vCPUs on the node, exactly once; write HOST:PORT,cpus=N, or --donor \
         HOST:PORT for its memory alone"
    )]
    Cpus {
        /// What was given.
        text: String,
    },
    /// The size is malformed.
    #[error(transparent)]
    Memory(#[from] ParseSizeError),
    /// The size is given more than once.
    #[error("`{text}` has memory= twice; give it once")]
    MemoryTwice {
        /// What was given.
        text: String,
    },
    /// The name of the certificate is malformed.
    #[error(transparent)]
    Name(#[from] SubjectError),
    /// The name is given more than once.
    #[error("`{text}` has name= twice; give it once")]
    NameTwice {
        /// What was given.
        text: String,
    },
    /// vCPUs do not come at that time.
    #[error(
        "`from={given}` is none of `from=init`, the default, for vCPUs that go to the node when the \
         guest's init runs, `from=ready`, when the guest has booted, and `from=start`, for such that are \
         there from the start"
    )]
    From {
        /// What was given.
        given: String,
    },
    /// The time is given more than once.
    #[error("`{text}` has from= twice; give it once")]
    FromTwice {
        /// What was given.
        text: String,
    },
    /// No node runs so many.
    #[error("`cpus={given}` is not a number from 1 to {CPUS_MAX}")]
    CpusRange {
        /// What was given.
        given: String,
    },
}

impl fmt::Display for NodeArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},cpus={}", self.address, self.cpus)?;
        if let Some(memory) = self.memory {
            write!(f, ",memory={memory}")?;
        }
        if let Some(name) = &self.name {
            write!(f, ",name={name}")?;
        }
        match self.from.is_default() {
            true => Ok(()),
            false => write!(f, ",from={}", self.from),
        }
    }
}

impl FromStr for NodeArg {
    type Err = ParseNodeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(',');
        let address = parts.next().unwrap_or_default().parse()?;
        let (mut cpus, mut memory, mut name, mut from) = (None, None, None, None);
        let unclear = || ParseNodeError::Cpus { text: text.into() };
        for option in parts {
            if let Some(given) = option.strip_prefix("memory=") {
                if memory.replace(given.parse()?).is_some() {
                    return Err(ParseNodeError::MemoryTwice { text: text.into() });
                }
                continue;
            }
            if let Some(given) = option.strip_prefix("name=") {
                if name.replace(given.parse()?).is_some() {
                    return Err(ParseNodeError::NameTwice { text: text.into() });
                }
                continue;
            }
            if let Some(given) = option.strip_prefix("from=") {
                if from.replace(given.parse()?).is_some() {
                    return Err(ParseNodeError::FromTwice { text: text.into() });
                }
                continue;
            }
            let Some(given) = option.strip_prefix("cpus=") else {
                let option = option.into();
                return Err(ParseNodeError::Option { option });
            };
            let number = given.parse().ok();
            let number = number.filter(|number| (1..=CPUS_MAX).contains(number));
            let number = number.ok_or_else(|| {
                let given = given.into();
                ParseNodeError::CpusRange { given }
            })?;
            if cpus.replace(number).is_some() {
                return Err(unclear());
            }
        }
        let cpus = cpus.ok_or_else(unclear)?;
        Ok(Self {
            address,
            cpus,
            memory,
            name,
            from: from.unwrap_or_default(),
        })
    }
}

serde_as_text!(NodeArg);
serde_as_text!(CpusFrom);

#[cfg(test)]
mod tests {
    use super::*;

    /// A node as it is printed, and whether that is read as the same node.
    fn node_named(text: &str) -> (String, bool) {
        let node: NodeArg = text.parse().expect("a node");
        let printed = node.to_string();
        let is_same = printed.parse() == Ok(node);
        (printed, is_same)
    }

    #[test]
    fn a_node_is_an_address_and_a_number_of_cpus() {
        let node: NodeArg = "[::1]:7000,cpus=254".parse().expect("a node");
        assert_eq!((node.cpus, node.address.port()), (254, 7000));
        assert_eq!(node.to_string(), "[::1]:7000,cpus=254");
        let lends: NodeArg = "h:1,memory=4G,cpus=2".parse().expect("a node");
        assert_eq!(lends.memory, Some(ByteSize::from_mib(4096)));
        assert_eq!(lends.to_string().parse(), Ok(lends));
        let refused = |text: &str| text.parse::<NodeArg>().expect_err(text).to_string();
        assert!(refused("h:1").contains("--donor"));
        assert!(refused("h:1,cpus=1,cpus=2").contains("exactly once"));
        assert!(refused("h:1,cpus=0").contains("1 to 254"));
        assert!(refused("h:1,cpus=255").contains("1 to 254"));
        assert!(refused("h:1,cpus=1,size=2G").contains("`size=2G`"));
        assert!(refused("h:1,cpus=1,memory=x").contains("`x`"));
        assert!(refused("h:1,cpus=1,memory=1G,memory=2G").contains("twice"));
        assert!(refused("h,cpus=1").contains("no valid port"));
        let named = node_named("h:1,cpus=2,name=alpha,memory=1G");
        assert_eq!(named, ("h:1,cpus=2,memory=1 GiB,name=alpha".into(), true));
        assert!(refused("h:1,cpus=1,name=A").contains("`A` is not a name"));
        assert!(refused("h:1,cpus=1,name=a,name=a").contains("name= twice"));
    }

    #[test]
    fn the_vcpus_of_a_node_come_with_init_or_at_another_time() {
        let node = |text: &str| text.parse::<NodeArg>();
        let late = node("h:1,from=init,cpus=2,memory=1G").expect("a node");
        assert_eq!(late.from, CpusFrom::Init);
        assert_eq!(late.to_string(), "h:1,cpus=2,memory=1 GiB");
        assert_eq!(node("h:1,cpus=2,memory=1G"), Ok(late.clone()));
        let ready = node_named("h:1,cpus=2,from=ready");
        assert_eq!(ready, ("h:1,cpus=2,from=ready".into(), true));
        assert_eq!(node(&late.to_string()), Ok(late));
        let soon = node("h:1,cpus=2,from=start").expect("a node");
        assert_eq!(
            (soon.from, soon.to_string()),
            (CpusFrom::Start, "h:1,cpus=2,from=start".into())
        );
        let refused = |text: &str| node(text).expect_err(text).to_string();
        let text = refused("h:1,cpus=1,from=boot");
        assert!(
            text.contains("`from=boot`") && text.contains("`from=ready`"),
            "{text}"
        );
        let text = refused("h:1,cpus=1,from=init,from=init");
        assert!(text.contains("from= twice"), "{text}");
        assert!(refused("h:1,from=init").contains("exactly once"));
    }
}
