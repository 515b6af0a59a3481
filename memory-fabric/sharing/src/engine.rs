//! The thread that serves shared memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_coherence::members::MEMBERS_MAX;
use fabric_coherence::message::Role;
use fabric_coherence::token::Keeper;
use fabric_coherence::{
    BlockIndex, Cache, CacheAction, Directory, DirectoryAction, Member, Message, Need, Number,
    Over, Progress,
};
use fabric_host::{HandOver, Spin};
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::{PAGE_SIZE, PageBytes, PageIndex};
use fabric_peers::{PeerError, PeerMessage, Peers};

use crate::depot::{Depot, Store};
use crate::evict::EvictionQueue;
use crate::faults::Pending;
use crate::frames::Frames;
use crate::give_way::GiveWay;
use crate::home::HomeStore;
use crate::merge::Tables;
use crate::owned::OwnedBlocks;
use crate::requests::Requests;
use crate::sleep::{Signals, Slept};
use crate::starvation::Token;
use crate::timers::{Deadlines, HomeWaits, SWEEPS_AT_ONCE, Sweeper};
use crate::{Config, Failure, FailureObserver, GANG_PART, GANG_UNITS_MAX, Homes, SharingStats};

/// A directory may serve every other member first: its deadline is that of so many transactions.
const DIRECTORY_PARTS: u32 = 16;
const _: () = assert!(DIRECTORY_PARTS as usize == MEMBERS_MAX);

/// A message that arrived, with the page beside it.
pub(crate) struct Arrival {
    pub(crate) from: Member,
    pub(crate) message: PeerMessage,
    pub(crate) bytes: Option<Box<PageBytes>>,
}

/// A page's bytes that wait for their grant.
pub(crate) struct Inbound {
    pub(crate) page: PageIndex,
    /// `None` for the page's home.
    pub(crate) from: Option<Member>,
    pub(crate) bytes: Box<PageBytes>,
}

/// Everything of one node.
pub(crate) struct Engine<P> {
    pub(crate) config: Config,
    pub(crate) frames: Frames,
    pub(crate) cache: Cache,
    pub(crate) directory: Directory,
    pub(crate) keeper: Keeper,
    pub(crate) peers: P,
    pub(crate) home: HomeStore,
    /// Where the home stores what it has no room for.
    pub(crate) store: Option<Store>,
    pub(crate) owned: OwnedBlocks,
    pub(crate) queue: EvictionQueue,
    pub(crate) tables: Tables,
    pub(crate) progress: Progress,
    /// What the times of `progress` begin with.
    origin: Instant,
    /// The time when this pass of the engine began, or when it last woke a thread that waited.
    pub(crate) now: Instant,
    pub(crate) transactions: Deadlines<(PageIndex, Number)>,
    pub(crate) blocks: Deadlines<(BlockIndex, Number)>,
    /// What peers owe that a grant names.
    pub(crate) answers: Deadlines<(PageIndex, Number)>,
    /// Pages given back that their directory has not confirmed.
    pub(crate) puts: Deadlines<(PageIndex, Number)>,
    pub(crate) requests: Requests,
    pub(crate) tokens: Deadlines<Number>,
    pub(crate) home_waits: HomeWaits,
    pub(crate) sweeper: Sweeper,
    /// The token of this node.
    pub(crate) token: Option<Token>,
    /// The thread for which this node has asked for the token.
    pub(crate) starving: Option<u32>,
    /// Messages of this node to itself.
    pub(crate) local: VecDeque<Message>,
    pub(crate) inbound: Vec<Inbound>,
    arrivals: Vec<Arrival>,
    pub(crate) deferred: VecDeque<Pending>,
    /// Buffers for later use.
    pub(crate) spare_pages: Vec<Box<PageBytes>>,
    pub(crate) spare_actions: Vec<Vec<CacheAction>>,
    /// Empty between two uses.
    pub(crate) spare_needs: Vec<Need>,
    spare_orders: Vec<Vec<DirectoryAction>>,
    pub(crate) stats: Arc<SharingStats>,
    pub(crate) signals: Signals,
    spin: Spin,
    pub(crate) hand_over: HandOver,
    pub(crate) give_way: GiveWay,
    /// For [`Self::sleep`], whose room is used again.
    pub(crate) watched: Vec<libc::pollfd>,
}

