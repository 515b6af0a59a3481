//! Distributed guest memory: paging, transports and donors. Has no knowledge of KVM.
//!
//! # The life of a fault
//!
//! A VM's memory on the node that runs it is one memfd with two views ([`guest_memory`]). The guest
//! view is KVM's; where a page's home is a donor ([`homes`]), the view is registered with
//! userfaultfd ([`uffd`]).
//!
//! A vCPU accesses a page that is not mapped. The kernel stops it, and the fault thread
//! (`pager::fault`) reads a message with the address. The page's state word (`page_map`) determines
//! the action; the kind of fault in the message may be outdated:
//!
//! - *untouched*: the page is filled with zeroes, without traffic;
//! - *resident*, *on probation*, *being written back*: the bytes are local and the page is mapped;
//!   an eviction in progress detects this and is cancelled;
//! - *remote*: a page is taken from the [budget](fabric::FabricConfig::local_bytes), a request is
//!   sent on the donor's urgent connection ([`transport`]), and the thread polls for more faults
//!   and for answers. The received page is installed in the guest view by UFFDIO_COPY, which
//!   allocates it, fills it, maps it and wakes the vCPU in one call: write-protected when the
//!   access was a read, so that the first write faults.
//!
//! The evictor (`pager::evict`) runs ahead of the faults. It keeps a reserve of free pages by
//! unmapping the oldest, observing which are touched again, and writing the others back on the
//! donor's bulk connection.
//!
//! Pages that the guest has freed ([`discard`]) lose their bytes locally and at home, and are
//! untouched again.
//!
//! The prefetcher (`pager::prefetch`) fetches pages that a pattern in the faults predicts, in runs,
//! on separate connections. They wait unmapped for their first touch, and are evicted first if it
//! does not come. The first touches of one run can be recorded for the next ([`working_set`]).
//!
//! Where both ends have RDMA, pages are read by it ([`transport::rdma`]) without the donor's CPU.
//! Where it was measured to be slower, write-backs use TCP, and so does all traffic when RDMA
//! fails.
//!
//! A donor ([`donor`]) lends memory under a lease, which a [`link`] renews and whose connections it
//! re-establishes when they break. [`wire`] has their protocol. On slow links pages travel
//! compressed ([`packing`]), where that was measured to pay.
//!
//! [`fabric::Fabric`] combines the parts. A [`view::FabricView`] of it can be read from any thread
//! while it runs.

// The shared support of the integration tests also serves unit tests, under the name that it uses.
#[cfg(test)]
extern crate self as memory_fabric;

pub mod compute;
pub mod discard;
pub mod donor;
mod drain;
mod extents;
pub mod fabric;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod heat;
pub mod link;
mod nodes;
mod pager;
pub mod stats;
pub mod view;
pub mod working_set;

pub use extents::{EXTENTS_MAX, Extents};
pub use fabric_homes::{BLOCK_BYTES, JOINERS_MAX, NodeId, NodeIds};
pub use fabric_pages::uffd::probe_features as userfaultfd_features;
pub use fabric_pages::{guest_memory, page, protection};
pub use fabric_transport::measure::Measured;

/// RDMA devices of this host.
pub mod rdma {
    pub use fabric_transport::rdma::resources::{DeviceUsage, Usage, pinned_bytes};
    pub use fabric_transport::rdma::{
        DeviceChoice, LaneEnds, LinkLayer, Mtu, RdmaError, Settings, Waiting, library_file,
        settings, summaries, usage,
    };
}

// The crates below, by the names that this one has for them.
use fabric_homes as homes;
use fabric_host as mapping;
use fabric_host as spin;
use fabric_host::slices;
use fabric_pages::{fingerprint, page_map, uffd, zap};
use fabric_transport::{control, policy, stream};
use fabric_wire as wire;
use fabric_wire::packing;

mod transport {
    pub use crate::donor::loopback;
    pub use fabric_transport::*;
}

#[cfg(test)]
#[path = "../transport/src/measure/slow.rs"]
mod slow;
// Unit tests use private parts of this build of the crate, which the support crate cannot access.
#[cfg(test)]
#[allow(dead_code, reason = "integration tests use the rest")]
#[path = "../test-support/src/fabric.rs"]
mod support;
