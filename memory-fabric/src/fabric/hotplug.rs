//! Adds memory to a running VM: donors join, blocks get a home, donors leave.

mod boot_events;
mod drain;
mod events;
mod join;
mod leave;
mod loss;
mod members;
mod transports;

use super::adapt::Change;
use super::leases::Leases;
use super::sealing::Sealer;
use super::{DonorAddress, FabricConfig, FabricError, FabricObserver};
use crate::discard::{DISCARD_TIME_MAX, DiscardError, Discarder};
use crate::drain::LastMoves;
use crate::homes::pools::Pools;
use crate::homes::{BLOCK_BYTES, BLOCK_PAGES, Home, HomeTable, NodeId};
use crate::link::Link;
use crate::link::rdma::RdmaLink;
use crate::page::{PageIndex, PageRange};
use crate::pager::Shared;
use crate::view::Lenders;
use crate::wire::TrafficClass;
pub(in crate::fabric) use boot_events::BootEvents;
use crossbeam_channel::Sender;
pub(crate) use drain::HOT_FAULTS_MIN;
pub use drain::{DrainError, Drains, HeatPolicy};
use fabric_replicas::ReplicaSet;
use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Blocks that are cleared at once: the evictor has [`DISCARD_TIME_MAX`] for them.
const BLOCKS_AT_ONCE: u32 = 32;

/// Deadline for clearing all blocks of a request. A thread of the machine waits for it, and the end
/// of a run waits 2 s for that thread. Blocks that were cleared by then need no time in the next
/// request.
const CLEAR_TIME_MAX: Duration = Duration::from_millis(1500);

