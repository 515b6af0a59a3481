//! The atomics of the page map: the standard ones, or loom's when its model checker runs.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU32;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::AtomicU32;
pub(crate) use std::sync::atomic::Ordering;
