//! What is set of RDMA connections, as it is given: `KEY=VALUE,...`, or a table with these keys.

use std::fmt;
use std::str::FromStr;

use memory_fabric::rdma::settings::{
    INLINE_BYTES_MAX, Retries, SERVICE_LEVEL_MAX, TIMEOUT_EXPONENTS,
};
use memory_fabric::rdma::{DeviceChoice, Mtu, Settings, Waiting};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::PAGE_SIZE_BYTES;
use super::gids::GidList;
use crate::size::ByteSize;

/// The keys.
const KEYS: [&str; 14] = [
    "device",
    "port",
    "gid-index",
    "mtu",
    "partition",
    "service-level",
    "traffic-class",
    "depth",
    "inline",
    "staging",
    "timeout",
    "retries",
    "completion",
    "peers",
];

/// Limit of `depth`: as many requests as a connection of a VM has outstanding.
const DEPTH_MAX: u16 = 64;
/// Limits of `staging`: a run of pages, and what a fast link carries in some milliseconds.
const STAGING: (ByteSize, ByteSize) = (ByteSize::from_bytes(256 << 10), ByteSize::from_mib(64));
/// Limit of `retries`: 7 is unlimited with SoftRoCE.
const RETRIES_MAX: u8 = 6;

/// What is set of RDMA connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaArg {
    /// The keys and values in the order of [`KEYS`], as they are given.
    given: Vec<(&'static str, String)>,
    settings: Settings,
}

/// Why a text does not set RDMA connections.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseRdmaError {
    /// An unknown key.
    #[error("`{0}` is not a key of --rdma; write KEY=VALUE,... with {keys}", keys = KEYS.join(", "))]
    Key(String),
    /// A key without a value.
    #[error("`{0}` has no value; write KEY=VALUE,...")]
    NoValue(String),
    /// A key is given twice.
    #[error("`{0}` is given twice; give it once")]
    Twice(&'static str),
    /// A value is outside its limits.
    #[error("{key}={given} does not exist; write {allowed}")]
    Value {
        /// The key.
        key: &'static str,
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: String,
    },
}

impl RdmaArg {
    /// Returns the settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Sets the device, if it is not set.
    #[must_use]
    pub(super) fn with_device(mut self, name: String) -> Self {
        if self.settings.device == DeviceChoice::default() {
            self.given.insert(0, (KEYS[0], name.clone()));
            self.settings.device = DeviceChoice::Named(name);
        }
        self
    }

    fn set(&mut self, key: &'static str, given: &str) -> Result<(), ParseRdmaError> {
        let wrong = |allowed: String| ParseRdmaError::Value {
            key,
            given: given.chars().take(80).collect(),
            allowed,
        };
        let number = |min: u16, max: u16| {
            let parsed = given.parse().ok().filter(|n| (min..=max).contains(n));
            parsed.ok_or_else(|| wrong(format!("a number from {min} to {max}")))
        };
        let small = |min: u8, max: u8| {
            let number = number(min.into(), max.into())?;
            Ok(u8::try_from(number).unwrap_or(max))
        };
        let all = &mut self.settings;
        match key {
            "device" if !given.is_empty() && given != "none" => {
                all.device = DeviceChoice::Named(given.to_owned());
            }
            "device" => {
                return Err(wrong(
                    "the name of a device, as `rdma link` shows it".into(),
                ));
            }
            "port" => all.port = Some(small(1, u8::MAX)?),
            "gid-index" => all.gid_index = Some(small(0, u8::MAX)?),
            "mtu" => {
                let mtu = given.parse().ok().and_then(Mtu::from_bytes);
                let mtu = mtu.ok_or_else(|| wrong("256, 512, 1024, 2048 or 4096".into()))?;
                all.mtu = Some(mtu);
            }
            "partition" => {
                let digits = given.strip_prefix("0x").unwrap_or_default();
                let key = u16::from_str_radix(digits, 16).ok().filter(|key| *key != 0);
                let key = key.ok_or_else(|| wrong("a P_Key from 0x1 to 0xffff".into()))?;
                all.partition = Some(key);
            }
            "service-level" => all.service_level = small(0, SERVICE_LEVEL_MAX)?,
            "traffic-class" => all.traffic_class = small(0, u8::MAX)?,
            "depth" => all.depth = Some(number(1, DEPTH_MAX)?),
            "inline" => all.inline_bytes = Some(number(0, INLINE_BYTES_MAX)?),
            "staging" => all.staging_pages = Some(staging(given).map_err(wrong)?),
            "timeout" => {
                let (min, max) = TIMEOUT_EXPONENTS;
                all.retries.timeout_exponent = small(min, max)?;
            }
            "retries" => {
                let count = small(0, RETRIES_MAX)?;
                all.retries = Retries {
                    count,
                    not_ready: count,
                    ..all.retries
                };
            }
            "completion" => {
                all.waiting = match given {
                    "event" => Waiting::Event,
                    "poll" => Waiting::Poll,
                    _ => return Err(wrong("event or poll".into())),
                };
            }
            "peers" => {
                let peers: Result<GidList, _> = given.parse();
                all.peers = peers.map_err(|error| wrong(error.to_string()))?.0;
            }
            _ => return Err(ParseRdmaError::Key(key.to_owned())),
        }
        self.given.push((key, given.to_owned()));
        Ok(())
    }
}

