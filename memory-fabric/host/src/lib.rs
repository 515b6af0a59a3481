//! Host services that crates of the memory fabric and of the monitor share: memory mappings,
//! waiting, scheduling, sockets' timers, file locks, counters. Has no knowledge of guests, or of who
//! talks to whom.

mod allowance;
mod class;
mod file_lock;
mod hand_over;
mod mapping;
pub mod metrics;
pub mod poll;
pub mod root;
mod seldom;
pub mod slices;
mod spin;
mod tcp;

pub use allowance::Allowance;
pub use class::{ThreadClass, begin_class, restrict_classes};
pub use file_lock::lock_file;
pub use hand_over::HandOver;
pub use mapping::{Advice, Mapping, UNMAP_RANGES_MAX, ZeroedSlice};
pub use seldom::Seldom;
pub use spin::Spin;
pub use tcp::prefer_latency;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a page of the host and of its guests: the base page of x86-64.
pub const PAGE_SIZE: usize = 4096;

/// Locks a mutex even if a thread panicked while it held the lock: for data that stays valid in
/// that case.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Formats an error and its causes on one line.
#[must_use]
pub fn describe(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
