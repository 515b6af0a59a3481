//! Credentials that all connections of a process share, and that can be read again while they last.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use fabric_host::describe;
use fabric_host::root::path_now;
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, ServerConfig};

use crate::Fingerprint;
use crate::certificate::fingerprint_of;
use crate::credentials::{
    AUTHORITIES_FILE, CERTIFICATE_FILE, Credentials, CredentialsError, KEY_FILE, REVOKED_FILE,
};
use crate::delegates::Delegates;
use crate::pinned::PinnedIdentity;
use crate::subject::{Name, Role, Subject};

/// Why credentials were not replaced.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The new ones cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// They are those of another member, whose leases and names this process does not have.
    #[error(
        "{path} has a certificate of {found}, and this process runs as {expected}; restart it to change that",
        path = path.display()
    )]
    Subject {
        /// The directory.
        path: PathBuf,
        /// Whom the new certificate names.
        found: Box<Subject>,
        /// Whom the one in use names.
        expected: Box<Subject>,
    },
    /// A certificate of another role.
    #[error(
        "{path} has a certificate of {found}, and {needed} is needed here; issue one with `ssi-hv pki issue AUTHORITY {needed}`",
        path = path.display()
    )]
    Role {
        /// The directory.
        path: PathBuf,
        /// Whom the certificate names.
        found: Box<Subject>,
        /// The role and a place for the name.
        needed: &'static str,
    },
}

/// The credentials in use, and what follows from them.
#[derive(Debug)]
struct Current {
    credentials: Arc<Credentials>,
    server: Arc<ServerConfig>,
}

impl Current {
    fn read(directory: &Path, delegates: &Arc<Delegates>) -> Result<Self, CredentialsError> {
        Self::new(Credentials::load(directory)?, delegates)
    }

    fn new(credentials: Credentials, delegates: &Arc<Delegates>) -> Result<Self, CredentialsError> {
        let server = Arc::new(credentials.server_with(Arc::clone(delegates))?);
        Ok(Self {
            credentials: Arc::new(credentials),
            server,
        })
    }
}

/// What changes when a file is replaced or written: its device, inode, size and time of change.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// The files of a directory at one time.
#[derive(Debug, PartialEq, Eq)]
struct Stamps([Stamp; 4]);

impl Stamps {
    fn of(directory: &Path) -> Self {
        let files = [CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE, REVOKED_FILE];
        Self(files.map(|file| {
            let found = fs::metadata(directory.join(file)).ok()?;
            let changed = (found.ctime(), found.ctime_nsec());
            Some((found.dev(), found.ino(), found.size(), changed.0, changed.1))
        }))
    }
}

/// Credentials of a directory. Every new connection uses the newest ones; connections that exist keep
/// those with which they were made.
#[derive(Debug)]
pub struct SharedCredentials {
    /// `None` for those of a process, which do not change.
    directory: Option<PathBuf>,
    current: RwLock<Current>,
    /// Whom a node accepts beside members.
    delegates: Arc<Delegates>,
    /// The files when they were read last, whether they could be used or not.
    read: Mutex<Stamps>,
}

impl SharedCredentials {
    /// Reads the credentials in a directory, for a process that is a node or a VM.
    ///
    /// # Errors
    /// Fails when they cannot be used, or name a member of another role.
    pub fn load(directory: &Path, role: Role) -> Result<Arc<Self>, ReloadError> {
        // Before they are read: what changes meanwhile is read by the next refresh.
        let read = Mutex::new(Stamps::of(directory));
        let delegates = Arc::default();
        let current = Current::read(directory, &delegates)?;
        let found = current.credentials.subject();
        if found.holder.role != role {
            return Err(ReloadError::Role {
                path: directory.to_owned(),
                found: Box::new(found.clone()),
                needed: match role {
                    Role::Node => "node/NAME",
                    Role::Vm => "vm/NAME",
                    Role::Operator => "operator/NAME",
                },
            });
        }
        Ok(Arc::new(Self {
            directory: Some(directory.to_owned()),
            current: RwLock::new(current),
            delegates,
            read,
        }))
    }

