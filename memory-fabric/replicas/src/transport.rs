//! A transport over the donors of all copies.
//!
//! - A write-back goes to both copies and completes when both donors have confirmed it, or one of
//!   them is out. While a copy moves, it goes to the new place as well.
//! - A read goes to one copy: to the primary one, or that on a much faster link. If its donor goes
//!   out, it is posted to the other; if its donor only does not answer for [`READ_STALL`], it is
//!   posted there too, and the first answer counts.
//! - A donor that does not confirm a write-back for [`WRITE_STALL`], which another has confirmed,
//!   goes out: the evictor would wait for it, and soon the guest.
//!
//! Of a [stripe](crate::stripe), a write-back stores a piece at each donor, and a read asks as many
//! donors as are needed, those of data first; what is said of the other copy holds for the other
//! pieces.
//!
//! The transport of the evictor, the only one that writes, also readmits donors and fills copies
//! (`repair`). Nothing here allocates after the start, except for a write-back of a page that is
//! being copied at that moment, or that a copy misses, and when a donor joins.

mod arrivals;
mod changes;
mod offsets;
mod outages;
mod reread;
mod sources;
mod striped;

use crate::copies::Noted;
use crate::member::{Member, Purpose};
use crate::placement::Place;
use crate::repair::Repairs;
use crate::set::{Inbox, ReplicaSet, Traffic};
#[cfg(test)]
use fabric_homes::BLOCK_BYTES;
use fabric_pages::page::PageBytes;
use fabric_transport::port::STALL_CHECK_INTERVAL;
use fabric_transport::{Completion, Full, IN_FLIGHT_MAX, Interest, PageTransport, Ticket};
use offsets::bit;
pub(crate) use offsets::{offset_at, page_in, split};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
pub(crate) use striped::Stripes;

/// Time without an answer after which a page is requested from the other copy as well: far above
/// the round trip of a usable link, and short enough to go unnoticed.
pub const READ_STALL: Duration = Duration::from_millis(250);

/// Time after which a donor goes out that does not confirm a write-back: a link which needs that
/// long for the 64 pages before it carries less than 128 KiB/s.
pub const WRITE_STALL: Duration = Duration::from_secs(2);

/// The thread that uses a transport.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// It only reads.
    Reader,
    /// It writes back, and repairs.
    Evictor,
}

/// What a request of the pager wants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Work {
    /// A page, or a run.
    Read { run: Option<u32> },
    /// A page is stored.
    Write,
    /// Pages are dropped.
    Drop { pages: u32 },
}

/// Whether a copy is to be asked that is [not valid](sources).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum AskUnsure {
    /// No, or it was.
    No,
    /// Before the valid one, since a page that came from that one did not open.
    First,
    /// As soon as its donor has room. Until then the valid one is asked, whose answer counts only if it
    /// opens.
    Later,
}

/// A request of the pager.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub ticket: Ticket,
    pub work: Work,
    pub offset: u64,
    /// Its number in the order in which operations were begun, from 1 on.
    pub number: u64,
    /// The donors whose answers are outstanding, a bit each.
    pub waits_for: u64,
    /// When it was posted, or when a write was confirmed by the first donor.
    pub since: Instant,
    /// Whether a read was posted to both copies, or a write is confirmed by one.
    pub is_half_done: bool,
    pub ask_unsure: AskUnsure,
    /// The donor that was asked for such a copy, a bit.
    pub unsure: u64,
}

impl Operation {
    pub(crate) fn is_write(&self) -> bool {
        self.work == Work::Write
    }

    fn is_read(&self) -> bool {
        matches!(self.work, Work::Read { .. })
    }

    /// Returns whether a copy that is not valid was asked for the page, or is to be.
    pub(crate) fn may_be_elsewhere(&self) -> bool {
        self.unsure != 0 || self.ask_unsure == AskUnsure::Later
    }
}

/// One transport for the copies on all donors. Offsets are those of the blocks' order in
/// [`Copies`](crate::Copies).
pub struct ReplicatedTransport {
    pub(crate) set: Arc<ReplicaSet>,
    role: Role,
    pub(crate) traffic: Arc<dyn Traffic>,
    pub(crate) members: Vec<Member>,
    /// Connections to donors that join.
    inbox: Inbox,
    pub(crate) operations: Vec<Option<Operation>>,
    pub(crate) free: Vec<u32>,
    /// Number of `operations` in use.
    pub(crate) outstanding: usize,
    /// Reads whose donor went out, and that found no room on another connection yet.
    pub(crate) unposted: VecDeque<u32>,
    /// Changes of the donors that were processed.
    changes: u32,
    /// Number of operations begun so far.
    begun: u64,
    noted: Noted,
    /// The newest time that places were vacated, and the operations begun until that was seen.
    vacated: (u32, u64),
    /// When to look for stalls next.
    pub(crate) look_at: Instant,
    pub(crate) repairs: Repairs,
    pub(crate) stripes: Option<Stripes>,
}

