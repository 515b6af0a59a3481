//! Names in certificates: who a process is, in which cluster.

use std::fmt;
use std::str::FromStr;

/// Longest name of a cluster or of a member: that of a label in DNS (RFC 1035, section 2.3.4).
pub const NAME_LENGTH_MAX: usize = 63;

/// What stands between the cluster and the role in a subject's URI.
const PATH: &str = "/ssi-hv/";
/// The scheme of identities in URIs (SPIFFE ID, section 2).
const SCHEME: &str = "spiffe://";

/// What a certificate permits its holder to be.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Role {
    /// Lends memory and vCPUs: accepts connections, and opens some to other nodes.
    Node,
    /// Runs a VM: opens connections to nodes.
    Vm,
    /// Administers nodes.
    Operator,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 3] = [Self::Node, Self::Vm, Self::Operator];

    /// Returns the role's word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Vm => "vm",
            Self::Operator => "operator",
        }
    }
}

/// A text that is not a name, a holder or a subject.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SubjectError {
    /// A part has a character that names cannot have, or a wrong length.
    #[error(
        "`{0}` is not a name: it has 1 to {NAME_LENGTH_MAX} of a-z, 0-9, `-`, `.` and `_`, and \
         begins with a letter or digit"
    )]
    Name(String),
    /// It is no role and name.
    #[error(
        "`{0}` is not ROLE/NAME, with one of the roles node, vm and operator; such as node/alpha"
    )]
    Holder(String),
    /// It is no identity of this program.
    #[error("`{0}` is not an identity; they have the form {SCHEME}CLUSTER{PATH}ROLE/NAME")]
    Uri(String),
}

/// The name of a cluster or a member.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Name(String);

impl Name {
    /// Returns the name's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let is_name = text.len() <= NAME_LENGTH_MAX
            && text.bytes().next().is_some_and(is_alphanumeric)
            && text
                .bytes()
                .all(|byte| is_alphanumeric(byte) || b"-._".contains(&byte));
        if is_name {
            Ok(Self(text.to_owned()))
        } else {
            // What is quoted stays readable.
            Err(SubjectError::Name(text.chars().take(80).collect()))
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Role and name of a member, written `ROLE/NAME`.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Holder {
    /// Its role.
    pub role: Role,
    /// Its name, unique within the role.
    pub name: Name,
}

impl FromStr for Holder {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || SubjectError::Holder(text.chars().take(80).collect());
        let (role, name) = text.split_once('/').ok_or_else(wrong)?;
        let role = Role::ALL.into_iter().find(|one| one.word() == role);
        Ok(Self {
            role: role.ok_or_else(wrong)?,
            name: name.parse()?,
        })
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.role.word(), self.name)
    }
}

/// A member of a cluster, written `spiffe://CLUSTER/ssi-hv/ROLE/NAME`.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Subject {
    /// The cluster, which has an authority of its own.
    pub cluster: Name,
    /// The member.
    pub holder: Holder,
}

impl FromStr for Subject {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text
            .strip_prefix(SCHEME)
            .and_then(|rest| rest.split_once(PATH));
        let wrong = || SubjectError::Uri(text.chars().take(160).collect());
        let (cluster, holder) = parts.ok_or_else(wrong)?;
        Ok(Self {
            cluster: cluster.parse()?,
            holder: holder.parse()?,
        })
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}{PATH}{}", self.cluster, self.holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_is_read_as_it_is_printed() {
        for text in [
            "spiffe://prod/ssi-hv/node/alpha",
            "spiffe://lab.example-1/ssi-hv/vm/a_b.c",
            "spiffe://x/ssi-hv/operator/0",
        ] {
            let subject: Subject = text.parse().unwrap();
            assert_eq!(subject.to_string(), text);
        }
    }

    #[test]
    fn what_is_no_subject_is_refused_by_name() {
        let long = "a".repeat(NAME_LENGTH_MAX + 1);
        for (text, part) in [
            ("", "not an identity"),
            ("https://prod/ssi-hv/node/a", "not an identity"),
            ("spiffe://prod/node/a", "not an identity"),
            ("spiffe:///ssi-hv/node/a", "not a name"),
            ("spiffe://Prod/ssi-hv/node/a", "not a name"),
            ("spiffe://prod/ssi-hv/donor/a", "not ROLE/NAME"),
            ("spiffe://prod/ssi-hv/node", "not ROLE/NAME"),
            ("spiffe://prod/ssi-hv/node/", "not a name"),
            ("spiffe://prod/ssi-hv/node/..", "not a name"),
            ("spiffe://prod/ssi-hv/node/a/b", "not a name"),
            ("spiffe://prod/ssi-hv/node/a\n", "not a name"),
            (&format!("spiffe://prod/ssi-hv/node/{long}"), "not a name"),
        ] {
            let error = text.parse::<Subject>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
