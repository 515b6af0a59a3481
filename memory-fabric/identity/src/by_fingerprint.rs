//! Certificates that are accepted by their fingerprints alone, whoever signed them.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use crate::Fingerprint;
use crate::certificate::fingerprint_of;
use crate::presented::check_chain;

/// Which fingerprints are accepted.
#[derive(Debug)]
enum Accepted {
    /// That of a donor, or any if none is given.
    Donor(Option<Fingerprint>),
    /// Those of processes of one VM.
    Processes(Vec<Fingerprint>),
}

/// Accepts a certificate by its fingerprint. The peer must prove that it has the private key.
#[derive(Debug)]
pub struct FingerprintVerifier {
    accepted: Accepted,
    algorithms: WebPkiSupportedAlgorithms,
}

impl FingerprintVerifier {
    /// Creates a verifier that accepts the donor with the fingerprint `wanted`, or any.
    #[must_use]
    pub fn of_donor(wanted: Option<Fingerprint>, provider: &CryptoProvider) -> Self {
        Self::new(Accepted::Donor(wanted), provider)
    }

    /// Creates a verifier that accepts these processes of a VM.
    pub(crate) fn of_processes(accepted: Vec<Fingerprint>, provider: &CryptoProvider) -> Self {
        Self::new(Accepted::Processes(accepted), provider)
    }

    fn new(accepted: Accepted, provider: &CryptoProvider) -> Self {
        Self {
            accepted,
            algorithms: provider.signature_verification_algorithms,
        }
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let found = fingerprint_of(certificate);
        match &self.accepted {
            Accepted::Donor(Some(wanted)) if *wanted != found => Err(Error::General(format!(
                "its fingerprint is {found}, and not {wanted}: it is another node, or was \
                 restarted, or a third party intercepts the connection; give the fingerprint that the \
                 node printed"
            ))),
            Accepted::Processes(accepted) if !accepted.contains(&found) => {
                Err(Error::General(format!(
                    "its fingerprint is {found}, which is not that of a process of this VM that is \
                     expected here: it is of another VM or an earlier boot, or a third party \
                     intercepts the connection"
                )))
            }
            Accepted::Donor(_) | Accepted::Processes(_) => Ok(()),
        }
    }
}

impl ServerCertVerifier for FingerprintVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check_chain(certificate, intermediates).map_err(Error::General)?;
        self.check(certificate)?;
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

impl ClientCertVerifier for FingerprintVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_chain(certificate, intermediates).map_err(Error::General)?;
        self.check(certificate)?;
        Ok(ClientCertVerified::assertion())
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
