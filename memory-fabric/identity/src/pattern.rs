//! Which members of a cluster a rule is for.

use std::fmt;
use std::str::FromStr;

use crate::subject::{Holder, Name, Role, SubjectError};

/// One member, or those of a role whose names begin alike: `vm/web`, `vm/tenant-a-*`, `vm/*`.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum HolderPattern {
    /// This member.
    One(Holder),
    /// The members of a role whose names begin with this text, which may be empty.
    Prefix(Role, String),
}

impl HolderPattern {
    /// Returns whether the pattern names this member.
    #[must_use]
    pub fn names(&self, holder: &Holder) -> bool {
        match self {
            Self::One(one) => one == holder,
            Self::Prefix(role, prefix) => {
                *role == holder.role && holder.name.as_str().starts_with(prefix)
            }
        }
    }

    /// Returns how closely it names its members: of two that name one member, the rule with the larger
    /// value is for it.
    #[must_use]
    pub fn closeness(&self) -> usize {
        match self {
            Self::One(_) => usize::MAX,
            Self::Prefix(_, prefix) => prefix.len(),
        }
    }
}

impl FromStr for HolderPattern {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some(begin) = text.strip_suffix('*') else {
            return Ok(Self::One(text.parse()?));
        };
        let wrong = || SubjectError::Holder(text.chars().take(80).collect());
        let (role, prefix) = begin.split_once('/').ok_or_else(wrong)?;
        let role = Role::ALL.into_iter().find(|one| one.word() == role);
        if !prefix.is_empty() {
            prefix.parse::<Name>()?;
        }
        Ok(Self::Prefix(role.ok_or_else(wrong)?, prefix.to_owned()))
    }
}

impl fmt::Display for HolderPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(holder) => holder.fmt(f),
            Self::Prefix(role, prefix) => write!(f, "{}/{prefix}*", role.word()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_names_one_member_or_those_that_begin_alike() {
        let pattern = |text: &str| text.parse::<HolderPattern>().expect(text);
        let holder = |text: &str| text.parse::<Holder>().expect(text);
        for (text, named, others) in [
            ("vm/web", &["vm/web"][..], &["vm/web2", "node/web"][..]),
            (
                "vm/a-*",
                &["vm/a-", "vm/a-1"],
                &["vm/a", "vm/b-1", "node/a-1"],
            ),
            ("node/*", &["node/alpha"], &["vm/alpha"]),
        ] {
            let one = pattern(text);
            assert_eq!(one.to_string(), text);
            assert!(named.iter().all(|name| one.names(&holder(name))), "{text}");
            assert!(
                !others.iter().any(|name| one.names(&holder(name))),
                "{text}"
            );
        }
        assert!(pattern("vm/a-*").closeness() > pattern("vm/*").closeness());
        assert!(pattern("vm/a").closeness() > pattern("vm/a-long-one-*").closeness());
        for wrong in ["", "*", "vm", "vm/", "vm/**", "guest/*", "vm/A*", "vm/../*"] {
            assert!(wrong.parse::<HolderPattern>().is_err(), "{wrong}");
        }
    }
}