    /// Makes those of a process that a member of `cluster` delegates to, as
    /// [`Credentials::of_process`] does.
    ///
    /// # Errors
    /// Fails when the authorities cannot be used.
    pub fn of_process(
        identity: &PinnedIdentity,
        cluster: Name,
        authorities: Vec<CertificateDer<'static>>,
    ) -> Result<Arc<Self>, CredentialsError> {
        let delegates = Arc::default();
        let credentials = Credentials::of_process(identity, cluster, authorities)?;
        Ok(Arc::new(Self {
            directory: None,
            current: RwLock::new(Current::new(credentials, &delegates)?),
            delegates,
            read: Mutex::new(Stamps([None; 4])),
        }))
    }

    /// Returns whom a node accepts beside members of the cluster.
    #[must_use]
    pub const fn delegates(&self) -> &Arc<Delegates> {
        &self.delegates
    }

    /// Returns the fingerprint of the certificate of a peer that was accepted as one of the
    /// [`delegates`](Self::delegates); `None` for a member of the cluster.
    #[must_use]
    pub fn of_delegate(
        &self,
        shown: &Subject,
        chain: &[CertificateDer<'_>],
    ) -> Option<Fingerprint> {
        let is_member = shown.cluster == self.current().subject().cluster;
        let certificate = chain.first().filter(|_| !is_member);
        certificate.map(fingerprint_of)
    }

    /// Reads the files again. They are used for new connections; when they cannot be used, the former
    /// ones stay. After a change of the root directory they are found if they are below it.
    ///
    /// # Errors
    /// Fails when they cannot be used, or name another member.
    pub fn reload(&self) -> Result<Arc<Credentials>, ReloadError> {
        let Some(directory) = &self.directory else {
            return Ok(self.current());
        };
        let new = Current::read(&path_now(directory), &self.delegates)?;
        let credentials = Arc::clone(&new.credentials);
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let (found, expected) = (credentials.subject(), current.credentials.subject());
        if found != expected {
            return Err(ReloadError::Subject {
                path: directory.clone(),
                found: Box::new(found.clone()),
                expected: Box::new(expected.clone()),
            });
        }
        *current = new;
        Ok(credentials)
    }

    /// Reads the files again if they have changed since they were read last, as
    /// [`reload`](Self::reload) does, and logs that, or why they cannot be used. Otherwise it takes
    /// four system calls.
    pub fn refresh(&self) {
        let Some(directory) = &self.directory else {
            return;
        };
        // Held until the files are in use: a thread that reads newer ones must not be overtaken.
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let found = Stamps::of(&path_now(directory));
        if *read == found {
            return;
        }
        *read = found;
        let directory = directory.display();
        match self.reload() {
            Ok(_) => tracing::info!("{directory} has changed, and is in use"),
            Err(error) => {
                tracing::warn!("credentials were not replaced: {}", describe(&error));
            }
        }
    }

    /// Returns the directory; empty for those of a process.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.as_deref().unwrap_or(Path::new(""))
    }

    /// Returns the credentials in use.
    #[must_use]
    pub fn current(&self) -> Arc<Credentials> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&current.credentials)
    }

    /// Returns the configuration of a node's end.
    #[must_use]
    pub fn server(&self) -> Arc<ServerConfig> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&current.server)
    }
}

/// The node that has to be at the other end of a connection, and what this end shows it.
#[derive(Clone, Debug)]
pub struct ExpectedNode {
    /// What this end shows.
    pub credentials: Arc<SharedCredentials>,
    /// The node's name.
    pub name: Name,
}

impl ExpectedNode {
    /// Returns the configuration of this end.
    ///
    /// # Errors
    /// Fails when the credentials cannot be used for this.
    pub fn client(&self) -> Result<ClientConfig, CredentialsError> {
        self.credentials.current().client(&self.name)
    }
}