/// The processor time of a thread that touches guest memory, as [`Progress`] has it.
pub(crate) fn thread_time(id: u32) -> Option<u64> {
    fabric_host::slices::thread_time(id).map(nanoseconds)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Runs the engine until it is stopped or fails, and reports a failure. Returns what keeps threads
/// waiting then: no thread may continue without the bytes of a lost page. A disk's thread would write
/// zeroes.
pub(crate) fn supervise<P: Peers>(
    mut engine: Engine<P>,
    failed: FailureObserver,
) -> Option<Frames> {
    fabric_host::begin_class(fabric_host::ThreadClass::Pager);
    fabric_host::slices::request_short_slices();
    // The engine's data is used again only to name what is lost.
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| engine.run()));
    // Nobody waits for an engine that has ended.
    engine.signals.fences.end(u64::MAX);
    engine.signals.discards.end();
    let failure = match result {
        Ok(Ok(())) => return None,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::Panicked,
    };
    let losses = engine.fence(&failure);
    failed(failure, losses);
    // The connections end with the rest, so that other nodes notice.
    Some(engine.frames)
}

impl<P: Peers> Engine<P> {
    pub(crate) fn new(
        config: Config,
        homes: &Homes,
        memory: Arc<GuestMemory>,
        peers: P,
        signals: Signals,
        stats: Arc<SharingStats>,
    ) -> Result<Self, Failure> {
        let pages = memory.bytes() / PAGE_SIZE;
        // The home of a block keeps its directory.
        let mine = homes.iter().map(|home| home == config.me);
        let directory = Directory::new(config.members, mine, fabric_coherence::directory::OPEN_MAX);
        let time = config.transaction_time_max;
        let now = Instant::now();
        let gang_time_max = (config.hold_unit * GANG_UNITS_MAX).min(time / GANG_PART);
        Ok(Self {
            frames: Frames::new(memory)?,
            cache: Cache::new(config.me, config.members, homes.iter()),
            directory,
            keeper: Keeper::default(),
            peers,
            home: HomeStore::new(pages),
            store: None,
            owned: OwnedBlocks::default(),
            queue: EvictionQueue::new(config.local_pages),
            tables: Tables::new(&config, Arc::clone(&signals.fences)),
            progress: Progress::new(nanoseconds(config.hold_unit), nanoseconds(gang_time_max)),
            origin: now,
            now,
            transactions: Deadlines::new(time),
            blocks: Deadlines::new(time),
            answers: Deadlines::new(time / 2),
            puts: Deadlines::new(time * DIRECTORY_PARTS),
            requests: Requests::new(time * DIRECTORY_PARTS),
            tokens: Deadlines::new(time),
            home_waits: HomeWaits::new(time),
            sweeper: Sweeper::default(),
            token: None,
            starving: None,
            local: VecDeque::new(),
            inbound: Vec::new(),
            arrivals: Vec::new(),
            deferred: VecDeque::new(),
            spare_pages: Vec::new(),
            spare_actions: Vec::new(),
            spare_needs: Vec::new(),
            spare_orders: Vec::new(),
            stats,
            signals,
            spin: Spin::new(config.spin),
            hand_over: HandOver::new(config.spin),
            give_way: GiveWay::new(),
            watched: Vec::new(),
            config,
        })
    }

    /// Adds the depot of this node's home, before the engine runs.
    pub(crate) fn set_depot(&mut self, depot: Box<dyn Depot>) {
        let pages = self.frames.pages();
        self.home = HomeStore::new(pages).with_places(|page| depot.has_place(page));
        self.store = Some(Store::new(depot));
    }

