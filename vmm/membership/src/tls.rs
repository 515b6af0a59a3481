//! TLS to etcd, in both directions: etcd proves its name, and the process shows its certificate.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use fabric_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE, certificates};
use fabric_identity::files;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};

use crate::error::TlsError;

/// What a process shows etcd, and which authorities it believes.
#[derive(Clone)]
pub struct Tls(pub(crate) Arc<ClientConfig>);

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads `ca.pem`, and `cert.pem` with `key.pem`, in a directory.
    ///
    /// # Errors
    ///
    /// Fails when a file is missing or malformed, or others may read the key.
    pub fn load(directory: &Path) -> Result<Self, TlsError> {
        let unusable = |name: &str, reason: &dyn fmt::Display| TlsError::Unusable {
            path: directory.join(name),
            reason: reason.to_string(),
        };
        let mut roots = RootCertStore::empty();
        for authority in certificates(&directory.join(AUTHORITIES_FILE))? {
            let added = roots.add(authority);
            added.map_err(|error| unusable(AUTHORITIES_FILE, &error))?;
        }
        let chain = certificates(&directory.join(CERTIFICATE_FILE))?;
        let key = files::read_private(&directory.join(KEY_FILE))?;
        let key = PrivateKeyDer::from_pem_slice(&key);
        let key = key.map_err(|error| unusable(KEY_FILE, &error))?;
        let config = ClientConfig::builder_with_provider(fabric_identity::provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| unusable(CERTIFICATE_FILE, &error))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|error| unusable(KEY_FILE, &error))?;
        Ok(Self(Arc::new(config)))
    }
}
