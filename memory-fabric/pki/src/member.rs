//! What members of a cluster have: keys, requests and certificates, as files in a directory.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use fabric_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE, REVOKED_FILE};
use fabric_identity::files::{self, Readers};
use fabric_identity::{NAME, Role, Subject, revocation};
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use crate::PkiError;
use crate::ledger::Entry;

/// The request for a certificate, beside the key that it is for.
const REQUEST_FILE: &str = "request.pem";

/// Creates a directory if it is absent.
pub(crate) fn directory(path: &Path) -> Result<(), PkiError> {
    // Only the owner looks into a directory with a key.
    let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.map_err(|source| PkiError::Directory {
        path: path.to_owned(),
        source,
    })
}

/// Refuses a path at which there is something.
pub(crate) fn absent(path: &Path) -> Result<(), PkiError> {
    // What cannot be examined cannot be created either, which then has the better error.
    if path.symlink_metadata().is_ok() {
        return Err(PkiError::Exists(path.to_owned()));
    }
    Ok(())
}

/// Returns what a certificate or request for `subject` contains.
pub(crate) fn parameters(subject: &Subject) -> Result<CertificateParams, PkiError> {
    let text = |text: &str| text.try_into().map_err(PkiError::making("a name"));
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    let name = subject.holder.to_string();
    parameters.distinguished_name.push(DnType::CommonName, name);
    parameters.subject_alt_names = vec![SanType::URI(text(&subject.to_string())?)];
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if subject.holder.role == Role::Node {
        // Nodes are found by address. TLS wants the name of a server: it is the same for all.
        let name = SanType::DnsName(text(NAME)?);
        parameters.subject_alt_names.push(name);
        let server = ExtendedKeyUsagePurpose::ServerAuth;
        parameters.extended_key_usages.push(server);
    }
    Ok(parameters)
}

/// A request for a certificate that an authority can sign.
#[derive(Debug)]
pub struct Request {
    pub(crate) subject: Subject,
    pub(crate) public_key: rcgen::PublicKey,
}

impl Request {
    /// Reads a request, and checks that its maker has the private key.
    ///
    /// # Errors
    /// Fails when it cannot be read, is malformed, or names no member of a cluster.
    pub fn read(path: &Path) -> Result<Self, PkiError> {
        let wrong = |reason: String| PkiError::Content {
            path: path.to_owned(),
            reason,
        };
        let text = String::from_utf8(files::read(path)?);
        let text = text.map_err(|error| wrong(error.to_string()))?;
        let parsed = CertificateSigningRequestParams::from_pem(&text);
        let parsed = parsed.map_err(|error| wrong(error.to_string()))?;
        let uris: Vec<_> = parsed
            .params
            .subject_alt_names
            .iter()
            .filter_map(|name| match name {
                SanType::URI(uri) => Some(uri.as_str()),
                _ => None,
            })
            .collect();
        let [uri] = uris[..] else {
            let count = uris.len();
            return Err(wrong(format!(
                "it has {count} URIs as alternative names; one made by `ssi-hv pki request` has 1"
            )));
        };
        let subject: Result<Subject, fabric_identity::SubjectError> = uri.parse();
        Ok(Self {
            subject: subject.map_err(|error| wrong(error.to_string()))?,
            public_key: parsed.public_key,
        })
    }
}

/// Makes a key, and a request for a certificate for it, in `path`. The key never leaves that
/// directory. Returns the file of the request.
///
/// # Errors
/// Fails when there is a key already, or a file cannot be written.
pub fn request(subject: &Subject, path: &Path) -> Result<PathBuf, PkiError> {
    directory(path)?;
    absent(&path.join(KEY_FILE))?;
    let key = KeyPair::generate().map_err(PkiError::making("a key"))?;
    let request = parameters(subject)?
        .serialize_request(&key)
        .and_then(|request| request.pem())
        .map_err(PkiError::making("a request"))?;
    let request_path = path.join(REQUEST_FILE);
    write_key(&key, path)?;
    files::write(&request_path, request.as_bytes(), Readers::All)?;
    Ok(request_path)
}

/// Writes the private key of a member into its directory.
pub(crate) fn write_key(key: &KeyPair, path: &Path) -> Result<(), PkiError> {
    let path = path.join(KEY_FILE);
    let written = files::write(&path, key.serialize_pem().as_bytes(), Readers::Owner);
    Ok(written?)
}

/// A certificate, and what its holder needs beside it.
#[derive(Debug)]
pub(crate) struct Issued {
    pub(crate) entry: Entry,
    pub(crate) certificate: String,
    pub(crate) authority: String,
    pub(crate) revoked: String,
}

impl Issued {
    /// Writes the files into a directory, and returns what the authority remembers of the certificate.
    /// A member that trusts other authorities as well continues to do so.
    pub(crate) fn write(self, path: &Path) -> Result<Entry, PkiError> {
        let (authorities, revoked) = self.beside_others(path)?;
        for (name, content) in [
            (AUTHORITIES_FILE, &authorities),
            (REVOKED_FILE, &revoked),
            (CERTIFICATE_FILE, &self.certificate),
        ] {
            files::write(&path.join(name), content.as_bytes(), Readers::All)?;
        }
        Ok(self.entry)
    }

    /// Returns the authorities and the lists of a member with these files.
    fn beside_others(&self, path: &Path) -> Result<(String, String), PkiError> {
        let authorities = there(&path.join(AUTHORITIES_FILE))?;
        if !has_others(&authorities, &self.authority) {
            return Ok((self.authority.clone(), self.revoked.clone()));
        }
        let lists = path.join(REVOKED_FILE);
        let revoked = there(&lists)? + "\n" + &self.revoked;
        let revoked = revocation::newest_of(&revoked);
        let revoked = revoked.map_err(|reason| PkiError::Content {
            path: lists,
            reason,
        })?;
        Ok((authorities, revoked))
    }
}

/// Returns a file of PEM as text; what does not exist is empty.
fn there(path: &Path) -> Result<String, PkiError> {
    if !path.try_exists().unwrap_or(true) {
        return Ok(String::new());
    }
    // What is no text is between its parts.
    Ok(String::from_utf8_lossy(&files::read(path)?).into_owned())
}

/// Whether a list of authorities has this one and others.
fn has_others(authorities: &str, own: &str) -> bool {
    let Ok(own) = CertificateDer::from_pem_slice(own.as_bytes()) else {
        return false;
    };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(authorities.as_bytes()).collect();
    all.is_ok_and(|all| all.len() > 1 && all.contains(&own))
}
