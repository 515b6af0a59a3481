//! Distributed guest memory: paging, transports and donors. Knows nothing of KVM.
//!
//! # The life of a fault
//!
//! A VM's memory on the node that runs it is one memfd with two views
//! ([`guest_memory`]). The guest view is KVM's; where a page is at home on a donor
//! ([`homes`]), the view is registered with userfaultfd ([`uffd`]).
//!
//! A vCPU touches a page that is not mapped. The kernel stops it and the fault thread
//! (`pager::fault`) reads a message with the address. The page's state word (`page_map`)
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
#[cfg(test)]
extern crate self as memory_fabric;

pub mod discard;
pub mod donor;
pub mod fabric;
pub mod heat;
pub mod link;
mod nodes;
mod pager;
pub mod stats;
pub mod view;
pub mod working_set;

pub use fabric_homes as homes;
pub use fabric_host::slices;
pub use fabric_pages::{guest_memory, page, uffd};
pub use fabric_transport::{control, policy, stream};
pub use fabric_wire as wire;
pub use fabric_wire::packing;

/// How pages travel between nodes.
pub mod transport {
    pub use crate::donor::loopback;
    pub use fabric_transport::*;
}

pub(crate) use fabric_host as mapping;
pub(crate) use fabric_host as spin;
pub(crate) use fabric_pages::{page_map, zap};

#[cfg(test)]
#[path = "../transport/src/measure/slow.rs"]
mod slow;
// Unit tests use private parts of this build of the crate, which the support crate does not know.
#[cfg(test)]
#[allow(dead_code, reason = "integration tests use the rest")]
#[path = "../test-support/src/fabric.rs"]
mod support;
