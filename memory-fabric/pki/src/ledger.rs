//! The list of what an authority issued.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use fabric_identity::files::{self, Readers};
use fabric_identity::{Holder, Name};
use serde::{Deserialize, Serialize};

use crate::PkiError;

/// Bytes of a serial number: random, so that none is guessed or used twice.
const SERIAL_BYTES: usize = 16;

/// The serial number of a certificate, written as hexadecimal digits.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Serial(Vec<u8>);

/// A text that is no serial number.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "`{0}` is not a serial number; give its hexadecimal digits, as `ssi-hv pki list` prints them"
)]
pub struct SerialError(String);

impl Serial {
    /// Returns a serial number from the bytes of a key identifier or random bytes; positive, as
    /// certificates have it (RFC 5280, section 4.1.2.2).
    pub(crate) fn from_random(bytes: [u8; SERIAL_BYTES]) -> Self {
        let mut bytes = bytes.to_vec();
        // Neither negative nor shortened: both would change the digits in certificates.
        bytes[0] = (bytes[0] & 0x3f) | 0x40;
        Self(bytes)
    }

    /// Returns the serial number with these bytes, big-endian.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// Returns its bytes, big-endian.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Serial {
    type Err = SerialError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || SerialError(text.chars().take(80).collect());
        if text.len() != 2 * SERIAL_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let bytes = (0..SERIAL_BYTES).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16));
        bytes
            .collect::<Result<_, _>>()
            .map(Self)
            .map_err(|_| wrong())
    }
}

/// Whether a certificate can be used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum State {
    /// It can.
    Valid,
    /// Its time is over.
    Expired,
    /// It was revoked.
    Revoked,
}

/// A certificate that was issued.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Entry {
    /// Its serial number.
    pub serial: Serial,
    /// Whom it names.
    pub holder: Holder,
    /// Last second of its validity, since 1970.
    pub not_after: i64,
    /// When it was revoked, in seconds since 1970.
    pub revoked: Option<i64>,
}

impl Entry {
    /// Returns whether the certificate can be used at a time, in seconds since 1970.
    #[must_use]
    pub const fn state(&self, now: i64) -> State {
        match self.revoked {
            Some(_) => State::Revoked,
            None if self.not_after < now => State::Expired,
            None => State::Valid,
        }
    }
}

/// Size limit of the ledger: some 600,000 certificates.
const LEDGER_BYTES_MAX: u64 = 64 << 20;

/// All that an authority remembers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Ledger {
    pub cluster: Name,
    /// Last second of the validity of the authority's certificate, since 1970.
    pub not_after: i64,
    /// Number of the newest list of revoked certificates (RFC 5280, section 5.2.3).
    pub crl_number: u64,
    pub entries: Vec<Entry>,
}

/// The ledger as its file has it.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct LedgerFile {
    cluster: String,
    not_after: i64,
    crl_number: u64,
    #[serde(default)]
    certificate: Vec<EntryFile>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct EntryFile {
    serial: String,
    holder: String,
    not_after: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    revoked: Option<i64>,
}

impl Ledger {
    pub(crate) fn read(path: &Path) -> Result<Self, PkiError> {
        let wrong = |reason: String| PkiError::Content {
            path: path.to_owned(),
            reason,
        };
        let text = String::from_utf8(files::read_within(path, LEDGER_BYTES_MAX)?);
        let text = text.map_err(|error| wrong(error.to_string()))?;
        let file: LedgerFile = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let entry = |one: EntryFile| {
            Ok(Entry {
                serial: one
                    .serial
                    .parse()
                    .map_err(|error: SerialError| error.to_string())?,
                holder: one
                    .holder
                    .parse()
                    .map_err(|error: fabric_identity::SubjectError| error.to_string())?,
                not_after: one.not_after,
                revoked: one.revoked,
            })
        };
        let entries: Result<Vec<_>, String> = file.certificate.into_iter().map(entry).collect();
        Ok(Self {
            cluster: file
                .cluster
                .parse()
                .map_err(|error: fabric_identity::SubjectError| wrong(error.to_string()))?,
            not_after: file.not_after,
            crl_number: file.crl_number,
            entries: entries.map_err(wrong)?,
        })
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), PkiError> {
        let entry = |one: &Entry| EntryFile {
            serial: one.serial.to_string(),
            holder: one.holder.to_string(),
            not_after: one.not_after,
            revoked: one.revoked,
        };
        let file = LedgerFile {
            cluster: self.cluster.to_string(),
            not_after: self.not_after,
            crl_number: self.crl_number,
            certificate: self.entries.iter().map(entry).collect(),
        };
        let text = toml::to_string(&file).map_err(|error| PkiError::Content {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        Ok(files::write(path, text.as_bytes(), Readers::All)?)
    }

    pub(crate) fn find(&self, serial: &Serial) -> Option<&Entry> {
        self.entries.iter().find(|one| one.serial == *serial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Ledger {
        let entry = |first: u8, holder: &str, revoked| Entry {
            serial: Serial::from_random([first; SERIAL_BYTES]),
            holder: holder.parse().unwrap(),
            not_after: 2_000_000_000,
            revoked,
        };
        Ledger {
            cluster: "prod".parse().unwrap(),
            not_after: 2_100_000_000,
            crl_number: 3,
            entries: vec![
                entry(0xff, "node/alpha", None),
                entry(0, "vm/web", Some(1_900_000_000)),
            ],
        }
    }

    #[test]
    fn a_ledger_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("issued.toml");
        ledger().write(&path).unwrap();
        assert_eq!(Ledger::read(&path).unwrap(), ledger());
    }

    #[test]
    fn a_ledger_of_many_years_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("issued.toml");
        let mut long = ledger();
        let entry = long.entries[0].clone();
        long.entries.resize(12_000, entry);
        long.write(&path).unwrap();
        assert!(std::fs::metadata(&path).unwrap().len() > files::FILE_BYTES_MAX);
        assert_eq!(Ledger::read(&path).unwrap(), long);
    }

    #[test]
    fn a_wrong_ledger_is_refused_with_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("issued.toml");
        for text in [
            "",
            "cluster = \"Prod\"\nnot-after = 9\ncrl-number = 1",
            "cluster = \"prod\"\nnot-after = 9\ncrl-number = -1",
            "cluster = \"prod\"\nnot-after = 9\ncrl-number = 1\nmore = 2",
            "cluster = \"prod\"\nnot-after = 9\ncrl-number = 1\n[[certificate]]\nserial = \"00\"\nholder = \"vm/a\"\nnot-after = 1",
        ] {
            std::fs::write(&path, text).unwrap();
            let error = Ledger::read(&path).expect_err(text).to_string();
            assert!(error.contains("issued.toml"), "{error}");
        }
    }

    #[test]
    fn serial_numbers_are_positive_and_read_as_printed() {
        for first in [0, 0x7f, 0x80, 0xff] {
            let serial = Serial::from_random([first; SERIAL_BYTES]);
            assert!((0x40..0x80).contains(&serial.bytes()[0]));
            assert_eq!(serial.to_string().parse(), Ok(serial));
        }
        for wrong in ["", "4f", &"g".repeat(32), &"4".repeat(33), &"+1".repeat(16)] {
            assert!(wrong.parse::<Serial>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_revoked_certificate_stays_revoked_after_its_time() {
        let entries = ledger().entries;
        assert_eq!(entries[0].state(2_000_000_000), State::Valid);
        assert_eq!(entries[0].state(2_000_000_001), State::Expired);
        assert_eq!(entries[1].state(2_000_000_001), State::Revoked);
    }
}