    fn run(&mut self) -> Result<(), Failure> {
        let mut faults = Vec::new();
        let mut idle_since = None;
        self.now = Instant::now();
        loop {
            self.signals.fence.check()?;
            let mut worked = self.serve_halts();
            let found = self.serve_faults(&mut faults)?;
            worked |= found;
            let comes_first = match found {
                true => self.looks_again(),
                false => self.gives_way(),
            };
            if comes_first {
                idle_since = None;
                continue;
            }
            self.flush();
            worked |= self.receive()?;
            if self.looks_again() {
                idle_since = None;
                continue;
            }
            self.give_way.passes();
            // Peers wait for the answers.
            self.flush();
            worked |= self.run_timers(self.now)?;
            worked |= self.serve_depot()?;
            worked |= self.retry()?;
            worked |= self.serve_fences()?;
            worked |= self.serve_discards()?;
            self.flush();
            self.flush_depot();
            self.frames.finish_some_frees()?;
            self.stats.local_pages.set(self.local_pages() as u64);
            if worked {
                self.now = Instant::now();
                idle_since = None;
                continue;
            }
            let idle = self.now - *idle_since.get_or_insert(self.now);
            let Self {
                hand_over, spin, ..
            } = self;
            let polls_on;
            (polls_on, self.now) = hand_over.pause(|| spin.keeps_polling(idle));
            if polls_on {
                continue;
            }
            // Nothing waits while the engine sleeps.
            self.flush_all();
            self.frames.finish_frees()?;
            if self.sleep()? == Slept::Stopped {
                return self.signals.fence.check();
            }
            self.now = Instant::now();
            let since = idle_since.take().unwrap_or(self.now);
            self.spin.slept(self.now - since);
        }
    }

    fn receive(&mut self) -> Result<bool, Failure> {
        let Self {
            peers,
            arrivals,
            spare_pages,
            ..
        } = self;
        peers.receive(&mut |from, message, bytes| {
            let bytes = bytes.map(|bytes| {
                let mut place = spare_pages
                    .pop()
                    .unwrap_or_else(|| Box::new([0; PAGE_SIZE]));
                place.copy_from_slice(bytes);
                place
            });
            arrivals.push(Arrival {
                from,
                message,
                bytes,
            });
        })?;
        if self.arrivals.is_empty() {
            return Ok(false);
        }
        let mut arrivals = std::mem::take(&mut self.arrivals);
        for arrival in arrivals.drain(..) {
            self.arrive(arrival)?;
            self.deliver_local()?;
        }
        self.arrivals = arrivals;
        Ok(true)
    }

    fn arrive(&mut self, arrival: Arrival) -> Result<(), Failure> {
        let Arrival {
            from,
            message,
            bytes,
        } = arrival;
        match message {
            PeerMessage::Coherence(message) => {
                if let (Message::Data { page, .. }, Some(bytes)) = (&message, bytes) {
                    self.inbound.push(Inbound {
                        page: *page,
                        from: Some(from),
                        bytes,
                    });
                }
                self.handle(from, &message)
            }
            PeerMessage::Home(message) => self.home_message(from, message, bytes),
            PeerMessage::Merge(message) => self.merge_message(from, message, bytes),
        }
    }

    /// Handles the messages that this node sent to itself.
    pub(crate) fn deliver_local(&mut self) -> Result<(), Failure> {
        while let Some(message) = self.local.pop_front() {
            self.handle(self.config.me, &message)?;
        }
        Ok(())
    }

    pub(crate) fn handle(&mut self, from: Member, message: &Message) -> Result<(), Failure> {
        match message.role() {
            Role::Directory => {
                if self.serve_table(from, message)? {
                    return Ok(());
                }
                let mut orders = self.spare_orders.pop().unwrap_or_default();
                self.directory.handle(from, message, &mut orders)?;
                if matches!(message, Message::SplitState { .. }) {
                    self.count_split_blocks();
                }
                self.order(orders)
            }
            Role::Cache => {
                let mut actions = self.actions();
                self.cache.handle(from, message, &mut actions)?;
                self.carry_out(actions)
            }
            Role::Token => self.token(from, message),
        }
    }

    fn count_split_blocks(&self) {
        let blocks = self.directory.split_blocks();
        self.stats.split_blocks.set(blocks as u64);
    }

    /// Carries out what the directory asks for.
    fn order(&mut self, mut orders: Vec<DirectoryAction>) -> Result<(), Failure> {
        for order in orders.drain(..) {
            match order {
                DirectoryAction::Send { to, message } => self.send(to, message)?,
                DirectoryAction::PageDeadline { page, number } => {
                    let directory = &self.directory;
                    let is_over = |(page, number)| directory.page_overdue(page, number).is_ok();
                    self.transactions.begin((page, number), self.now, is_over);
                }
                DirectoryAction::BlockDeadline { block, number } => {
                    let directory = &self.directory;
                    let is_over = |(block, number)| directory.block_overdue(block, number).is_ok();
                    self.blocks.begin((block, number), self.now, is_over);
                }
            }
        }
        self.spare_orders.push(orders);
        Ok(())
    }