impl fmt::Debug for ReplicatedTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicatedTransport")
            .field("role", &self.role)
            .field("outstanding", &self.outstanding)
            .finish_non_exhaustive()
    }
}

impl ReplicatedTransport {
    /// Creates a transport over those to the donors, in the order of their links.
    ///
    /// # Panics
    ///
    /// With more than 64 donors.
    #[must_use]
    pub fn new(
        set: Arc<ReplicaSet>,
        role: Role,
        transports: Vec<Box<dyn PageTransport>>,
        traffic: Arc<dyn Traffic>,
    ) -> Self {
        assert!(transports.len() <= crate::DONORS_MAX, "too many donors");
        // Every operation but those without room has a place on a connection, now or before.
        let most = (transports.len() + 2) * IN_FLIGHT_MAX;
        let numbers = u32::try_from(most).expect("a few donors");
        let inbox = set.note_with(transports.len());
        let noted = set.copies().register();
        let (layout, blocks) = (set.copies().layout(), set.copies().blocks());
        let members = transports.into_iter().enumerate();
        let members = members.map(|(donor, transport)| Member::new(transport, set.path(donor)));
        Self {
            members: members.collect(),
            inbox,
            set,
            role,
            traffic,
            operations: vec![None; most],
            free: (0..numbers).rev().collect(),
            outstanding: 0,
            unposted: VecDeque::with_capacity(most),
            changes: 0,
            begun: 0,
            vacated: (noted.epoch(), 0),
            noted,
            look_at: Instant::now(),
            repairs: match role {
                Role::Reader => Repairs::new(layout),
                Role::Evictor => Repairs::new(layout).of_blocks(blocks),
            },
            stripes: layout.map(Stripes::new),
        }
    }

    /// Returns whether a write-back of the page at this offset is outstanding.
    pub(crate) fn is_being_written(&self, offset: u64) -> bool {
        let mut operations = self.operations.iter().flatten();
        operations.any(|operation| operation.is_write() && operation.offset == offset)
    }

    fn begin(&mut self, ticket: Ticket, work: Work, offset: u64) -> Result<u32, Full> {
        let index = self.free.pop().ok_or(Full)?;
        self.outstanding += 1;
        self.begun += 1;
        self.operations[index as usize] = Some(Operation {
            ticket,
            work,
            offset,
            number: self.begun,
            waits_for: 0,
            since: Instant::now(),
            is_half_done: false,
            ask_unsure: AskUnsure::No,
            unsure: 0,
        });
        Ok(index)
    }

    fn end(&mut self, index: u32) -> Operation {
        self.outstanding -= 1;
        self.free.push(index);
        let operation = self.operations[index as usize].take();
        operation.expect("an operation in progress")
    }

    pub(crate) fn operation(&mut self, index: u32) -> &mut Operation {
        let operation = self.operations[index as usize].as_mut();
        operation.expect("an operation in progress")
    }

    /// Posts a read to one copy that it was not posted to, if there is room; or to as many pieces as
    /// it needs.
    pub(crate) fn post_to_copy(&mut self, index: u32) -> Result<(), Full> {
        if self.stripes.is_some() {
            return self.post_to_pieces(index);
        }
        let Operation {
            offset,
            work,
            waits_for,
            ..
        } = *self.operation(index);
        let Work::Read { run } = work else {
            unreachable!("only reads are posted to one copy");
        };
        if let Some(posted) = self.post_to_unsure(index) {
            return posted;
        }
        let (block, in_block) = split(offset);
        let pages = run.unwrap_or(1);
        for place in self
            .sources(block, page_in(in_block), pages)
            .into_iter()
            .flatten()
        {
            let member = &mut self.members[usize::from(place.donor)];
            if waits_for & bit(place.donor) != 0 || member.out {
                continue;
            }
            let purpose = Purpose::Operation(index);
            if member
                .read(purpose, offset_at(place, in_block, 1), run)
                .is_ok()
            {
                let operation = self.operation(index);
                operation.waits_for |= bit(place.donor);
                // Of one that was asked while it was filled: it is valid now, and its answer counts.
                operation.unsure &= !bit(place.donor);
                return Ok(());
            }
        }
        Err(Full)
    }

    fn post_any_read(&mut self, ticket: Ticket, work: Work, offset: u64) -> Result<(), Full> {
        if self.role == Role::Reader && self.changes != self.set.copies().changes() {
            // A request that is refused here comes again only after an answer, which may be none.
            self.readmit_seen();
        }
        let index = self.begin(ticket, work, offset)?;
        if let Some(stripes) = &mut self.stripes {
            stripes.begin(index, false);
        }
        self.post_to_copy(index).inspect_err(|_| {
            self.end(index);
        })
    }

