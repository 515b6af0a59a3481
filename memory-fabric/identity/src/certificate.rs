//! Certificates of donors, which sign themselves.

use crate::Fingerprint;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use sha2::{Digest, Sha256};
use std::io;

/// The name in every certificate: donors are identified by fingerprints, not by names.
pub const NAME: &str = "ssi-hv";

/// Returns the fingerprint of a certificate.
pub(crate) fn fingerprint_of(certificate: &CertificateDer<'_>) -> Fingerprint {
    Fingerprint(Sha256::digest(certificate).into())
}

/// A donor's certificate and its key.
#[derive(Debug)]
pub struct Identity {
    /// The certificate that a node presents.
    pub certificate: CertificateDer<'static>,
    /// Its private key.
    pub key: PrivatePkcs8KeyDer<'static>,
}

impl Identity {
    /// Generates a certificate with its key.
    ///
    /// # Errors
    ///
    /// Fails when there is no randomness for the key.
    pub fn generate() -> io::Result<Self> {
        let made = rcgen::generate_simple_self_signed(vec![NAME.to_owned()]);
        let made = made.map_err(io::Error::other)?;
        Ok(Self {
            certificate: made.cert.der().clone(),
            key: PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()),
        })
    }

    /// Returns the fingerprint of the certificate.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of(&self.certificate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_read_as_it_is_printed() {
        let one = Identity::generate().expect("an identity").fingerprint();
        let other = Identity::generate().expect("an identity").fingerprint();
        assert_ne!(one, other);
        assert_eq!(one.to_string().parse(), Ok(one));
        assert_eq!(one.to_string().to_uppercase().parse(), Ok(one));
        for wrong in ["", "ab", &"g".repeat(64), &"+".repeat(64), &"a".repeat(65)] {
            let error = wrong.parse::<Fingerprint>().expect_err(wrong).to_string();
            assert!(error.contains("64 hexadecimal digits"), "{error}");
        }
    }
}
