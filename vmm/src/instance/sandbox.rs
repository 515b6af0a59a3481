//! What the process of a VM gives up before the guest starts.

use ssi_hv_sandbox::{Restricted, Sandbox, SandboxError};

use crate::config::RunConfig;
use crate::control_socket::directory::{Directory, all_paths};

/// Restricts this process to the files that its configuration names, those of the system, and the
/// system calls of a VM. Called before other threads are started, and before the guest exists.
/// Returns what to keep while the process runs.
pub fn enter(config: &RunConfig) -> Result<Option<Restricted>, SandboxError> {
    if !config.sandbox {
        return Ok(None);
    }
    // Created here: afterwards no directory can be. Why it cannot be used is said where it is used.
    let _ = Directory::for_listening();
    let restricted = sandbox(config).enter()?;
    if !restricted.files() {
        tracing::info!("this kernel has no Landlock: the VM's process can open other files");
    }
    Ok(Some(restricted))
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
    // Each is replaced as a whole, or is a socket.
    let created = [
        &config.console,
        &config.hvc,
        &config.record_working_set,
        &config.report,
    ];
    let vsock = config.vsock.as_ref().map(|vsock| &vsock.path);
    created
        .into_iter()
        .flatten()
        .chain(vsock)
        .for_each(|path| sandbox.create(path));
    // All of them: a name must not be that of another VM of this user, whose socket may be stale.
    for path in all_paths() {
        sandbox.create_in(path);
    }
    sandbox
}