/// Why memory is not added.
#[derive(Debug, thiserror::Error)]
pub enum HotplugError {
    /// More was requested than there are addresses for.
    #[error("{asked} bytes requested, {limit} is the limit")]
    TooMuch {
        /// Requested bytes.
        asked: u64,
        /// Size of the region.
        limit: u64,
    },
    /// The size is not whole blocks.
    #[error("{0} bytes are not whole blocks of {BLOCK_BYTES}")]
    NotBlocks(u64),
    /// A donor was named although none is needed.
    #[error("{0} bytes are lent already, or plugged; no donor is needed for that")]
    Needless(u64),
    /// There is no id for another donor.
    #[error("{0} donors have joined, which is the limit; ask one of them for more")]
    TooManyDonors(usize),
    /// Another donor is joining.
    #[error("another donor is joining")]
    Joining,
    /// The loopback transport has no donors.
    #[error("no donor can join a VM with the transport loopback")]
    Loopback,
    /// The donor could not join.
    #[error(transparent)]
    Donor(#[from] FabricError),
    /// The fabric has ended.
    #[error("the pager has ended")]
    Ended,
}

/// Adds memory to a running VM and removes it again. Clones share it; may outlive the fabric.
#[derive(Clone, Debug)]
pub struct Hotplug(Arc<Inner>);

pub(super) struct Inner {
    /// The addresses of memory that can be added: whole blocks, or none.
    pages: PageRange,
    requested_blocks: Arc<AtomicU32>,
    shared: Arc<Shared>,
    discarder: Discarder,
    config: FabricConfig,
    observer: FabricObserver,
    /// One for each thread of the pager that uses transports.
    classes: Vec<TrafficClass>,
    lenders: Lenders,
    adapter: Sender<Change>,
    sealer: Arc<Sealer>,
    /// The leases of the guest's start, and their events.
    leases: Leases,
    boot_events: BootEvents,
    /// `None` without replicas.
    replicas: Option<Arc<ReplicaSet>>,
    moves: Arc<LastMoves>,
    /// Slots that are no home, and not free.
    spent: Mutex<drain::SpentSlots>,
    /// The addresses of donors that sent too many wrong pieces, and whose links others have now.
    distrusted: Mutex<BTreeSet<SocketAddr>>,
    state: Mutex<State>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hotplug")
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    pools: Pools,
    /// One for each link of a donor that can join.
    joiners: Vec<Joiner>,
    /// Number of the last loan of a donor that joined.
    loans: u64,
    joining: bool,
    /// Room of donors is chosen for blocks: one without blocks stays, so that none of its slots is
    /// that of another loan.
    choosing: bool,
    closed: bool,
    /// Links of donors of the guest's start that were lost and hold nothing.
    lost: HashSet<usize>,
    /// Threads that end the leases of leaving donors.
    leaving: Vec<JoinHandle<()>>,
    /// Where the loss of a donor is announced while another is drained.
    news: Option<Sender<()>>,
}

/// A slot for a donor.
#[derive(Debug, Default)]
struct Joiner {
    taken: bool,
    /// The number of its loan: another donor may get the place later.
    loan: u64,
    /// Whether its link last reported it as unreachable.
    away: bool,
    lost: bool,
    /// Why, while the monitor was not notified of it, since nothing was used.
    unreported_loss: Option<String>,
    /// Whether the monitor was notified that it is unreachable.
    reported_down: bool,
    links: Option<(Link, Vec<RdmaLink>)>,
}

/// The parts of a [`Hotplug`] that its fabric does not contain.
pub(super) struct Parts {
    pub requested_blocks: Arc<AtomicU32>,
    pub shared: Arc<Shared>,
    pub discarder: Discarder,
    pub classes: Vec<TrafficClass>,
    pub lenders: Lenders,
    pub adapter: Sender<Change>,
    pub sealer: Arc<Sealer>,
    pub leases: Leases,
    pub boot_events: BootEvents,
    pub replicas: Option<Arc<ReplicaSet>>,
    pub moves: Arc<LastMoves>,
}

impl Hotplug {
    /// Creates it without donors that have joined.
    pub(super) fn new(parts: Parts, config: &FabricConfig, observer: &FabricObserver) -> Self {
        let Parts {
            requested_blocks,
            shared,
            discarder,
            classes,
            lenders,
            adapter,
            sealer,
            leases,
            boot_events,
            replicas,
            moves,
        } = parts;
        let none = PageRange::new(PageIndex::new(0), 0);
        let pages = shared.homes.added().unwrap_or(none);
        let config = FabricConfig {
            replay: Vec::new(),
            ..config.clone()
        };
        let joiners = shared.nodes.joiner_links();
        let state = State {
            pools: Pools::new(shared.homes.local()),
            joiners: joiners.map(|_| Joiner::default()).collect(),
            loans: 0,
            joining: false,
            choosing: false,
            closed: false,
            lost: HashSet::new(),
            leaving: Vec::new(),
            news: None,
        };
        let inner = Arc::new(Inner {
            pages,
            requested_blocks,
            shared,
            discarder,
            config,
            observer: Arc::clone(observer),
            classes,
            lenders,
            adapter,
            sealer,
            leases,
            boot_events,
            replicas,
            moves,
            spent: Mutex::default(),
            distrusted: Mutex::default(),
            state: Mutex::new(state),
        });
        inner.handle_losses();
        Self(inner)
    }

    /// Returns what drains donors.
    pub(super) fn drains(&self) -> Drains {
        Drains(Arc::clone(&self.0))
    }

    /// Returns the pages that may be added.
    #[must_use]
    pub fn pages(&self) -> PageRange {
        self.0.pages
    }

    /// Returns the homes of all blocks.
    #[must_use]
    pub fn homes(&self) -> &HomeTable {
        &self.0.shared.homes
    }

    /// Returns the part of `bytes` that neither joined donors nor this node provide already.
    #[must_use]
    pub fn missing_bytes(&self, bytes: u64) -> u64 {
        let blocks = u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
        u64::from(self.0.lock().pools.missing(blocks)) * BLOCK_BYTES
    }

