//! Where the sockets are: a directory that only its user can enter.

mod locks;

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::client::try_connect;
use ssi_hv_api::name::{VmName, called};

/// The variable that names the directory, if it is not to be the usual one.
pub const VARIABLE: &str = "SSI_HV_RUNTIME_DIR";

/// Where the node listens that is a service of the system (`ssi-hv-node.service`). It has a user of its
/// own; root may look there.
const SERVICE: &str = "/run/ssi-hv-node";

/// Why there is no such directory.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It cannot be made or looked at.
    #[error("cannot use the directory {}; name another one in {VARIABLE}", path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Others could have put something there.
    #[error("{} {problem}, so it is not used; remove it, or name another one in {VARIABLE}", path.display())]
    Unsafe {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A process that starts has stood still for longer than any needs.
    #[error("another process keeps {} locked; let it go on, or end it (fuser(1) names it)", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
}

/// What listens on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `ssi-hv run`.
    Vm,
    /// `ssi-hv node`.
    Node,
}

/// A socket by its file name: `vm-PID.sock`, `vm-PID-NAME.sock` or `node-PID.sock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: Kind,
    /// Its process.
    pub pid: u32,
    /// The name that the VM was given.
    pub name: Option<VmName>,
    /// The socket.
    pub path: PathBuf,
}

impl Entry {
    fn parse(path: PathBuf) -> Option<Self> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".sock")?;
        let (kind, rest) = match stem.strip_prefix("vm-") {
            Some(rest) => (Kind::Vm, rest),
            None => (Kind::Node, stem.strip_prefix("node-")?),
        };
        let (pid, name) = match rest.split_once('-') {
            Some((pid, name)) if kind == Kind::Vm => (pid, Some(name.parse().ok()?)),
            Some(_) => return None,
            None => (rest, None),
        };
        Some(Self {
            kind,
            pid: pid.parse().ok()?,
            name,
            path,
        })
    }

    /// Whether a user who says `wanted` means this one: its process or its name.
    #[must_use]
    pub fn is_called(&self, wanted: &str) -> bool {
        self.pid.to_string() == wanted || self.has_name(wanted)
    }

    /// Whether this is a VM that is shown under this name, be it given or not.
    #[must_use]
    pub fn has_name(&self, wanted: &str) -> bool {
        self.kind == Kind::Vm && called(self.name.as_ref(), self.pid) == wanted
    }

    /// Whether somebody listens.
    fn is_served(&self) -> bool {
        match try_connect(&self.path) {
            Ok(_) => true,
            // Anything else than a refusal, such as a full queue, is no sign of an end.
            Err(error) => !matches!(
                error.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
            ),
        }
    }
}

/// A directory of sockets that was found to be safe.
#[derive(Clone, Debug)]
pub struct Directory {
    path: PathBuf,
    /// Its device and inode: it may have several paths.
    identity: (u64, u64),
}

/// The directories to listen in, the best first: what [`VARIABLE`] names; else `/run/ssi-hv` of root; else
/// `ssi-hv` in `XDG_RUNTIME_DIR` and `/tmp/ssi-hv-UID`.
#[must_use]
pub fn candidates() -> Vec<PathBuf> {
    // SAFETY: the call has no arguments and cannot fail.
    let uid = unsafe { libc::geteuid() };
    candidates_of(
        std::env::var_os(VARIABLE),
        std::env::var_os("XDG_RUNTIME_DIR"),
        uid,
    )
}

fn candidates_of(named: Option<OsString>, xdg: Option<OsString>, uid: u32) -> Vec<PathBuf> {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return vec![named.into()];
    }
    if uid == 0 {
        // Whatever the shell: a login has other variables than a service.
        return vec!["/run/ssi-hv".into()];
    }
    // The specification of XDG wants an absolute path, and others to be ignored.
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
    let in_xdg = xdg.map(|path| path.join("ssi-hv"));
    let in_tmp = PathBuf::from(format!("/tmp/ssi-hv-{uid}"));
    in_xdg.into_iter().chain([in_tmp]).collect()
}

