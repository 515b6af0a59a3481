//! The donors of replicated memory: what their links report, and what follows from it.

mod links;
mod moves;
mod suspicion;

use crate::copies::{Copies, LeaveError, Spared};
use fabric_host::lock;
use fabric_host::metrics::Counter;
use fabric_transport::PageTransport;
use fabric_transport::path::PathStats;
use links::LinkState;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;
pub use suspicion::Check;
use suspicion::Suspicion;

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
    /// A donor is unreachable, and the guest waits for it: it has what no other in use has.
    Awaited {
        /// Index of the donor's link.
        donor: usize,
        /// Why it is unreachable.
        reason: String,
    },
    /// A donor is back for which the guest waited.
    Back {
        /// Index of the donor's link.
        donor: usize,
    },
    /// The guest does not wait for this donor any more, although it is not back: others have its memory.
    AwaitedNoMore {
        /// Index of the donor's link.
        donor: usize,
    },
    /// Every block has two copies again.
    Repaired,
    /// A donor sends pieces of pages that are not what was written, which others replace. Reported
    /// once a minute at most.
    WrongPieces {
        /// Index of the donor's link.
        donor: usize,
        /// How many so far.
        pieces: u64,
    },
    /// Pages are lost: copies were made without them, since none that could be read was right then, and
    /// no donor that is left, or may return, has them.
    PagesLost {
        /// How many more than before.
        pages: u64,
    },
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

/// A donor that joins.
#[derive(Debug)]
pub struct Newcomer {
    /// The blocks that it lends.
    pub slots: u32,
    /// A donor in the same zone, if there is one.
    pub beside: Option<usize>,
    /// A connection for each thread, in the order in which their transports were made.
    pub transports: Vec<Box<dyn PageTransport>>,
    /// Speed of the path to it, if it is known.
    pub path: Option<Arc<PathStats>>,
}

/// A thread's connection to a donor that joins.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub donor: u8,
    pub transport: Box<dyn PageTransport>,
    pub path: Option<Arc<PathStats>>,
}

/// The connections that a thread has yet to take.
pub(crate) type Inbox = Arc<Mutex<Vec<Arrival>>>;

/// The donors of replicated memory, shared by their links and the transports of the pager.
pub struct ReplicaSet {
    copies: Copies,
    links: Mutex<Vec<LinkState>>,
    /// Speed of the path to each donor of the start, once it is known.
    paths: Mutex<Vec<Option<Arc<PathStats>>>>,
    /// Wakes the threads of the pager.
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
    observer: ReplicaObserver,
    /// That of the donor that leaves.
    leave_observer: Mutex<Option<LeaveObserver>>,
    /// For each donor, the transports with a connection to it.
    connected: Mutex<Vec<u32>>,
    /// Notified when one of these numbers changes, and when a donor is readmitted.
    connections_changed: Condvar,
    /// One for each transport, in the order in which they were made.
    inboxes: Mutex<Vec<Inbox>>,
    /// Whether blocks with both copies in one zone were reported.
    has_reported_zones: AtomicBool,
    /// How pages are checked, where they can be.
    check: OnceLock<Check>,
    /// For each donor, the wrong pieces that it sent.
    suspicions: Mutex<Vec<Suspicion>>,
    /// Number of times that a donor went out.
    pub losses: Counter,
    /// Blocks whose second copy was restored.
    pub repaired_blocks: Counter,
    /// Pieces that were not what was written, and that others replaced.
    pub wrong_pieces: Counter,
}

impl fmt::Debug for ReplicaSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicaSet")
            .field("links", &self.links)
            .finish_non_exhaustive()
    }
}

