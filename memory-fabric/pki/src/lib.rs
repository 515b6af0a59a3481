//! The authority of a cluster. It is a directory of files on a host that the operator trusts, and
//! no server: nodes and VMs get their certificates as files.
//!
//! | file | contents |
//! |---|---|
//! | `ca.pem` | the authority's certificate, which members need |
//! | `ca.key` | its private key, which stays here |
//! | `crl.pem` | the list of revoked certificates, which members need |
//! | `issued.toml` | all certificates that were issued |

mod authority;
mod error;
#[cfg(test)]
mod handshake_tests;
mod ledger;
mod member;

pub use authority::{Authority, Validity, date_text};
pub use error::PkiError;
pub use ledger::{Entry, Serial, SerialError, State};
pub use member::{Request, request};
