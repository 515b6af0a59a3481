//! The limit of this process's open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open files to its maximum: a node needs one for each connection of a VM, and
/// the usual limit of 1024, which is kept low for programs that use select(2), would suffice for
/// some two hundred VMs.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // Best effort: if it fails, the limit is unchanged.
    let _ = setrlimit(Resource::Nofile, raised);
}
