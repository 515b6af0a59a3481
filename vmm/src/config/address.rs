//! Addresses of nodes and donors in textual form: `HOST:PORT` and
//! `HOST:PORT[,memory=SIZE][,name=NAME][,zone=ZONE][,fingerprint=HEX]`.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use fabric_identity::{Name, SubjectError};
use memory_fabric::fabric::{Fingerprint, FingerprintError};

use super::text::serde_as_text;
use crate::size::{ByteSize, ParseSizeError};

/// A host, by name or address, and a port.
///
/// The name is resolved only when the address is used: see [`HostPort::resolve`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    host: String,
    port: u16,
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> Self {
        Self {
            host: address.ip().to_string(),
            port: address.port(),
        }
    }
}

impl HostPort {
    /// The host: a name, an IPv4 address, or an IPv6 address without its brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Whether the host is an address, which needs no resolver.
    #[must_use]
    pub fn is_numeric(&self) -> bool {
        self.host.parse::<IpAddr>().is_ok()
    }

    /// The port; 0 lets the system choose one to listen on.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Every address of the host, IPv4 first, in a stable order.
    ///
    /// # Errors
    ///
    /// If the name has no address or cannot be resolved.
    pub fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let mut addresses: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        addresses.sort_by_key(SocketAddr::is_ipv6);
        addresses.dedup();
        if addresses.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the name has no address",
            ));
        }
        Ok(addresses)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Why a text is not an address of a donor or a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseAddressError {
    /// There is no port, or it is not a number up to 65535.
    #[error(
        "`{text}` has no valid port; write HOST:PORT with a port up to 65535, such as 127.0.0.1:7000"
    )]
    Port {
        /// What was given.
        text: String,
    },
    /// There is no host, or it is not one.
    #[error(
        "`{text}` has no valid host; write HOST:PORT, and an IPv6 address in brackets, such as [::1]:7000"
    )]
    Host {
        /// What was given.
        text: String,
    },
    /// An unknown option follows the address.
    #[error(
        "`{option}` is not an option of a donor; write HOST:PORT[,memory=SIZE][,name=NAME][,zone=ZONE][,fingerprint=HEX]"
    )]
    Option {
        /// The unknown part.
        option: String,
    },
    /// An option is given twice.
    #[error("`{text}` gives {option} twice; give it once")]
    Twice {
        /// What was given.
        text: String,
        /// Which.
        option: &'static str,
    },
    /// The name of the certificate is malformed.
    #[error(transparent)]
    Name(#[from] SubjectError),
    /// The zone is malformed.
    #[error("zone={given}: {source}")]
    Zone {
        /// What was given.
        given: String,
        /// What a zone may be.
        source: SubjectError,
    },
    /// The fingerprint is malformed.
    #[error(transparent)]
    Fingerprint(#[from] FingerprintError),
    /// The size of the memory is malformed.
    #[error(transparent)]
    Size(#[from] ParseSizeError),
}

impl FromStr for HostPort {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad_host = || ParseAddressError::Host { text: text.into() };
        let bad_port = || ParseAddressError::Port { text: text.into() };

        let (host, port) = text.rsplit_once(':').ok_or_else(bad_port)?;
        let host = match host.strip_prefix('[') {
            Some(bracketed) => {
                let inner = bracketed.strip_suffix(']').ok_or_else(bad_host)?;
                inner
                    .parse::<IpAddr>()
                    .ok()
                    .filter(IpAddr::is_ipv6)
                    .map(|_| inner)
                    .ok_or_else(bad_host)?
            }
            None => host,
        };
        let bracketed = text.starts_with('[');
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if host.is_empty() || !(bracketed || host.chars().all(plain)) {
            return Err(bad_host());
        }
        if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad_port());
        }
        Ok(Self {
            host: host.into(),
            port: port.parse().map_err(|_| bad_port())?,
        })
    }
}

/// A donor, and the memory requested from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Donor {
    /// Its address.
    pub address: HostPort,
    /// The requested memory; by default its share of the whole guest, or less if it has less.
    pub memory: Option<ByteSize>,
    /// The required fingerprint of its certificate, for UDP.
    pub fingerprint: Option<Fingerprint>,
    /// Its name in the certificate of the cluster's authority.
    pub name: Option<Name>,
    /// Its failure domain, such as a rack: copies of one page are in different ones.
    pub zone: Option<Name>,
}

impl fmt::Display for Donor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        if let Some(memory) = self.memory {
            write!(f, ",memory={memory}")?;
        }
        if let Some(fingerprint) = self.fingerprint {
            write!(f, ",fingerprint={fingerprint}")?;
        }
        if let Some(name) = &self.name {
            write!(f, ",name={name}")?;
        }
        if let Some(zone) = &self.zone {
            write!(f, ",zone={zone}")?;
        }
        Ok(())
    }
}

