//! Adding memory to a running VM: donors that join, blocks that get a home, donors that leave.

use super::adapt::Change;
use super::connections::Connections;
use super::sources::obtain;
use super::{DonorAddress, FabricConfig, FabricError, FabricEvent, FabricObserver, TransportKind};
use crate::discard::{DiscardError, Discarder};
use crate::hotplug::pools::Pools;
use crate::hotplug::{BLOCK_BYTES, BLOCK_PAGES, JOINERS_MAX, Region};
use crate::layout::NodeId;
use crate::link::rdma::RdmaLink;
use crate::link::{Leased, Link, LinkConfig, LinkEvent};
use crate::page::{PAGE_SIZE, PageRange};
use crate::pager::Shared;
use crate::pager::lanes::LaneChange;
use crate::stream::Carrier;
use crate::transport::PageTransport;
use crate::transport::vacant::Vacant;
use crate::view::{Lenders, LentBy};
use crate::wire::TrafficClass;
use crossbeam_channel::{Sender, bounded};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a thread of the pager may take to take note of a transport.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(2);

/// Blocks that are cleared at once: the evictor has
/// [`DISCARD_TIME_MAX`](crate::discard::DISCARD_TIME_MAX) for them.
const BLOCKS_AT_ONCE: u32 = 32;

/// Why memory is not added.
#[derive(Debug, thiserror::Error)]
pub enum HotplugError {
    /// More than there are addresses for.
    #[error("{asked} bytes are asked for, {limit} is the limit")]
    TooMuch {
        /// What was asked for.
        asked: u64,
        /// What the region has.
        limit: u64,
    },
    /// Not whole blocks.
    #[error("{0} bytes are not whole blocks of {BLOCK_BYTES}")]
    NotBlocks(u64),
    /// A donor was named that is not needed.
    #[error("{0} bytes are lent already, or plugged; no donor is needed for that")]
    Needless(u64),
    /// There is no number for another donor.
    #[error("{JOINERS_MAX} donors have joined, which is the limit; ask one of them for more")]
    TooManyDonors,
    /// Another donor is joining.
    #[error("another donor is joining")]
    Joining,
    /// Pages do not travel over a network.
    #[error("no donor can join a VM with the transport loopback")]
    Loopback,
    /// The donor did not come.
    #[error(transparent)]
    Donor(#[from] FabricError),
    /// The fabric has ended.
    #[error("the pager has ended")]
    Ended,
}

/// Adds memory to a running VM and takes it away again. Clones share it; may outlive the fabric.
#[derive(Clone, Debug)]
pub struct Hotplug(Arc<Inner>);

pub(super) struct Inner {
    region: Arc<Region>,
    shared: Arc<Shared>,
    discarder: Discarder,
    config: FabricConfig,
    observer: FabricObserver,
    /// To each thread of the pager that uses transports.
    lanes: Vec<(TrafficClass, Sender<LaneChange>)>,
    lenders: Lenders,
    adapter: Sender<Change>,
    /// Donors of the start.
    fixed: usize,
    state: Mutex<State>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hotplug")
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    pools: Pools,
    /// For each place from `fixed` on.
    joiners: Vec<Joiner>,
    joining: bool,
    closed: bool,
    /// Threads that see a donor off.
    leaving: Vec<JoinHandle<()>>,
}

/// A place for a donor.
#[derive(Debug, Default)]
struct Joiner {
    taken: bool,
    /// As its link told last.
    away: bool,
    lost: bool,
    /// Whether the monitor knows that it is away.
    told: bool,
    links: Option<(Link, Vec<RdmaLink>)>,
}

/// What a [`Hotplug`] is made of beside what it finds in its fabric.
pub(super) struct Parts {
    pub region: Arc<Region>,
    pub shared: Arc<Shared>,
    pub discarder: Discarder,
    pub lanes: Vec<(TrafficClass, Sender<LaneChange>)>,
    pub lenders: Lenders,
    pub adapter: Sender<Change>,
    pub fixed: usize,
}

impl Hotplug {
    pub(super) fn new(parts: Parts, config: &FabricConfig, observer: &FabricObserver) -> Self {
        let Parts {
            region,
            shared,
            discarder,
            lanes,
            lenders,
            adapter,
            fixed,
        } = parts;
        let config = FabricConfig {
            replay: Vec::new(),
            ..config.clone()
        };
        let joiners = (0..JOINERS_MAX).map(|_| Joiner::default()).collect();
        Self(Arc::new(Inner {
            region,
            shared,
            discarder,
            config,
            observer: Arc::clone(observer),
            lanes,
            lenders,
            adapter,
            fixed,
            state: Mutex::new(State {
                joiners,
                ..State::default()
            }),
        }))
    }