/// The directories to look into: the candidates, and that of a login of this user, which a service of the same
/// user does not have in its environment.
fn looked_into() -> Vec<PathBuf> {
    // SAFETY: the call has no arguments and cannot fail.
    let uid = unsafe { libc::geteuid() };
    looked_into_of(candidates(), is_named(), uid)
}

fn looked_into_of(mut candidates: Vec<PathBuf>, named: bool, uid: u32) -> Vec<PathBuf> {
    let of_login = PathBuf::from(format!("/run/user/{uid}/ssi-hv"));
    if !named && uid != 0 && !candidates.contains(&of_login) {
        candidates.push(of_login);
    }
    candidates
}

/// Whether [`VARIABLE`] names the only directory.
fn is_named() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|named| !named.is_empty())
}

impl Directory {
    /// The first candidate that can be used, made if need be.
    ///
    /// # Errors
    ///
    /// What is wrong with the last one, when there is none.
    pub fn for_listening() -> Result<Self, DirectoryError> {
        let mut result = None;
        for path in candidates() {
            let attempt = Self::create(&path);
            if attempt.is_ok() {
                return attempt;
            }
            result = Some(attempt);
        }
        result.expect("there is always a candidate")
    }

    /// Every directory of this user that exists; for root that of the system's node too, unless a directory is
    /// named. One that is not safe has nothing of this user's in it: it is left out, with a warning.
    ///
    /// # Errors
    ///
    /// When none of them is safe.
    pub fn for_looking() -> Result<Vec<Self>, DirectoryError> {
        // SAFETY: the call has no arguments and cannot fail.
        let is_root = unsafe { libc::geteuid() } == 0;
        // Nobody but root makes directories in /run, so it is as safe as its own.
        let service = (is_root && !is_named()).then(|| Self::open_of(Path::new(SERVICE), None));
        let own = looked_into().into_iter().map(|path| Self::open(&path));
        Self::usable(own.chain(service))
    }

    /// The VM that has this name, wherever it listens.
    ///
    /// # Errors
    ///
    /// When nowhere can be looked.
    pub fn vm_named(name: &VmName) -> Result<Option<Entry>, DirectoryError> {
        for directory in Self::for_looking()? {
            let mut sockets = directory.sockets()?.into_iter();
            let found = sockets.find(|entry| entry.has_name(name.as_str()));
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    fn usable(
        opened: impl Iterator<Item = Result<Self, DirectoryError>>,
    ) -> Result<Vec<Self>, DirectoryError> {
        let (mut found, mut is_absent, mut wrong) = (Vec::<Self>::new(), false, None);
        for opened in opened {
            match opened {
                Ok(directory) if found.iter().any(|other| directory.is(other)) => {}
                Ok(directory) => found.push(directory),
                Err(DirectoryError::Unusable { source, .. })
                    if source.kind() == io::ErrorKind::NotFound =>
                {
                    is_absent = true;
                }
                Err(error) => wrong = Some(error),
            }
        }
        match wrong {
            Some(error) if found.is_empty() && !is_absent => Err(error),
            Some(error) => {
                tracing::warn!("{error}");
                Ok(found)
            }
            None => Ok(found),
        }
    }

    /// The directory at `path`, made if need be.
    ///
    /// # Errors
    ///
    /// When it cannot be made or is not safe.
    pub fn create(path: &Path) -> Result<Self, DirectoryError> {
        match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => {
                return Err(DirectoryError::Unusable {
                    path: path.into(),
                    source,
                });
            }
        }
        Self::open(path)
    }

    /// The directory at `path`.
    ///
    /// # Errors
    ///
    /// When it is not there, or not safe: not a directory, of another user, or open to others.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        // SAFETY: the call has no arguments and cannot fail.
        Self::open_of(path, Some(unsafe { libc::geteuid() }))
    }

