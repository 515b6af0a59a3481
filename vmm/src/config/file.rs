//! Files of TOML: reading `vm.toml` with flags laid over it, its keys, and printing it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::de::value::Error as ValueError;
use serde::de::{Deserializer, Error as _, Visitor};
use serde::{Deserialize, Serialize, forward_to_deserialize_any};
use toml::Table;

use super::RunSettings;
use super::nearest::{nearest, with_suggestion};
use super::planned;

/// The largest file that is read: a configuration is a few lines, and a wrong path may name
/// a disk image.
pub const CONFIG_FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    /// It cannot be read.
    #[error("cannot read {what} {}", path.display())]
    Read {
        /// What it is.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It is too large to be a configuration.
    #[error("{what} {} has {bytes} bytes, {CONFIG_FILE_BYTES_MAX} is the limit; name a file of TOML", path.display())]
    TooLarge {
        /// What it is to be.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// It is a device or a pipe that does not come to an end.
    #[error("{what} {} gives more than {CONFIG_FILE_BYTES_MAX} bytes, the limit; name a file of TOML", path.display())]
    Endless {
        /// What it is to be.
        what: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// It is not TOML, or a value has a wrong form.
    #[error("{}:{line}: {message}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// It has a key that no flag has.
    #[error("{}: unknown key `{key}`; {remedy}", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The nearest one, or where to look.
        remedy: String,
    },
    /// The flags cannot be written as TOML.
    #[error("the flags cannot be written as TOML: {message}")]
    Unprintable {
        /// Why not.
        message: String,
    },
}

impl RunSettings {
    /// Reads a file and lays over it the values of flags. A flag that is repeatable replaces the
    /// whole list of the file.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is malformed, or has a key that no flag has.
    pub fn read(path: &Path, flags: Table) -> Result<Self, ConfigFileError> {
        let text = read("--config", path)?;
        let mut table = checked_table(path, &text)?;
        table.extend(flags);
        Self::deserialize(table).map_err(|error| malformed(path, "", &error))
    }

    /// The settings as the text of a `vm.toml`.
    ///
    /// # Errors
    ///
    /// If a path in them is not UTF-8.
    pub fn printed(&self) -> Result<String, ConfigFileError> {
        toml::to_string(self).map_err(|error| ConfigFileError::Unprintable {
            message: error.to_string(),
        })
    }
}

/// Settings by the keys that a file has for them.
///
/// # Errors
///
/// If a path in them is not UTF-8.
pub fn to_table(config: &impl Serialize) -> Result<Table, ConfigFileError> {
    Table::try_from(config).map_err(|error| ConfigFileError::Unprintable {
        message: error.to_string(),
    })
}

/// The text of a file that is small enough to be a configuration.
pub(crate) fn read(what: &'static str, path: &Path) -> Result<String, ConfigFileError> {
    let unreadable = |source| ConfigFileError::Read {
        what,
        path: path.into(),
        source,
    };
    let file = File::open(path).map_err(unreadable)?;
    let bytes = file.metadata().map_err(unreadable)?.len();
    if bytes > CONFIG_FILE_BYTES_MAX {
        return Err(ConfigFileError::TooLarge {
            what,
            path: path.into(),
            bytes,
        });
    }
    // What is no file on a disk has no size.
    let mut text = Vec::new();
    file.take(CONFIG_FILE_BYTES_MAX + 1)
        .read_to_end(&mut text)
        .map_err(unreadable)?;
    if u64::try_from(text.len()).is_ok_and(|bytes| bytes > CONFIG_FILE_BYTES_MAX) {
        return Err(ConfigFileError::Endless {
            what,
            path: path.into(),
        });
    }
    String::from_utf8(text).map_err(|error| {
        unreadable(io::Error::new(
            io::ErrorKind::InvalidData,
            error.utf8_error(),
        ))
    })
}

/// Whether a file, be it wrong otherwise, has something at the end of these keys. What is no TOML has
/// nothing, and what is no file cannot be read a second time.
#[must_use]
pub fn has_key(path: &Path, keys: &[&str]) -> bool {
    let table = readable_table(path);
    let [first, further @ ..] = keys else {
        return false;
    };
    let found = further
        .iter()
        .try_fold(table.get(*first), |value, key| Some(value?.get(*key)));
    found.flatten().is_some()
}

/// The file that a key of a file names, if it has a name there.
#[must_use]
pub fn named_file(path: &Path, key: &str) -> Option<PathBuf> {
    let table = readable_table(path);
    table.get(key)?.as_str().map(PathBuf::from)
}

/// What can be read of a file; else nothing.
fn readable_table(path: &Path) -> Table {
    let is_file = fs::metadata(path).is_ok_and(|found| found.is_file());
    let text = is_file.then(|| read("the file", path).ok()).flatten();
    toml::from_str(&text.unwrap_or_default()).unwrap_or_default()
}

/// Parses the text; every key is known and every value has the right form.
fn checked_table(path: &Path, text: &str) -> Result<Table, ConfigFileError> {
    let table: Table = toml::from_str(text).map_err(|error| malformed(path, text, &error))?;
    check_keys(path, "run", &table, &keys_of::<RunSettings>())?;
    toml::from_str::<RunSettings>(text).map_err(|error| malformed(path, text, &error))?;
    Ok(table)
}

/// The keys that a file may have for these settings.
#[must_use]
pub fn keys_of<T: for<'de> Deserialize<'de>>() -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    // Nothing is read: a structure names its keys when it asks for them.
    let _ = T::deserialize(Keys(&mut keys));
    keys
}

/// Takes the keys of a structure that would be read.
struct Keys<'a>(&'a mut BTreeSet<String>);

impl<'de> Deserializer<'de> for Keys<'_> {
    type Error = ValueError;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, ValueError> {
        Err(ValueError::custom("not a structure"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        self.0.extend(fields.iter().map(|&key| key.to_owned()));
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Fails at a key that is none of `known`, which are those of the command `verb`.
pub(crate) fn check_keys(
    path: &Path,
    verb: &str,
    table: &Table,
    known: &BTreeSet<String>,
) -> Result<(), ConfigFileError> {
    let Some(key) = table.keys().find(|key| !known.contains(*key)) else {
        return Ok(());
    };
    let remedy = match planned::flag(verb, &format!("--{key}")) {
        Some(planned) => format!("it is not there yet in this build; {}", planned.instead),
        None => nearest_key(key, verb, known),
    };
    Err(ConfigFileError::UnknownKey {
        path: path.into(),
        key: key.clone(),
        remedy,
    })
}

/// The known key that is most like `key`, or where the keys are listed.
fn nearest_key(key: &str, verb: &str, known: &BTreeSet<String>) -> String {
    let dashed = key.replace('_', "-");
    match nearest(&dashed, known.iter().map(String::as_str)) {
        Some(candidate) => format!("did you mean `{candidate}`?"),
        None => format!("the keys are the flags of `ssi-hv {verb} --help`"),
    }
}

pub(crate) fn malformed(path: &Path, text: &str, error: &toml::de::Error) -> ConfigFileError {
    let line = error
        .span()
        .and_then(|span| text.get(..span.start))
        .map_or(1, |before| before.matches('\n').count() + 1);
    ConfigFileError::Malformed {
        path: path.into(),
        line,
        message: with_suggestion(error.message().replace('\n', ", ")),
    }
}
