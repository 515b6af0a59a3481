//! One 8-byte entry for each page: a state word that decides everything, and a queue link, which
//! tells of a remote page when it was evicted.
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
//! `Installing` and `Fetching` are held by a fault thread, `Dropping` by the evictor: nobody
//! else changes the page's bytes or its mapping while they last. The three states in which
//! the page is not mapped but its bytes are still here (`Probation`, `WritingBack` and,
//! briefly, `Dropping`) are only entered by the evictor, and only it unmaps. So a fault that
//! finds `Probation` or `WritingBack` takes the page back by one compare-and-swap, and the
//! evictor notices when its own fails.
//!
//! A page that the guest has freed is discarded: the evictor takes it from `Remote` straight to
//! `Untouched`, and from any of the states with bytes here by way of `Dropping`. It stays where
//! it is in the evictor's queues, which cannot be left in the middle; *listed* remembers that.
//!
//! Pages may also be fetched before anybody asks for them (`pager::prefetch`). Such a page goes
//! from `Fetching` straight to `Probation`, flagged *ahead*: its bytes are here, it is not
//! mapped, so that its first touch is seen, and the evictor may drop it as any other there.
//!
//! # Flags
//!
//! - *dirty*: the bytes here differ from those at home. A page that is not dirty is never
//!   mapped writable.
//! - *contended*: somebody faulted on the page while it was held; the holder must see to it.
//! - *listed*: the page is in the arrivals, in a queue of the evictor or in its table of
//!   write-backs, or whoever set the flag is about to put it there; nobody else may. It is set
//!   by the holder of a page that gets bytes, before the page is let go of. A page without bytes
//!   here is listed only when it was discarded; the evictor takes it out when it comes across it.
//! - *ahead*: fetched before anybody asked for it, and not touched since. *chained*: the same,
//!   and mapped along when the page before it is touched.
//!
//! # Fingerprint
//!
//! The rest of the word is the slot of the page's [fingerprint](crate::fingerprint), if it has
//! one: that of the bytes that its home holds. The slot belongs to the page from the fetch until
//! the word lets it go: the thread that fetched the page sets it before it releases the page, and
//! the evictor alone clears it, when the page is dropped or before it posts a write-back. So a
//! slot in the word is that of this stay of the page, and no later one's.

mod state;

use crate::page::PageIndex;
#[cfg(not(loom))]
use crate::page::{PAGES_MAX, PageRange};
use crate::sync::{AtomicU32, Ordering};
use state::{AHEAD, CHAINED, CONTENDED, DIRTY, FLAG_BITS, LISTED, SLOT};
pub use state::{Kind, SLOTS_MAX, State};

/// The entry of one page.
#[derive(Debug)]
pub struct PageEntry {
    state: AtomicU32,
    /// The next page in the queue that this page is in: its number plus one, or 0.
    link: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<PageEntry>() == 8);

