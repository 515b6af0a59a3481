//! Who a process is: the subjects of certificates, credentials that an authority confirms, and
//! certificates that a donor generates at its start, identified by their fingerprints.

#[cfg(feature = "certificates")]
mod by_fingerprint;
#[cfg(feature = "certificates")]
mod certificate;
#[cfg(feature = "certificates")]
pub mod credentials;
#[cfg(feature = "certificates")]
mod delegates;
pub mod files;
mod fingerprint;
mod pattern;
#[cfg(feature = "certificates")]
pub mod pinned;
#[cfg(feature = "certificates")]
pub mod presented;
#[cfg(feature = "certificates")]
mod provider;
#[cfg(feature = "certificates")]
pub mod revocation;
#[cfg(feature = "certificates")]
mod shared;
pub mod subject;
#[cfg(feature = "certificates")]
mod verifiers;

#[cfg(feature = "certificates")]
pub use by_fingerprint::FingerprintVerifier;
#[cfg(feature = "certificates")]
pub use certificate::{Identity, NAME};
#[cfg(feature = "certificates")]
pub use credentials::{Credentials, CredentialsError};
#[cfg(feature = "certificates")]
pub use delegates::{Delegates, Delegation};
pub use fingerprint::{Fingerprint, FingerprintError};
pub use pattern::HolderPattern;
#[cfg(feature = "certificates")]
pub use provider::provider;
#[cfg(feature = "certificates")]
pub use rustls::pki_types::CertificateDer;
#[cfg(feature = "certificates")]
pub use shared::{ExpectedNode, ReloadError, SharedCredentials};
pub use subject::{Holder, Name, Role, Subject, SubjectError};