impl ReplicaSet {
    /// Creates a set of `donors` donors, including those that may join.
    #[must_use]
    pub fn new(copies: Copies, donors: usize, observer: ReplicaObserver) -> Self {
        Self {
            copies,
            links: Mutex::new(vec![LinkState::default(); donors]),
            paths: Mutex::new(vec![None; donors]),
            wake: OnceLock::new(),
            observer,
            leave_observer: Mutex::new(None),
            connected: Mutex::new(vec![0; donors]),
            connections_changed: Condvar::new(),
            inboxes: Mutex::default(),
            has_reported_zones: AtomicBool::new(false),
            check: OnceLock::new(),
            suspicions: Mutex::new(vec![Suspicion::default(); donors]),
            losses: Counter::default(),
            repaired_blocks: Counter::default(),
            wrong_pieces: Counter::default(),
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

    /// Sets where transports that are made later find the speed of the path to a donor.
    pub fn set_path(&self, donor: usize, path: Arc<PathStats>) {
        lock(&self.paths)[donor] = Some(path);
    }

    pub(crate) fn path(&self, donor: usize) -> Option<Arc<PathStats>> {
        lock(&self.paths)[donor].clone()
    }

    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    fn id(donor: usize) -> u8 {
        u8::try_from(donor).expect("at most 64 donors")
    }

    /// Stops the use of a donor, unless a block has its only copy there; true when it is not used
    /// now.
    pub(crate) fn exclude(&self, donor: usize, reason: &str) -> bool {
        let excluded = self.copies.exclude(Self::id(donor));
        excluded.is_ok_and(|was_used| {
            self.note_out(donor, was_used, reason);
            true
        })
    }

    /// The same for good: its copies get other places.
    fn expel(&self, donor: usize, spared: Spared, reason: &str) -> bool {
        let expelled = self.copies.expel(Self::id(donor), spared);
        expelled.is_ok_and(|was_used| {
            self.note_out(donor, was_used, reason);
            // The thread that repairs finds other places.
            self.wake();
            self.report_lost(0..self.copies.blocks());
            true
        })
    }

    fn note_out(&self, donor: usize, was_used: bool, reason: &str) {
        if was_used {
            self.losses.increment();
            self.wake();
            (self.observer)(ReplicaEvent::Degraded {
                donor,
                reason: reason.to_owned(),
            });
        }
    }

    /// Begins to move all copies off a donor that is in use, to those in `targets`, or to any if there
    /// are none. Returns their number. The observer receives what happens until the end.
    ///
    /// # Errors
    ///
    /// See [`LeaveError`]. Nothing has changed then, and the observer is dropped.
    pub fn leave(
        &self,
        donor: usize,
        targets: &[usize],
        observer: LeaveObserver,
    ) -> Result<u32, LeaveError> {
        let mut current = lock(&self.leave_observer);
        let blocks = match targets {
            [] => self.copies.leave(Self::id(donor))?,
            named => {
                let bits = named.iter().fold(0, |bits, donor| bits | 1 << donor);
                self.copies.leave_for(Self::id(donor), bits)?
            }
        };
        *current = Some(observer);
        drop(current);
        self.wake();
        Ok(blocks)
    }

    /// Begins to move copies to donors that have less than their share. Returns their number. The
    /// observer receives what happens until the end.
    ///
    /// # Errors
    ///
    /// While copies move. Nothing has changed then, and the observer is dropped.
    pub fn rebalance(&self, observer: LeaveObserver) -> Result<u32, LeaveError> {
        let mut current = lock(&self.leave_observer);
        let copies = self.copies.rebalance()?;
        *current = Some(observer);
        drop(current);
        self.wake();
        Ok(copies)
    }

    /// Ends that after the copy that is moving now. Returns false when there is nothing to end.
    pub fn stop_rebalancing(&self) -> bool {
        let is_ending = self.copies.stop_rebalancing();
        self.wake();
        is_ending
    }

    /// Ends the use of a donor that holds no copy, and waits until all threads have closed their
    /// connections to it, so that no answer of it is used. Returns false if it holds one, or after
    /// the deadline.
    pub fn retire(&self, donor: usize, deadline: Instant) -> bool {
        if !self.copies.retire(Self::id(donor)) {
            return false;
        }
        self.settle_links();
        self.drop_arrivals(donor);
        self.wake();
        self.wait_until(deadline, |connected| connected[donor] == 0)
    }

    /// Forgets what the link of the last donor in a place reported, and what that has sent, before another one connects
    /// there. The place is that of a donor that has left.
    pub fn prepare(&self, donor: usize) {
        self.forget_link(donor);
        self.forget_suspicion(donor);
    }

    /// Adds a donor in a place that was prepared: each thread gets its connection, then the donor is
    /// used. Returns false, and has closed the connections, if there is a donor, or this one is lost
    /// or not connected everywhere before the deadline.
    pub fn join(&self, donor: usize, newcomer: Newcomer, deadline: Instant) -> bool {
        let (id, beside) = (Self::id(donor), newcomer.beside.map(Self::id));
        let inboxes = lock(&self.inboxes).clone();
        // A thread that ends has none.
        let is_for_all = newcomer.transports.len() == inboxes.len();
        let has_connections = lock(&self.connected)[donor] > 0;
        if !is_for_all || has_connections || !self.copies.join(id, newcomer.slots, beside) {
            return false;
        }
        let threads = u32::try_from(inboxes.len()).expect("a few threads");
        for (inbox, transport) in inboxes.iter().zip(newcomer.transports) {
            lock(inbox).push(Arrival {
                donor: id,
                transport,
                path: newcomer.path.clone(),
            });
        }
        // After the connections, so that a thread that sees the change finds its own.
        self.copies.note_change();
        self.wake();
        let has_joined = self.wait_until(deadline, |connected| connected[donor] == threads)
            && self.copies.note_joined(id)
            && {
                self.wake();
                self.wait_until(deadline, |_| !self.copies.is_out(id))
            };
        // One that got a copy at this moment stays.
        if has_joined || !self.copies.retire(id) {
            return true;
        }
        self.drop_arrivals(donor);
        self.wake();
        false
    }

    /// Drops connections that no thread has taken.
    fn drop_arrivals(&self, donor: usize) {
        let id = Self::id(donor);
        let inboxes = lock(&self.inboxes).clone();
        for inbox in inboxes {
            let mut arrivals = lock(&inbox);
            let untaken: Vec<_> = arrivals.extract_if(.., |one| one.donor == id).collect();
            drop(arrivals);
            // Closing a connection may take long.
            drop(untaken);
        }
    }

    /// Waits until a condition of the connections is met; false after the deadline.
    fn wait_until(&self, deadline: Instant, is_met: impl Fn(&[u32]) -> bool) -> bool {
        let mut connected: MutexGuard<'_, Vec<u32>> = lock(&self.connected);
        while !is_met(&connected) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.connections_changed.wait_timeout(connected, left);
            connected = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// A transport with connections to these first donors was made. Returns where it gets those to
    /// donors that join.
    pub(crate) fn note_with(&self, donors: usize) -> Inbox {
        let mut connected = lock(&self.connected);
        connected[..donors].iter_mut().for_each(|count| *count += 1);
        let inbox = Inbox::default();
        lock(&self.inboxes).push(Arc::clone(&inbox));
        inbox
    }

    /// A transport ends.
    pub(crate) fn note_end(&self, inbox: &Inbox) {
        lock(&self.inboxes).retain(|other| !Arc::ptr_eq(other, inbox));
    }

    /// A transport has a connection to a donor that joins.
    pub(crate) fn note_connected(&self, donor: usize) {
        lock(&self.connected)[donor] += 1;
        self.connections_changed.notify_all();
    }

    /// A donor is used again, or for the first time.
    pub(crate) fn note_readmitted(&self) {
        // It may have become unreachable at this moment. Others may be needed no longer.
        self.settle_links();
        // With the lock, so that one that is about to wait does not miss it.
        drop(lock(&self.connected));
        self.connections_changed.notify_all();
    }

    /// A transport has no connection to a donor any more.
    pub(crate) fn note_without(&self, donor: usize) {
        lock(&self.connected)[donor] -= 1;
        self.connections_changed.notify_all();
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