impl PageEntry {
    /// The entry of an untouched page.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: AtomicU32::new(Kind::Untouched as u32),
            link: AtomicU32::new(0),
        }
    }

    /// The state now. Acquire: pairs with the Release of every change, so that whoever sees
    /// a state also sees the bytes and mappings that came before it.
    #[must_use]
    pub fn state(&self) -> State {
        State(self.state.load(Ordering::Acquire))
    }

    fn swap_if(&self, from: State, to: State) -> bool {
        // AcqRel: takes over what the previous holder did, hands on what we did.
        self.state
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Fault thread: takes an `Untouched` page to fill it, or one whose bytes are here
    /// (`Resident`, `Probation`, `WritingBack`) to map it. False when the page is no longer
    /// in the state `seen`.
    #[must_use]
    pub fn begin_install(&self, seen: State) -> bool {
        debug_assert!(matches!(
            seen.kind(),
            Kind::Untouched | Kind::Resident | Kind::Probation | Kind::WritingBack
        ));
        self.swap_if(seen, seen.with_kind(Kind::Installing))
    }

    /// Fault thread: takes a `Remote` page to fetch it.
    #[must_use]
    pub fn begin_fetch(&self, seen: State) -> bool {
        debug_assert_eq!(seen.kind(), Kind::Remote);
        self.swap_if(seen, seen.only_listed(Kind::Fetching))
    }

    /// Fault thread: remembers that somebody waits for the holder of the page, who sees
    /// to it when done. False when the page is no longer in the state `seen`.
    #[must_use]
    pub fn contend(&self, seen: State) -> bool {
        debug_assert!(matches!(
            seen.kind(),
            Kind::Fetching | Kind::Installing | Kind::Dropping
        ));
        self.swap_if(seen, State(seen.0 | CONTENDED))
    }

    /// Holder of `Installing`: the page is dirty from now on. To be called before it is
    /// mapped writable.
    pub fn mark_dirty(&self) {
        debug_assert!(matches!(
            self.state().kind(),
            Kind::Installing | Kind::Fetching
        ));
        self.state.fetch_or(DIRTY, Ordering::AcqRel);
    }

    /// Holder of `Fetching`, whose bytes are here: their fingerprint is in this slot.
    pub fn set_fingerprint(&self, slot: u32) {
        debug_assert!(slot < SLOTS_MAX);
        debug_assert_eq!(self.state().kind(), Kind::Fetching);
        debug_assert_eq!(self.state().fingerprint(), None);
        // AcqRel: pairs with the evictor's Acquire, so that it finds the fingerprint there.
        self.state
            .fetch_or((slot + 1) << FLAG_BITS, Ordering::AcqRel);
    }

    /// Evictor: a write-back is posted next, so the fingerprint is not that of the bytes at home
    /// any more. False when the page is no longer in the state `seen`: it was touched.
    #[must_use]
    pub fn clear_fingerprint(&self, seen: State) -> bool {
        debug_assert_eq!(seen.kind(), Kind::WritingBack);
        self.swap_if(seen, State(seen.0 & !SLOT))
    }

    /// Holder of `Installing` or `Fetching`: the page is mapped. True when somebody else
    /// faulted on it meanwhile and must be woken.
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

    /// Prefetcher, holder of `Fetching`: the bytes are here, and nobody asked for them yet. False
    /// when somebody does: the page is still held, and must be mapped.
    #[must_use]
    pub fn finish_ahead(&self, chained: bool) -> bool {
        let flags = AHEAD | if chained { CHAINED } else { 0 };
        let seen = self.state();
        debug_assert!(seen.kind() == Kind::Fetching && seen.is_listed());
        let ahead = State(seen.with_only(Kind::Probation, LISTED).0 | flags);
        !seen.is_contended() && self.swap_if(seen, ahead)
    }

    /// Holder of `Fetching`: the bytes did not come; the page is remote again. True when somebody
    /// faulted meanwhile; that fault must then be handled anew.
    #[must_use]
    pub fn abandon_fetch(&self) -> bool {
        let before = self.change(|seen| seen.only_listed(Kind::Remote));
        debug_assert_eq!(before.kind(), Kind::Fetching);
        before.is_contended()
    }

    /// Evictor: puts a `Resident` page on probation. False when it is not resident. The
    /// caller unmaps it next.
    #[must_use]
    pub fn begin_probation(&self) -> bool {
        let seen = self.state();
        seen.kind() == Kind::Resident && self.swap_if(seen, seen.with_kind(Kind::Probation))
    }

    /// Evictor: takes an unmapped page that was not touched (`Probation`), or one that is
    /// home (`WritingBack`), to drop it; the caller has taken it out of its queue. False when
    /// it was touched.
    #[must_use]
    pub fn begin_drop(&self, from: Kind) -> bool {
        debug_assert!(matches!(from, Kind::Probation | Kind::WritingBack));
        let seen = self.state();
        seen.kind() == from && self.swap_if(seen, seen.with_only(Kind::Dropping, 0))
    }

    /// Evictor: takes a page whose bytes are here (`Resident`, `Probation`, `WritingBack`) to
    /// free them, because the guest does not want them any more. It stays in its queue. False
    /// when it is no longer in the state `seen`.
    #[must_use]
    pub fn begin_discard(&self, seen: State) -> bool {
        debug_assert!(matches!(
            seen.kind(),
            Kind::Resident | Kind::Probation | Kind::WritingBack
        ));
        self.swap_if(seen, seen.with_only(Kind::Dropping, LISTED))
    }

    /// Evictor: a `Remote` page whose bytes the guest does not want any more. False when it is
    /// no longer in the state `seen`.
    #[must_use]
    pub fn forget(&self, seen: State) -> bool {
        debug_assert_eq!(seen.kind(), Kind::Remote);
        self.swap_if(seen, seen.only_listed(Kind::Untouched))
    }

    /// Holder of `Installing` or `Fetching`, before it lets go: true when it must put the page
    /// into one of the evictor's places next; false when the page is in one already, and must be
    /// left there. Listed while it is held, the page cannot come into a second place meanwhile,
    /// whatever becomes of it.
    #[must_use]
    pub fn list(&self) -> bool {
        debug_assert!(matches!(
            self.state().kind(),
            Kind::Installing | Kind::Fetching
        ));
        // AcqRel: pairs with that of `unlist`, so that the link is written after it was read.
        self.state.fetch_or(LISTED, Ordering::AcqRel) & LISTED == 0
    }

    /// Evictor, which has taken the page out of a queue: true when there are no bytes here, so
    /// that it stays out; false when it belongs into a queue.
    #[must_use]
    pub fn unlist(&self) -> bool {
        let mut seen = self.state();
        while matches!(seen.kind(), Kind::Untouched | Kind::Remote) && seen.is_listed() {
            if self.swap_if(seen, State(seen.0 & !LISTED)) {
                return true;
            }
            seen = self.state();
        }
        false
    }

    /// Evictor, which has taken the page out of a queue: leaves it out, bytes and all, until it is
    /// touched again. False when somebody holds it.
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

    /// Evictor: starts to send home a page on probation. False when it was touched.
    #[must_use]
    pub fn begin_write_back(&self) -> bool {
        let seen = self.state();
        seen.kind() == Kind::Probation && self.swap_if(seen, seen.with_kind(Kind::WritingBack))
    }

    /// Evictor, holder of `Dropping`: the bytes here are gone. Returns the state before: when it
    /// was contended, a fault came meanwhile and must be handled anew; when it had a fingerprint,
    /// the slot is free now.
    #[must_use]
    pub fn finish_drop(&self, to: Kind) -> State {
        debug_assert!(matches!(to, Kind::Untouched | Kind::Remote));
        let before = self.change(|seen| seen.only_listed(to));
        debug_assert_eq!(before.kind(), Kind::Dropping);
        before
    }

    /// Changes the state whatever it is, for the page's holder; others may set flags at the
    /// same time. Gives the state before.
    fn change(&self, to: impl Fn(State) -> State) -> State {
        loop {
            let seen = self.state();
            if self.swap_if(seen, to(seen)) {
                return seen;
            }
        }
    }

    /// The page that follows this one in its queue.
    pub fn link(&self) -> Option<PageIndex> {
        // Relaxed: a link is only read by the queue's owner, which got it through the
        // Acquire of the queue's head.
        self.link
            .load(Ordering::Relaxed)
            .checked_sub(1)
            .map(PageIndex::new)
    }

    /// Makes `next` the page that follows this one in its queue.
    pub fn set_link(&self, next: Option<PageIndex>) {
        let raw = next.map_or(0, |page| page.number() + 1);
        self.link.store(raw, Ordering::Relaxed);
    }

    /// Holder of `Fetching`: what the eviction of the page left, which only a page that is in
    /// no queue has.
    pub fn stamp(&self) -> u32 {
        // Relaxed: the state, which the holder got by Acquire, came after it.
        self.link.load(Ordering::Relaxed)
    }

    /// Holder of `Dropping`: leaves a number with the page, for whoever fetches it again.
    pub fn set_stamp(&self, stamp: u32) {
        self.link.store(stamp, Ordering::Relaxed);
    }
}

