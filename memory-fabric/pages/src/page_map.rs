//! One 8-byte entry for each page: a state word that determines all actions, and a queue link,
//! which stores the eviction stamp of a remote page.
//!
//! # States
//!
//! ```text
//!             first touch                         touched again
//!  Untouched ------------> Installing ----------> Resident <-----------+
//!      ^                      ^   ^                   |                |
//!      | all zero             |   | touched           | zap            | mapped
//!      |                      |   +-------------+     v                |
//!      |   Remote --> Fetching (mapped by COPY) | Probation --> Installing
//!      |     ^                                  |     |  dirty
//!      |     |                                  |     v
//!      +-- Dropping <---------------------------+- WritingBack
//! ```
//!
//! A fault thread holds pages in `Installing` and `Fetching`, and the evictor holds those in
//! `Dropping`: no other thread changes the page's bytes or its mapping in these states. The three
//! states in which the page is not mapped but its bytes are still local (`Probation`, `WritingBack`
//! and, briefly, `Dropping`) are only entered by the evictor, and only the evictor unmaps. A fault
//! that finds `Probation` or `WritingBack` therefore takes the page back with one compare-and-swap,
//! and the evictor detects it when its own fails.
//!
//! A page that the guest has freed is discarded: the evictor moves it from `Remote` directly to
//! `Untouched`, and from any state with local bytes through `Dropping`. It stays in its queue of
//! the evictor, from whose middle it cannot be removed; *listed* records that.
//!
//! A `Remote` page whose home is lost becomes `Lost`: it has no bytes. A fault on it takes it
//! through `Installing`, in which it is poisoned, and back. When the guest frees it, the evictor
//! takes it through `Dropping` to `Untouched`.
//!
//! Pages may also be prefetched (`pager::prefetch`). Such a page goes from `Fetching` directly to
//! `Probation`, flagged *ahead*: its bytes are local, it is not mapped, so that its first touch
//! faults, and the evictor may drop it like any other page there.
//!
//! # Flags
//!
//! - *dirty*: the local bytes differ from those at home. A page that is not dirty is never mapped
//!   writable.
//! - *contended*: a fault occurred on the page while it was held; the holder must handle it.
//! - *listed*: the page is in the arrivals, in a queue of the evictor or in its table of
//!   write-backs, or the thread that set the flag is about to put it there; no other thread may.
//!   The holder of a page that gets bytes sets it before the release. A page without local bytes is
//!   listed only when it was discarded; the evictor takes it out when it reaches it.
//! - *ahead*: prefetched, and not touched since. *chained*: the same, and mapped along when a
//!   page before it in its stream is touched.
//!
//! # Fingerprint
//!
//! The rest of the word is the slot of the page's [fingerprint](crate::fingerprint), if it has one:
//! that of the bytes at its home, or of those of the write-back that is on its way there. The slot
//! belongs to the page until the word no longer contains it: the thread that fetched the page sets
//! it before it releases the page, or the evictor before it posts a write-back, and only the
//! evictor clears it, when the page is dropped. A slot in the word thus belongs to the current
//! residency of the page, and to no later one.

mod state;

use crate::page::PageIndex;
#[cfg(not(loom))]
use crate::page::{PAGES_MAX, PageRange};
use crate::sync::{AtomicU32, Ordering};
use state::{AHEAD, CHAINED, CONTENDED, DIRTY, FLAG_BITS, LISTED};
pub use state::{Kind, SLOTS_MAX, State};

/// The entry of one page.
#[derive(Debug)]
#[cfg_attr(not(loom), derive(zerocopy::FromZeros))]
pub struct PageEntry {
    state: AtomicU32,
    /// The next page in this page's queue: its number plus one, or 0.
    link: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<PageEntry>() == 8);

