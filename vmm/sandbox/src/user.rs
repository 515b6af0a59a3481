//! The user that a process becomes.

use std::fs;
use std::io;

use thiserror::Error;

/// The users of this host (passwd(5)). Users of a directory service are given by their numbers:
/// asking such a service would load libraries and open connections.
const USERS: &str = "/etc/passwd";

/// Why a user cannot be used.
#[derive(Debug, Error)]
pub enum UserError {
    /// No such user.
    #[error(
        "--user {0}: {USERS} has no such user; create it (useradd --system), or give two numbers, UID:GID"
    )]
    Unknown(String),
    /// The numbers are none.
    #[error("--user {0} is neither a name nor two numbers, UID:GID, of 1 to 4294967294 each")]
    Malformed(String),
    /// The user or the group is that of root.
    #[error("--user {0} is root or has its group; name a user without rights of its own")]
    Root(String),
    /// The users cannot be read.
    #[error("cannot read {USERS} for --user {name}; give two numbers, UID:GID")]
    Unreadable {
        /// The name.
        name: String,
        /// Why not.
        source: io::Error,
    },
}

/// A user and its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    name: String,
    uid: u32,
    gid: u32,
}

impl User {
    /// Finds a user by its name, or by two numbers, `UID:GID`, which need no entry.
    ///
    /// # Errors
    ///
    /// When there is no such user, and for root.
    pub fn find(text: &str) -> Result<Self, UserError> {
        let user = if text.contains(':') {
            numbers(text).ok_or_else(|| UserError::Malformed(text.to_owned()))?
        } else {
            let users = fs::read(USERS).map_err(|source| UserError::Unreadable {
                name: text.to_owned(),
                source,
            })?;
            let users = String::from_utf8_lossy(&users);
            named(&users, text).ok_or_else(|| UserError::Unknown(text.to_owned()))?
        };
        if user.uid == 0 || user.gid == 0 {
            return Err(UserError::Root(text.to_owned()));
        }
        Ok(user)
    }

    /// Its name, or its numbers, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number.
    #[must_use]
    pub const fn uid(&self) -> u32 {
        self.uid
    }

    /// The number of its group.
    #[must_use]
    pub const fn gid(&self) -> u32 {
        self.gid
    }
}

/// The kernel reads -1 as "no change".
fn number(text: &str) -> Option<u32> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_plain)?;
    (number != u32::MAX).then_some(number)
}

fn numbers(text: &str) -> Option<User> {
    let (uid, gid) = text.split_once(':')?;
    Some(User {
        name: text.to_owned(),
        uid: number(uid)?,
        gid: number(gid)?,
    })
}

/// Finds an entry, `NAME:PASSWORD:UID:GID:...`.
fn named(users: &str, name: &str) -> Option<User> {
    let mut entries = users.lines().map(|line| line.split(':'));
    entries.find_map(|mut fields| {
        let found = fields.next()?;
        let (uid, gid) = (fields.nth(1)?, fields.next()?);
        (found == name && !name.is_empty()).then_some(())?;
        Some(User {
            name: name.to_owned(),
            uid: number(uid)?,
            gid: number(gid)?,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_numbers_are_taken_as_they_are() {
        let users = "root:x:0:0:root:/root:/bin/sh\nvm:x:990:991::/:/none\nbad:x:-1:5::\nshort:x\n";
        let found = |name| named(users, name).map(|user| (user.uid, user.gid));
        assert_eq!(found("vm"), Some((990, 991)));
        assert_eq!(found("root"), Some((0, 0)));
        for absent in ["v", "", "x", "bad", "short"] {
            assert_eq!(found(absent), None, "{absent}");
        }
        let user = User::find("64000:64001").expect("numbers");
        assert_eq!((user.uid(), user.gid()), (64000, 64001));
    }

    #[test]
    fn root_and_what_the_kernel_takes_for_no_change_are_refused() {
        for (text, part) in [
            ("0:5", "is root"),
            ("5:0", "is root"),
            ("root", "is root"),
            ("4294967295:5", "neither a name nor"),
            ("5:4294967296", "neither a name nor"),
            ("+5:5", "neither a name nor"),
            ("5:", "neither a name nor"),
            ("no-such-user", "has no such user"),
            ("", "has no such user"),
        ] {
            let error = User::find(text).expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
