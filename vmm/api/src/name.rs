//! The name of a VM.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Limit of a name: it is part of the name of a socket, whose path the kernel limits to 107 bytes.
pub const VM_NAME_BYTES_MAX: usize = 32;

/// A name that can be part of a file name and is not a number, so that a VM can also be addressed
/// by its process id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

impl VmName {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns the displayed name of a VM: its name, or else one made of its process id.
#[must_use]
pub fn called(name: Option<&VmName>, pid: u32) -> String {
    name.map_or_else(|| format!("ssi-hv-{pid}"), ToString::to_string)
}

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a name; a name begins with a letter and has letters, digits, `-`, `_` and `.`, \
     {VM_NAME_BYTES_MAX} at most"
)]
pub struct NameError(String);

impl FromStr for VmName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let good = text.len() <= VM_NAME_BYTES_MAX
            && text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        if good {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError(text.to_owned()))
        }
    }
}

impl TryFrom<String> for VmName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> Self {
        name.0
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_plain_word() {
        for good in ["a", "web-1.test_2", &"x".repeat(VM_NAME_BYTES_MAX)] {
            assert_eq!(good.parse::<VmName>().expect("a name").as_str(), good);
        }
        for bad in [
            "",
            "1",
            "1a",
            "../x",
            "a/b",
            "a b",
            "\u{e9}",
            &"x".repeat(VM_NAME_BYTES_MAX + 1),
        ] {
            assert!(bad.parse::<VmName>().is_err(), "{bad}");
        }
    }
}