impl PageEntry {
    /// Creates the entry of an untouched page.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: AtomicU32::new(Kind::Untouched as u32),
            link: AtomicU32::new(0),
        }
    }

    /// Returns the current state. Acquire: pairs with the Release of every change, so that the
    /// bytes and mappings that preceded a state are visible with it.
    #[must_use]
    pub fn state(&self) -> State {
        State(self.state.load(Ordering::Acquire))
    }

    fn swap_if(&self, from: State, to: State) -> bool {
        // AcqRel: acquires the previous holder's effects, and releases ours.
        self.state
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// For the fault thread: takes an `Untouched` page to fill it, or one whose bytes are local
    /// (`Resident`, `Probation`, `WritingBack`) to map it. Returns false when the page is no longer
    /// in the state `seen`.
    #[must_use]
    pub fn begin_install(&self, seen: State) -> bool {
        debug_assert!(matches!(
            seen.kind(),
            Kind::Untouched | Kind::Resident | Kind::Probation | Kind::WritingBack
        ));
        self.swap_if(seen, seen.with_kind(Kind::Installing))
    }

    /// For the fault thread: takes a `Lost` page to poison it. Returns false when the page is no
    /// longer in the state `seen`.
    #[must_use]
    pub fn begin_poison(&self, seen: State) -> bool {
        debug_assert_eq!(seen.kind(), Kind::Lost);
        self.swap_if(seen, seen.only_listed(Kind::Installing))
    }

    /// For the holder of `Installing`, which has poisoned the page. Returns true when another fault
    /// occurred in the meantime, whose thread must be woken.
    #[must_use]
    pub fn finish_poison(&self) -> bool {
        let before = self.change(|seen| seen.only_listed(Kind::Lost));
        debug_assert_eq!(before.kind(), Kind::Installing);
        before.is_contended()
    }

    /// For the fault thread: takes a `Remote` page to fetch it.
    #[must_use]
    pub fn begin_fetch(&self, seen: State) -> bool {
        debug_assert_eq!(seen.kind(), Kind::Remote);
        self.swap_if(seen, seen.only_listed(Kind::Fetching))
    }

    /// For the fault thread: records that a fault waits for the holder of the page, which handles
    /// it when done. Returns false when the page is no longer in the state `seen`.
    #[must_use]
    pub fn contend(&self, seen: State) -> bool {
        debug_assert!(matches!(
            seen.kind(),
            Kind::Fetching | Kind::Installing | Kind::Dropping
        ));
        self.swap_if(seen, State(seen.0 | CONTENDED))
    }

    /// For the holder of `Installing`: marks the page dirty. Call it before the page is mapped
    /// writable.
    pub fn mark_dirty(&self) {
        debug_assert!(matches!(
            self.state().kind(),
            Kind::Installing | Kind::Fetching
        ));
        self.state.fetch_or(DIRTY, Ordering::AcqRel);
    }

    /// For the holder of `Fetching` with the bytes: stores the slot of their fingerprint.
    pub fn set_fingerprint(&self, slot: u32) {
        debug_assert!(slot < SLOTS_MAX);
        debug_assert_eq!(self.state().kind(), Kind::Fetching);
        debug_assert_eq!(self.state().fingerprint(), None);
        // AcqRel: pairs with the evictor's Acquire, so that the fingerprint is visible to it.
        self.state
            .fetch_or((slot + 1) << FLAG_BITS, Ordering::AcqRel);
    }

    /// For the evictor: a write-back is posted next; stores the slot of the fingerprint of its bytes
    /// for a page that has none. Returns false when the page is no longer in the state `seen`: it
    /// was touched.
    #[must_use]
    pub fn attach_fingerprint(&self, seen: State, slot: u32) -> bool {
        debug_assert!(slot < SLOTS_MAX);
        debug_assert_eq!(seen.kind(), Kind::WritingBack);
        debug_assert_eq!(seen.fingerprint(), None);
        self.swap_if(seen, State(seen.0 | (slot + 1) << FLAG_BITS))
    }

    /// For the holder of `Installing` or `Fetching`: the page is mapped. Returns true when another
    /// fault occurred in the meantime, whose thread must be woken.
    #[must_use]
    pub fn finish_install(&self) -> bool {
        let mut seen = self.state();
        loop {
            debug_assert!(matches!(seen.kind(), Kind::Installing | Kind::Fetching));
            debug_assert!(seen.is_listed(), "{seen:?} would never be evicted");
            let resident = seen.with_only(Kind::Resident, DIRTY | LISTED);
            if self.swap_if(seen, resident) {
                return seen.is_contended();
            }
            seen = self.state();
        }
    }

    /// For the prefetcher, holder of `Fetching`: the bytes are local, and no fault waits for them
    /// yet. Returns false when one does: the page is still held, and must be mapped.
    #[must_use]
    pub fn finish_ahead(&self, chained: bool) -> bool {
        let flags = AHEAD | if chained { CHAINED } else { 0 };
        let seen = self.state();
        debug_assert!(seen.kind() == Kind::Fetching && seen.is_listed());
        let ahead = State(seen.with_only(Kind::Probation, LISTED).0 | flags);
        !seen.is_contended() && self.swap_if(seen, ahead)
    }

    /// For the holder of `Fetching`: the bytes did not arrive; the page is remote again. Returns
    /// true when a fault occurred in the meantime, which must be handled again.
    #[must_use]
    pub fn abandon_fetch(&self) -> bool {
        let before = self.change(|seen| seen.only_listed(Kind::Remote));
        debug_assert_eq!(before.kind(), Kind::Fetching);
        before.is_contended()
    }

    /// For a thread that has changed the home of the page's block, or learned of the change: returns
    /// whether the page is being fetched, maybe from the home before. Once it is not, no fetch reads
    /// that home any more.
    ///
    /// A load would not suffice: a thread that takes the page to fetch it stores the state and then
    /// loads the home, so that both loads could miss the other thread's store. This is a
    /// read-modify-write, which has a place among the changes of the state: after that of
    /// [`begin_fetch`](Self::begin_fetch), and sees it, or before, and is acquired by it together
    /// with the new home, since all changes of the state are read-modify-writes.
    #[must_use]
    pub fn is_fetching_after_move(&self) -> bool {
        State(self.state.fetch_or(0, Ordering::AcqRel)).kind() == Kind::Fetching
    }

    /// For the evictor: puts a `Resident` page on probation. Returns false when it is not resident.
    /// The caller unmaps it next.
    #[must_use]
    pub fn begin_probation(&self) -> bool {
        let seen = self.state();
        seen.kind() == Kind::Resident && self.swap_if(seen, seen.with_kind(Kind::Probation))
    }

    /// For the evictor: takes an unmapped page that was not touched (`Probation`), or one that was
    /// written back (`WritingBack`), to drop it; the caller has taken it out of its queue. Returns
    /// false when it was touched.
    #[must_use]
    pub fn begin_drop(&self, from: Kind) -> bool {
        debug_assert!(matches!(from, Kind::Probation | Kind::WritingBack));
        let seen = self.state();
        seen.kind() == from && self.swap_if(seen, seen.with_only(Kind::Dropping, 0))
    }

    /// For the evictor: takes a page whose bytes are local (`Resident`, `Probation`, `WritingBack`)
    /// to free them, because the guest has freed the page. It stays in its queue. Returns false
    /// when it is no longer in the state `seen`.
    #[must_use]
    pub fn begin_discard(&self, seen: State) -> bool {
        debug_assert!(matches!(
            seen.kind(),
            Kind::Resident | Kind::Probation | Kind::WritingBack
        ));
        self.swap_if(seen, seen.with_only(Kind::Dropping, LISTED))
    }

    /// For the evictor: a `Remote` page that the guest has freed. Returns false when it is no
    /// longer in the state `seen`.
    #[must_use]
    pub fn forget(&self, seen: State) -> bool {
        debug_assert_eq!(seen.kind(), Kind::Remote);
        self.swap_if(seen, seen.only_listed(Kind::Untouched))
    }

    /// A `Remote` page whose home is lost has no bytes any more. Returns false when it is no longer
    /// in the state `seen`.
    #[must_use]
    pub fn lose(&self, seen: State) -> bool {
        debug_assert_eq!(seen.kind(), Kind::Remote);
        self.swap_if(seen, seen.only_listed(Kind::Lost))
    }

    /// For the evictor: takes a `Lost` page that the guest has freed, to make it usable again.
    /// Returns false when it is no longer in the state `seen`.
    #[must_use]
    pub fn begin_recovery(&self, seen: State) -> bool {
        debug_assert_eq!(seen.kind(), Kind::Lost);
        self.swap_if(seen, seen.only_listed(Kind::Dropping))
    }

    /// For the evictor, whose write-back will not be confirmed, because the home is lost: the page
    /// is on probation again. Returns false when it was touched or discarded.
    #[must_use]
    pub fn cancel_write_back(&self) -> bool {
        let seen = self.state();
        seen.kind() == Kind::WritingBack && self.swap_if(seen, seen.with_kind(Kind::Probation))
    }

    /// For the holder of `Installing` or `Fetching`, before the release: returns true when it must
    /// put the page into one of the evictor's places next; false when the page is in one already,
    /// and must stay there. Listed while it is held, the page cannot enter a second place, whatever
    /// happens to it.
    #[must_use]
    pub fn list(&self) -> bool {
        debug_assert!(matches!(
            self.state().kind(),
            Kind::Installing | Kind::Fetching
        ));
        // AcqRel: pairs with that of `unlist`, so that the link is written after it was read.
        self.state.fetch_or(LISTED, Ordering::AcqRel) & LISTED == 0
    }

    /// For the evictor, which has taken the page out of a queue: returns true when it has no local
    /// bytes, so that it stays out; false when it belongs into a queue.
    #[must_use]
    pub fn unlist(&self) -> bool {
        let mut seen = self.state();
        while matches!(seen.kind(), Kind::Untouched | Kind::Remote | Kind::Lost) && seen.is_listed()
        {
            if self.swap_if(seen, State(seen.0 & !LISTED)) {
                return true;
            }
            seen = self.state();
        }
        false
    }

    /// For the evictor, which has taken the page out of a queue: leaves it out, with its bytes,
    /// until it is touched again. Returns false when another thread holds it.
    #[must_use]
    pub fn set_aside(&self) -> bool {
        loop {
            let seen = self.state();
            match seen.kind() {
                Kind::Fetching | Kind::Installing | Kind::Dropping => return false,
                _ if self.swap_if(seen, State(seen.0 & !LISTED)) => return true,
                _ => {}
            }
        }
    }

    /// For the evictor: starts to write back a page on probation. Returns false when it was
    /// touched.
    #[must_use]
    pub fn begin_write_back(&self) -> bool {
        let seen = self.state();
        seen.kind() == Kind::Probation && self.swap_if(seen, seen.with_kind(Kind::WritingBack))
    }

    /// For the evictor, holder of `Dropping`: the local bytes are freed. Returns the state before:
    /// when it was contended, a fault occurred in the meantime and must be handled again; when it
    /// had a fingerprint, the slot is free now.
    #[must_use]
    pub fn finish_drop(&self, to: Kind) -> State {
        debug_assert!(matches!(to, Kind::Untouched | Kind::Remote));
        let before = self.change(|seen| seen.only_listed(to));
        debug_assert_eq!(before.kind(), Kind::Dropping);
        before
    }

    /// Changes any state, for the page's holder; others may set flags concurrently. Returns the
    /// state before.
    fn change(&self, to: impl Fn(State) -> State) -> State {
        loop {
            let seen = self.state();
            if self.swap_if(seen, to(seen)) {
                return seen;
            }
        }
    }

    /// Returns the page that follows this one in its queue.
    pub fn link(&self) -> Option<PageIndex> {
        // Relaxed: a link is only read by the queue's owner, which obtained it through the Acquire
        // of the queue's head.
        self.link
            .load(Ordering::Relaxed)
            .checked_sub(1)
            .map(PageIndex::new)
    }

    /// Sets the page that follows this one in its queue.
    pub fn set_link(&self, next: Option<PageIndex>) {
        let raw = next.map_or(0, |page| page.number() + 1);
        self.link.store(raw, Ordering::Relaxed);
    }

    /// For the holder of `Fetching`: returns the stamp from the page's eviction, which only a page
    /// in no queue has.
    pub fn stamp(&self) -> u32 {
        // Relaxed: the state, which the holder read with Acquire, was stored after it.
        self.link.load(Ordering::Relaxed)
    }

    /// For the holder of `Dropping`: stores a stamp for the next fetch of the page.
    pub fn set_stamp(&self, stamp: u32) {
        self.link.store(stamp, Ordering::Relaxed);
    }
}

