//! The authority itself.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fabric_host::lock_file;
use fabric_identity::credentials::{self, AUTHORITIES_FILE, REVOKED_FILE};
use fabric_identity::files::{self, Readers};
use fabric_identity::presented::{self, Presented};
use fabric_identity::{Holder, Name, Subject, provider};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData, RevokedCertParams,
    SerialNumber, SubjectPublicKeyInfo,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::PkiError;
use crate::ledger::{Entry, Ledger, Serial, State};
use crate::member::{self, Issued, Request};

/// The authority's private key.
const KEY_FILE: &str = "ca.key";
/// What it issued.
const LEDGER_FILE: &str = "issued.toml";
/// How long a command waits for another one that uses the authority.
const LOCK_TIME_MAX: Duration = Duration::from_secs(10);
/// How much earlier than now certificates begin: clocks of members may be late by this.
const CLOCK_DIFFERENCE_SECONDS: i64 = 300;
const DAY_SECONDS: i64 = 24 * 60 * 60;

/// For how long a certificate is valid.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Validity {
    /// Days from now on.
    pub days: u32,
}

impl Validity {
    const fn end(self, now: i64) -> i64 {
        now + self.days as i64 * DAY_SECONDS
    }
}

/// The authority of a cluster, which no other command uses while this value exists.
#[derive(Debug)]
pub struct Authority {
    directory: PathBuf,
    ledger: Ledger,
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate, as PEM.
    certificate: String,
    /// Holds the lock.
    _lock: File,
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    // A clock before 1970 is refused as a date.
    since.map_or(-1, |since| {
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    })
}

fn date(seconds: i64) -> Result<OffsetDateTime, PkiError> {
    let date = OffsetDateTime::from_unix_timestamp(seconds);
    date.ok()
        .filter(|date| (1970..=9999).contains(&date.year()))
        .ok_or(PkiError::Clock(seconds))
}

/// Returns a time as text in UTC, such as `2027-01-31T12:00:00Z`; `seconds` are those since 1970.
#[must_use]
pub fn date_text(seconds: i64) -> String {
    let date = date(seconds).ok();
    let text = date.and_then(|date| date.format(&Rfc3339).ok());
    text.unwrap_or_else(|| format!("{seconds} s since 1970"))
}

fn serial() -> Result<Serial, PkiError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(PkiError::Random)?;
    Ok(Serial::from_random(bytes))
}

fn locked(directory: &Path) -> Result<File, PkiError> {
    let lock = File::open(directory).map_err(|source| PkiError::Directory {
        path: directory.to_owned(),
        source,
    })?;
    lock_file(&lock, LOCK_TIME_MAX).map_err(|source| PkiError::Locked {
        path: directory.to_owned(),
        seconds: LOCK_TIME_MAX.as_secs(),
        source,
    })?;
    Ok(lock)
}

impl Authority {
    /// Creates an authority in a directory, which may exist and must not have one.
    ///
    /// # Errors
    /// Fails when there is one already, or a file cannot be written.
    pub fn create(path: &Path, cluster: Name, validity: Validity) -> Result<Self, PkiError> {
        member::directory(path)?;
        let lock = locked(path)?;
        for name in [KEY_FILE, AUTHORITIES_FILE, LEDGER_FILE] {
            member::absent(&path.join(name))?;
        }
        let serial = serial()?;
        let now = now();
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = DistinguishedName::new();
        // A list of revoked certificates is found by the name of its authority: two authorities of a
        // cluster, of which one replaces the other, need different names.
        let name = format!("ssi-hv {cluster} {}", &serial.to_string()[..8]);
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.serial_number = Some(SerialNumber::from_slice(serial.bytes()));
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        parameters.not_before = date(now - CLOCK_DIFFERENCE_SECONDS)?;
        parameters.not_after = date(validity.end(now))?;
        let key = KeyPair::generate().map_err(PkiError::making("a key"))?;
        let certificate = parameters.self_signed(&key);
        let certificate = certificate
            .map_err(PkiError::making("a certificate"))?
            .pem();
        files::write(
            &path.join(KEY_FILE),
            key.serialize_pem().as_bytes(),
            Readers::Owner,
        )?;
        files::write(
            &path.join(AUTHORITIES_FILE),
            certificate.as_bytes(),
            Readers::All,
        )?;
        let mut authority = Self {
            directory: path.to_owned(),
            ledger: Ledger {
                cluster,
                not_after: validity.end(now),
                crl_number: 0,
                entries: Vec::new(),
            },
            issuer: Issuer::new(parameters, key),
            certificate,
            _lock: lock,
        };
        authority.list_revoked(now)?;
        Ok(authority)
    }

