//! The donors of replicated memory: what their links report, and what follows from it.

use crate::copies::{Copies, LeaveError, Repair};
use fabric_host::lock;
use fabric_host::metrics::Counter;
use fabric_transport::path::PathStats;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A change of redundancy.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ReplicaEvent {
    /// A donor is not used any more; the guest continues with the other copies.
    Degraded {
        /// Index of the donor's link.
        donor: usize,
        /// Why.
        reason: String,
    },
    /// Every block has two copies again.
    Repaired,
    /// Blocks have both copies in one zone, for want of room in others. Reported once.
    InOneZone {
        /// How many.
        blocks: u32,
    },
}

/// What the loss of a donor means.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Loss {
    /// A block has no copy left.
    OfBlocks,
    /// Every block has a copy.
    OfCopies {
        /// Whether the guest waited for the donor.
        was_awaited: bool,
    },
}

/// Receives changes, on any thread of the fabric. Must return soon.
pub type ReplicaObserver = Box<dyn Fn(ReplicaEvent) + Send + Sync>;

/// Counts pages for each donor.
pub trait Traffic: Send + Sync {
    /// A donor confirmed a page.
    fn wrote(&self, donor: usize);
    /// A donor sent pages that no fault waited for.
    fn fetched(&self, donor: usize, pages: u32);
}

/// What a donor that leaves reports, on the thread that repairs. Must return soon.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LeaveEvent {
    /// A copy has moved.
    Moved,
    /// The last one that could. So many stayed.
    Ended {
        /// Copies that stayed.
        stayed: u32,
    },
}

/// Receives these events.
pub type LeaveObserver = Box<dyn FnMut(LeaveEvent) + Send>;

/// State of a donor's link.
#[derive(Clone, Copy, Debug, Default)]
struct LinkState {
    /// Whether the donor is unreachable.
    down: bool,
    /// Whether the guest waits for it: it has the only copy of a block.
    awaited: bool,
}

/// The donors of replicated memory, shared by their links and the transports of the pager.
pub struct ReplicaSet {
    copies: Copies,
    links: Mutex<Vec<LinkState>>,
    /// Speed of the path to each donor, once it is known.
    paths: Box<[OnceLock<Arc<PathStats>>]>,
    /// Wakes the threads of the pager.
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
    observer: ReplicaObserver,
    /// That of the donor that leaves.
    leave_observer: Mutex<Option<LeaveObserver>>,
    /// For each donor, the transports with a connection to it.
    connected: Mutex<Vec<u32>>,
    disconnected: Condvar,
    /// Whether blocks with both copies in one zone were reported.
    has_reported_zones: AtomicBool,
    /// Number of times that a donor went out.
    pub losses: Counter,
    /// Blocks whose second copy was restored.
    pub repaired_blocks: Counter,
}

impl fmt::Debug for ReplicaSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicaSet")
            .field("links", &self.links)
            .finish_non_exhaustive()
    }
}

impl ReplicaSet {
    /// Creates a set of `donors` donors.
    #[must_use]
    pub fn new(copies: Copies, donors: usize, observer: ReplicaObserver) -> Self {
        Self {
            copies,
            links: Mutex::new(vec![LinkState::default(); donors]),
            paths: (0..donors).map(|_| OnceLock::new()).collect(),
            wake: OnceLock::new(),
            observer,
            leave_observer: Mutex::new(None),
            connected: Mutex::new(vec![0; donors]),
            disconnected: Condvar::new(),
            has_reported_zones: AtomicBool::new(false),
            losses: Counter::default(),
            repaired_blocks: Counter::default(),
        }
    }

    /// Returns the copies.
    #[must_use]
    pub fn copies(&self) -> &Copies {
        &self.copies
    }

    /// Sets how the threads of the pager are woken after a change. Later calls have no effect.
    pub fn set_wake(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.wake.set(Box::new(wake));
    }

    /// Sets where the speed of the path to a donor is found. Later calls have no effect.
    pub fn set_path(&self, donor: usize, path: Arc<PathStats>) {
        let _ = self.paths[donor].set(path);
    }

    /// Returns the time to fetch a page from a donor, if it is known.
    pub(crate) fn latency(&self, donor: u8) -> Option<Duration> {
        let path = self.paths.get(usize::from(donor))?.get()?;
        Some(path.latency_estimate())
    }

    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    fn with_link<T>(&self, donor: usize, change: impl FnOnce(&mut LinkState) -> T) -> T {
        let mut links = lock(&self.links);
        change(&mut links[donor])
    }

