//! What the process of a VM gives up before the guest starts.
//!
//! Files are restricted first, before any other thread exists. System calls are too, unless the user
//! is changed: that is done when all is open, and needs calls that are forbidden afterwards.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use memory_fabric::guest_memory::keep_huge_bytes;
use rustix::fs::{Access, access};
use ssi_hv_sandbox::{
    Privileges, Restricted, Sandbox, SandboxError, be_alone, never_gain_privileges, restrict_calls,
};

use super::run_error::RunError;
use crate::config::RunConfig;
use crate::control_socket::directory::{Directory, all_paths};
use crate::host;
use crate::report::ReportFile;

/// What is in force for this process.
#[derive(Debug)]
pub struct Confinement<'a> {
    config: &'a RunConfig,
    /// Kept while the process runs.
    restricted: Mutex<Option<Restricted>>,
}

/// Restricts this process to the files that its configuration names, those of the system, and the
/// system calls of a VM. Called before other threads are started, and before the guest exists.
pub fn enter(config: &RunConfig) -> Result<Confinement<'_>, SandboxError> {
    if config.privileges.is_some() {
        never_gain_privileges()?;
    }
    let mut restricted = None;
    if config.sandbox {
        // Created here: afterwards no directory can be. Why it cannot be used is said where it is
        // used.
        let _ = Directory::for_listening();
        let sandbox = sandbox(config);
        be_alone()?;
        let entered = match config.privileges {
            Some(_) => sandbox.enter_files()?,
            None => sandbox.enter()?,
        };
        if !entered.files() {
            tracing::info!("this kernel has no Landlock: the VM's process can open other files");
        }
        restricted = Some(entered);
    }
    Ok(Confinement {
        config,
        restricted: Mutex::new(restricted),
    })
}

impl Confinement<'_> {
    /// Changes user and root, if so configured, when everything is open and before the guest runs.
    pub fn complete(&self) -> Result<(), RunError> {
        let Some(privileges) = &self.config.privileges else {
            return Ok(());
        };
        host::keep_available_memory();
        keep_huge_bytes();
        if let Some(root) = privileges.root() {
            let mut restricted = self
                .restricted
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(restricted) = &mut *restricted {
                restricted.keep_below(root);
            }
        }
        privileges.give_up()?;
        if let Some(root) = privileges.root() {
            host::root_changed_to(root.to_owned());
        }
        self.check_directories(privileges)?;
        if self.config.sandbox {
            restrict_calls().map_err(RunError::Sandbox)?;
        }
        let user = privileges.user();
        tracing::info!(
            "the process is now of the user {} (uid {}, gid {}), with the root {}",
            user.name(),
            user.uid(),
            user.gid(),
            privileges.root().unwrap_or(Path::new("/")).display()
        );
        Ok(())
    }

    /// Whether the user can create what is created later: at the end of a run it is too late.
    fn check_directories(&self, privileges: &Privileges) -> Result<(), RunError> {
        for (flag, path) in created(self.config) {
            let now = host::path_now(&path);
            // A device or a pipe is written, not replaced.
            let is_written = flag == "--report" && now.exists() && !now.is_file();
            let (place, rights) = match now.parent() {
                _ if is_written => (now.as_path(), Access::WRITE_OK),
                Some(parent) if !parent.as_os_str().is_empty() => {
                    (parent, Access::WRITE_OK | Access::EXEC_OK)
                }
                _ => (Path::new("."), Access::WRITE_OK | Access::EXEC_OK),
            };
            access(place, rights).map_err(|error| RunError::NotForUser {
                flag,
                path,
                user: privileges.user().name().to_owned(),
                source: error.into(),
            })?;
        }
        Ok(())
    }
}

/// Returns why another boot is not possible: a file that each boot reads is another one than when the
/// process was restricted, as after a new build of the kernel.
pub fn forbids_boot(config: &RunConfig) -> Option<String> {
    let read = [Some(&config.kernel), config.initrd.as_ref()];
    let is_refused = |path: &&Path| {
        let opened = File::open(host::path_now(path));
        opened.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
    };
    let mut read = read.into_iter().flatten().map(PathBuf::as_path);
    let replaced = read.find(is_refused).filter(|_| config.sandbox)?;
    Some(format!(
        "the guest is not restarted: {} is another file than at the start, which the sandbox keeps \
         from being read; run ssi-hv again, or with --sandbox off",
        replaced.display()
    ))
}

/// The files and sockets that are created, replaced or removed later, with their flags.
fn created(config: &RunConfig) -> impl Iterator<Item = (&'static str, PathBuf)> {
    let report = config.report.as_deref().map(ReportFile::place);
    let vsock = config.vsock.as_ref().map(|vsock| vsock.path.clone());
    let files = [
        ("--hvc", config.hvc.clone()),
        ("--record-working-set", config.record_working_set.clone()),
        ("--report", report),
        ("--vsock path=", vsock),
    ];
    let given = files.into_iter();
    given.filter_map(|(flag, path)| Some((flag, path?)))
}

fn sandbox(config: &RunConfig) -> Sandbox {
    let mut sandbox = Sandbox::default();
    sandbox.read(&config.kernel);
    let read = [
        &config.initrd,
        &config.replay_working_set,
        &config.credentials,
    ];
    read.into_iter()
        .flatten()
        .for_each(|path| sandbox.read(path));
    for disk in &config.disks {
        if disk.read_only {
            sandbox.read(&disk.path);
        } else {
            sandbox.write(&disk.path);
        }
    }
    // Each is replaced as a whole, or is a socket. That of the console is opened at the start.
    let console = config.console.iter().cloned();
    created(config)
        .map(|(_, path)| path)
        .chain(console)
        .for_each(|path| sandbox.create(path));
    // All of them: a name must not be that of another VM of this user, whose socket may be stale.
    for path in all_paths() {
        sandbox.create_in(path);
    }
    sandbox
}
