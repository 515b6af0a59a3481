//! The connection to one donor among those of a replicated transport.

use fabric_pages::page::PageBytes;
use fabric_transport::path::PathStats;
use fabric_transport::vacant::Vacant;
use fabric_transport::{Completion, Full, IN_FLIGHT_MAX, Interest, PageTransport, Ticket};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What a request to a donor is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Purpose {
    /// A request of the pager, by its index.
    Operation(u32),
    /// The valid copy of a page that is being repaired, by its number in the block, or pieces of that
    /// one and those behind it.
    CopyRead(u32),
    /// The new copy of such a page, or pieces of so many.
    CopyWrite { page: u32, pages: u32 },
    /// The answer is not used: the donor went out, or another one answered first.
    Abandoned,
}

/// Limit of requests of repairs to a donor, reads and writes each: a quarter of a connection, so that
/// most is left to the pager.
pub(crate) const REPAIR_REQUESTS_MAX: usize = IN_FLIGHT_MAX / 4;

/// What is outstanding of repairs, also of one that was given up.
#[derive(Clone, Debug)]
enum OfRepair {
    Read,
    /// Of these bytes.
    Write(Range<u64>),
}

/// An answer of a donor.
#[derive(Debug)]
pub(crate) enum Answer<'a> {
    Page(&'a PageBytes),
    Run(&'a [u8]),
    Written,
    Dropped,
}

/// The connection to one donor.
#[derive(Debug)]
pub(crate) struct Member {
    transport: Box<dyn PageTransport>,
    /// Speed of the path, if it is known.
    path: Option<Arc<PathStats>>,
    /// Indexed by the ticket of this connection.
    requests: Vec<Option<Purpose>>,
    free: Vec<u32>,
    /// By the ticket.
    of_repairs: Vec<Option<OfRepair>>,
    /// Number of reads, and of writes, of these.
    repair_reads: usize,
    repair_writes: usize,
    /// Outstanding drops, which have no tickets, in the order of posting.
    drops: VecDeque<Purpose>,
    /// Whether the donor is out, as far as this thread has seen.
    pub out: bool,
    /// Whether it has left, and there is no connection to it.
    pub has_left: bool,
}

impl Member {
    pub fn new(transport: Box<dyn PageTransport>, path: Option<Arc<PathStats>>) -> Self {
        let most = u32::try_from(IN_FLIGHT_MAX).expect("a small constant");
        Self {
            transport,
            path,
            requests: vec![None; IN_FLIGHT_MAX],
            free: (0..most).rev().collect(),
            of_repairs: vec![None; IN_FLIGHT_MAX],
            repair_reads: 0,
            repair_writes: 0,
            drops: VecDeque::with_capacity(IN_FLIGHT_MAX),
            out: false,
            has_left: false,
        }
    }

    /// The place of a donor that has left, or of one that may join.
    pub fn left() -> Self {
        Self {
            out: true,
            has_left: true,
            ..Self::new(Box::new(Vacant), None)
        }
    }

    /// A donor that joins: it is out until it is readmitted.
    pub fn joining(transport: Box<dyn PageTransport>, path: Option<Arc<PathStats>>) -> Self {
        Self {
            out: true,
            ..Self::new(transport, path)
        }
    }

    /// Returns the time to fetch a page, if it is known.
    pub fn latency(&self) -> Option<Duration> {
        Some(self.path.as_ref()?.latency_estimate())
    }

    pub fn transport(&mut self) -> &mut dyn PageTransport {
        &mut *self.transport
    }

    pub fn interests(&self, watch: &mut dyn FnMut(Interest)) {
        self.transport.interests(watch);
    }

    pub fn in_flight(&self) -> usize {
        self.transport.in_flight()
    }

    pub fn has_room(&self) -> bool {
        self.in_flight() < IN_FLIGHT_MAX && !self.free.is_empty()
    }

    /// Returns whether a repair may read from the donor now.
    pub fn has_room_for_repair_read(&self) -> bool {
        self.has_room() && self.repair_reads < REPAIR_REQUESTS_MAX
    }

    /// Returns whether a repair may write to the donor now.
    pub fn has_room_for_repair_write(&self) -> bool {
        self.has_room() && self.repair_writes < REPAIR_REQUESTS_MAX
    }

    /// Returns whether nothing is outstanding.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0
    }

    fn post(
        &mut self,
        purpose: Purpose,
        post: impl FnOnce(&mut dyn PageTransport, Ticket) -> Result<(), Full>,
    ) -> Result<u32, Full> {
        let ticket = self.free.pop().ok_or(Full)?;
        if let Err(full) = post(&mut *self.transport, Ticket(ticket)) {
            self.free.push(ticket);
            return Err(full);
        }
        self.requests[ticket as usize] = Some(purpose);
        if let Purpose::CopyRead(_) = purpose {
            self.of_repairs[ticket as usize] = Some(OfRepair::Read);
            self.repair_reads += 1;
        }
        Ok(ticket)
    }

    /// Requests a page, or a run of them.
    pub fn read(&mut self, purpose: Purpose, offset: u64, run: Option<u32>) -> Result<(), Full> {
        self.post(purpose, |transport, ticket| match run {
            Some(pages) => transport.post_read_run(ticket, offset, pages),
            None => transport.post_read(ticket, offset),
        })
        .map(|_| ())
    }

    /// Requests pieces of consecutive pages, which come as a run.
    pub fn read_pieces(&mut self, purpose: Purpose, offset: u64, bytes: usize) -> Result<(), Full> {
        let bytes = u32::try_from(bytes).expect("at most a run of pages");
        self.post(purpose, |transport, ticket| {
            transport.post_read_piece(ticket, offset, bytes)
        })
        .map(|_| ())
    }

    /// Stores a page, or a piece of one, of which no write is outstanding.
    pub fn write(&mut self, purpose: Purpose, offset: u64, bytes: &[u8]) -> Result<(), Full> {
        let written = offset..offset + bytes.len() as u64;
        debug_assert!(!self.is_copying(&written), "two writes of one page");
        let ticket = self.post(purpose, |transport, ticket| {
            match <&PageBytes>::try_from(bytes) {
                Ok(page) => transport.post_write(ticket, offset, page),
                Err(_) => transport.post_write_piece(ticket, offset, bytes),
            }
        })?;
        if let Purpose::CopyWrite { .. } = purpose {
            self.of_repairs[ticket as usize] = Some(OfRepair::Write(written));
            self.repair_writes += 1;
        }
        Ok(())
    }

    /// Returns whether a repair's write of any of these bytes is outstanding, also one of a repair that
    /// was given up: no other may be posted then, since they may take different ways.
    pub fn is_copying(&self, bytes: &Range<u64>) -> bool {
        let overlaps = |outstanding: &OfRepair| match outstanding {
            OfRepair::Write(copy) => copy.start < bytes.end && bytes.start < copy.end,
            OfRepair::Read => false,
        };
        self.repair_writes > 0 && self.of_repairs.iter().flatten().any(overlaps)
    }

    pub fn drop_pages(&mut self, purpose: Purpose, offset: u64, pages: u32) -> Result<(), Full> {
        self.transport.post_drop(offset, pages)?;
        self.drops.push_back(purpose);
        Ok(())
    }

    /// Returns whether an answer is outstanding that is not used.
    pub fn has_abandoned(&self) -> bool {
        let mut requests = self.requests.iter().flatten().chain(&self.drops);
        requests.any(|purpose| *purpose == Purpose::Abandoned)
    }

    /// Ignores the answers to requests for which `ends` returns true.
    pub fn abandon(&mut self, ends: impl Fn(Purpose) -> bool) {
        let requests = self.requests.iter_mut().flatten();
        for purpose in requests.chain(&mut self.drops) {
            if ends(*purpose) {
                *purpose = Purpose::Abandoned;
            }
        }
    }

    /// Passes on all answers that have arrived.
    pub fn poll(&mut self, answered: &mut dyn FnMut(Purpose, Answer<'_>)) {
        let (requests, free, drops) = (&mut self.requests, &mut self.free, &mut self.drops);
        let of_repairs = &mut self.of_repairs;
        let (repair_reads, repair_writes) = (&mut self.repair_reads, &mut self.repair_writes);
        let mut purpose_of = |Ticket(ticket): Ticket| {
            free.push(ticket);
            match of_repairs[ticket as usize].take() {
                Some(OfRepair::Read) => *repair_reads -= 1,
                Some(OfRepair::Write(_)) => *repair_writes -= 1,
                None => {}
            }
            requests[ticket as usize].take().expect("a ticket in use")
        };
        self.transport.poll(&mut |completion| match completion {
            Completion::Read(ticket, page) | Completion::ReadFrom(_, ticket, page) => {
                answered(purpose_of(ticket), Answer::Page(page));
            }
            Completion::ReadRun(ticket, bytes) | Completion::ReadRunFrom(_, ticket, bytes) => {
                answered(purpose_of(ticket), Answer::Run(bytes));
            }
            Completion::Written(ticket) => answered(purpose_of(ticket), Answer::Written),
            Completion::Unread(ticket) => {
                unreachable!("{ticket:?}: what is sealed is above the copies")
            }
            Completion::Dropped(_) => {
                let purpose = drops.pop_front().unwrap_or(Purpose::Abandoned);
                answered(purpose, Answer::Dropped);
            }
        });
    }
}
