//! The rules of a node: given one by one, and in files that are read again while it runs.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use fabric_identity::HolderPattern;
use fabric_identity::files::{self, FileError};
use memory_fabric::donor::policy::Rule;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::allow::{self, Allow, ParseAllowError, RULES_MAX};

/// What precedes the path of a file of rules.
const FILE_MARK: char = '@';
/// What begins a comment in a file.
const COMMENT: char = '#';
/// Limit of a quotation of a file.
const QUOTED_CHARS_MAX: usize = 80;

/// A value of `--allow`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowArg {
    /// A rule.
    Rule(Allow),
    /// A file of rules.
    File(PathBuf),
}

/// Why a text is no such value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseAllowArgError {
    /// It is no rule.
    #[error(transparent)]
    Rule(#[from] ParseAllowError),
    /// It names no file.
    #[error("`@` is followed by no path; write @FILE, with one rule in each line of FILE")]
    NoPath,
}

impl FromStr for AllowArg {
    type Err = ParseAllowArgError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix(FILE_MARK) {
            Some("") => Err(ParseAllowArgError::NoPath),
            Some(path) => Ok(Self::File(path.into())),
            None => Ok(Self::Rule(text.parse()?)),
        }
    }
}

impl fmt::Display for AllowArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule) => rule.fmt(f),
            Self::File(path) => write!(f, "{FILE_MARK}{}", path.display()),
        }
    }
}

impl Serialize for AllowArg {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The keys of a rule, or of a file of rules, in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Keys {
    identity: Option<String>,
    file: Option<String>,
    bytes: Option<String>,
    leases: Option<u64>,
    connections: Option<u64>,
    pinned: Option<String>,
    cpus: Option<u64>,
    gids: Option<String>,
}

impl Keys {
    fn value(self) -> Result<AllowArg, String> {
        let options = [
            (allow::BYTES, self.bytes),
            (allow::LEASES, self.leases.map(|count| count.to_string())),
            (
                allow::CONNECTIONS,
                self.connections.map(|count| count.to_string()),
            ),
            (allow::PINNED, self.pinned),
            (allow::CPUS, self.cpus.map(|count| count.to_string())),
            (allow::GIDS, self.gids),
        ];
        let mut text = match (self.identity, self.file) {
            (Some(identity), None) => identity,
            (None, Some(file)) => {
                if options.iter().any(|(_, value)| value.is_some()) {
                    return Err("a file has the limits of its rules itself".to_owned());
                }
                return format!("{FILE_MARK}{file}")
                    .parse()
                    .map_err(|error: ParseAllowArgError| error.to_string());
            }
            _ => return Err("a rule has either identity = or file =".to_owned()),
        };
        if text.contains(',') {
            return Err(format!(
                "`{text}` is not ROLE/NAME; its limits are keys of their own"
            ));
        }
        for (option, value) in options {
            if let Some(value) = value {
                text.push_str(&format!(",{option}{value}"));
            }
        }
        let rule: Result<Allow, _> = text.parse();
        rule.map(AllowArg::Rule).map_err(|error| error.to_string())
    }
}

impl<'de> Deserialize<'de> for AllowArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = AllowArg;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a rule: identity = \"ROLE/NAME\", and limits; or file = \"FILE\"")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<AllowArg, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<AllowArg, A::Error> {
                let keys = Keys::deserialize(MapAccessDeserializer::new(map))?;
                keys.value().map_err(A::Error::custom)
            }
        }

        deserializer.deserialize_any(Either)
    }
}

/// Where a rule is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// By itself.
    Argument,
    /// In a line of a file, counted from 1.
    Line(PathBuf, usize),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument => f.write_str("--allow"),
            Self::Line(path, number) => write!(f, "{}, line {number}", path.display()),
        }
    }
}

/// Why rules cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// A file cannot be read.
    #[error("the rules of --allow cannot be read")]
    File(#[from] FileError),
    /// A line is not text.
    #[error("{0}: the line is not UTF-8; write one rule in each line")]
    NotText(Origin),
    /// A line is no rule.
    #[error("{origin}: `{text}` is no rule")]
    Line {
        /// Which one.
        origin: Origin,
        /// The line, or how it begins.
        text: String,
        /// Why not.
        source: ParseAllowError,
    },
    /// Members have two rules.
    #[error("{second}: {members} has a rule already in {first}; remove one of them")]
    Twice {
        /// The members.
        members: HolderPattern,
        /// The rule that comes first.
        first: Origin,
        /// The other one.
        second: Origin,
    },
    /// There are too many.
    #[error(
        "{0}: it is one rule more than {RULES_MAX}, which is the limit of --allow; name several members by \
         ROLE/PREFIX*"
    )]
    TooMany(Origin),
}

/// The rules of a node, or where they are. All members that none names are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy(Vec<AllowArg>);

impl Policy {
    /// Returns the policy of these values of `--allow`; `None` without any, and everybody is
    /// allowed everything.
    #[must_use]
    pub fn of(given: &[AllowArg]) -> Option<Self> {
        (!given.is_empty()).then(|| Self(given.to_vec()))
    }

    /// Returns whether there are files, which may change.
    #[must_use]
    pub fn has_files(&self) -> bool {
        self.0
            .iter()
            .any(|given| matches!(given, AllowArg::File(_)))
    }

