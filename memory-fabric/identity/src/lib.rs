//! Who a donor is: a certificate that it makes when it starts, known by its fingerprint.

#[cfg(feature = "certificates")]
mod certificate;
mod fingerprint;

#[cfg(feature = "certificates")]
pub use certificate::{DonorVerifier, Identity, NAME};
pub use fingerprint::{Fingerprint, FingerprintError};
