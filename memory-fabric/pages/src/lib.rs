//! Guest pages on one host: their numbers, their states, the two views of their memory, and
//! userfaultfd. Knows no transport and no donor.
//!
//! - [`page`]: page numbers and ranges;
//! - [`page_map`]: the state word of each page, modelled with loom;
//! - [`fingerprint`]: which pages that count as dirty are equal to their home's copy;
//! - [`guest_memory`]: the guest view and the fabric view of one memfd;
//! - [`protection`]: whether the kernel keeps write protection;
//! - [`uffd`]: page faults of the guest view, and the calls that resolve them;
//! - [`zap`]: unmapping scattered pages of the guest view.

pub mod fingerprint;
#[cfg(not(loom))]
pub mod guest_memory;
pub mod page;
pub mod page_map;
#[cfg(not(loom))]
pub mod protection;
mod sync;
#[cfg(not(loom))]
pub mod uffd;
#[cfg(not(loom))]
pub mod zap;

#[cfg(all(test, loom))]
mod loom_tests;