impl FromStr for Donor {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(',');
        let address = parts.next().unwrap_or_default().parse()?;
        let (mut memory, mut fingerprint, mut name, mut zone) = (None, None, None, None);
        for part in parts {
            let (option, twice) = if let Some(size) = part.strip_prefix("memory=") {
                ("memory=", memory.replace(size.parse()?).is_some())
            } else if let Some(hex) = part.strip_prefix("fingerprint=") {
                ("fingerprint=", fingerprint.replace(hex.parse()?).is_some())
            } else if let Some(given) = part.strip_prefix("name=") {
                ("name=", name.replace(given.parse()?).is_some())
            } else if let Some(given) = part.strip_prefix("zone=") {
                let named = given.parse();
                let named = named.map_err(|source| ParseAddressError::Zone {
                    given: given.chars().take(80).collect(),
                    source,
                })?;
                ("zone=", zone.replace(named).is_some())
            } else {
                let option = part.into();
                return Err(ParseAddressError::Option { option });
            };
            if twice {
                let text = text.into();
                return Err(ParseAddressError::Twice { text, option });
            }
        }
        Ok(Self {
            address,
            memory,
            fingerprint,
            name,
            zone,
        })
    }
}

serde_as_text!(HostPort);
serde_as_text!(Donor);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn host_port(text: &str) -> Result<(String, u16), ParseAddressError> {
        text.parse::<HostPort>().map(|a| (a.host, a.port))
    }

    #[test]
    fn names_and_addresses_of_both_families_are_read() {
        assert_eq!(host_port("127.0.0.1:7000"), Ok(("127.0.0.1".into(), 7000)));
        assert_eq!(host_port("node-1.lan:1"), Ok(("node-1.lan".into(), 1)));
        assert_eq!(host_port("[::1]:65535"), Ok(("::1".into(), 65535)));
    }

    #[test]
    fn a_missing_or_impossible_port_is_named() {
        for text in ["127.0.0.1", "host:", "host:65536", "host:+1", "host:http"] {
            assert!(
                matches!(host_port(text), Err(ParseAddressError::Port { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn a_missing_or_impossible_host_is_named() {
        for text in [
            ":7000",
            "[::1:7000",
            "::1:7000",
            "[host]:7000",
            "ho st:7000",
        ] {
            assert!(
                matches!(host_port(text), Err(ParseAddressError::Host { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn a_donor_may_say_how_much_it_lends() {
        let donor: Donor = "10.0.0.2:7000,memory=2G".parse().expect("a donor");
        assert_eq!(donor.memory, Some(ByteSize::from_mib(2048)));
        assert_eq!(donor.to_string(), "10.0.0.2:7000,memory=2 GiB");
        let donor: Donor = "localhost:7000".parse().expect("a donor");
        assert_eq!(donor.memory, None);
    }

    #[test]
    fn other_options_of_a_donor_are_refused() {
        let refused = |text: &str| text.parse::<Donor>().expect_err(text).to_string();
        assert!(refused("h:1,size=2G").contains("`size=2G`"));
        assert!(refused("h:1,memory=2X").contains("`2X`"));
        assert!(refused("h:1,memory=1G,memory=2G").contains("memory= twice"));
        let one = format!("fingerprint={}", "0b".repeat(32));
        assert!(refused(&format!("h:1,{one},{one}")).contains("fingerprint= twice"));
        assert!(refused("h:1,fingerprint=0b").contains("64 hexadecimal digits"));
        assert!(refused("h:1,").contains("``"));
        assert!(refused("h:1,zone=a,zone=b").contains("zone= twice"));
        let text = refused("h:1,zone=Rack 1");
        assert!(text.contains("zone=Rack 1: "), "{text}");
    }

    #[test]
    fn localhost_resolves_to_loopback_with_ipv4_first() {
        let address: HostPort = "localhost:7000".parse().expect("an address");
        let resolved = address.resolve().expect("localhost has an address");
        assert!(
            resolved.iter().all(|a| a.ip().is_loopback()),
            "{resolved:?}"
        );
        assert!(resolved.is_sorted_by_key(SocketAddr::is_ipv6));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,60}") {
            let _ = text.parse::<Donor>();
        }

        #[test]
        fn what_is_printed_is_read_as_the_same_donor(
            host in "[a-z][a-z0-9.-]{0,20}", port: u16, memory: Option<u64>,
            fingerprint in prop::option::of("[0-9a-f]{64}"),
            name in prop::option::of("[a-z0-9][a-z0-9._-]{0,62}"),
            zone in prop::option::of("[a-z0-9][a-z0-9._-]{0,62}"),
        ) {
            let fingerprint = fingerprint.map(|hex| hex.parse().expect("a fingerprint"));
            let address = HostPort { host, port };
            let name = name.map(|name| name.parse().expect("a name"));
            let zone = zone.map(|zone| zone.parse().expect("a zone"));
            let memory = memory.map(ByteSize::from_bytes);
            let donor = Donor { address, memory, fingerprint, name, zone };
            prop_assert_eq!(donor.to_string().parse(), Ok(donor));
        }
    }
}