    /// Notes when all requests are answered that may be for places that copies have left.
    fn note_answered(&mut self) {
        let copies = self.set.copies();
        let epoch = copies.vacated_epoch();
        if epoch == self.noted.epoch() {
            return;
        }
        if self.vacated.0 != epoch {
            self.vacated = (epoch, self.begun);
        }
        let is_of_before = |operation: &Operation| operation.number <= self.vacated.1;
        if self.operations.iter().flatten().any(is_of_before) {
            return;
        }
        // A late read is harmless. A late write is not, unless the donor is never used again.
        let members = (0..=u8::MAX).zip(&self.members);
        let is_writing =
            |(donor, member): (u8, &Member)| member.has_abandoned() && !copies.is_lost(donor);
        if self.role == Role::Evictor && members.into_iter().any(is_writing) {
            return;
        }
        self.noted.note(epoch);
    }

    fn post_unposted(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        while let Some(&index) = self.unposted.front() {
            // A read of a stripe may have got pieces from other donors, and another operation its
            // number.
            let stripes = self.stripes.as_ref();
            let is_short = stripes.is_none_or(|all| all.is_short(index));
            let operation = self.operations[index as usize];
            match operation.map(|operation| (operation.work, operation.waits_for)) {
                Some((Work::Read { .. }, _)) if is_short && self.post_to_copy(index).is_err() => {
                    break;
                }
                Some((Work::Drop { .. }, 0)) => self.bereft(index, complete),
                _ => {}
            }
            self.unposted.pop_front();
        }
    }
}

impl Drop for ReplicatedTransport {
    fn drop(&mut self) {
        self.set.note_end(&self.inbox);
        for (donor, member) in self.members.drain(..).enumerate() {
            let has_left = member.has_left;
            drop(member);
            if !has_left {
                self.set.note_without(donor);
            }
        }
    }
}

impl PageTransport for ReplicatedTransport {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post_any_read(ticket, Work::Read { run: None }, offset)
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        self.post_any_read(ticket, Work::Read { run: Some(pages) }, offset)
    }

    fn post_reread(&mut self, ticket: Ticket, offset: u64, run: Option<u32>) -> Result<(), Full> {
        self.post_any_reread(ticket, offset, run)
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        self.post_change(ticket, Work::Write, offset, Some(page))
    }

    fn post_drop(&mut self, offset: u64, pages: u32) -> Result<(), Full> {
        self.post_change(Ticket(0), Work::Drop { pages }, offset, None)
    }

    fn flush(&mut self) {
        for member in &mut self.members {
            member.transport().flush();
        }
    }

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        self.leave_excluded(complete);
        for donor in 0..self.members.len() {
            self.poll_member(donor, complete);
        }
        if self.role == Role::Reader {
            // Before what waits for such a donor.
            self.readmit_seen();
        }
        self.post_unposted(complete);
        self.decide_rereads(complete);
        self.note_answered();
        self.look_for_stalls();
        if self.role == Role::Evictor {
            self.repair();
        }
        self.flush();
    }

    fn in_flight(&self) -> usize {
        let used = self.members.iter().filter(|member| !member.out);
        let most = used.map(Member::in_flight).max().unwrap_or(0);
        match self.outstanding {
            // Repairs and late answers are none of the pager's requests, but need room.
            0 if most < IN_FLIGHT_MAX => 0,
            _ => most.max(1),
        }
    }

    fn arm(&mut self) -> bool {
        let mut armed = true;
        for member in &mut self.members {
            armed &= member.transport().arm();
        }
        // A read that is not posted waits for an answer to another.
        let is_ready =
            |index: &u32| self.operations[*index as usize].is_some_and(|one| !one.is_read());
        armed && self.changes == self.set.copies().changes() && !self.unposted.iter().any(is_ready)
    }

    fn wake_by(&mut self) -> Option<Instant> {
        let operations = self.operations.iter().flatten();
        let stalls = operations.filter_map(|operation| match operation.work {
            Work::Read { .. } if !operation.is_half_done => Some(operation.since + READ_STALL),
            Work::Write if operation.is_half_done => Some(operation.since + WRITE_STALL),
            _ => None,
        });
        let first = stalls.min();
        // A request that cannot be helped must not keep the thread awake.
        let first = first.map(|at| at.max(self.look_at));
        let due = self.repairs.due();
        let rereads = self.stripes.as_ref().filter(|all| all.rereads > 0);
        let due = due.into_iter().chain(rereads.map(|_| self.look_at));
        // `poll` finds connections that answer nothing. Requests of repairs, and those that were given
        // up, are none of which the pager knows.
        let is_asked = self.members.iter().any(|member| !member.is_idle());
        let check = is_asked.then(|| Instant::now() + STALL_CHECK_INTERVAL);
        let members = self.members.iter_mut();
        let members = members.filter_map(|member| member.transport().wake_by());
        members.chain(first).chain(due).chain(check).min()
    }

    fn interests(&self, watch: &mut dyn FnMut(Interest)) {
        for member in &self.members {
            member.interests(watch);
        }
    }
}

#[cfg(test)]
mod tests;