    /// The directory at `path`, which belongs to this user, if one is given.
    fn open_of(path: &Path, owner: Option<u32>) -> Result<Self, DirectoryError> {
        let found = fs::symlink_metadata(path).map_err(|source| DirectoryError::Unusable {
            path: path.into(),
            source,
        })?;
        let problem = if !found.is_dir() {
            Some("is not a directory")
        } else if owner.is_some_and(|owner| found.uid() != owner) {
            Some("belongs to another user")
        } else if found.mode() & 0o077 != 0 {
            Some("is open to other users (its mode should be 0700)")
        } else {
            None
        };
        match problem {
            Some(problem) => Err(DirectoryError::Unsafe {
                path: path.into(),
                problem,
            }),
            None => Ok(Self {
                path: path.into(),
                identity: (found.dev(), found.ino()),
            }),
        }
    }

    fn is(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Where a process is to listen.
    #[must_use]
    pub fn socket_path(&self, kind: Kind, pid: u32, name: Option<&VmName>) -> PathBuf {
        let file = match (kind, name) {
            (Kind::Vm, Some(name)) => format!("vm-{pid}-{name}.sock"),
            (Kind::Vm, None) => format!("vm-{pid}.sock"),
            (Kind::Node, _) => format!("node-{pid}.sock"),
        };
        self.path.join(file)
    }

    /// The sockets on which somebody listens, by process; those that ended processes left are
    /// removed.
    ///
    /// # Errors
    ///
    /// When the directory cannot be read.
    pub fn sockets(&self) -> Result<Vec<Entry>, DirectoryError> {
        let unusable = |source| DirectoryError::Unusable {
            path: self.path.clone(),
            source,
        };
        let mut found = Vec::new();
        for file in fs::read_dir(&self.path).map_err(unusable)? {
            let path = file.map_err(unusable)?.path();
            let Some(entry) = Entry::parse(path) else {
                continue;
            };
            if entry.is_served() {
                found.push(entry);
            } else if !is_running(entry.pid) {
                // Refused and no process: nobody will ever listen here. A process that is there
                // may be about to listen.
                let _ = fs::remove_file(&entry.path);
            }
        }
        found.sort_by_key(|entry| entry.pid);
        Ok(found)
    }
}

fn is_running(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_directory_is_what_was_named_or_the_users_own() {
        let all = |named: Option<&str>, xdg: Option<&str>, uid| {
            candidates_of(named.map(Into::into), xdg.map(Into::into), uid)
                .iter()
                .map(|path| path.display().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(all(Some("/here"), Some("/run/user/7"), 7), ["/here"]);
        assert_eq!(all(None, Some("/run/user/0"), 0), ["/run/ssi-hv"]);
        assert_eq!(
            all(None, Some("/run/user/7"), 7),
            ["/run/user/7/ssi-hv", "/tmp/ssi-hv-7"]
        );
        assert_eq!(all(Some(""), Some("relative"), 7), ["/tmp/ssi-hv-7"]);
    }

    #[test]
    fn the_directory_of_a_login_is_looked_into_from_everywhere() {
        let looked_into = |candidates: &[&str], named, uid| {
            let candidates = candidates.iter().map(PathBuf::from).collect();
            looked_into_of(candidates, named, uid)
                .iter()
                .map(|path| path.display().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            looked_into(&["/tmp/ssi-hv-7"], false, 7),
            ["/tmp/ssi-hv-7", "/run/user/7/ssi-hv"]
        );
        let login = ["/run/user/7/ssi-hv", "/tmp/ssi-hv-7"];
        assert_eq!(looked_into(&login, false, 7), login);
        assert_eq!(looked_into(&["/here"], true, 7), ["/here"]);
        assert_eq!(looked_into(&["/run/ssi-hv"], false, 0), ["/run/ssi-hv"]);
    }

    #[test]
    fn a_directory_that_others_could_write_to_is_refused() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let path = place.path().join("sockets");
        Directory::create(&path).expect("is made");
        let mode = |path: &Path| fs::metadata(path).expect("is there").mode() & 0o777;
        assert_eq!(mode(&path), 0o700);
        Directory::create(&path).expect("is there already");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o770)).expect("is changed");
        let error = Directory::create(&path).expect_err("open to others");
        assert!(error.to_string().contains("open to other users"), "{error}");

        let link = place.path().join("link");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("is changed");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        let error = Directory::create(&link).expect_err("could be another's");
        assert!(error.to_string().contains("not a directory"), "{error}");
        assert!(Directory::create(&place.path().join("no/such")).is_err());
    }

    #[test]
    fn a_directory_of_another_user_hides_no_other() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let own = place.path().join("own");
        Directory::create(&own).expect("is made");
        let others = place.path().join("others");
        fs::create_dir(&others).expect("is made");
        fs::set_permissions(&others, fs::Permissions::from_mode(0o777)).expect("is changed");
        let absent = place.path().join("absent");
        let look = |paths: &[&PathBuf]| {
            let found = Directory::usable(paths.iter().map(|path| Directory::open(path)));
            found.map(|found| found.len())
        };
        assert_eq!(look(&[&own, &others]).ok(), Some(1));
        assert_eq!(look(&[&others, &own]).ok(), Some(1));
        assert_eq!(look(&[&absent, &others]).ok(), Some(0));
        assert_eq!(look(&[&absent]).ok(), Some(0));
        let error = look(&[&others]).expect_err("there is no other");
        assert!(error.to_string().contains("open to other users"), "{error}");
    }

