//! Lists of revoked certificates: the newest of each authority counts.
//!
//! While one authority replaces another, a file has the lists of both, one behind the other. A list
//! that is appended later does not replace the older one of its authority by itself: rustls uses the
//! first that it finds.

use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject as _;
use x509_parser::prelude::{CertificateRevocationList, FromDer};

/// AuthorityKeyIdentifier (RFC 5280, section 5.2.1), which distinguishes keys of one name.
const AUTHORITY_KEY_IDENTIFIER: &str = "2.5.29.35";

/// Whose list it is, and which one.
struct ListOf {
    issuer: Vec<u8>,
    key: Option<Vec<u8>>,
    /// Its number, big-endian without leading zeros, after their count; and its time.
    age: (usize, Vec<u8>, i64),
}

impl ListOf {
    fn read(list: &CertificateRevocationListDer<'_>) -> Result<Self, String> {
        let parsed = CertificateRevocationList::from_der(list.as_ref());
        let (_, parsed) = parsed.map_err(|error| error.to_string())?;
        let mut extensions = parsed.extensions().iter();
        let key = extensions.find(|one| one.oid.to_id_string() == AUTHORITY_KEY_IDENTIFIER);
        let number = parsed.crl_number().map(|number| number.to_bytes_be());
        let number = number.unwrap_or_default();
        Ok(Self {
            issuer: parsed.issuer().as_raw().to_vec(),
            key: key.map(|one| one.value.to_vec()),
            age: (number.len(), number, parsed.last_update().timestamp()),
        })
    }
}

/// Returns the newest list of each authority.
///
/// # Errors
/// When one is malformed.
pub(crate) fn newest(
    lists: Vec<CertificateRevocationListDer<'static>>,
) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let lists = lists.into_iter().map(|list| (ListOf::read(&list), list));
    let kept = newest_by(lists)?;
    Ok(kept.collect())
}

/// Returns what of the text of a file has the newest list of each authority.
///
/// # Errors
/// When one is malformed.
pub fn newest_of(text: &str) -> Result<String, String> {
    const BEGIN: &str = "-----BEGIN X509 CRL-----";
    const END: &str = "-----END X509 CRL-----";
    let blocks = text.split_inclusive(END);
    let blocks = blocks.filter_map(|block| block.get(block.find(BEGIN)?..));
    let lists = blocks.map(|block| {
        let list = CertificateRevocationListDer::from_pem_slice(block.as_bytes());
        let of = list.map_err(|error| error.to_string());
        (of.and_then(|list| ListOf::read(&list)), block)
    });
    let kept = newest_by(lists)?;
    Ok(kept.map(|block| block.to_owned() + "\n").collect())
}

/// Returns the newest of each authority.
fn newest_by<T>(
    lists: impl Iterator<Item = (Result<ListOf, String>, T)>,
) -> Result<impl Iterator<Item = T>, String> {
    let mut kept: Vec<(ListOf, T)> = Vec::new();
    for (of, list) in lists {
        let of = of?;
        let is_same = |other: &ListOf| other.issuer == of.issuer && other.key == of.key;
        match kept.iter_mut().find(|(other, _)| is_same(other)) {
            Some(other) if other.0.age < of.age => *other = (of, list),
            Some(_) => {}
            None => kept.push((of, list)),
        }
    }
    Ok(kept.into_iter().map(|(_, list)| list))
}
