//! Moves blocks of the guest's initial memory from one donor to another: a state machine over the
//! evictor's transports.
//!
//! The evictor runs it, the only thread that writes pages to donors. One block moves at a time:
//!
//! 1. *Held*: no page of the block is written back from now on; pages that would be stay here. The
//!    block waits until write-backs that are outstanding have been confirmed.
//! 2. *Copied*: its pages are read from the old home and written to the new one, at a bounded rate,
//!    except those of which the home has no bytes that count.
//! 3. *Moved*: when the new home has confirmed them all, the home table changes, in a new epoch, and
//!    pages are written back again.
//!
//! So the bytes at the old home do not change while they are copied, and a fetch that was posted
//! there gets the right ones, also if the block has moved since: the page is held until then, and
//! is not written back. A move that cannot end leaves the block where it was.

use crate::homes::{BLOCK_PAGES, Home, HomeTable};
use crate::page::{PAGE_SIZE, PageBytes, PageIndex};
use crate::transport::{IN_FLIGHT_MAX, PageTransport, Ticket};
use crossbeam_channel::Sender;
use fabric_host::Allowance;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

/// Limit of the rate of moves, as that of the repair of copies: most of a fast link is left to the
/// guest.
pub(crate) const MOVE_BYTES_PER_SECOND: u64 = 128 << 20;

/// Pages that are copied at once.
const LANES: usize = 32;

/// Pages that may be copied at once after a pause.
const BURST_PAGES: u64 = 64;

/// Limit of outstanding requests on a transport for posting more for a move: the rest is for
/// write-backs.
const IN_FLIGHT_FOR_MOVES: usize = IN_FLIGHT_MAX / 2;

/// Requests for a move that may be outstanding on a transport in any case: write-backs leave room for
/// them.
const IN_FLIGHT_KEPT: usize = IN_FLIGHT_MAX / 8;

/// In a ticket: the request belongs to a move. Then follow the lane, and its use.
const MOVE_TICKET: u32 = 1 << 31;
const USE_BITS: u32 = 24;

/// A block to be moved.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct BlockMove {
    pub block: u32,
    pub from: Home,
    pub to: Home,
}

/// Blocks to be moved, in order.
#[derive(Debug)]
pub(crate) struct MoveOrder {
    pub moves: VecDeque<BlockMove>,
    pub progress: Arc<MoveProgress>,
    /// Notified when the order ends: done, or without some blocks. Disconnected when the evictor
    /// ends.
    pub end: Sender<()>,
}

/// The progress of an order, readable from any thread.
#[derive(Debug, Default)]
pub(crate) struct MoveProgress {
    moved: AtomicU32,
    stopped: AtomicBool,
    given_up: AtomicBool,
    unreadable: AtomicBool,
}

impl MoveProgress {
    /// Counts a block that has moved.
    pub fn note_moved(&self) {
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of blocks that have moved.
    pub fn moved(&self) -> u32 {
        // Relaxed: a number for reports. Homes are read from the table.
        self.moved.load(Ordering::Relaxed)
    }

    /// Has the order end after the block that is moving.
    pub fn stop(&self) {
        // Relaxed: nothing else depends on it.
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Notes that a block stays because a page of it does not open.
    fn note_unreadable(&self, page: PageIndex) {
        // One line of an order: a hostile donor can change every page.
        if !self.unreadable.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{page} cannot be moved: what its donor sends is not what was written back last; its \
                 block stays there"
            );
        }
    }

    /// Returns whether a block stays for that.
    pub fn was_unreadable(&self) -> bool {
        // Relaxed: it is read after the end of the order.
        self.unreadable.load(Ordering::Relaxed)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Returns whether a move was given up when a part of the block may have been on its way.
    pub fn was_given_up(&self) -> bool {
        // Relaxed: it is read after the end of the order.
        self.given_up.load(Ordering::Relaxed)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    Free,
    Reading,
    /// It was read.
    Arrived,
    Writing,
    /// It is being read, and its block does not move any more.
    Abandoned,
}

/// A page on its way.
#[derive(Debug)]
struct Lane {
    page: PageIndex,
    /// The link over which it is read.
    source: usize,
    phase: Phase,
    /// Number of its use, so that answers for an earlier one are recognized.
    usage: u32,
    bytes: Box<PageBytes>,
}

impl Lane {
    fn new() -> Self {
        Self {
            page: PageIndex::new(0),
            source: 0,
            phase: Phase::Free,
            usage: 0,
            bytes: Box::new([0; PAGE_SIZE]),
        }
    }

    fn ticket(&self, number: usize) -> Ticket {
        let number = u32::try_from(number).expect("a few lanes");
        Ticket(MOVE_TICKET | number << USE_BITS | self.usage)
    }

    fn release(&mut self) {
        self.phase = Phase::Free;
        self.usage = (self.usage + 1) & ((1 << USE_BITS) - 1);
    }
}

/// The block that is moving.
#[derive(Clone, Copy, Debug)]
struct Current {
    block_move: BlockMove,
    /// The next page to be read, in the block.
    next: u32,
    /// End of the guest's memory in the block.
    end: u32,
    /// Whether the write-backs from before have been confirmed.
    is_still: bool,
}

/// Whether a home has bytes of a page that count: only those are copied, and only those can be
/// opened where pages are sealed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum AtHome {
    /// They may be needed.
    Yes,
    /// The page is untouched, or was not written back since; it will be before it is fetched.
    No,
    /// Another thread changes the page at the moment.
    Unknown,
}

/// What the state machine has to know of the pager.
pub(crate) trait Pages {
    /// Whether a write-back of a page of the block is outstanding.
    fn is_being_written(&self, block: u32) -> bool;
    /// Whether the home has bytes of the page that count.
    fn at_home(&self, page: PageIndex) -> AtHome;
    /// Takes note that a block has another home now.
    fn has_moved(&self, block: u32, to: Home);
}

/// Moves in progress.
#[derive(Debug)]
pub(crate) struct Relocation {
    order: Option<MoveOrder>,
    current: Option<Current>,
    lanes: Vec<Lane>,
    /// Lanes of moves that were given up.
    abandoned: usize,
    allowance: Allowance,
    due: Option<Instant>,
}

impl Relocation {
    pub fn new() -> Self {
        let per_second = MOVE_BYTES_PER_SECOND / PAGE_SIZE as u64;
        Self {
            order: None,
            current: None,
            lanes: Vec::new(),
            abandoned: 0,
            allowance: Allowance::new(per_second, BURST_PAGES),
            due: None,
        }
    }

