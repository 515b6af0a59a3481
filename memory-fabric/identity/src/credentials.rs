//! The certificate, key and authorities with which a process proves who it is, and checks others.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::delegates::Delegates;
use crate::files::{self, FileError};
use crate::pinned::PinnedIdentity;
use crate::presented::{Presented, PresentedError, check_chain};
use crate::subject::{Name, Role, Subject};
use crate::verifiers::{Confirming, MemberVerifier, NodeVerifier, Revocation};
use crate::{Fingerprint, certificate, revocation};

/// The certificate, and those between it and the authority.
pub const CERTIFICATE_FILE: &str = "cert.pem";
/// Its private key.
pub const KEY_FILE: &str = "key.pem";
/// The authorities whose certificates are accepted: two while one replaces the other.
pub const AUTHORITIES_FILE: &str = "ca.pem";
/// Lists of revoked certificates, of which the newest of each authority counts. Without the file none is
/// revoked.
pub const REVOKED_FILE: &str = "crl.pem";

/// Limit of the certificates in one file.
const CERTIFICATES_MAX: usize = 16;

/// Credentials that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file has no such content.
    #[error("{path} has no {what} in PEM: {reason}", path = path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        what: &'static str,
        /// Why it is none.
        reason: String,
    },
    /// A file has too many certificates.
    #[error("{path} has {count} certificates, and may have {CERTIFICATES_MAX}", path = path.display())]
    Many {
        /// The file.
        path: PathBuf,
        /// How many.
        count: usize,
    },
    /// The certificate names no member.
    #[error("{path}: {reason}", path = path.display())]
    Presented {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: PresentedError,
    },
    /// Key and certificate do not belong together.
    #[error("the key in {path} is not that of the certificate: {reason}", path = path.display())]
    Key {
        /// The file of the key.
        path: PathBuf,
        /// Why not.
        reason: rustls::Error,
    },
    /// The authorities do not confirm the certificate: it has expired, was revoked, or is another's.
    #[error(
        "{path} is not confirmed by the authorities in {authorities}: {reason}",
        path = path.display(), authorities = authorities.display()
    )]
    Refused {
        /// The file of the certificate.
        path: PathBuf,
        /// The file of the authorities.
        authorities: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The authorities or lists of revoked certificates cannot be used.
    #[error("{path} cannot be used: {reason}", path = path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

/// What a process proves its identity with.
pub struct Credentials {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Arc<RootCertStore>,
    /// As in the file; `roots` has only what is compared.
    authorities: Vec<CertificateDer<'static>>,
    revoked: Vec<CertificateRevocationListDer<'static>>,
    provider: Arc<CryptoProvider>,
    presented: Presented,
    /// What [`Self::confirm`] checks with, made by its first use.
    confirming: OnceLock<Result<Confirming<dyn ClientCertVerifier>, String>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("presented", &self.presented)
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads the credentials in a directory, as `ssi-hv pki issue` writes it, and checks that they
    /// are valid now.
    ///
    /// # Errors
    /// Fails when a file is missing or malformed, when others may read the key, when key and
    /// certificate differ, and when the authorities do not confirm the certificate.
    pub fn load(directory: &Path) -> Result<Self, CredentialsError> {
        let path = directory.join(CERTIFICATE_FILE);
        let chain = certificates(&path)?;
        let key_path = directory.join(KEY_FILE);
        let key = PrivateKeyDer::from_pem_slice(&files::read_private(&key_path)?);
        let key = key.map_err(|error| content(&key_path, "private key", &error))?;
        let authorities = directory.join(AUTHORITIES_FILE);
        let trusted = certificates(&authorities)?;
        let roots = Arc::new(roots(&authorities, &trusted)?);
        let revoked = revoked(&directory.join(REVOKED_FILE))?;
        let presented = Presented::read(&chain[0]).map_err(|reason| {
            let path = path.clone();
            CredentialsError::Presented { path, reason }
        })?;
        let provider = crate::provider();
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &provider).map_err(|reason| {
            CredentialsError::Key {
                path: key_path,
                reason,
            }
        })?;
        let loaded = Self {
            chain,
            key,
            roots,
            authorities: trusted,
            revoked,
            provider,
            presented,
            confirming: OnceLock::new(),
        };
        let refused = |reason: &dyn fmt::Display| CredentialsError::Refused {
            path: path.clone(),
            authorities: authorities.clone(),
            reason: reason.to_string(),
        };
        // Its peers would refuse it.
        check_chain(&loaded.chain[0], &loaded.chain[1..]).map_err(|why| refused(&why))?;
        // Every certificate of an authority of this program is one for clients.
        let verifier = loaded.confirming()?;
        let (certificate, between) = (&loaded.chain[0], &loaded.chain[1..]);
        let confirmed = verifier.confirm(between, |verifier| {
            verifier.verify_client_cert(certificate, between, now())
        });
        confirmed.map_err(|error| refused(&error))?;
        Ok(loaded)
    }

    /// Makes those of a process that a member of `cluster` delegates to: it shows its own
    /// certificate, and accepts what these authorities confirm. Lists of revoked certificates it
    /// has none.
    ///
    /// # Errors
    /// Fails when an authority has no such certificate, or there is none.
    pub fn of_process(
        identity: &PinnedIdentity,
        cluster: Name,
        authorities: Vec<CertificateDer<'static>>,
    ) -> Result<Self, CredentialsError> {
        let unusable = |reason: String| CredentialsError::Unusable {
            path: AUTHORITIES_FILE.into(),
            reason,
        };
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            let added = roots.add(authority);
            added.map_err(|error| unusable(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(unusable("it names no authority".to_owned()));
        }
        let (certificate, key) = identity.parts();
        let presented = Presented::read(&certificate);
        let mut presented = presented.map_err(|error| unusable(error.to_string()))?;
        presented.subject.cluster = cluster;
        Ok(Self {
            chain: vec![certificate],
            key,
            roots: Arc::new(roots),
            authorities: Vec::new(),
            revoked: Vec::new(),
            provider: crate::provider(),
            presented,
            confirming: OnceLock::new(),
        })
    }

    /// Returns the certificates of the authorities.
    #[must_use]
    pub fn authorities(&self) -> &[CertificateDer<'static>] {
        &self.authorities
    }

    /// Returns whom the certificate names.
    #[must_use]
    pub const fn subject(&self) -> &Subject {
        &self.presented.subject
    }

    /// Returns what the certificate says.
    #[must_use]
    pub const fn presented(&self) -> &Presented {
        &self.presented
    }

    /// Returns the fingerprint of the certificate.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        certificate::fingerprint_of(&self.chain[0])
    }

    /// Checks who confirms a certificate of a client, without what is specific to a cluster.
    fn confirming(&self) -> Result<Confirming<dyn ClientCertVerifier>, CredentialsError> {
        Confirming::new(!self.revoked.is_empty(), |revocation| {
            let (roots, provider) = (Arc::clone(&self.roots), Arc::clone(&self.provider));
            let builder = WebPkiClientVerifier::builder_with_provider(roots, provider)
                .with_crls(self.revoked.clone());
            let builder = match revocation {
                Revocation::OfFirst => builder.only_check_end_entity_revocation(),
                Revocation::OfAllKnown => builder.allow_unknown_revocation_status(),
            };
            builder.build().map_err(unusable_lists)
        })
    }

    /// Checks that the authorities confirm the certificate of a peer now, and that it was not revoked.
    ///
    /// # Errors
    /// Fails with the reason when they do not.
    pub fn confirm(&self, chain: &[CertificateDer<'_>]) -> Result<(), String> {
        let Some((certificate, between)) = chain.split_first() else {
            return Err("there is no certificate".to_owned());
        };
        check_chain(certificate, between)?;
        let verifier = self.confirming.get_or_init(|| {
            let verifier = self.confirming();
            verifier.map_err(|error| error.to_string())
        });
        let verifier = verifier.as_ref().map_err(Clone::clone)?;
        let confirmed = verifier.confirm(between, |verifier| {
            verifier.verify_client_cert(certificate, between, now())
        });
        confirmed.map(|_| ()).map_err(|error| error.to_string())
    }

    /// Returns the TLS configuration of a node: TLS 1.3 only, clients must be members of the same
    /// cluster, and no session is resumed.
    ///
    /// # Errors
    /// Fails when the credentials cannot be used for this.
    pub fn server(&self) -> Result<ServerConfig, CredentialsError> {
        self.server_with(Arc::default())
    }

    /// As [`server`](Self::server), and accepts `delegates` too.
    pub(crate) fn server_with(
        &self,
        delegates: Arc<Delegates>,
    ) -> Result<ServerConfig, CredentialsError> {
        let verifier = MemberVerifier::new(
            self.confirming()?,
            self.presented.subject.cluster.clone(),
            &Role::ALL,
            delegates,
        );
        let provider = Arc::clone(&self.provider);
        let mut tls = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .map_err(unusable)?;
        // Each connection is checked anew, so that a revoked certificate ends with its connections.
        tls.send_tls13_tickets = 0;
        tls.max_early_data_size = 0;
        Ok(tls)
    }

    /// Returns the TLS configuration of a VM's end: TLS 1.3 only, and the peer must be the node of the
    /// same cluster with the name `node`.
    ///
    /// # Errors
    /// Fails when the credentials cannot be used for this.
    pub fn client(&self, node: &Name) -> Result<ClientConfig, CredentialsError> {
        let provider = Arc::clone(&self.provider);
        let confirming = Confirming::new(!self.revoked.is_empty(), |revocation| {
            let (roots, provider) = (Arc::clone(&self.roots), Arc::clone(&self.provider));
            let builder = WebPkiServerVerifier::builder_with_provider(roots, provider)
                .with_crls(self.revoked.clone());
            let builder = match revocation {
                Revocation::OfFirst => builder.only_check_end_entity_revocation(),
                Revocation::OfAllKnown => builder.allow_unknown_revocation_status(),
            };
            builder.build().map_err(unusable_lists)
        })?;
        let cluster = self.presented.subject.cluster.clone();
        let verifier = NodeVerifier::new(confirming, cluster, node.clone());
        let mut tls = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(unusable)?;
        tls.resumption = Resumption::disabled();
        Ok(tls)
    }
}

fn now() -> UnixTime {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    UnixTime::since_unix_epoch(now.unwrap_or_default())
}

fn unusable_lists(error: impl std::error::Error) -> CredentialsError {
    CredentialsError::Unusable {
        path: REVOKED_FILE.into(),
        reason: error.to_string(),
    }
}

fn unusable(error: rustls::Error) -> CredentialsError {
    CredentialsError::Unusable {
        path: CERTIFICATE_FILE.into(),
        reason: error.to_string(),
    }
}

fn content(path: &Path, what: &'static str, reason: &dyn fmt::Display) -> CredentialsError {
    CredentialsError::Content {
        path: path.to_owned(),
        what,
        reason: reason.to_string(),
    }
}

/// Reads the certificates of a file: at least one.
///
/// # Errors
/// Fails when the file cannot be read, has none, or too many.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let bytes = files::read(path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let read = read.map_err(|error| content(path, "certificate", &error))?;
    match read.len() {
        0 => Err(content(path, "certificate", &"there is no such section")),
        count if count > CERTIFICATES_MAX => Err(CredentialsError::Many {
            path: path.to_owned(),
            count,
        }),
        _ => Ok(read),
    }
}

fn roots(
    path: &Path,
    authorities: &[CertificateDer<'static>],
) -> Result<RootCertStore, CredentialsError> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        let added = roots.add(authority.clone());
        added.map_err(|error| content(path, "certificate of an authority", &error))?;
    }
    Ok(roots)
}

fn revoked(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialsError> {
    if !path.try_exists().unwrap_or(true) {
        return Ok(Vec::new());
    }
    let bytes = files::read(path)?;
    let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&bytes).collect();
    match lists {
        Ok(lists) if !lists.is_empty() => revocation::newest(lists)
            .map_err(|reason| content(path, "list of revoked certificates", &reason)),
        Ok(_) => Err(content(
            path,
            "list of revoked certificates",
            &"there is no such section",
        )),
        Err(error) => Err(content(path, "list of revoked certificates", &error)),
    }
}
