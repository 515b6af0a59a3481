//! What a node registers: public facts only.

use fabric_identity::{Fingerprint, Name};
use serde::{Deserialize, Serialize};

use crate::error::quoted;
use crate::target::host_port;

/// The version of [`Member`].
pub const MEMBER_SCHEMA: u32 = 1;
/// Largest entry: one of this version has some 400 bytes.
pub const MEMBER_BYTES_MAX: usize = 4096;
/// Most memory that is believed: 1 PiB, beyond which sums of many nodes could overflow.
const MEMORY_BYTES_MAX: u64 = 1 << 50;
/// Longest text of a release.
const RELEASE_BYTES_MAX: usize = 32;

/// How pages can travel to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// Streams.
    Tcp,
    /// QUIC.
    Udp,
    /// Adapters.
    Rdma,
}

/// A node that lends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// [`MEMBER_SCHEMA`].
    pub schema: u32,
    /// Where VMs reach it, `HOST:PORT`.
    pub address: String,
    /// How pages can travel.
    pub transports: Vec<Carrier>,
    /// Memory that it lends in all.
    pub memory_bytes: u64,
    /// Memory that no VM has now. The node alone decides what it lends.
    pub free_bytes: u64,
    /// Its failure domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// vCPUs that it lends.
    pub cpus: u8,
    /// Whether VMs need a certificate of its authority; its own has its name.
    pub certificates: bool,
    /// Without certificates: the SHA-256 of the certificate that it shows by UDP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Version of its program.
    pub release: String,
    /// Version of the protocol that it speaks.
    pub wire: u8,
}

/// Why an entry is left out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    /// Its key does not end with a name.
    #[error("its key ends with no name")]
    Name,
    /// It is too large.
    #[error("it has {0} bytes, and {MEMBER_BYTES_MAX} is the limit")]
    Large(usize),
    /// It is of another version.
    #[error("it has schema {0}, and this program knows {MEMBER_SCHEMA}")]
    Schema(u32),
    /// It is no JSON of this form.
    #[error("it is not understood: {0}")]
    Malformed(String),
    /// A value is impossible.
    #[error("{field} is impossible: {value}")]
    Value {
        /// Which.
        field: &'static str,
        /// What it is.
        value: String,
    },
}

#[derive(Deserialize)]
struct Versioned {
    schema: u32,
}

impl Member {
    /// Reads the entry of a key that ends with `name`.
    pub(crate) fn read(name: &[u8], value: &[u8]) -> Result<(Name, Self), MemberError> {
        let name = std::str::from_utf8(name).map_err(|_| MemberError::Name)?;
        let name = name.parse().map_err(|_| MemberError::Name)?;
        if value.len() > MEMBER_BYTES_MAX {
            return Err(MemberError::Large(value.len()));
        }
        let malformed =
            |error: serde_json::Error| MemberError::Malformed(quoted(&error.to_string()));
        // A later version may have other fields.
        let Versioned { schema } = serde_json::from_slice(value).map_err(malformed)?;
        if schema != MEMBER_SCHEMA {
            return Err(MemberError::Schema(schema));
        }
        let member: Self = serde_json::from_slice(value).map_err(malformed)?;
        member.check()?;
        Ok((name, member))
    }

