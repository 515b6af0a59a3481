//! Distributed guest memory: paging, transports and donors. Knows nothing of KVM.
//!
//! # The life of a fault
//!
//! A VM's memory on the node that runs it is one memfd with two views
//! ([`guest_memory`]). The guest view is KVM's; where a page is at home on a donor
//! ([`layout`]), the view is registered with userfaultfd ([`uffd`]).
//!
//! A vCPU touches a page that is not mapped. The kernel stops it and the fault thread
//! (`pager::fault`) reads a message with the address. The page's state word ([`page_map`])
//! decides what to do; the message's own idea of the fault may be out of date:
//!
//! - *untouched*: the page is made of zeros, with no traffic;
//! - *resident*, *on probation*, *being written back*: the bytes are here, the page is mapped;
//!   an eviction that was under way notices and gives up;
//! - *remote*: room is taken out of a [budget](fabric::FabricConfig::local_bytes), a request
//!   goes out on the donor's urgent connection ([`transport`]), and the thread looks for more
//!   faults and for answers. The page that comes is put into the guest view by UFFDIO_COPY,
//!   which allocates it, fills it, maps it and wakes the vCPU in one call: write-protected
//!   when the access was a read, so that a first write is seen.
//!
//! The evictor (`pager::evict`) runs ahead of all that. It keeps a reserve of free pages by
//! unmapping the oldest, watching which are touched again, and sending the others home on the
//! donor's bulk connection.
//!
//! Pages that the guest has freed ([`discard`]) lose their bytes here and at home, and are
//! untouched again.
//!
//! The prefetcher (`pager::prefetch`) fetches pages that a pattern in the faults promises, in
//! runs, on connections of its own. They wait unmapped for their first touch, and are the first
//! to go when nobody touches them. What was touched first in one run can be recorded for the
//! next ([`working_set`]).
//!
//! Where both ends have RDMA, pages are read by it ([`transport::rdma`]), and the donor's processor
//! has no part; write-backs go by TCP, and so does all when RDMA fails.
//!
//! A donor ([`donor`]) lends memory under a lease, which a [`link`] keeps alive and whose
//! connections it makes again when they break. What they say to each other is in [`wire`]. On
//! slow links pages travel compressed ([`packing`]), where that was measured to pay.
//!
//! [`fabric::Fabric`] puts the parts together. A [`view::FabricView`] of it can be looked at from
//! any thread while it runs.

// What the integration tests share serves unit tests too, by the name that it knows.
#[cfg(all(test, not(loom)))]
extern crate self as memory_fabric;

#[cfg(not(loom))]
pub mod control;
#[cfg(not(loom))]
pub mod discard;
#[cfg(not(loom))]
pub mod donor;
#[cfg(not(loom))]
pub mod fabric;
#[cfg(not(loom))]
pub mod guest_memory;
#[cfg(not(loom))]
pub mod heat;
#[cfg(not(loom))]
pub mod hotplug;
#[cfg(not(loom))]
pub mod layout;
#[cfg(not(loom))]
pub mod link;
#[cfg(not(loom))]
mod mapping;
#[cfg(not(loom))]
pub mod packing;
pub mod page;
pub mod page_map;
#[cfg(not(loom))]
mod pager;
#[cfg(not(loom))]
pub mod policy;
#[cfg(not(loom))]
mod spin;
#[cfg(not(loom))]
pub mod stats;
#[cfg(not(loom))]
pub mod stream;
mod sync;
#[cfg(not(loom))]
pub mod transport;
#[cfg(not(loom))]
pub mod turns;
#[cfg(not(loom))]
pub mod uffd;
#[cfg(not(loom))]
pub mod view;
#[cfg(not(loom))]
pub mod wire;
#[cfg(not(loom))]
pub mod working_set;
#[cfg(not(loom))]
mod zap;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
#[path = "../tests/support/mod.rs"]
mod support;