    /// Returns all rules, after reading the files.
    ///
    /// # Errors
    ///
    /// Fails at the first file that cannot be read, line that is no rule, second rule for the same
    /// members, or rule beyond the limit, and names it.
    pub fn read(&self) -> Result<Vec<Rule>, PolicyError> {
        let mut rules = Rules::default();
        for given in &self.0 {
            match given {
                AllowArg::Rule(rule) => rules.add(rule, Origin::Argument)?,
                AllowArg::File(path) => rules.add_lines(path, &files::read(path)?)?,
            }
        }
        Ok(rules.rules)
    }

    /// Compares the rules that are given by themselves with their limits. Files may be on another
    /// host, where the node will run.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn check(&self) -> Result<(), PolicyError> {
        let mut rules = Rules::default();
        self.0.iter().try_for_each(|given| match given {
            AllowArg::Rule(rule) => rules.add(rule, Origin::Argument),
            AllowArg::File(_) => Ok(()),
        })
    }
}

/// Rules so far.
#[derive(Default)]
struct Rules {
    rules: Vec<Rule>,
    origins: HashMap<HolderPattern, Origin>,
}

impl Rules {
    fn add(&mut self, rule: &Allow, origin: Origin) -> Result<(), PolicyError> {
        if self.rules.len() >= RULES_MAX as usize {
            return Err(PolicyError::TooMany(origin));
        }
        if let Some(first) = self.origins.get(&rule.members) {
            return Err(PolicyError::Twice {
                members: rule.members.clone(),
                first: first.clone(),
                second: origin,
            });
        }
        self.origins.insert(rule.members.clone(), origin);
        self.rules.push(Rule::from(rule));
        Ok(())
    }

    fn add_lines(&mut self, path: &Path, bytes: &[u8]) -> Result<(), PolicyError> {
        for (number, line) in (1..).zip(bytes.split(|byte| *byte == b'\n')) {
            let origin = Origin::Line(path.to_owned(), number);
            let Ok(line) = std::str::from_utf8(line) else {
                return Err(PolicyError::NotText(origin));
            };
            // Names of members contain no such character.
            let text = line.split(COMMENT).next().unwrap_or_default().trim();
            if text.is_empty() {
                continue;
            }
            match text.parse() {
                Ok(rule) => self.add(&rule, origin)?,
                Err(source) => {
                    return Err(PolicyError::Line {
                        origin,
                        text: text.chars().take(QUOTED_CHARS_MAX).collect(),
                        source,
                    });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(error: PolicyError) -> String {
        format!("{:#}", anyhow::Error::from(error))
    }

    #[test]
    fn a_value_is_a_rule_or_the_file_of_several() {
        for (text, keys) in [
            (
                "vm/web-*,bytes=4 GiB,leases=2,connections=32,pinned=1 GiB",
                "identity = \"vm/web-*\"\nbytes = \"4G\"\nleases = 2\nconnections = 32\npinned = \"1G\"",
            ),
            ("@/etc/ssi-hv/rules", "file = \"/etc/ssi-hv/rules\""),
        ] {
            let value: AllowArg = text.parse().expect("a value");
            assert_eq!(value.to_string(), text);
            assert_eq!(toml::from_str::<AllowArg>(keys).expect("a value"), value);
        }
        assert_eq!("@".parse::<AllowArg>(), Err(ParseAllowArgError::NoPath));
        for wrong in [
            "identity = \"vm/a,bytes=1G\"",
            "bytes = \"1G\"",
            "identity = \"vm/a\"\nsize = 1",
            "identity = \"vm/a\"\nleases = 0",
            "identity = \"@rules\"",
            "identity = \"vm/a\"\nfile = \"rules\"",
            "file = \"rules\"\nleases = 1",
            "file = \"\"",
        ] {
            assert!(toml::from_str::<AllowArg>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_has_a_rule_in_each_line_and_an_error_names_the_line() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("rules");
        let given = ["vm/db".to_owned(), format!("@{}", path.display())];
        let given = given.map(|text| text.parse().expect("a value"));
        let policy = Policy::of(&given).expect("a policy");
        policy.check().expect("the file is not read");
        assert!(policy.has_files());
        assert!(chain(policy.read().expect_err("no file")).contains("cannot read"));
        let read = |text: &[u8]| {
            std::fs::write(&path, text).expect("written");
            policy.read()
        };
        let rules =
            read(b"# Web servers.\n\n  vm/web-*,leases=2  # each\r\nvm/cache").expect("rules");
        let names: Vec<_> = rules.iter().map(|rule| rule.members.to_string()).collect();
        assert_eq!(names, ["vm/db", "vm/web-*", "vm/cache"]);
        assert_eq!(rules[1].limits.leases, Some(2));
        assert_eq!(read(b"").expect("no rules").len(), 1);
        for (text, part) in [
            (&b"vm/a\nweb"[..], "rules, line 2: `web` is no rule: "),
            (
                b"\n\nvm/a,size=1G # x",
                "line 3: `vm/a,size=1G` is no rule: `size=1G` is not an option",
            ),
            (
                b"vm/a\nvm/b\nvm/a,leases=1",
                "line 3: vm/a has a rule already in",
            ),
            (b"vm/db", "line 1: vm/db has a rule already in --allow"),
            (b"vm/a\n\xff", "line 2: the line is not UTF-8"),
        ] {
            let error = chain(read(text).expect_err("refused"));
            assert!(error.contains(part), "{error}");
        }
        let many = |count| -> String {
            (1..=count)
                .map(|number| format!("vm/v{number}\n"))
                .collect()
        };
        assert_eq!(read(many(1023).as_bytes()).expect("as many").len(), 1024);
        let error = chain(read(many(1024).as_bytes()).expect_err("refused"));
        assert!(
            error.contains("line 1024: it is one rule more than 1024"),
            "{error}"
        );
    }
}