    /// The pages that may be added.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.0.region
    }

    /// What of `bytes` neither donors that joined lend nor this node gives already.
    #[must_use]
    pub fn missing_bytes(&self, bytes: u64) -> u64 {
        let blocks = u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
        u64::from(self.0.lock().pools.missing(blocks)) * BLOCK_BYTES
    }

    /// From now on blocks can be plugged until there are so many bytes of them. What is missing
    /// comes from `donor`, which joins for that, or from this node, beyond its budget. When this
    /// fails, nothing has changed. Donors of which nothing is needed any more leave.
    ///
    /// Connecting to a donor takes as long as at the start of a VM.
    ///
    /// # Errors
    ///
    /// See [`HotplugError`].
    pub fn request(&self, bytes: u64, donor: Option<DonorAddress>) -> Result<(), HotplugError> {
        let inner = &self.0;
        let limit = inner.region.pages().bytes();
        if bytes > limit {
            let asked = bytes;
            return Err(HotplugError::TooMuch { asked, limit });
        }
        if !bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(HotplugError::NotBlocks(bytes));
        }
        let blocks = u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
        if let Some(donor) = donor {
            inner.join(blocks, donor)?;
        } else {
            let mut state = inner.lock();
            state.may_change()?;
            state.pools.request(blocks);
        }
        inner.region.set_requested(blocks);
        inner.see_off_idle();
        Ok(())
    }

    /// Gives memory to blocks of the region that have none: zeroes until they are written.
    ///
    /// # Errors
    ///
    /// When there is not enough, or the evictor does not come to it; nothing has changed then.
    pub fn plug(&self, blocks: Range<u32>) -> Result<(), PlugError> {
        let inner = &self.0;
        let count = blocks.end - blocks.start;
        let places = inner.lock().pools.take(count).ok_or(PlugError::NoMemory)?;
        // What a guest wrote there before goes.
        if let Err(error) = inner.clear(&blocks) {
            let mut state = inner.lock();
            places
                .into_iter()
                .for_each(|place| state.pools.give_back(place));
            return Err(error.into());
        }
        let here = places.iter().filter(|place| place.home == NodeId::COMPUTE);
        let here = here.count() as u64 * u64::from(BLOCK_PAGES);
        if inner.shared.budget.grow(here) {
            let _ = inner.shared.fault_wake.write(1);
        }
        for (block, place) in blocks.zip(places) {
            inner.region.settle(block, place);
        }
        Ok(())
    }

    /// Takes the memory of plugged blocks away, here and at home.
    ///
    /// # Errors
    ///
    /// When the evictor does not come to it. The blocks have memory then as before; some may have
    /// lost their bytes.
    pub fn unplug(&self, blocks: Range<u32>) -> Result<(), PlugError> {
        let inner = &self.0;
        for block in blocks.clone() {
            inner.region.set_leaving(block, true);
        }
        if let Err(error) = inner.clear(&blocks) {
            for block in blocks {
                inner.region.set_leaving(block, false);
            }
            return Err(error.into());
        }
        let places: Vec<_> = blocks.filter_map(|b| inner.region.unsettle(b)).collect();
        let here = places.iter().filter(|place| place.home == NodeId::COMPUTE);
        let here = here.count() as u64 * u64::from(BLOCK_PAGES);
        inner.shared.budget.shrink(here);
        let mut state = inner.lock();
        places
            .into_iter()
            .for_each(|place| state.pools.give_back(place));
        drop(state);
        inner.see_off_idle();
        Ok(())
    }

    /// Ends all leases of donors that joined; nobody joins any more.
    pub(super) fn close(&self) {
        let inner = &self.0;
        let (leaving, links) = {
            let mut state = inner.lock();
            state.closed = true;
            let links: Vec<_> = state.joiners.iter_mut().map(|j| j.links.take()).collect();
            (std::mem::take(&mut state.leaving), links)
        };
        for thread in leaving {
            let _ = thread.join();
        }
        for (donor, links) in (inner.fixed..).zip(links) {
            if let Some((link, rdma_links)) = links {
                // Before the lease ends.
                drop(rdma_links);
                inner.note_end(donor, link);
            }
        }
    }
}

