//! Certificates that are known one by one: those of the processes of one VM on several hosts.
//!
//! Each process makes a key that never leaves it, and a certificate for it that lasts as long as
//! the process. Their fingerprints come to the other processes over connections between members of
//! the cluster. An authority for each boot would do the same with keys that travel; and this needs
//! no clock.

use std::fmt;
use std::io;
use std::sync::Arc;

use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::version::TLS13;
use rustls::{ClientConfig, Error, ServerConfig};

use crate::by_fingerprint::FingerprintVerifier;
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
            provider: crate::provider(),
        })
    }

    /// Returns the fingerprint by which others know this process.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.identity.fingerprint()
    }

    /// Returns the certificate and its key.
    pub(crate) fn parts(&self) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
        let key = self.identity.key.clone_key();
        (self.identity.certificate.clone(), key.into())
    }

    fn verifier(&self, accepted: Vec<Fingerprint>) -> Arc<FingerprintVerifier> {
        Arc::new(FingerprintVerifier::of_processes(accepted, &self.provider))
    }

    /// Returns the configuration for a connection to the process with the certificate `peer`: TLS
    /// 1.3 only, and no session is resumed.
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

    /// Returns the configuration for connections from the processes with the certificates `peers`:
    /// TLS 1.3 only, and no session is resumed.
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

/// The processes of one VM as one of them knows them, and what its connections to them are made of.
#[derive(Debug)]
pub struct PinnedPeers {
    table: Vec<Fingerprint>,
    clients: Vec<Arc<ClientConfig>>,
    server: Arc<ServerConfig>,
}

impl PinnedPeers {
    /// Lists the processes in their order. The process with `identity` is at the place `me`: it
    /// connects to those behind it, and accepts those before it.
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