    pub(crate) fn send(&mut self, to: Member, message: Message) -> Result<(), Failure> {
        if to == self.config.me {
            self.local.push_back(message);
            return Ok(());
        }
        self.send_peer(to, PeerMessage::Coherence(message))
    }

    /// Sends a message without a page to another node.
    pub(crate) fn send_peer(&mut self, to: Member, message: PeerMessage) -> Result<(), Failure> {
        if self.may_leave(&message)? {
            let is_unblock = matches!(message, PeerMessage::Coherence(Message::Unblock { .. }));
            self.give_way.is_urgent |= !(self.give_way.can_wait && is_unblock);
            self.peers.send(to, message, None);
        } else {
            self.hold_back(to, message, None);
        }
        Ok(())
    }

    /// Sends a message with the bytes of a page that is here, and that no vCPU can write.
    pub(crate) fn send_frame(
        &mut self,
        to: Member,
        message: PeerMessage,
        page: PageIndex,
    ) -> Result<(), Failure> {
        if self.may_leave(&message)? {
            self.give_way.is_urgent = true;
            self.peers.send(to, message, Some(self.frames.bytes(page)));
        } else {
            let mut place = self.spare_page();
            place.copy_from_slice(self.frames.bytes(page));
            self.hold_back(to, message, Some(place));
        }
        Ok(())
    }

    pub(crate) fn spare_page(&mut self) -> Box<PageBytes> {
        let spare = self.spare_pages.pop();
        spare.unwrap_or_else(|| Box::new([0; PAGE_SIZE]))
    }

    pub(crate) fn actions(&mut self) -> Vec<CacheAction> {
        self.spare_actions.pop().unwrap_or_default()
    }

    /// The time as [`Progress`] has it.
    pub(crate) fn ticks(&self, now: Instant) -> u64 {
        nanoseconds(now.saturating_duration_since(self.origin))
    }

    pub(crate) fn instant(&self, ticks: u64) -> Instant {
        self.origin + Duration::from_nanos(ticks)
    }

    fn run_timers(&mut self, now: Instant) -> Result<bool, Failure> {
        let mut worked = false;
        while let Some(Over { page, held }) = self.progress.over(self.ticks(now), thread_time) {
            self.stats.hold.record(Duration::from_nanos(held));
            self.merge_instead(page)?;
            let mut actions = self.actions();
            self.cache.released(page, &mut actions);
            self.carry_out(actions)?;
            worked = true;
        }
        while let Some((page, number)) = self.transactions.overdue(now) {
            self.directory.page_overdue(page, number)?;
        }
        while let Some((block, number)) = self.blocks.overdue(now) {
            self.directory.block_overdue(block, number)?;
        }
        while let Some((page, number)) = self.answers.overdue(now) {
            self.cache.overdue(page, number)?;
        }
        while let Some((page, number)) = self.puts.overdue(now) {
            self.cache.put_unanswered(page, number)?;
        }
        while let Some(page) = self.requests.overdue(now) {
            self.cache.unanswered(page)?;
        }
        while let Some(number) = self.tokens.overdue(now) {
            self.keeper.overdue(number)?;
        }
        if let Some(page) = self.home_waits.overdue(now) {
            let peer = self.home_of(page);
            let seconds = self.config.transaction_time_max.as_secs();
            let reason = format!("it did not serve {page} as its home within {seconds} s");
            return Err(PeerError::Lost { peer, reason }.into());
        }
        for _ in 0..SWEEPS_AT_ONCE {
            let Some(block) = self.sweeper.turn(now, &self.directory) else {
                break;
            };
            let mut orders = self.spare_orders.pop().unwrap_or_default();
            self.directory.sweep(block, &mut orders);
            if !orders.is_empty() {
                worked = true;
                self.count_split_blocks();
            }
            self.order(orders)?;
        }
        self.check_tables(now)?;
        if self.is_token_over(now) {
            self.return_token()?;
            worked = true;
        }
        self.deliver_local()?;
        Ok(worked)
    }
}
