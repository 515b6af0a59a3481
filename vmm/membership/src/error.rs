//! Errors of etcd, of its address, and of its credentials.

use std::io;
use std::path::PathBuf;

use fabric_identity::CredentialsError;
use fabric_identity::files::FileError;

/// Longest part of a text by etcd that a message quotes.
const QUOTED_MAX: usize = 200;

/// Why etcd gave no answer that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdError {
    /// No answer came.
    #[error("etcd at {endpoint} cannot be asked: {reason}")]
    Unreachable {
        /// The endpoint that was tried last.
        endpoint: String,
        /// Why not.
        reason: String,
    },
    /// etcd refused.
    #[error("etcd at {endpoint} refuses: {message}")]
    Refused {
        /// The endpoint.
        endpoint: String,
        /// What it answered.
        message: String,
    },
    /// The answer has another form.
    #[error("etcd at {endpoint} answers something that is not understood: {what}")]
    Malformed {
        /// The endpoint.
        endpoint: String,
        /// What is wrong.
        what: String,
    },
    /// All together took too long.
    #[error("etcd at {endpoints} gave no answer within {seconds} s; is it running, and reachable?")]
    Late {
        /// All endpoints.
        endpoints: String,
        /// The limit.
        seconds: u64,
    },
    /// Another node has the name.
    #[error(
        "the name {name} is that of another node of the cluster, at {other}; give one of them another name"
    )]
    NameTaken {
        /// The name.
        name: String,
        /// The address of the other one.
        other: String,
    },
    /// The host has no thread or descriptor left.
    #[error("cannot start what asks etcd: {0}")]
    System(String),
}

/// Why a text is no address of etcd.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not the address of an etcd: {reason}; write etcd://HOST:PORT[,HOST:PORT][/PREFIX], or etcds:// for TLS"
)]
pub struct TargetError {
    /// What was given.
    pub text: String,
    /// What is wrong.
    pub reason: String,
}

/// Why etcd cannot be asked as configured.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// Certificates cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// A file has no key, or not that of the certificate.
    #[error("{path} cannot be used: {reason}", path = path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// TLS is asked for, without an authority.
    #[error(
        "{0} needs the authority of etcd's certificate; add --cluster-credentials DIR, with ca.pem, cert.pem and key.pem"
    )]
    NoAuthority(String),
    /// A name has no address.
    #[error("cannot resolve {endpoint} of --cluster")]
    Resolve {
        /// The endpoint.
        endpoint: String,
        /// Why not.
        source: io::Error,
    },
    /// Others could change what etcd answers.
    #[error(
        "--cluster {endpoint} is not a loopback address, and etcd:// is neither encrypted nor authenticated; use --cluster-credentials DIR, or add --insecure if the network is trusted"
    )]
    Open {
        /// The endpoint.
        endpoint: String,
    },
}

/// Returns the beginning of a text that was received, in one printable line.
pub(crate) fn quoted(text: &str) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(QUOTED_MAX).collect()
}
