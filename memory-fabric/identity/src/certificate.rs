//! Certificates of donors: generation and verification.

use crate::Fingerprint;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};
use sha2::{Digest, Sha256};
use std::io;

/// The name in every certificate: donors are identified by fingerprints, not by names.
pub const NAME: &str = "ssi-hv";

/// Returns the fingerprint of a certificate.
pub(crate) fn fingerprint_of(certificate: &CertificateDer<'_>) -> Fingerprint {
    Fingerprint(Sha256::digest(certificate).into())
}

/// Checks that a certificate has the fingerprint `wanted`, if one is given.
pub(crate) fn check_fingerprint(
    certificate: &CertificateDer<'_>,
    wanted: Option<Fingerprint>,
) -> Result<(), Error> {
    let found = fingerprint_of(certificate);
    match wanted {
        Some(wanted) if wanted != found => Err(Error::General(format!(
            "its fingerprint is {found}, and not {wanted}: it is another node, or was \
             restarted, or a third party intercepts the connection; give the fingerprint that the \
             node printed"
        ))),
        _ => Ok(()),
    }
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

/// Accepts the donor with one fingerprint, or any donor if none is given. In both cases the peer
/// must prove that it has the private key of its certificate.
#[derive(Debug)]
pub struct DonorVerifier {
    wanted: Option<Fingerprint>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl DonorVerifier {
    /// Creates a verifier that accepts the donor with the fingerprint `wanted`, or any.
    #[must_use]
    pub fn new(wanted: Option<Fingerprint>, provider: &CryptoProvider) -> Self {
        Self {
            wanted,
            algorithms: provider.signature_verification_algorithms,
        }
    }
}

impl ServerCertVerifier for DonorVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check_fingerprint(certificate, self.wanted)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
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
