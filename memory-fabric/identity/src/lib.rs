//! Who a donor is: a certificate that it makes when it starts, known by its fingerprint.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};
use sha2::{Digest, Sha256};
use std::fmt;
use std::io;
use std::str::FromStr;

/// The name in every certificate: nodes are known by their fingerprints.
pub const NAME: &str = "ssi-hv";

/// Digits of a fingerprint.
const DIGITS: usize = 64;

/// SHA-256 of a donor's certificate.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub struct Fingerprint([u8; 32]);

/// Why a text is not a fingerprint.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{0}` is not a fingerprint; give the {DIGITS} hexadecimal digits that the node printed")]
pub struct FingerprintError(String);

impl Fingerprint {
    fn of(certificate: &CertificateDer<'_>) -> Self {
        Self(Sha256::digest(certificate).into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || FingerprintError(text.to_owned());
        if text.len() != DIGITS || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        for (place, byte) in bytes.iter_mut().enumerate() {
            let digits = &text[2 * place..2 * place + 2];
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

/// A donor's certificate and its key.
#[derive(Debug)]
pub struct Identity {
    /// The certificate, which a node shows.
    pub certificate: CertificateDer<'static>,
    /// Its private key.
    pub key: PrivatePkcs8KeyDer<'static>,
}

impl Identity {
    /// A new certificate and key.
    ///
    /// # Errors
    ///
    /// When there is no randomness for the key.
    pub fn generate() -> io::Result<Self> {
        let made = rcgen::generate_simple_self_signed(vec![NAME.to_owned()]);
        let made = made.map_err(io::Error::other)?;
        Ok(Self {
            certificate: made.cert.der().clone(),
            key: PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()),
        })
    }

    /// The fingerprint of the certificate.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }
}

/// Accepts the donor with one fingerprint, or any where none was given. In either case the other
/// end has to have the key of the certificate that it shows.
#[derive(Debug)]
pub struct DonorVerifier {
    wanted: Option<Fingerprint>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl DonorVerifier {
    /// A verifier that accepts the donor with the fingerprint `wanted`, or any.
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
        let found = Fingerprint::of(certificate);
        match self.wanted {
            Some(wanted) if wanted != found => Err(Error::General(format!(
                "its fingerprint is {found}, and not {wanted}: it is another node, or was started \
                 again, or somebody is in between; give the fingerprint that the node printed"
            ))),
            _ => Ok(ServerCertVerified::assertion()),
        }
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