    /// Sets how many bytes of blocks may be plugged. The missing part comes from `donor`, which
    /// joins for it, or from this node, beyond its budget. If this fails, nothing has changed.
    /// Donors that are no longer needed leave.
    ///
    /// Connecting to a donor takes as long as at the start of a VM.
    ///
    /// # Errors
    ///
    /// See [`HotplugError`].
    pub fn request(&self, bytes: u64, donor: Option<DonorAddress>) -> Result<(), HotplugError> {
        let inner = &self.0;
        let limit = inner.pages.bytes();
        if bytes > limit {
            let asked = bytes;
            return Err(HotplugError::TooMuch { asked, limit });
        }
        if !bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(HotplugError::NotBlocks(bytes));
        }
        let blocks = u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
        if let Some(donor) = donor {
            // A slot may be missing because a leaving donor could not get a thread, so that is
            // retried first.
            let joined = inner.join(blocks, donor);
            joined.inspect_err(|_| inner.disconnect_idle())?;
        } else {
            let mut state = inner.lock();
            state.may_change()?;
            inner.note_request(&mut state, blocks);
        }
        inner.disconnect_idle();
        Ok(())
    }

    /// Gives memory to blocks without it, counted from the first that can be added: zeroes until
    /// they are written.
    ///
    /// # Errors
    ///
    /// Fails when there is not enough memory, or the evictor does not respond in time; nothing has
    /// changed then.
    pub fn plug(&self, blocks: Range<u32>) -> Result<(), PlugError> {
        let inner = &self.0;
        let count = blocks.end - blocks.start;
        let places = inner.lock().pools.take(count).ok_or(PlugError::NoMemory)?;
        // Drops what the guest wrote there before.
        if let Err(error) = inner.clear(&blocks) {
            let mut state = inner.lock();
            places
                .into_iter()
                .for_each(|place| state.pools.release(place));
            return Err(error.into());
        }
        let here = inner.pages_here(&places);
        if inner.shared.budget.grow(here) {
            inner.shared.faults.wake();
        }
        for (block, home) in blocks.zip(places) {
            inner.shared.homes.assign(inner.first_block() + block, home);
        }
        Ok(())
    }

    /// Removes the memory of plugged blocks, locally and at home.
    ///
    /// # Errors
    ///
    /// When not all of their pages can be taken in time: one is being fetched or written back by a
    /// donor that does not answer. The blocks keep their memory and its bytes then (virtio 1.2,
    /// section 5.15.6: "the device MUST NOT modify memory ... of plugged memory blocks").
    pub fn unplug(&self, blocks: Range<u32>) -> Result<(), PlugError> {
        let inner = &self.0;
        let homes = &inner.shared.homes;
        let in_table = |block| inner.first_block() + block;
        let deadline = Instant::now() + CLEAR_TIME_MAX;
        inner
            .discarder
            .clear_whole(inner.pages_of(&blocks), deadline)?;
        let unassigned = blocks.map(in_table).filter_map(|b| homes.unassign(b));
        let places: Vec<_> = unassigned.collect();
        let here = inner.pages_here(&places);
        inner.shared.budget.shrink(here);
        let mut state = inner.lock();
        places
            .into_iter()
            .for_each(|place| state.pools.release(place));
        drop(state);
        inner.disconnect_idle();
        Ok(())
    }

    /// Ends all leases of donors that joined, and prevents new ones.
    pub(super) fn close(&self) {
        let inner = &self.0;
        let (leaving, links) = {
            let mut state = inner.lock();
            state.closed = true;
            state.news = None;
            let links: Vec<_> = state.joiners.iter_mut().map(|j| j.links.take()).collect();
            (std::mem::take(&mut state.leaving), links)
        };
        for thread in leaving {
            let _ = thread.join();
        }
        let mut ending = Vec::new();
        for (donor, links) in (inner.shared.nodes.fixed()..).zip(links) {
            if let Some((mut link, rdma_links)) = links {
                // Before the lease ends.
                drop(rdma_links);
                link.begin_release();
                ending.push((donor, link));
            }
        }
        for (donor, link) in ending {
            inner.note_end(donor, link.release());
        }
    }
}

