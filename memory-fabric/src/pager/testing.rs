//! The shared state of the pager, without its threads.

use super::mailbox::{
    EvictorInbox, EvictorMailbox, FaultInbox, FaultMailbox, PrefetcherInbox, PrefetcherMailbox,
};
use super::{Budget, Lifecycle, Policies, Shared};
use crate::fingerprint::FingerprintTable;
use crate::guest_memory::GuestMemory;
use crate::heat::Touches;
use crate::homes::{HomeTable, NodeIds};
use crate::nodes::Nodes;
use crate::page::{PAGE_SIZE, PageIndex};
use crate::page_map::{Kind, PageMap};
use crate::stats::PagerStats;
use crate::uffd::Uffd;
use std::sync::Arc;
use std::time::Duration;

/// The inboxes of the threads, which the test owns instead.
pub(super) struct Inboxes {
    pub faults: FaultInbox,
    pub evictor: EvictorInbox,
    pub prefetcher: PrefetcherInbox,
}

/// Creates the state for the pages of a table, with links for `donors` donors that join.
pub(super) fn shared(homes: HomeTable, cache_pages: u64, donors: usize) -> (Arc<Shared>, Inboxes) {
    let nodes = Nodes::new(&[], &NodeIds::in_order(0).joiners[..donors]);
    let homes = homes.with_links(nodes.all());
    let span_pages = homes.span_pages();
    let bytes = usize::try_from(span_pages).expect("a small guest") * PAGE_SIZE;
    let (faults, fault_inbox) = FaultMailbox::new().expect("an eventfd");
    let (evictor, evictor_inbox) = EvictorMailbox::new().expect("an eventfd");
    let (prefetcher, prefetcher_inbox) = PrefetcherMailbox::new().expect("an eventfd");
    let shared = Shared {
        memory: Arc::new(GuestMemory::new(bytes).expect("a small memory")),
        nodes: Arc::new(nodes),
        homes: Arc::new(homes),
        map: PageMap::new(span_pages).expect("a small map"),
        fingerprints: FingerprintTable::new(cache_pages).expect("a small table"),
        uffd: Uffd::new().expect("userfaultfd, as root has it"),
        stats: Arc::new(PagerStats::new(donors)),
        touches: Touches::new(span_pages).expect("a small map"),
        budget: Budget::new(cache_pages),
        policies: Arc::new(Policies::new(Vec::new(), 0, donors)),
        forecast: Default::default(),
        recorder: None,
        copy_write_protected: true,
        continue_write_protected: true,
        spin: Duration::ZERO,
        lifecycle: Lifecycle::new(Arc::new(|error| panic!("{error}"))),
        losses: super::Losses::new(donors),
        faults,
        evictor,
        prefetcher,
    };
    let inboxes = Inboxes {
        faults: fault_inbox,
        evictor: evictor_inbox,
        prefetcher: prefetcher_inbox,
    };
    (Arc::new(shared), inboxes)
}

/// Makes an untouched page one that was written and then written back.
pub(super) fn make_remote(shared: &Shared, page: PageIndex) {
    let entry = shared.map.entry(page);
    assert!(entry.begin_install(entry.state()));
    assert!(entry.list());
    assert!(!entry.finish_install());
    assert!(entry.begin_probation());
    assert!(entry.begin_drop(Kind::Probation));
    assert!(!entry.finish_drop(Kind::Remote).is_contended());
}
