//! How many files this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process have as many files open as it may: a node has three for each connection of a VM, and the usual
/// limit of 1024, which is kept low for programs that use select(2), would be all for some ninety VMs.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // Where it is refused, the limit stays what it was.
    let _ = setrlimit(Resource::Nofile, raised);
}
