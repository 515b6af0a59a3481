//! Why an authority refuses or fails.

use std::io;
use std::path::PathBuf;

use fabric_identity::credentials::CredentialsError;
use fabric_identity::files::FileError;
use fabric_identity::presented::PresentedError;
use fabric_identity::{Holder, Subject};

use crate::ledger::Serial;

/// An operation that failed. A certificate whose files could not be written is in the list all the
/// same, so that it can be revoked.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file of certificates cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// A file exists that would be replaced.
    #[error("{} exists, and is not replaced; name another directory, or remove it", .0.display())]
    Exists(PathBuf),
    /// A directory cannot be created or opened.
    #[error("cannot use the directory {path}", path = path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another command holds the authority.
    #[error("another command has used the authority in {path} for {seconds} s", path = path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
        /// How long this one waited.
        seconds: u64,
        /// What the lock's call returned.
        source: io::Error,
    },
    /// A file of the authority has wrong content.
    #[error("{path}: {reason}", path = path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A certificate says nothing that can be used.
    #[error("{path}: {reason}", path = path.display())]
    Presented {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: PresentedError,
    },
    /// A certificate would be valid for longer than that of the authority.
    #[error(
        "{days} days are more than the authority has left, which is {left}; ask for fewer, or make a new authority"
    )]
    TooLong {
        /// What was asked for.
        days: u32,
        /// Whole days until the authority's certificate ends.
        left: i64,
    },
    /// A request is for another identity than the operator named.
    #[error(
        "the request is for {requested}, and not for {named}; sign it under its own name, or refuse it"
    )]
    OtherIdentity {
        /// Whom the request names.
        requested: Subject,
        /// Whom the operator named.
        named: Subject,
    },
    /// A certificate is none of this authority.
    #[error(
        "the certificate {serial} is not in the list of this authority; name one that it issued"
    )]
    NotIssued {
        /// Its serial number.
        serial: Serial,
    },
    /// Nothing valid was issued to a holder.
    #[error("{0} has no certificate that is valid; `ssi-hv pki list` shows all")]
    NothingValid(Holder),
    /// A certificate was revoked before.
    #[error("the certificate {serial} was revoked; issue a new one with another key")]
    Revoked {
        /// Its serial number.
        serial: Serial,
    },
    /// A key, certificate or list cannot be made.
    #[error("cannot make {what}")]
    Making {
        /// What.
        what: &'static str,
        /// Why not.
        source: rcgen::Error,
    },
    /// The system has no random numbers.
    #[error("the system has no random numbers: {0}")]
    Random(getrandom::Error),
    /// The clock is outside of what certificates can say.
    #[error(
        "the clock of this host is at {0} s since 1970, outside the dates of certificates; set it"
    )]
    Clock(i64),
}

impl PkiError {
    pub(crate) const fn making(what: &'static str) -> impl Fn(rcgen::Error) -> Self {
        move |source| Self::Making { what, source }
    }
}
