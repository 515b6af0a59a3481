//! Classes of threads: what a process restricts of a thread depends on what the thread is for.

use std::sync::OnceLock;

/// What a thread is for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ThreadClass {
    /// Runs a vCPU.
    Vcpu,
    /// Serves faults, prefetches, writes pages back, or shares pages between nodes.
    Pager,
    /// Follows the connections to a donor or node, and makes them again.
    Link,
    /// Serves a device of the guest.
    Device,
}

impl ThreadClass {
    /// All classes.
    pub const ALL: [Self; 4] = [Self::Vcpu, Self::Pager, Self::Link, Self::Device];
}

static RESTRICT: OnceLock<fn(ThreadClass)> = OnceLock::new();

/// Sets what [`begin_class`] does in this process. Until then it does nothing. Only the first call
/// has an effect.
pub fn restrict_classes(restrict: fn(ThreadClass)) {
    let _ = RESTRICT.set(restrict);
}

/// Restricts this thread, and those that it starts, to what its class needs. A thread calls it
/// before it does anything that the guest or a peer can influence.
pub fn begin_class(class: ThreadClass) {
    if let Some(restrict) = RESTRICT.get() {
        restrict(class);
    }
}