    /// Opens the authority in a directory.
    ///
    /// # Errors
    /// Fails when a file is missing or wrong, when others may read the key, and when another command
    /// uses the authority for ten seconds.
    pub fn open(path: &Path) -> Result<Self, PkiError> {
        let lock = locked(path)?;
        let ledger = Ledger::read(&path.join(LEDGER_FILE))?;
        let key_path = path.join(KEY_FILE);
        let wrong = |path: PathBuf, reason: String| PkiError::Content { path, reason };
        let key = files::read_private(&key_path)?;
        let key = KeyPair::from_pem(&String::from_utf8_lossy(&key));
        let key = key.map_err(|error| wrong(key_path.clone(), error.to_string()))?;
        let certificate_path = path.join(AUTHORITIES_FILE);
        let certificates = credentials::certificates(&certificate_path)?;
        let public = presented::public_key(&certificates[0]).map_err(|reason| {
            let path = certificate_path.clone();
            PkiError::Presented { path, reason }
        })?;
        if public != key.subject_public_key_info() {
            let reason = format!("it is not the key of {}", certificate_path.display());
            return Err(wrong(key_path, reason));
        }
        let issuer = Issuer::from_ca_cert_der(&certificates[0], key)
            .map_err(|error| wrong(certificate_path.clone(), error.to_string()))?;
        let certificate = String::from_utf8_lossy(&files::read(&certificate_path)?).into_owned();
        Ok(Self {
            directory: path.to_owned(),
            ledger,
            issuer,
            certificate,
            _lock: lock,
        })
    }

    /// Returns the cluster.
    #[must_use]
    pub const fn cluster(&self) -> &Name {
        &self.ledger.cluster
    }

    /// Returns all certificates that were issued, oldest first, with their states now.
    pub fn entries(&self) -> impl Iterator<Item = (&Entry, State)> {
        let now = now();
        let entries = self.ledger.entries.iter();
        entries.map(move |entry| (entry, entry.state(now)))
    }

    /// Makes a key and a certificate for it, and writes them into the directory `output`.
    ///
    /// # Errors
    /// Fails when there is a key in `output`, when the authority ends before the certificate would, and
    /// when a file cannot be written.
    pub fn issue(
        &mut self,
        holder: &Holder,
        validity: Validity,
        output: &Path,
    ) -> Result<Entry, PkiError> {
        let key = KeyPair::generate().map_err(PkiError::making("a key"))?;
        // Before the list has a certificate without a key.
        member::directory(output)?;
        member::absent(&output.join(credentials::KEY_FILE))?;
        let issued = self.certify(holder, &key, validity)?;
        member::write_key(&key, output)?;
        issued.write(output)
    }

    /// Makes a certificate for the key of a request, if it is for the holder that the operator named,
    /// and writes it into the directory `output`.
    ///
    /// # Errors
    /// As [`Self::issue`], and when the request is for another identity.
    pub fn sign(
        &mut self,
        request: &Request,
        holder: &Holder,
        validity: Validity,
        output: &Path,
    ) -> Result<Entry, PkiError> {
        let named = self.subject(holder);
        if request.subject != named {
            return Err(PkiError::OtherIdentity {
                requested: request.subject.clone(),
                named,
            });
        }
        member::directory(output)?;
        self.certify(holder, &request.public_key, validity)?
            .write(output)
    }

    /// Makes another certificate for the same key and holder, and writes it into the directory
    /// `output`. The old one stays valid to its end.
    ///
    /// # Errors
    /// As [`Self::issue`], and when the certificate in `path` is none of this authority, or was
    /// revoked.
    pub fn renew(
        &mut self,
        path: &Path,
        validity: Validity,
        output: &Path,
    ) -> Result<Entry, PkiError> {
        let shown = credentials::certificates(path)?;
        let old = Presented::read(&shown[0]).map_err(|reason| PkiError::Presented {
            path: path.to_owned(),
            reason,
        })?;
        let serial = Serial::from_bytes(&old.serial);
        // Numbers and names of others are no secret: every peer can write them into a certificate with a
        // key of their own.
        let is_signed = self.has_signed(&shown[0], old.not_after)?;
        let entry = self.ledger.find(&serial).filter(|_| is_signed);
        let entry = entry.filter(|entry| old.subject == self.subject(&entry.holder));
        let Some(entry) = entry else {
            return Err(PkiError::NotIssued { serial });
        };
        if entry.revoked.is_some() {
            return Err(PkiError::Revoked { serial });
        }
        let key = SubjectPublicKeyInfo::from_der(&old.public_key);
        let key = key.map_err(PkiError::making("a public key"))?;
        let holder = entry.holder.clone();
        member::directory(output)?;
        self.certify(&holder, &key, validity)?.write(output)
    }

    /// Returns whether this authority has signed a certificate, which may have expired: it is looked at
    /// as in the last second of its validity.
    fn has_signed(&self, shown: &CertificateDer<'_>, last: i64) -> Result<bool, PkiError> {
        let own = CertificateDer::from_pem_slice(self.certificate.as_bytes());
        let wrong = |reason: String| PkiError::Content {
            path: self.directory.join(AUTHORITIES_FILE),
            reason,
        };
        let own = own.map_err(|error| wrong(error.to_string()))?;
        let mut roots = RootCertStore::empty();
        roots.add(own).map_err(|error| wrong(error.to_string()))?;
        let roots = Arc::new(roots);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
        let verifier = verifier.map_err(|error| wrong(error.to_string()))?;
        let last = u64::try_from(last).unwrap_or_default();
        let last = UnixTime::since_unix_epoch(Duration::from_secs(last));
        Ok(verifier.verify_client_cert(shown, &[], last).is_ok())
    }