/// Why blocks are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum PlugError {
    /// There is no memory for them.
    #[error("no donor that can be reached lends so much, and this node gives no more")]
    NoMemory,
    /// Their pages are in use.
    #[error(transparent)]
    Discard(#[from] DiscardError),
}

impl State {
    fn may_change(&self) -> Result<(), HotplugError> {
        match (self.closed, self.joining) {
            (true, _) => Err(HotplugError::Ended),
            (_, true) => Err(HotplugError::Joining),
            _ => Ok(()),
        }
    }

    /// Gives the place of a joiner to a new donor.
    fn take_place(&mut self, joiner: usize) {
        self.loans += 1;
        self.joiners[joiner] = Joiner {
            taken: true,
            loan: self.loans,
            ..Joiner::default()
        };
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the index in the home table of the first block that can be added.
    fn first_block(&self) -> u32 {
        HomeTable::block_of(self.pages.first)
    }

    /// Returns the pages of blocks that are counted from the first that can be added.
    fn pages_of(&self, blocks: &Range<u32>) -> PageRange {
        let (_, rest) = self.pages.split_at(blocks.start * BLOCK_PAGES);
        rest.split_at((blocks.end - blocks.start) * BLOCK_PAGES).0
    }

    /// Returns the number of pages whose home is this node.
    fn pages_here(&self, homes: &[Home]) -> u64 {
        let local = self.shared.homes.local();
        let here = homes.iter().filter(|home| home.node == local);
        here.count() as u64 * u64::from(BLOCK_PAGES)
    }

    /// Returns the node of a donor's link.
    fn node_of(&self, donor: usize) -> NodeId {
        self.shared.nodes.node_at(donor)
    }

    /// Returns the index of a joined donor's state.
    fn joiner_of(&self, donor: usize) -> usize {
        donor - self.shared.nodes.fixed()
    }

    fn clear(&self, blocks: &Range<u32>) -> Result<(), DiscardError> {
        in_pieces(
            blocks,
            Instant::now() + CLEAR_TIME_MAX,
            |piece, deadline| self.discarder.clear(self.pages_of(&piece), deadline),
        )
    }
}

/// Clears blocks in pieces until the deadline. Each piece has a deadline too, which is not later.
fn in_pieces(
    blocks: &Range<u32>,
    deadline: Instant,
    mut clear: impl FnMut(Range<u32>, Instant) -> Result<(), DiscardError>,
) -> Result<(), DiscardError> {
    let mut first = blocks.start;
    while first < blocks.end {
        let now = Instant::now();
        if now >= deadline {
            return Err(DiscardError::Late);
        }
        let end = blocks.end.min(first + BLOCKS_AT_ONCE);
        clear(first..end, deadline.min(now + DISCARD_TIME_MAX))?;
        first = end;
    }
    Ok(())
}

#[cfg(test)]
mod unplug_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pieces_of_a_request_have_one_deadline() {
        let deadline = Instant::now() + Duration::from_millis(300);
        let mut pieces = Vec::new();
        let result = in_pieces(&(5..200), deadline, |piece, until| {
            assert!(until <= deadline);
            pieces.push(piece);
            // The third one uses up all the time.
            while pieces.len() == 3 && Instant::now() < deadline {
                std::thread::yield_now();
            }
            Ok(())
        });
        assert!(matches!(result, Err(DiscardError::Late)));
        assert_eq!(pieces, [5..37, 37..69, 69..101]);
    }

    #[test]
    fn each_piece_has_a_deadline_of_its_own_and_all_are_cleared() {
        let long = Instant::now() + DISCARD_TIME_MAX * 100;
        let mut pieces = Vec::new();
        let result = in_pieces(&(0..70), long, |piece, until| {
            assert!(until <= Instant::now() + DISCARD_TIME_MAX);
            pieces.push(piece);
            Ok(())
        });
        assert!(result.is_ok());
        assert_eq!(pieces, [0..32, 32..64, 64..70]);
    }
}
