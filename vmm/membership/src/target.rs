//! The address of an etcd: `etcd://HOST:PORT[,HOST:PORT][/PREFIX]`.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::str::FromStr;

use crate::error::{TargetError, TlsError};
use crate::tls::Tls;

const PLAIN: &str = "etcd://";
const SECURE: &str = "etcds://";
/// The prefix of all keys, unless another one is given.
const PREFIX_DEFAULT: &str = "/ssi-hv";
/// Longest prefix.
const PREFIX_BYTES_MAX: usize = 128;
/// Most endpoints: etcd advises clusters of up to seven members.
const ENDPOINTS_MAX: usize = 7;

/// Where members are registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    is_secure: bool,
    /// Each `HOST:PORT`, in the order in which they are tried.
    endpoints: Vec<String>,
    prefix: String,
}

impl Target {
    /// Returns whether a text is meant as an address of etcd.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        text.starts_with(PLAIN) || text.starts_with(SECURE)
    }

    /// Returns the prefix of the keys of nodes.
    pub(crate) fn nodes(&self) -> String {
        format!("{}/nodes/", self.prefix)
    }

    /// Resolves names, and reads the files of `credentials`, once: a process that is restricted later
    /// needs neither again. `is_open` allows an etcd beyond this host without TLS.
    ///
    /// # Errors
    ///
    /// Fails when a name has no address, a file cannot be used, or TLS is missing.
    pub fn endpoints(
        &self,
        credentials: Option<&Path>,
        is_open: bool,
    ) -> Result<Endpoints, TlsError> {
        let tls = match credentials {
            Some(directory) => Some(Tls::load(directory)?),
            None if self.is_secure => return Err(TlsError::NoAuthority(self.to_string())),
            None => None,
        };
        let mut all = Vec::new();
        for name in &self.endpoints {
            let failed = |source| TlsError::Resolve {
                endpoint: name.clone(),
                source,
            };
            let mut addresses: Vec<_> = name.to_socket_addrs().map_err(failed)?.collect();
            // As for donors: where both are known, IPv6 is the one that may not pass.
            addresses.sort_by_key(SocketAddr::is_ipv6);
            let is_here = addresses.iter().all(|address| address.ip().is_loopback());
            if !is_here && tls.is_none() && !is_open {
                return Err(TlsError::Open {
                    endpoint: name.clone(),
                });
            }
            all.push(Endpoint {
                name: name.clone(),
                addresses,
            });
        }
        Ok(Endpoints {
            target: self.clone(),
            all,
            tls,
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_secure { SECURE } else { PLAIN };
        write!(f, "{scheme}{}", self.endpoints.join(","))?;
        match self.prefix.as_str() {
            PREFIX_DEFAULT => Ok(()),
            prefix => f.write_str(prefix),
        }
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let wrong = |reason: &str| TargetError {
            text: crate::error::quoted(text),
            reason: reason.to_owned(),
        };
        let (is_secure, rest) = match (text.strip_prefix(SECURE), text.strip_prefix(PLAIN)) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(wrong("it begins with neither etcd:// nor etcds://")),
        };
        let (hosts, prefix) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, PREFIX_DEFAULT),
        };
        let prefix = match prefix.trim_end_matches('/') {
            "" => PREFIX_DEFAULT,
            prefix => prefix,
        };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/".contains(&byte);
        if prefix.len() > PREFIX_BYTES_MAX || !prefix.bytes().all(plain) {
            let reason = format!(
                "its prefix has more than {PREFIX_BYTES_MAX} bytes, or others than letters, digits, `-`, `.`, `_` and `/`"
            );
            return Err(wrong(&reason));
        }
        let endpoints: Vec<_> = hosts.split(',').map(str::to_owned).collect();
        if endpoints.len() > ENDPOINTS_MAX {
            let reason = format!(
                "it has {} endpoints, and {ENDPOINTS_MAX} is the limit",
                endpoints.len()
            );
            return Err(wrong(&reason));
        }
        if let Some(bad) = endpoints.iter().find(|one| host_port(one).is_none()) {
            return Err(wrong(&format!("`{bad}` is not HOST:PORT")));
        }
        Ok(Self {
            is_secure,
            endpoints,
            prefix: prefix.to_owned(),
        })
    }
}

/// Splits `HOST:PORT`, where an IPv6 address is in brackets, and the port is not 0.
pub(crate) fn host_port(text: &str) -> Option<(&str, u16)> {
    /// Longest name of a host (RFC 1035, section 2.3.4).
    const HOST_BYTES_MAX: usize = 253;
    let (host, port) = text.rsplit_once(':')?;
    let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|&port| is_port && port > 0)?;
    let bracketed = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    if let Some(inner) = bracketed {
        let ip: IpAddr = inner.parse().ok()?;
        return ip.is_ipv6().then_some((inner, port));
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_host = !host.is_empty() && host.len() <= HOST_BYTES_MAX && host.bytes().all(plain);
    is_host.then_some((host, port))
}

/// One server of an etcd.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    /// As it was given.
    pub name: String,
    pub addresses: Vec<SocketAddr>,
}

/// An etcd that can be asked.
#[derive(Clone, Debug)]
pub struct Endpoints {
    pub(crate) target: Target,
    pub(crate) all: Vec<Endpoint>,
    pub(crate) tls: Option<Tls>,
}

impl fmt::Display for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.target.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_address_has_endpoints_and_a_prefix() {
        for (text, nodes) in [
            ("etcd://127.0.0.1:2379", "/ssi-hv/nodes/"),
            ("etcd://127.0.0.1:2379/", "/ssi-hv/nodes/"),
            ("etcds://a:1,[::1]:2/x/y", "/x/y/nodes/"),
        ] {
            let target: Target = text.parse().expect(text);
            assert_eq!(target.nodes(), nodes);
            assert_eq!(target.to_string().parse(), Ok(target));
        }
    }

    #[test]
    fn a_wrong_address_is_refused_with_its_part() {
        for (text, part) in [
            ("http://h:1", "neither etcd:// nor etcds://"),
            ("etcd://", "`` is not HOST:PORT"),
            ("etcd://h", "`h` is not HOST:PORT"),
            ("etcd://h:0", "`h:0` is not HOST:PORT"),
            ("etcd://a:1,", "`` is not HOST:PORT"),
            ("etcd://user@h:1", "`user@h:1` is not HOST:PORT"),
            ("etcd://h:1/a b", "its prefix"),
            ("etcd://a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1", "7 is the limit"),
        ] {
            let error = text.parse::<Target>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn an_etcd_beyond_this_host_needs_tls_or_consent() {
        let target: Target = "etcd://192.0.2.1:2379".parse().expect("an address");
        let error = target.endpoints(None, false).expect_err("open").to_string();
        assert!(error.contains("--cluster-credentials") && error.contains("--insecure"));
        assert!(target.endpoints(None, true).is_ok());
        let target: Target = "etcds://127.0.0.1:2379".parse().expect("an address");
        let error = target.endpoints(None, true).expect_err("no authority");
        assert!(error.to_string().contains("ca.pem"), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "(etcds?://)?.{0,60}") {
            let _ = text.parse::<Target>();
        }
    }
}
