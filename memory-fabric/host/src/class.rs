//! Classes of threads: what a process restricts of a thread depends on what the thread is for.

use std::sync::OnceLock;

/// What a thread is for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ThreadClass {
    /// Runs a vCPU.
    Vcpu,
    /// Serves faults, prefetches or writes pages back.
    Pager,
    /// Serves a device of the guest.
    Device,
}

static RESTRICT: OnceLock<fn(ThreadClass)> = OnceLock::new();

/// Sets what [`begin_class`] does in this process, once and for all. Until then it does nothing.
pub fn restrict_classes(restrict: fn(ThreadClass)) {
    // A process is restricted once; a second time it would be by the same.
    let _ = RESTRICT.set(restrict);
}

/// Restricts this thread, and those that it starts, to what its class needs. Called by a thread before
/// it does anything that the guest or a peer can influence.
pub fn begin_class(class: ThreadClass) {
    if let Some(restrict) = RESTRICT.get() {
        restrict(class);
    }
}