/// Returns a size in pages, or what is allowed.
fn staging(given: &str) -> Result<usize, String> {
    let (min, max) = STAGING;
    let size: Option<ByteSize> = given.parse().ok();
    let size = size
        .filter(|size| (min..=max).contains(size) && size.bytes().is_multiple_of(PAGE_SIZE_BYTES));
    let pages = size.and_then(|size| usize::try_from(size.bytes() / PAGE_SIZE_BYTES).ok());
    pages.ok_or_else(|| format!("a size from {min} to {max}, in whole pages of {PAGE_SIZE_BYTES}"))
}

impl FromStr for RdmaArg {
    type Err = ParseRdmaError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut all = Self::default();
        for option in text.split(',') {
            let short = || option.chars().take(80).collect();
            let (name, value) = match option.split_once('=') {
                Some(parts) => parts,
                None if KEYS.contains(&option) => return Err(ParseRdmaError::NoValue(short())),
                None => return Err(ParseRdmaError::Key(short())),
            };
            let key = KEYS.into_iter().find(|key| *key == name);
            let key = key.ok_or_else(|| ParseRdmaError::Key(name.chars().take(80).collect()))?;
            if all.given.iter().any(|(there, _)| *there == key) {
                return Err(ParseRdmaError::Twice(key));
            }
            all.set(key, value)?;
        }
        Ok(all)
    }
}

impl fmt::Display for RdmaArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (key, value)) in self.given.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma}{key}={value}")?;
        }
        Ok(())
    }
}

impl Serialize for RdmaArg {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RdmaArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = RdmaArg;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"KEY=VALUE,...\", or a table with these keys")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<RdmaArg, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RdmaArg, A::Error> {
                let mut options = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, toml::Value>()? {
                    let value = match value {
                        toml::Value::String(text) => text,
                        other => other.to_string(),
                    };
                    options.push(format!("{key}={value}"));
                }
                options.join(",").parse().map_err(serde::de::Error::custom)
            }
        }

        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_set_and_printed_again() {
        let text = "device=mlx5_0,port=2,gid-index=3,mtu=1024,partition=0x8001,service-level=5,\
                    traffic-class=106,depth=32,inline=64,staging=4M,timeout=12,retries=3,\
                    completion=poll,peers=10.78.0.2+fe80::1";
        let arg: RdmaArg = text.parse().expect("settings");
        assert_eq!(arg.to_string(), text);
        let expected = Settings {
            device: DeviceChoice::Named("mlx5_0".to_owned()),
            port: Some(2),
            gid_index: Some(3),
            mtu: Mtu::from_bytes(1024),
            partition: Some(0x8001),
            service_level: 5,
            traffic_class: 106,
            retries: Retries {
                timeout_exponent: 12,
                count: 3,
                not_ready: 3,
            },
            depth: Some(32),
            inline_bytes: Some(64),
            staging_pages: Some(1024),
            waiting: Waiting::Poll,
            peers: ["10.78.0.2", "fe80::1"]
                .map(|text| text.parse().expect("an address"))
                .to_vec(),
        };
        assert_eq!(arg.settings(), &expected);
        for key in KEYS {
            assert!(text.contains(&format!("{key}=")), "{key} is not tried");
        }
    }

    #[test]
    fn a_table_has_the_same_keys() {
        #[derive(Deserialize)]
        struct File {
            rdma: RdmaArg,
        }
        let file: File = toml::from_str("[rdma]\ngid-index = 3\nstaging = \"1M\"").expect("TOML");
        assert_eq!(file.rdma.settings().gid_index, Some(3));
        assert_eq!(file.rdma.settings().staging_pages, Some(256));
        let file: File = toml::from_str("rdma = \"gid-index=3,staging=1M\"").expect("TOML");
        assert_eq!(file.rdma.settings().gid_index, Some(3));
        let wrong = toml::from_str::<File>("[rdma]\ngid = 3").map(|_| ());
        let text = wrong.expect_err("no such key").to_string();
        assert!(
            text.contains("`gid` is not a key") && text.contains("gid-index"),
            "{text}"
        );
    }

    #[test]
    fn a_wrong_value_is_shown_with_its_limits() {
        for (text, part) in [
            ("", "`` is not a key of --rdma; write KEY=VALUE,..."),
            ("mtu", "`mtu` has no value"),
            ("mtu=1024,mtu=512", "`mtu` is given twice"),
            (
                "mtu=1500",
                "mtu=1500 does not exist; write 256, 512, 1024, 2048 or 4096",
            ),
            (
                "depth=0",
                "depth=0 does not exist; write a number from 1 to 64",
            ),
            ("depth=65", "write a number from 1 to 64"),
            ("inline=1025", "write a number from 0 to 1024"),
            ("inline=-1", "write a number from 0 to 1024"),
            ("port=0", "write a number from 1 to 255"),
            ("gid-index=256", "write a number from 0 to 255"),
            ("partition=7", "write a P_Key from 0x1 to 0xffff"),
            ("partition=0x0", "write a P_Key from 0x1 to 0xffff"),
            ("service-level=16", "write a number from 0 to 15"),
            ("traffic-class=-1", "write a number from 0 to 255"),
            ("staging=4K", "write a size from 256 KiB to 64 MiB"),
            ("staging=300001", "in whole pages of 4096"),
            ("timeout=20", "write a number from 10 to 19"),
            ("retries=7", "write a number from 0 to 6"),
            ("completion=spin", "write event or poll"),
            ("peers=host", "`host` is no address"),
            ("device=", "write the name of a device"),
        ] {
            let error = text.parse::<RdmaArg>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
