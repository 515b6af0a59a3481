//! `--cluster etcd://...`: where nodes register, and how.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use fabric_identity::Name;
use ssi_hv_membership::{Endpoints, Target, TargetError, TlsError};

use super::address::{HostPort, ParseAddressError};
use super::text::serde_as_text;
use crate::size::ByteSize;

/// Why a node cannot register as configured.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// The address of etcd is malformed.
    #[error("--cluster: {0}")]
    Target(#[from] TargetError),
    /// etcd cannot be asked.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// What is registered is given, and not where.
    #[error("{0} is for nodes and VMs that use etcd; add --cluster etcd://HOST:PORT, or remove it")]
    WithoutCluster(&'static str),
    /// A flag that has no meaning beside etcd.
    #[error(
        "--cluster etcd:// finds the donors of the VM, and does not go with {0}; remove one of the two"
    )]
    NotWithEtcd(&'static str),
    /// How much is to be on nodes is not known.
    #[error(
        "--cluster etcd:// needs --local-memory SIZE: the rest of the guest's {0} is then on nodes"
    )]
    LocalMemoryNotGiven(ByteSize),
    /// Nothing is to be on nodes.
    #[error(
        "--local-memory {local} is all that the guest has ({memory}), so that no node is used; lower it, or omit --cluster"
    )]
    NothingForNodes {
        /// Memory that is here.
        local: ByteSize,
        /// Memory of the guest.
        memory: ByteSize,
    },
    /// VMs cannot connect to a wildcard address.
    #[error(
        "--listen {0} is no address for VMs, which is what --cluster registers; add --member address=HOST:PORT"
    )]
    Everywhere(HostPort),
    /// The name of the certificate is another one.
    #[error(
        "--member name={given} is not the name in the certificate, {certified}, which VMs compare; remove name="
    )]
    NotCertified {
        /// What was given.
        given: Name,
        /// The name in the certificate.
        certified: Name,
    },
    /// The host name is no name of a node.
    #[error("the host name `{0}` is no name for a node; add --member name=NAME")]
    NoName(String),
}

/// Why a text does not describe a member.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseMemberError {
    /// An option is unknown.
    #[error(
        "`{0}` is not an option of a member; write name=NAME,zone=ZONE,address=HOST:PORT, or some of them"
    )]
    Option(String),
    /// An option is given twice.
    #[error("`{0}` gives an option twice; give it once")]
    Twice(String),
    /// A name or a zone is malformed.
    #[error(transparent)]
    Name(#[from] fabric_identity::SubjectError),
    /// The address is malformed.
    #[error(transparent)]
    Address(#[from] ParseAddressError),
}

/// What a node registers of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberArg {
    /// Its name.
    pub name: Option<Name>,
    /// Its failure domain.
    pub zone: Option<Name>,
    /// Where VMs reach it.
    pub address: Option<HostPort>,
}

impl fmt::Display for MemberArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_ref().map(|name| format!("name={name}"));
        let zone = self.zone.as_ref().map(|zone| format!("zone={zone}"));
        let address = self.address.as_ref();
        let address = address.map(|address| format!("address={address}"));
        let given: Vec<_> = [name, zone, address].into_iter().flatten().collect();
        f.write_str(&given.join(","))
    }
}

impl FromStr for MemberArg {
    type Err = ParseMemberError;

    fn from_str(text: &str) -> Result<Self, ParseMemberError> {
        let mut member = Self::default();
        for part in text.split(',') {
            let is_twice = if let Some(name) = part.strip_prefix("name=") {
                member.name.replace(name.parse()?).is_some()
            } else if let Some(zone) = part.strip_prefix("zone=") {
                member.zone.replace(zone.parse()?).is_some()
            } else if let Some(address) = part.strip_prefix("address=") {
                member.address.replace(address.parse()?).is_some()
            } else {
                return Err(ParseMemberError::Option(part.chars().take(80).collect()));
            };
            if is_twice {
                return Err(ParseMemberError::Twice(text.chars().take(80).collect()));
            }
        }
        Ok(member)
    }
}

serde_as_text!(MemberArg);

/// Where a node registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The etcd.
    pub target: Target,
    /// The directory with what is shown to etcd, and believed of it.
    pub credentials: Option<PathBuf>,
    /// Whether an etcd beyond this host may be used without TLS.
    pub insecure: bool,
    /// What is registered.
    pub member: MemberArg,
}

impl Membership {
    /// Returns how etcd is asked: resolves names, and reads credentials.
    ///
    /// # Errors
    ///
    /// Fails when one of both cannot be done.
    pub fn endpoints(&self) -> Result<Endpoints, MembershipError> {
        let credentials = self.credentials.as_deref();
        Ok(self.target.endpoints(credentials, self.insecure)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_read_as_it_is_printed() {
        for text in [
            "name=a,zone=rack-1,address=h:7000",
            "zone=b",
            "address=[::1]:1",
        ] {
            let member: MemberArg = text.parse().expect(text);
            assert_eq!(member.to_string(), text);
        }
    }

    #[test]
    fn a_wrong_member_is_named_by_its_part() {
        for (text, part) in [
            ("", "`` is not an option"),
            ("size=1", "`size=1` is not an option"),
            ("name=a,name=b", "gives an option twice"),
            ("name=A", "`A` is not a name"),
            ("zone=rack 1", "`rack 1` is not a name"),
            ("address=h", "`h` has no valid port"),
        ] {
            let error = text.parse::<MemberArg>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