    fn check(&self) -> Result<(), MemberError> {
        let refuse = |field, value: &dyn ToString| {
            Err(MemberError::Value {
                field,
                value: quoted(&value.to_string()),
            })
        };
        if host_port(&self.address).is_none() {
            return refuse("address", &self.address);
        }
        if self.transports.is_empty() || self.transports.len() > 3 {
            return refuse("transports", &self.transports.len());
        }
        if self.memory_bytes > MEMORY_BYTES_MAX {
            return refuse("memory_bytes", &self.memory_bytes);
        }
        if self.free_bytes > self.memory_bytes {
            return refuse("free_bytes", &self.free_bytes);
        }
        if let Some(zone) = self
            .zone
            .as_ref()
            .filter(|zone| zone.parse::<Name>().is_err())
        {
            return refuse("zone", zone);
        }
        let shown = self.fingerprint.as_ref();
        if let Some(shown) = shown.filter(|text| text.parse::<Fingerprint>().is_err()) {
            return refuse("fingerprint", shown);
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-+".contains(&byte);
        let release = &self.release;
        if release.len() > RELEASE_BYTES_MAX || !release.bytes().all(plain) {
            return refuse("release", release);
        }
        Ok(())
    }

    /// Returns its failure domain.
    #[must_use]
    pub fn zone(&self) -> Option<Name> {
        self.zone.as_ref()?.parse().ok()
    }

    /// Returns the fingerprint of its certificate.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint.as_ref()?.parse().ok()
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        // Numbers, texts and lists of words have a form in JSON.
        serde_json::to_vec(self).expect("an entry is JSON")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn member(address: &str) -> Member {
        Member {
            schema: MEMBER_SCHEMA,
            address: address.to_owned(),
            transports: vec![Carrier::Tcp, Carrier::Udp],
            memory_bytes: 1 << 30,
            free_bytes: 1 << 29,
            zone: Some("rack-1".to_owned()),
            cpus: 2,
            certificates: false,
            fingerprint: Some("0b".repeat(32)),
            release: "0.1.0".to_owned(),
            wire: 11,
        }
    }

    #[test]
    fn what_is_written_is_read_as_the_same() {
        let written = member("10.0.0.1:7000");
        let (name, read) = Member::read(b"alpha", &written.to_json()).expect("is right");
        assert_eq!((name.as_str(), read), ("alpha", written));
    }

    #[test]
    fn a_wrong_entry_is_named_with_its_problem() {
        let good = || serde_json::to_value(member("h:1")).expect("JSON");
        let refused = |key: &[u8], value: &serde_json::Value| {
            let bytes = serde_json::to_vec(value).expect("JSON");
            Member::read(key, &bytes).expect_err("wrong").to_string()
        };
        assert!(refused(b"../x", &good()).contains("no name"));
        assert!(refused(b"\xff", &good()).contains("no name"));
        for (field, value, part) in [
            ("schema", 2.into(), "schema 2"),
            ("address", "h".into(), "address is impossible: h"),
            ("address", "h:1\n".into(), "address is impossible: h:1 "),
            ("address", "-oX:1,zone=a:2".into(), "address is impossible"),
            ("transports", Vec::<u8>::new().into(), "transports"),
            ("transports", vec!["pigeon"].into(), "pigeon"),
            ("memory_bytes", (1_u64 << 51).into(), "memory_bytes"),
            ("memory_bytes", (-1).into(), "not understood"),
            ("free_bytes", ((1_u64 << 30) + 1).into(), "free_bytes"),
            ("zone", "Rack 1".into(), "zone is impossible: Rack 1"),
            ("cpus", 256.into(), "not understood"),
            ("fingerprint", "0b".into(), "fingerprint"),
            ("release", "x".repeat(33).into(), "release"),
            ("release", "1 \u{1b}[2J".into(), "release"),
            ("token", "secret".into(), "unknown field `token`"),
        ] {
            let mut value_of = good();
            value_of[field] = value;
            let text = refused(b"a", &value_of);
            assert!(text.contains(part), "{field}: {text}");
            assert!(!text.contains(char::is_control), "{text:?}");
        }
        let large = Member::read(b"a", &[b' '; MEMBER_BYTES_MAX + 1]).expect_err("large");
        assert_eq!(large, MemberError::Large(MEMBER_BYTES_MAX + 1));
        let deep = Member::read(b"a", &[b'['; MEMBER_BYTES_MAX]).expect_err("deep");
        assert!(deep.to_string().contains("not understood"), "{deep}");
    }

    proptest! {
        #[test]
        fn no_entry_makes_the_reader_panic(
            name in prop::collection::vec(any::<u8>(), 0..70),
            value in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = Member::read(&name, &value);
        }
    }
}