impl Default for PageEntry {
    fn default() -> Self {
        Self::new()
    }
}

/// The entries of all pages of a guest: 8 bytes a page, taken from the host only when a page
/// near it is first touched.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct PageMap {
    entries: fabric_host::Mapping,
    pages: usize,
}

#[cfg(not(loom))]
impl PageMap {
    /// A map for the pages below number `pages`, all untouched.
    ///
    /// # Errors
    ///
    /// When the host has no address space left.
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
        let bytes = (pages * size_of::<PageEntry>()).max(1);
        Ok(Self {
            entries: fabric_host::Mapping::anonymous(bytes)?,
            pages,
        })
    }

    /// The entry of a page.
    ///
    /// # Panics
    ///
    /// When the page is outside the map.
    #[must_use]
    pub fn entry(&self, page: PageIndex) -> &PageEntry {
        &self.entries()[page.index()]
    }

    fn entries(&self) -> &[PageEntry] {
        let first = self.entries.as_ptr().cast::<PageEntry>();
        // SAFETY: the mapping holds `pages` entries, is page-aligned, lives as long as self,
        // and starts zeroed, which is a valid `PageEntry`; all access is by atomics.
        unsafe { std::slice::from_raw_parts(first, self.pages) }
    }

    /// How many pages of `range` are in each kind of state now: a snapshot that is not
    /// atomic over pages.
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