    fn id(donor: usize) -> u8 {
        u8::try_from(donor).expect("at most 64 donors")
    }

    /// Stops the use of a donor, unless a block has its only copy there; true when it is not used
    /// now.
    pub(crate) fn exclude(&self, donor: usize, reason: &str) -> bool {
        match self.copies.exclude(Self::id(donor)) {
            Ok(false) => true,
            Ok(true) => {
                self.losses.increment();
                self.wake();
                (self.observer)(ReplicaEvent::Degraded {
                    donor,
                    reason: reason.to_owned(),
                });
                true
            }
            Err(_) => false,
        }
    }

    /// A donor is unreachable. Returns whether the guest has to wait for it.
    pub fn down(&self, donor: usize, reason: &str) -> bool {
        self.with_link(donor, |link| link.down = true);
        let awaited = !self.exclude(donor, reason);
        self.with_link(donor, |link| link.awaited = awaited);
        awaited
    }

    /// A donor is back. Returns whether the guest waited for it.
    pub fn up(&self, donor: usize) -> bool {
        let awaited = self.with_link(donor, |link| {
            link.down = false;
            std::mem::take(&mut link.awaited)
        });
        self.wake();
        awaited
    }

    /// The memory of a donor is lost.
    pub fn lost(&self, donor: usize, reason: &str) -> Loss {
        let was_awaited = self.with_link(donor, |link| {
            link.down = true;
            std::mem::take(&mut link.awaited)
        });
        if !self.exclude(donor, reason) {
            return Loss::OfBlocks;
        }
        self.copies.lose(Self::id(donor));
        // The thread that repairs finds other places.
        self.wake();
        Loss::OfCopies { was_awaited }
    }

    /// Begins to move all copies off a donor that is in use, and returns their number. The observer
    /// receives what happens until the end.
    ///
    /// # Errors
    ///
    /// See [`LeaveError`]. Nothing has changed then, and the observer is dropped.
    pub fn leave(&self, donor: usize, observer: LeaveObserver) -> Result<u32, LeaveError> {
        let mut current = lock(&self.leave_observer);
        let blocks = self.copies.leave(Self::id(donor))?;
        *current = Some(observer);
        drop(current);
        self.wake();
        Ok(blocks)
    }

    /// Ends the use of a donor that holds no copy, and waits until all threads have closed their
    /// connections to it, so that no answer of it is used. Returns false if it holds one, or after
    /// the deadline.
    pub fn retire(&self, donor: usize, deadline: Instant) -> bool {
        if !self.copies.retire(Self::id(donor)) {
            return false;
        }
        self.wake();
        let mut connected = lock(&self.connected);
        while connected[donor] > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.disconnected.wait_timeout(connected, left);
            connected = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Gives up a move that has begun, whose target went out.
    pub(crate) fn give_up_move(&self, given_up: &Repair) {
        self.copies.give_up_move(given_up);
        // The threads note that its place was left.
        self.wake();
    }

    pub(crate) fn note_moved(&self) {
        if let Some(observer) = &mut *lock(&self.leave_observer) {
            observer(LeaveEvent::Moved);
        }
    }

    pub(crate) fn note_left(&self, stayed: u32) {
        // The threads note that copies have left places.
        self.wake();
        self.report_zones();
        let observer = lock(&self.leave_observer).take();
        if let Some(mut observer) = observer {
            observer(LeaveEvent::Ended { stayed });
        }
    }

    /// A transport with connections to all donors was made.
    pub(crate) fn note_with(&self, donors: usize) {
        let mut connected = lock(&self.connected);
        connected[..donors].iter_mut().for_each(|count| *count += 1);
    }

    /// A transport has no connection to a donor any more.
    pub(crate) fn note_without(&self, donor: usize) {
        lock(&self.connected)[donor] -= 1;
        self.disconnected.notify_all();
    }

    pub(crate) fn is_down(&self, donor: usize) -> bool {
        self.with_link(donor, |link| link.down)
    }

    /// Reports blocks with both copies in one zone, if it has not been done.
    pub fn report_zones(&self) {
        if self.has_reported_zones.load(Ordering::Relaxed) {
            return;
        }
        let blocks = self.copies.in_one_zone();
        // Relaxed: the flag orders nothing else.
        if blocks > 0 && !self.has_reported_zones.swap(true, Ordering::Relaxed) {
            (self.observer)(ReplicaEvent::InOneZone { blocks });
        }
    }

    pub(crate) fn note_complete(&self) {
        (self.observer)(ReplicaEvent::Repaired);
    }
}