/// Why blocks stay as they are.
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
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clear(&self, blocks: &Range<u32>) -> Result<(), DiscardError> {
        let mut first = blocks.start;
        while first < blocks.end {
            let count = (blocks.end - first).min(BLOCKS_AT_ONCE);
            let pages = self.region.pages_of(first).first;
            let pages = PageRange::new(pages, count * BLOCK_PAGES);
            self.discarder.clear(pages)?;
            first += count;
        }
        Ok(())
    }

    /// A donor joins, for what is missing to `blocks`.
    fn join(self: &Arc<Self>, blocks: u32, donor: DonorAddress) -> Result<(), HotplugError> {
        if self.config.transport == TransportKind::Loopback {
            return Err(HotplugError::Loopback);
        }
        let (place, missing) = {
            let mut state = self.lock();
            state.may_change()?;
            let missing = state.pools.missing(blocks);
            if missing == 0 {
                return Err(HotplugError::Needless(u64::from(blocks) * BLOCK_BYTES));
            }
            let place = self.place_for(&state, donor.address);
            let place = place.ok_or(HotplugError::TooManyDonors)?;
            state.joiners[place - self.fixed] = Joiner {
                taken: true,
                ..Joiner::default()
            };
            state.joining = true;
            (place, missing)
        };
        let joined = self.connect(place, donor, u64::from(missing) * BLOCK_BYTES);
        let mut state = self.lock();
        state.joining = false;
        let joiner = &mut state.joiners[place - self.fixed];
        let ended = match joined {
            Err(error) => {
                joiner.taken = false;
                return Err(error);
            }
            Ok(links) => {
                joiner.links = Some(links);
                state.closed || state.joiners[place - self.fixed].lost
            }
        };
        let usable = !state.joiners[place - self.fixed].away && !ended;
        state.pools.join(place, missing, usable);
        if ended {
            let why = if state.closed {
                HotplugError::Ended
            } else {
                HotplugError::Donor(FabricError::System(
                    "keep a donor that joined: its memory was lost at once",
                    std::io::ErrorKind::ConnectionAborted.into(),
                ))
            };
            drop(state);
            self.see_off(place);
            return Err(why);
        }
        state.pools.request(blocks);
        Ok(())
    }

    /// The place of a donor: its own one if it was here before, else one that is new, else one
    /// that another has left.
    fn place_for(&self, state: &State, address: SocketAddr) -> Option<usize> {
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        let free = |place: &usize| !state.joiners[place - self.fixed].taken;
        let places = self.fixed..self.fixed + JOINERS_MAX;
        let known = |place: &usize| lenders.get(*place).and_then(|lent| lent.address);
        let own = |place: &usize| free(place) && known(place) == Some(address);
        places
            .clone()
            .find(own)
            .or_else(|| Some(lenders.len()).filter(|place| places.contains(place)))
            .or_else(|| places.clone().find(free))
    }

    /// Leases from a donor, and gives its transports to the pager.
    fn connect(
        self: &Arc<Self>,
        place: usize,
        donor: DonorAddress,
        bytes: u64,
    ) -> Result<(Link, Vec<RdmaLink>), HotplugError> {
        let node = NodeId(u16::try_from(place + 1).expect("few donors"));
        let address = donor.address;
        let leased: Result<Leased, _> = obtain(
            self.config.transport,
            donor.fingerprint,
            LinkConfig {
                node,
                address,
                carrier: Carrier::Tcp,
                vm: self.config.vm.clone(),
                bytes,
                or_less: false,
                grace: self.config.grace,
            },
        );
        let leased = leased.map_err(|source| FabricError::Donor { address, source })?;
        if leased.grant().bytes < bytes {
            let (lent, wanted) = (leased.grant().bytes, bytes);
            return Err(FabricError::TooLittle {
                address,
                lent,
                wanted,
            }
            .into());
        }
        let mut lent_by = LentBy {
            address: Some(address),
            ..LentBy::default()
        };
        let stats = &self.shared.stats.donors[place];
        let traffic = |class| Arc::clone(stats.traffic(class));
        let bells: Vec<_> = self.lanes.iter().map(|(class, _)| *class).collect();
        let bells: Vec<_> = bells
            .into_iter()
            .map(|class| (class, self.bell(class)))
            .collect();
        let mut made = Connections::default();
        let observer = self.observer_of(place);
        made.add(
            &self.config,
            leased,
            &bells,
            &traffic,
            &mut lent_by,
            &observer,
        )?;
        let Connections {
            urgent,
            bulk,
            ahead,
            rdma_links,
            mut links,
            rdma_refusals,
            followed,
        } = made;
        for refusal in rdma_refusals {
            tracing::info!("donor {address} is not read by RDMA: {refusal}");
        }
        let link = links.pop().expect("one was made");
        let path = lent_by.path.clone();
        let mut lanes = [urgent, bulk, ahead].map(|mut transports| transports.pop());
        for &(class, _) in &self.lanes {
            let lane = &mut lanes[lane_of(class)];
            let transport = lane.take().expect("one for each class");
            if self.change(place, class, transport).is_none() {
                self.vacate(place);
                return Err(HotplugError::Ended);
            }
        }
        if let Some(path) = path {
            self.shared.policies.join(place, Some(path));
        }
        for followed in followed {
            let _ = self.adapter.try_send(Change::Follow(followed));
        }
        let mut lenders = self.lenders.write().unwrap_or_else(PoisonError::into_inner);
        if place < lenders.len() {
            lenders[place] = lent_by;
        } else {
            lenders.push(lent_by);
        }
        Ok((link, rdma_links))
    }

    fn bell(&self, class: TrafficClass) -> &vmm_sys_util::eventfd::EventFd {
        match class {
            TrafficClass::Urgent => &self.shared.fault_wake,
            TrafficClass::Bulk => &self.shared.evict_wake,
            _ => self.shared.prefetch_bell.descriptor(),
        }
    }

    /// Gives a thread of the pager another transport; gives what it had. `None` when it does not
    /// take it in time, or has ended.
    fn change(
        &self,
        donor: usize,
        class: TrafficClass,
        transport: Box<dyn PageTransport>,
    ) -> Option<Box<dyn PageTransport>> {
        let (_, lane) = self.lanes.iter().find(|(of, _)| *of == class)?;
        let (replaced, before) = bounded(1);
        let change = LaneChange {
            donor,
            transport,
            replaced,
        };
        lane.send_timeout(change, CHANGE_TIME_MAX).ok()?;
        // A full counter rings as well.
        let _ = self.bell(class).write(1);
        before.recv_timeout(CHANGE_TIME_MAX).ok()
    }

    fn vacate(&self, donor: usize) {
        for &(class, _) in &self.lanes {
            // Dropped here, which closes its connection.
            drop(self.change(donor, class, Box::new(Vacant)));
        }
    }

    /// Sees off donors of which nothing is needed any more.
    fn see_off_idle(self: &Arc<Self>) {
        let idle = {
            let state = self.lock();
            if state.joining {
                Vec::new()
            } else {
                state.pools.idle()
            }
        };
        for donor in idle {
            self.see_off(donor);
        }
    }

    /// A donor of which nothing is plugged leaves, on a thread that takes the time for it.
    fn see_off(self: &Arc<Self>, donor: usize) {
        let mut state = self.lock();
        if !state.pools.leave(donor) {
            return;
        }
        let Some(links) = state.joiners[donor - self.fixed].links.take() else {
            return;
        };
        state.leaving.retain(|thread| !thread.is_finished());
        let inner = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name(format!("leave-{}", donor + 1))
            .spawn(move || inner.end(donor, links));
        match thread {
            Ok(thread) => state.leaving.push(thread),
            // The lease ends with the links, which were dropped with the closure.
            Err(error) => tracing::warn!(%error, "no thread to see a donor off"),
        }
    }

    fn end(&self, donor: usize, (link, rdma_links): (Link, Vec<RdmaLink>)) {
        let node = node_of(donor);
        self.vacate(donor);
        self.shared.policies.join(donor, None);
        let _ = self.adapter.try_send(Change::Forget(node));
        // Before the lease ends.
        drop(rdma_links);
        let address = link.address();
        self.note_end(donor, link);
        let told = {
            let mut state = self.lock();
            let joiner = &mut state.joiners[donor - self.fixed];
            joiner.taken = false;
            std::mem::take(&mut joiner.told)
        };
        if told {
            (self.observer)(FabricEvent::Link(LinkEvent::Up { node }));
        }
        tracing::info!("donor {address} ({node}) has left: nothing of it is plugged any more");
    }

    /// Ends a lease, and keeps what the donor counted.
    fn note_end(&self, donor: usize, link: Link) {
        let own_count = link.release();
        let mut lenders = self.lenders.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(lent_by) = lenders.get_mut(donor) {
            lent_by.link = None;
            lent_by.own_count = Some(own_count);
        }
    }

    /// What takes the events of a donor that joined: it concerns the guest only while something of
    /// the donor is plugged.
    fn observer_of(self: &Arc<Self>, donor: usize) -> FabricObserver {
        let inner = Arc::downgrade(self);
        let observer = Arc::clone(&self.observer);
        Arc::new(move |event| match (Weak::upgrade(&inner), event) {
            (Some(inner), FabricEvent::Link(event)) => inner.take_event(donor, event),
            (_, event) => observer(event),
        })
    }

    fn take_event(self: &Arc<Self>, donor: usize, event: LinkEvent) {
        let node = node_of(donor);
        let mut state = self.lock();
        let used = state.pools.used_of(donor).unwrap_or(0) > 0;
        let joiner = &mut state.joiners[donor - self.fixed];
        let (usable, told) = match event {
            LinkEvent::Down { .. } => {
                joiner.away = true;
                joiner.told |= used;
                (false, used.then_some(event))
            }
            LinkEvent::Up { .. } => {
                joiner.away = false;
                (true, std::mem::take(&mut joiner.told).then_some(event))
            }
            LinkEvent::Lost { ref reason, .. } => {
                joiner.lost = true;
                if !used {
                    tracing::warn!("{node}, of which nothing is plugged, is lost: {reason}");
                }
                (false, used.then_some(event))
            }
        };
        state.pools.set_usable(donor, usable);
        drop(state);
        if let Some(event) = told {
            (self.observer)(FabricEvent::Link(event));
        } else if !usable {
            self.see_off_lost(donor);
        }
    }

    /// A donor that is lost for good, and of which nothing is plugged, leaves.
    fn see_off_lost(self: &Arc<Self>, donor: usize) {
        let lost = self.lock().joiners[donor - self.fixed].lost;
        if lost {
            self.see_off(donor);
        }
    }
}

fn node_of(donor: usize) -> NodeId {
    NodeId(u16::try_from(donor + 1).expect("few donors"))
}

fn lane_of(class: TrafficClass) -> usize {
    match class {
        TrafficClass::Urgent => 0,
        TrafficClass::Bulk => 1,
        _ => 2,
    }
}

/// Blocks of a region are multiples of pages.
const _: () = assert!(BLOCK_BYTES == BLOCK_PAGES as u64 * PAGE_SIZE as u64);