    /// Takes an order; an earlier one has ended.
    pub fn take(&mut self, order: MoveOrder) {
        if self.lanes.is_empty() {
            self.lanes.extend((0..LANES).map(|_| Lane::new()));
        }
        self.order = Some(order);
    }

    /// Returns whether pages of the block must not be written back at the moment, nor dropped at home:
    /// a read of them is on its way.
    pub fn holds(&self, block: u32) -> bool {
        let current = self.current.as_ref();
        let is_read =
            |lane: &Lane| lane.phase == Phase::Abandoned && HomeTable::block_of(lane.page) == block;
        current.is_some_and(|current| current.block_move.block == block)
            || self.abandoned > 0 && self.lanes.iter().any(is_read)
    }

    /// Returns how many requests may be outstanding on a transport for posting a write-back.
    pub fn in_flight_for_write_backs(&self) -> usize {
        match self.current {
            Some(_) => IN_FLIGHT_MAX - IN_FLIGHT_KEPT,
            None => IN_FLIGHT_MAX,
        }
    }

    /// Returns whether the transport has room for a request of a move, which has lanes in this phase
    /// there.
    fn has_room(&self, transport: &dyn PageTransport, phase: Phase) -> bool {
        let own = self.lanes.iter().filter(|lane| lane.phase == phase).count();
        own < IN_FLIGHT_KEPT || transport.in_flight() < IN_FLIGHT_FOR_MOVES
    }

    /// Returns whether there is no order.
    pub fn is_idle(&self) -> bool {
        self.order.is_none() && self.current.is_none()
    }

    /// Returns when there is something to do without an answer of a donor.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Returns whether an answer with this ticket is for a move.
    pub fn is_for_move(Ticket(ticket): Ticket) -> bool {
        ticket & MOVE_TICKET != 0
    }

    fn lane_of(&mut self, Ticket(ticket): Ticket) -> Option<&mut Lane> {
        let lane = (ticket & !MOVE_TICKET) >> USE_BITS;
        let usage = ticket & ((1 << USE_BITS) - 1);
        let lane = self.lanes.get_mut(lane as usize)?;
        (lane.usage == usage).then_some(lane)
    }

    /// Takes a page that was read.
    pub fn read(&mut self, ticket: Ticket, bytes: &PageBytes) {
        match self.lane_of(ticket) {
            Some(lane) if lane.phase == Phase::Abandoned => {
                lane.release();
                self.abandoned -= 1;
            }
            Some(lane) => {
                *lane.bytes = *bytes;
                lane.phase = Phase::Arrived;
            }
            None => {}
        }
    }

    /// Notes that a page cannot be read, nor its block be moved: it stays, and nobody waits for it.
    pub fn unread(&mut self, ticket: Ticket) {
        let Some(lane) = self.lane_of(ticket) else {
            return;
        };
        let (page, is_of_current) = (lane.page, lane.phase != Phase::Abandoned);
        lane.release();
        match is_of_current {
            true => {
                if let Some(order) = &self.order {
                    order.progress.note_unreadable(page);
                }
                self.give_up(None);
            }
            false => self.abandoned -= 1,
        }
    }

    /// Gives up the move in progress. From a link that is `gone` no answer comes.
    fn give_up(&mut self, gone: Option<usize>) {
        self.current = None;
        for lane in &mut self.lanes {
            match lane.phase {
                Phase::Abandoned => {}
                Phase::Reading if Some(lane.source) != gone => {
                    lane.phase = Phase::Abandoned;
                    self.abandoned += 1;
                }
                _ => lane.release(),
            }
        }
        if let Some(order) = &self.order {
            order.progress.given_up.store(true, Ordering::Relaxed);
        }
    }

