//! Certificates that are known one by one: those of the processes of one VM on several hosts.
//!
//! Each process makes a key that never leaves it, and a certificate for it that lasts as long as the
//! process. Their fingerprints come to the other processes over connections between members of the
//! cluster. An authority for each boot would do the same with keys that travel; and this needs no
//! clock.

use std::fmt;
use std::io;
use std::sync::Arc;

use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName as Issuer, Error, ServerConfig,
    SignatureScheme,
};

use crate::certificate::{Identity, NAME, fingerprint_of};
use crate::{Fingerprint, Subject};

/// The certificate of this process, and its key.
pub struct PinnedIdentity {
    identity: Identity,
    provider: Arc<CryptoProvider>,
}

impl fmt::Debug for PinnedIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PinnedIdentity")
            .field(&self.fingerprint())
            .finish()
    }
}

impl PinnedIdentity {
    /// Generates a key and a certificate that names `subject`. The name is for people: nothing is
    /// accepted by it.
    ///
    /// # Errors
    ///
    /// Fails when there is no randomness for the key.
    pub fn generate(subject: &Subject) -> io::Result<Self> {
        let key = KeyPair::generate().map_err(io::Error::other)?;
        let names = vec![NAME.to_owned()];
        let mut parameters = CertificateParams::new(names).map_err(io::Error::other)?;
        let uri = subject.to_string().try_into().map_err(io::Error::other)?;
        parameters.subject_alt_names.push(SanType::URI(uri));
        parameters.distinguished_name = DistinguishedName::new();
        let certificate = parameters.self_signed(&key).map_err(io::Error::other)?;
        Ok(Self {
            identity: Identity {
                certificate: certificate.der().clone(),
                key: PrivatePkcs8KeyDer::from(key.serialize_der()),
            },
            provider: Arc::new(rustls::crypto::ring::default_provider()),
        })
    }

    /// Returns the fingerprint by which others know this process.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.identity.fingerprint()
    }

    fn verifier(&self, accepted: Vec<Fingerprint>) -> Arc<PinnedVerifier> {
        Arc::new(PinnedVerifier {
            accepted,
            algorithms: self.provider.signature_verification_algorithms,
        })
    }

    /// Returns the configuration for a connection to the process with the certificate `peer`: TLS 1.3
    /// only, and no session is resumed.
    ///
    /// # Errors
    ///
    /// Fails when the key cannot be used for this.
    pub fn client(&self, peer: Fingerprint) -> Result<ClientConfig, Error> {
        let mut tls = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(self.verifier(vec![peer]))
            .with_client_auth_cert(
                vec![self.identity.certificate.clone()],
                self.identity.key.clone_key().into(),
            )?;
        tls.resumption = Resumption::disabled();
        Ok(tls)
    }

    /// Returns the configuration for connections from the processes with the certificates `peers`: TLS
    /// 1.3 only, and no session is resumed.
    ///
    /// # Errors
    ///
    /// Fails when the key cannot be used for this.
    pub fn server(&self, peers: Vec<Fingerprint>) -> Result<ServerConfig, Error> {
        let mut tls = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(self.verifier(peers))
            .with_single_cert(
                vec![self.identity.certificate.clone()],
                self.identity.key.clone_key().into(),
            )?;
        tls.send_tls13_tickets = 0;
        tls.max_early_data_size = 0;
        Ok(tls)
    }
}

/// Accepts certificates with these fingerprints, whose holders prove that they have the keys.
#[derive(Debug)]
struct PinnedVerifier {
    accepted: Vec<Fingerprint>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl PinnedVerifier {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let found = fingerprint_of(certificate);
        if self.accepted.contains(&found) {
            return Ok(());
        }
        Err(Error::General(format!(
            "its fingerprint is {found}, which is not that of a process of this VM that is expected \
             here: it is of another VM or an earlier boot, or a third party intercepts the connection"
        )))
    }
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
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

impl ClientCertVerifier for PinnedVerifier {
    fn root_hint_subjects(&self) -> &[Issuer] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
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

/// The processes of one VM as one of them knows them, and what its connections to them are made of.
#[derive(Debug)]
pub struct PinnedPeers {
    table: Vec<Fingerprint>,
    clients: Vec<Arc<ClientConfig>>,
    server: Arc<ServerConfig>,
}

impl PinnedPeers {
    /// Lists the processes in their order. The process with `identity` is at the place `me`: it connects
    /// to those behind it, and accepts those before it.
    ///
    /// # Errors
    ///
    /// Fails when the key cannot be used for this.
    pub fn new(
        identity: &PinnedIdentity,
        me: usize,
        table: Vec<Fingerprint>,
    ) -> Result<Self, Error> {
        let clients = table
            .iter()
            .map(|peer| identity.client(*peer).map(Arc::new));
        let before = table.iter().take(me).copied().collect();
        Ok(Self {
            clients: clients.collect::<Result<_, _>>()?,
            server: Arc::new(identity.server(before)?),
            table,
        })
    }

    /// Returns the configuration for a connection to the process at this place, if there is one.
    #[must_use]
    pub fn client(&self, place: usize) -> Option<Arc<ClientConfig>> {
        self.clients.get(place).cloned()
    }

    /// Returns the configuration for connections from other processes.
    #[must_use]
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// Returns the place of the process with this certificate.
    #[must_use]
    pub fn place_of(&self, certificate: &CertificateDer<'_>) -> Option<usize> {
        let found = fingerprint_of(certificate);
        self.table.iter().position(|one| *one == found)
    }
}
