//! What a certificate says of its holder.

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::subject::{Subject, SubjectError};

/// Limit of the certificates that a peer shows: its own, and those between it and the authority.
pub const CHAIN_CERTIFICATES_MAX: usize = 4;

/// Limit of their bytes. An end keeps what its peer shows as long as the connection; certificates of
/// `ssi-hv pki` have some 600 bytes, and those with RSA keys of 4,096 bits some 2,000.
pub const CHAIN_BYTES_MAX: usize = 8 << 10;

/// Checks that what a peer shows is within its limits.
pub(crate) fn check_chain(
    certificate: &CertificateDer<'_>,
    between: &[CertificateDer<'_>],
) -> Result<(), String> {
    let count = 1 + between.len();
    let bytes = certificate.len() + between.iter().map(|one| one.len()).sum::<usize>();
    if count <= CHAIN_CERTIFICATES_MAX && bytes <= CHAIN_BYTES_MAX {
        return Ok(());
    }
    Err(format!(
        "it comes with others as a chain of {count} certificates and {bytes} bytes, and \
         {CHAIN_CERTIFICATES_MAX} of {CHAIN_BYTES_MAX} bytes are the limit; show it with those \
         between it and the authority alone"
    ))
}

/// A certificate that names no member of a cluster.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PresentedError {
    /// It is malformed.
    #[error("the certificate is malformed: {0}")]
    Malformed(String),
    /// It has no URI, or several.
    #[error("the certificate has {0} URIs as alternative names; one of an ssi-hv authority has 1")]
    Uris(usize),
    /// Its URI is no identity.
    #[error(transparent)]
    Subject(#[from] SubjectError),
}

/// The contents of a certificate that this program uses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Presented {
    /// Whom it names.
    pub subject: Subject,
    /// Its serial number, big-endian.
    pub serial: Vec<u8>,
    /// First second of its validity, since 1970.
    pub not_before: i64,
    /// Last second of its validity, since 1970.
    pub not_after: i64,
    /// The public key with its algorithm (`SubjectPublicKeyInfo`, RFC 5280), as DER.
    pub public_key: Vec<u8>,
}

impl Presented {
    /// Reads a certificate. It says nothing of whether the certificate can be believed.
    ///
    /// # Errors
    /// Fails when it is malformed, or does not name one member of a cluster.
    pub fn read(certificate: &CertificateDer<'_>) -> Result<Self, PresentedError> {
        let parsed = parse(certificate)?;
        let names = parsed.subject_alternative_name();
        let names = names.map_err(|error| PresentedError::Malformed(error.to_string()))?;
        let names = names.map_or(&[][..], |extension| &extension.value.general_names);
        let uris: Vec<&str> = names
            .iter()
            .filter_map(|name| match name {
                GeneralName::URI(uri) => Some(*uri),
                _ => None,
            })
            .collect();
        let [uri] = uris[..] else {
            return Err(PresentedError::Uris(uris.len()));
        };
        Ok(Self {
            subject: uri.parse()?,
            serial: parsed.raw_serial().to_vec(),
            not_before: parsed.validity().not_before.timestamp(),
            not_after: parsed.validity().not_after.timestamp(),
            public_key: parsed.public_key().raw.to_vec(),
        })
    }
}

/// Returns the public key of any certificate, with its algorithm, as DER.
///
/// # Errors
/// Fails when the certificate is malformed.
pub fn public_key(certificate: &CertificateDer<'_>) -> Result<Vec<u8>, PresentedError> {
    Ok(parse(certificate)?.public_key().raw.to_vec())
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, PresentedError> {
    match X509Certificate::from_der(certificate) {
        Ok(([], parsed)) => Ok(parsed),
        Ok((rest, _)) => {
            let count = rest.len();
            Err(PresentedError::Malformed(format!(
                "{count} bytes follow it"
            )))
        }
        Err(error) => Err(PresentedError::Malformed(error.to_string())),
    }
}