    /// Notes that a page was written.
    pub fn written(&mut self, ticket: Ticket) {
        if let Some(lane) = self.lane_of(ticket) {
            lane.release();
        }
    }

    /// Gives up moves that involve a donor whose transport has changed: only its answers do not come.
    pub fn leave(&mut self, link: usize, homes: &HomeTable) {
        for lane in &mut self.lanes {
            if lane.phase == Phase::Abandoned && lane.source == link {
                lane.release();
                self.abandoned -= 1;
            }
        }
        let involves = |block_move: &BlockMove| {
            let links = [block_move.from, block_move.to].map(|home| homes.link_to(home.node));
            links.contains(&Some(link))
        };
        if let Some(order) = &mut self.order {
            order.moves.retain(|block_move| !involves(block_move));
        }
        if self
            .current
            .is_some_and(|current| involves(&current.block_move))
        {
            self.give_up(Some(link));
        }
    }

    /// Does what can be done without waiting; returns true when there was something.
    pub fn step(
        &mut self,
        homes: &HomeTable,
        transports: &mut [Box<dyn PageTransport>],
        pages: &dyn Pages,
    ) -> bool {
        self.due = None;
        let mut worked = false;
        loop {
            let Some(mut current) = self.current.take().or_else(|| self.begin(homes)) else {
                return worked;
            };
            if !current.is_still {
                if pages.is_being_written(current.block_move.block) {
                    self.current = Some(current);
                    return worked;
                }
                current.is_still = true;
            }
            let [from, to] = [current.block_move.from, current.block_move.to];
            let [source, target] = [from, to].map(|home| homes.link_to_home(home));
            worked |= self.write(to, &mut *transports[target]);
            let source = (source, &mut *transports[source] as &mut dyn PageTransport);
            worked |= self.read_on(&mut current, from, source, pages);
            let is_over = |lane: &Lane| matches!(lane.phase, Phase::Free | Phase::Abandoned);
            let is_copied = self.lanes.iter().all(is_over);
            if current.next < current.end || !is_copied {
                self.current = Some(current);
                return worked;
            }
            homes.move_home(current.block_move.block, from, to);
            pages.has_moved(current.block_move.block, to);
            if let Some(order) = &self.order {
                order.progress.note_moved();
            }
            worked = true;
        }
    }

    /// Takes the next block; ends the order when there is none.
    fn begin(&mut self, homes: &HomeTable) -> Option<Current> {
        let order = self.order.as_mut()?;
        if order.progress.is_stopped() {
            order.moves.clear();
        }
        let next = order.moves.pop_front();
        let Some(block_move) = next else {
            if let Some(order) = self.order.take() {
                // Without a receiver nobody waits for it.
                let _ = order.end.try_send(());
            }
            return None;
        };
        let pages = homes.pages_of(block_move.block);
        Some(Current {
            block_move,
            next: pages.first.number() % BLOCK_PAGES,
            end: pages.first.number() % BLOCK_PAGES + pages.count,
            is_still: false,
        })
    }

    /// Posts reads of the following pages to lanes that are free.
    fn read_on(
        &mut self,
        current: &mut Current,
        from: Home,
        (link, source): (usize, &mut dyn PageTransport),
        pages: &dyn Pages,
    ) -> bool {
        let first = current.block_move.block * BLOCK_PAGES;
        let now = Instant::now();
        let mut worked = false;
        for number in 0..self.lanes.len() {
            if self.lanes[number].phase != Phase::Free {
                continue;
            }
            let page = |current: &Current| PageIndex::new(first + current.next);
            let mut at_home = AtHome::No;
            while current.next < current.end {
                at_home = pages.at_home(page(current));
                if at_home != AtHome::No {
                    break;
                }
                current.next += 1;
            }
            if at_home == AtHome::Unknown {
                // That takes less time than a request.
                self.due = Some(now + Allowance::PAUSE);
                break;
            }
            if current.next == current.end || !self.has_room(source, Phase::Reading) {
                break;
            }
            if self.allowance.take(now, 1) == 0 {
                self.due = Some(now + Allowance::PAUSE);
                break;
            }
            let page = page(current);
            let lane = &mut self.lanes[number];
            let posted = source.post_read(lane.ticket(number), from.offset_of(page));
            if posted.is_err() {
                break;
            }
            (lane.page, lane.source, lane.phase) = (page, link, Phase::Reading);
            current.next += 1;
            worked = true;
        }
        source.flush();
        worked
    }

    /// Posts writes of pages that were read.
    fn write(&mut self, to: Home, target: &mut dyn PageTransport) -> bool {
        let mut worked = false;
        for number in 0..self.lanes.len() {
            if self.lanes[number].phase != Phase::Arrived {
                continue;
            }
            if !self.has_room(target, Phase::Writing) {
                break;
            }
            let lane = &mut self.lanes[number];
            let offset = to.offset_of(lane.page);
            let posted = target.post_write(lane.ticket(number), offset, &lane.bytes);
            if posted.is_err() {
                break;
            }
            lane.phase = Phase::Writing;
            worked = true;
        }
        target.flush();
        worked
    }
}

#[cfg(test)]
mod tests;