impl Default for PageEntry {
    fn default() -> Self {
        Self::new()
    }
}

/// The entries of all pages of a guest: 8 bytes per page, allocated by the kernel when a page near
/// it is first touched.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct PageMap {
    entries: fabric_host::ZeroedSlice<PageEntry>,
}

#[cfg(not(loom))]
impl PageMap {
    /// Creates a map of untouched pages below number `pages`.
    ///
    /// # Errors
    ///
    /// Fails when the host has no address space left.
    ///
    /// # Panics
    ///
    /// When `pages` is more than [`PAGES_MAX`]: the guest's size is checked before.
    pub fn new(pages: u64) -> std::io::Result<Self> {
        assert!(
            pages <= PAGES_MAX,
            "{pages} pages, {PAGES_MAX} is the limit"
        );
        let pages = usize::try_from(pages).expect("a page number fits usize");
        // A zeroed entry is that of an untouched page.
        let entries = fabric_host::ZeroedSlice::new(pages)?;
        Ok(Self { entries })
    }

    /// Returns the entry of a page.
    ///
    /// # Panics
    ///
    /// When the page is outside the map.
    #[must_use]
    pub fn entry(&self, page: PageIndex) -> &PageEntry {
        &self.entries[page.index()]
    }

    /// Counts the pages of `range` in wanted states: a snapshot that is not atomic over pages.
    #[must_use]
    pub fn count(&self, range: PageRange, wanted: impl Fn(State) -> bool) -> u64 {
        range
            .iter()
            .filter(|&page| wanted(self.entry(page).state()))
            .count() as u64
    }

    /// Bytes of metadata for each page.
    pub const BYTES_PER_PAGE: usize = size_of::<PageEntry>();
}

#[cfg(all(test, not(loom)))]
mod tests;