    /// Revokes a certificate. One that was revoked before stays so, and the list is written again.
    ///
    /// # Errors
    /// Fails when it is none of this authority, or a file cannot be written.
    pub fn revoke(&mut self, serial: &Serial) -> Result<(), PkiError> {
        if self.ledger.find(serial).is_none() {
            let serial = serial.clone();
            return Err(PkiError::NotIssued { serial });
        }
        self.revoke_all(|entry| entry.serial == *serial)
    }

    /// Revokes all certificates of a holder, and returns their numbers: also those that have expired,
    /// for which another could be made. If all were revoked before, the list is written again, and
    /// their numbers are returned.
    ///
    /// # Errors
    /// Fails when there is none, or a file cannot be written.
    pub fn revoke_holder(&mut self, holder: &Holder) -> Result<Vec<Serial>, PkiError> {
        let of = |wanted: &[State]| -> Vec<Serial> {
            let all = self.entries();
            let found =
                all.filter(|(entry, state)| entry.holder == *holder && wanted.contains(state));
            found.map(|(entry, _)| entry.serial.clone()).collect()
        };
        let mut serials = of(&[State::Valid, State::Expired]);
        if serials.is_empty() {
            // The command before may have ended between the ledger and the list.
            serials = of(&[State::Revoked]);
        }
        if serials.is_empty() {
            return Err(PkiError::NothingValid(holder.clone()));
        }
        self.revoke_all(|entry| serials.contains(&entry.serial))?;
        Ok(serials)
    }

    fn revoke_all(&mut self, is_it: impl Fn(&Entry) -> bool) -> Result<(), PkiError> {
        let now = now();
        for entry in self.ledger.entries.iter_mut().filter(|entry| is_it(entry)) {
            entry.revoked.get_or_insert(now);
        }
        self.list_revoked(now)
    }

    fn subject(&self, holder: &Holder) -> Subject {
        Subject {
            cluster: self.ledger.cluster.clone(),
            holder: holder.clone(),
        }
    }

    fn certify(
        &mut self,
        holder: &Holder,
        key: &impl PublicKeyData,
        validity: Validity,
    ) -> Result<Issued, PkiError> {
        let (now, serial) = (now(), serial()?);
        let not_after = validity.end(now);
        if not_after > self.ledger.not_after {
            return Err(PkiError::TooLong {
                days: validity.days,
                left: (self.ledger.not_after - now).div_euclid(DAY_SECONDS),
            });
        }
        let mut parameters = member::parameters(&self.subject(holder))?;
        parameters.serial_number = Some(SerialNumber::from_slice(serial.bytes()));
        parameters.not_before = date(now - CLOCK_DIFFERENCE_SECONDS)?;
        parameters.not_after = date(not_after)?;
        parameters.use_authority_key_identifier_extension = true;
        let certificate = parameters.signed_by(key, &self.issuer);
        let certificate = certificate.map_err(PkiError::making("a certificate"))?;
        let revoked = files::read(&self.directory.join(REVOKED_FILE))?;
        let entry = Entry {
            serial,
            holder: holder.clone(),
            not_after,
            revoked: None,
        };
        self.ledger.entries.push(entry.clone());
        // Before anybody has the certificate: what is not listed cannot be revoked.
        self.ledger.write(&self.directory.join(LEDGER_FILE))?;
        Ok(Issued {
            entry,
            certificate: certificate.pem(),
            authority: self.certificate.clone(),
            revoked: String::from_utf8_lossy(&revoked).into_owned(),
        })
    }

    /// Writes the ledger, then the list of revoked certificates that follows from it. A command that
    /// ends in between is repeated by revoking again.
    fn list_revoked(&mut self, now: i64) -> Result<(), PkiError> {
        self.ledger.crl_number += 1;
        self.ledger.write(&self.directory.join(LEDGER_FILE))?;
        let revoked = self.ledger.entries.iter().filter_map(|entry| {
            let revoked = entry.revoked?;
            Some(date(revoked).map(|revocation_time| RevokedCertParams {
                serial_number: SerialNumber::from_slice(entry.serial.bytes()),
                revocation_time,
                reason_code: None,
                invalidity_date: None,
            }))
        });
        let list = CertificateRevocationListParams {
            this_update: date(now)?,
            // Lists are distributed as files when something changes, so this one has no end of its own.
            next_update: date(self.ledger.not_after.max(now + 1))?,
            crl_number: SerialNumber::from(self.ledger.crl_number),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect::<Result<_, _>>()?,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).and_then(|list| list.pem());
        let list = list.map_err(PkiError::making("a list of revoked certificates"))?;
        files::write(
            &self.directory.join(REVOKED_FILE),
            list.as_bytes(),
            Readers::All,
        )?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
