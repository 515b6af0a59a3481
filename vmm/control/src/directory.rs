//! The directory of sockets, which only its user can enter.

mod locks;

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::client::try_connect;
use rustix::process::geteuid;
use ssi_hv_api::name::{VmName, called};

/// The environment variable that replaces the default directory.
pub const VARIABLE: &str = "SSI_HV_RUNTIME_DIR";

/// Directory of the system's node service (`ssi-hv-node.service`). The service has a user of its
/// own; root may read the directory.
const SERVICE: &str = "/run/ssi-hv-node";

/// Why no directory can be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It cannot be created or read.
    #[error("cannot use the directory {}; name another one in {VARIABLE}", path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Other users could have placed files there.
    #[error("{} {problem}, so it is not used; remove it, or name another one in {VARIABLE}", path.display())]
    Unsafe {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A starting process has held the lock for longer than a start takes.
    #[error("another process keeps {} locked; let it go on, or end it (fuser(1) names it)", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
}

/// The process that listens on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `ssi-hv run`.
    Vm,
    /// `ssi-hv node`.
    Node,
}

/// A socket, described by its file name: `vm-PID.sock`, `vm-PID-NAME.sock` or `node-PID.sock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The kind of process that listens.
    pub kind: Kind,
    /// Its process id.
    pub pid: u32,
    /// The VM's name from `--name`.
    pub name: Option<VmName>,
    /// Path of the socket.
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

    /// Returns whether `wanted`, from the command line, is this process's id or name.
    #[must_use]
    pub fn is_called(&self, wanted: &str) -> bool {
        self.pid.to_string() == wanted || self.has_name(wanted)
    }

    /// Returns whether this is a VM that is displayed under this name, given or generated.
    #[must_use]
    pub fn has_name(&self, wanted: &str) -> bool {
        self.kind == Kind::Vm && called(self.name.as_ref(), self.pid) == wanted
    }

    /// Returns whether a process listens on it.
    fn is_served(&self) -> bool {
        match try_connect(&self.path) {
            Ok(_) => true,
            // Any other error, such as a full queue, does not show that the listener has ended.
            Err(error) => !matches!(
                error.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
            ),
        }
    }
}

/// A directory of sockets whose permissions were checked.
#[derive(Clone, Debug)]
pub struct Directory {
    path: PathBuf,
    /// Its device and inode: it may have several paths.
    identity: (u64, u64),
}

/// Returns the directories to listen in, in order of preference: what [`VARIABLE`] names; otherwise
/// `/run/ssi-hv` for root; otherwise `ssi-hv` in `XDG_RUNTIME_DIR` and `/tmp/ssi-hv-UID`.
fn candidates() -> Vec<PathBuf> {
    let uid = geteuid().as_raw();
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
        // Independent of XDG_RUNTIME_DIR, since a login and a service have different variables.
        return vec!["/run/ssi-hv".into()];
    }
    // The XDG specification requires an absolute path, and that others are ignored.
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
    let in_xdg = xdg.map(|path| path.join("ssi-hv"));
    let in_tmp = PathBuf::from(format!("/tmp/ssi-hv-{uid}"));
    in_xdg.into_iter().chain([in_tmp]).collect()
}

/// Returns the directories to search: the candidates, and that of this user's login session, which
/// a service of the same user does not have in its environment.
fn search_path() -> Vec<PathBuf> {
    let uid = geteuid().as_raw();
    search_path_of(candidates(), is_named(), uid)
}

fn search_path_of(mut candidates: Vec<PathBuf>, named: bool, uid: u32) -> Vec<PathBuf> {
    let of_login = PathBuf::from(format!("/run/user/{uid}/ssi-hv"));
    if !named && uid != 0 && !candidates.contains(&of_login) {
        candidates.push(of_login);
    }
    candidates
}

/// Returns every directory that [`Directory::for_listening`] may use or [`Directory::for_looking`]
/// may read, whether it exists or not.
#[must_use]
pub fn all_paths() -> Vec<PathBuf> {
    let mut paths = search_path();
    paths.push(SERVICE.into());
    paths
}

/// Returns whether [`VARIABLE`] names the only directory.
fn is_named() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|named| !named.is_empty())
}

impl Directory {
    /// Opens the first usable candidate, which is created if necessary.
    ///
    /// # Errors
    ///
    /// Fails with the problem of the last candidate when none is usable.
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

    /// Opens every existing directory of this user. For root this includes that of the system's
    /// node unless [`VARIABLE`] is set. A directory with unsafe permissions is skipped with a
    /// warning, since it cannot have been created by this user's processes.
    ///
    /// # Errors
    ///
    /// Fails when none is safe.
    pub fn for_looking() -> Result<Vec<Self>, DirectoryError> {
        let is_root = geteuid().is_root();
        // Only root can create directories in /run, so it is as safe as root's own.
        let service = (is_root && !is_named()).then(|| Self::open_of(Path::new(SERVICE), None));
        let own = search_path().into_iter().map(|path| Self::open(&path));
        Self::usable(own.chain(service))
    }

    /// Finds the VM with this name in all directories of this user.
    ///
    /// # Errors
    ///
    /// Fails when no directory can be read.
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

    /// Opens the directory at `path`, which is created if necessary.
    ///
    /// # Errors
    ///
    /// Fails when it cannot be created or is not safe.
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

    /// Opens the directory at `path`.
    ///
    /// # Errors
    ///
    /// Fails when it does not exist, or is not safe: not a directory, of another user, or open to
    /// others.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        Self::open_of(path, Some(geteuid().as_raw()))
    }

    /// Opens the directory at `path`, which must belong to `owner` if one is given.
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

    /// Returns the socket's path for a process.
    #[must_use]
    pub fn socket_path(&self, kind: Kind, pid: u32, name: Option<&VmName>) -> PathBuf {
        let file = match (kind, name) {
            (Kind::Vm, Some(name)) => format!("vm-{pid}-{name}.sock"),
            (Kind::Vm, None) => format!("vm-{pid}.sock"),
            (Kind::Node, _) => format!("node-{pid}.sock"),
        };
        self.path.join(file)
    }

    /// Returns the sockets that have listeners, sorted by process, and removes those of ended
    /// processes.
    ///
    /// # Errors
    ///
    /// Fails when the directory cannot be read.
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
                // The connection is refused and the process does not exist, so no process will
                // listen here again. An existing process may be about to listen.
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
        let search_path = |candidates: &[&str], named, uid| {
            let candidates = candidates.iter().map(PathBuf::from).collect();
            search_path_of(candidates, named, uid)
                .iter()
                .map(|path| path.display().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            search_path(&["/tmp/ssi-hv-7"], false, 7),
            ["/tmp/ssi-hv-7", "/run/user/7/ssi-hv"]
        );
        let login = ["/run/user/7/ssi-hv", "/tmp/ssi-hv-7"];
        assert_eq!(search_path(&login, false, 7), login);
        assert_eq!(search_path(&["/here"], true, 7), ["/here"]);
        assert_eq!(search_path(&["/run/ssi-hv"], false, 0), ["/run/ssi-hv"]);
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
            // The generated name of a VM without one.
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
        // Process ids are below 2^22 (linux/threads.h, PID_MAX_LIMIT).
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