    #[test]
    fn names_of_sockets_are_read_as_they_are_written() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let directory = Directory::create(&place.path().join("s")).expect("is made");
        let name: VmName = "web-1".parse().expect("a name");
        for (kind, name) in [
            (Kind::Vm, None),
            (Kind::Vm, Some(&name)),
            (Kind::Node, None),
        ] {
            let path = directory.socket_path(kind, 17, name);
            let entry = Entry::parse(path).expect("is one of ours");
            assert_eq!((entry.kind, entry.pid), (kind, 17));
            assert_eq!(entry.name.as_ref(), name);
            assert!(entry.is_called("17"));
            assert_eq!(entry.is_called("web-1"), name.is_some());
            // What a VM without a name is shown as.
            let nameless = kind == Kind::Vm && name.is_none();
            assert_eq!(entry.is_called("ssi-hv-17"), nameless);
        }
        for other in ["vm-x.sock", "vm-1-.sock", "node-1-a.sock", "vm-1", "a.sock"] {
            assert_eq!(Entry::parse(other.into()), None, "{other}");
        }
    }

    #[test]
    fn stale_sockets_are_removed_and_others_are_not() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let directory = Directory::create(&place.path().join("s")).expect("is made");
        let path = |pid| directory.socket_path(Kind::Vm, pid, None);
        let own = std::process::id();
        // Process numbers end at 2^22 (linux/threads.h, PID_MAX_LIMIT).
        let (gone, served) = (1 << 23, (1 << 23) + 1);
        drop(UnixListener::bind(path(gone)).expect("is bound"));
        drop(UnixListener::bind(path(own)).expect("is bound"));
        let _listener = UnixListener::bind(path(served)).expect("is bound");
        fs::write(place.path().join("s/notes"), "mine").expect("is written");
        let found = directory.sockets().expect("is read");
        assert_eq!(found.iter().map(|e| e.pid).collect::<Vec<_>>(), [served]);
        assert!(!path(gone).exists(), "its process is gone");
        assert!(path(own).exists(), "its process may be about to listen");
        assert!(place.path().join("s/notes").exists());
    }
}
