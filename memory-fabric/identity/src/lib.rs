//! The identity of a donor: a certificate that it generates at start, identified by its
//! fingerprint.

#[cfg(feature = "certificates")]
mod certificate;
mod fingerprint;

#[cfg(feature = "certificates")]
pub use certificate::{DonorVerifier, Identity, NAME};
pub use fingerprint::{Fingerprint, FingerprintError};
