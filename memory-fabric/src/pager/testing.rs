//! What threads of the pager share, without the threads.

use super::prefetch::Bell;
use super::{Budget, Policies, Shared};
use crate::guest_memory::GuestMemory;
use crate::heat::Touches;
use crate::homes::{HomeTable, NodeIds};
use crate::nodes::Nodes;
use crate::page::{PAGE_SIZE, PageIndex};
use crate::page_map::{Kind, PageMap};
use crate::stats::PagerStats;
use crate::uffd::Uffd;
use crossbeam_channel::Receiver;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// For the pages of a table, with links to `donors` donors that join, and what is handed back to the
/// fault thread.
pub(super) fn shared(
    homes: HomeTable,
    cache_pages: u64,
    donors: usize,
) -> (Arc<Shared>, Receiver<PageIndex>) {
    let span_pages = homes.span_pages();
    let bytes = usize::try_from(span_pages).expect("a small guest") * PAGE_SIZE;
    let bell = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
    let (retries, handed_back) = crossbeam_channel::bounded(64);
    let shared = Shared {
        memory: Arc::new(GuestMemory::new(bytes).expect("a small memory")),
        nodes: Arc::new(Nodes::new(
            homes.local(),
            &[],
            &NodeIds::in_order(0).joiners[..donors],
        )),
        homes: Arc::new(homes),
        map: PageMap::new(span_pages).expect("a small map"),
        uffd: Uffd::new().expect("userfaultfd, as root has it"),
        stats: Arc::new(PagerStats::new(donors)),
        touches: Touches::new(span_pages).expect("a small map"),
        budget: Budget::new(cache_pages),
        policies: Arc::new(Policies::new(Vec::new(), 0, donors)),
        arrivals: Default::default(),
        returns: Default::default(),
        evicted: Default::default(),
        ahead: Default::default(),
        forecast: Default::default(),
        retries,
        fault_wake: bell(),
        evict_wake: bell(),
        evict_told: AtomicBool::new(false),
        prefetch_bell: Bell::new(bell()),
        recorder: None,
        stopping: AtomicBool::new(false),
        stopped_at: OnceLock::new(),
        failed: Arc::new(|error| panic!("{error}")),
        continue_write_protected: true,
        spin: Duration::ZERO,
    };
    (Arc::new(shared), handed_back)
}

/// An untouched page has been written, and sent home.
pub(super) fn make_remote(shared: &Shared, page: PageIndex) {
    let entry = shared.map.entry(page);
    assert!(entry.begin_install(entry.state()));
    assert!(entry.list());
    assert!(!entry.finish_install());
    assert!(entry.begin_probation());
    assert!(entry.begin_drop(Kind::Probation));
    assert!(!entry.finish_drop(Kind::Remote));
}
