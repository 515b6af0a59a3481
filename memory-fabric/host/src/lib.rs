//! What the memory fabric asks of the host, and what all its crates share: memory mappings,
//! waiting, scheduling, counters. Knows neither guests nor networks.

mod mapping;
pub mod metrics;
pub mod poll;
pub mod slices;
mod spin;

pub use mapping::Mapping;
pub use spin::Spin;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes in a page of the host, and of its guests: the base page of x86-64.
pub const PAGE_SIZE: usize = 4096;

/// Locks a mutex, also after a thread panicked while it held the lock: for data that every
/// critical section leaves valid.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error and its causes, on one line.
#[must_use]
pub fn describe(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
