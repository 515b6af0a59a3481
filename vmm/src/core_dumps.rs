//! No core dump of a process that has secrets: keys of sealed pages and certificates, tokens of leases,
//! pages on their way.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The size in bytes at which the kernel neither writes a file, which would have a page at least, nor
/// starts a program that collects dumps, as it does without a limit and at 0 (core(5)).
const NONE: u64 = 1;

/// Has the kernel make no core dump of this process. Best effort: a lower limit that was set cannot be
/// raised.
pub fn forbid() {
    let most = getrlimit(Resource::Core)
        .maximum
        .map_or(NONE, |now| now.min(NONE));
    let none = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    let _ = setrlimit(Resource::Core, none);
}
