//! A transport that seals what it sends and opens what it receives.
//!
//! A page that does not open is requested once more: bits flip, and a transport to several donors can
//! look for one that [opens](LinkSeal::is_genuine). If that does not open either, the [`Judge`]
//! decides, at most [`VERDICTS_MAX`] times. Such a page is never given to the pager.
//!
//! Nothing here allocates after the start, and no lock is taken.

use crate::key::{KeyError, NotGenuine, Place, VmKey};
use crate::table::SealTable;
use fabric_host::metrics::Counter;
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_transport::{Completion, Full, Interest, PageTransport, Ticket};
use fabric_wire::{RUN_PAGES_MAX, TrafficClass};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Limit of verdicts on one read. Each to read it again follows a change of the donors or of one copy,
/// and there are 64 donors at most.
pub const VERDICTS_MAX: u32 = 128;

/// What can go wrong with a sealed page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// A page did not open, twice.
    NotGenuine {
        /// The index of the donor that sent it, where the transport leads to several.
        donor: Option<usize>,
        /// Where it is stored, as offset in the lease.
        offset: u64,
        /// Whether no thread waits for it: it is read ahead of its use, or to be moved.
        is_ahead: bool,
    },
    /// The same after [`VERDICTS_MAX`] verdicts, of a page that a thread waits for. It is lost.
    NeverGenuine {
        /// The index of the donor that sent it last, where the transport leads to several.
        donor: Option<usize>,
        /// Where it is stored, as offset in the lease.
        offset: u64,
    },
    /// A page could not be sealed. It was not sent, and its write-back never completes.
    NotSealed(KeyError),
}

/// What follows from a page that does not open.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// It is read again: the donor that sent it is not used any more, and another has a copy.
    ReadAgain,
    /// It is not read now, nor are the others of its run: no thread waits for it, or one that does reads
    /// it alone. Of a page that a thread waits for as `Lost`.
    Later,
    /// It is lost. Its request never completes: the thread that touched the page must not continue.
    Lost,
}

/// Decides about faults, on a thread of the pager. Must return soon.
pub trait Judge: Send + Sync {
    /// Something went wrong. The verdict is ignored on all but [`Fault::NotGenuine`].
    fn judge(&self, fault: Fault) -> Verdict;
}

/// Counters of sealed pages.
#[derive(Debug, Default)]
pub struct SealStats {
    /// Pages that were sealed.
    pub sealed: Counter,
    /// Pages that were opened.
    pub opened: Counter,
    /// Pages that did not open, each time.
    pub rejected: Counter,
}

/// The seals of the pages behind one link, shared by the transports of all threads to it.
pub struct LinkSeal {
    key: Arc<VmKey>,
    table: SealTable,
    node: u32,
    stats: Arc<SealStats>,
    judge: Arc<dyn Judge>,
}

impl fmt::Debug for LinkSeal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkSeal")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl LinkSeal {
    /// Creates the seals of a lease of so many bytes at `node`, which no other link of the VM has.
    ///
    /// # Errors
    ///
    /// When the host has no address space for the table.
    pub fn new(
        key: Arc<VmKey>,
        node: u32,
        lease_bytes: u64,
        stats: Arc<SealStats>,
        judge: Arc<dyn Judge>,
    ) -> io::Result<Self> {
        Ok(Self {
            key,
            table: SealTable::new(lease_bytes)?,
            node,
            stats,
            judge,
        })
    }

    fn place(&self, offset: u64) -> Place {
        let node = self.node;
        Place { node, offset }
    }

    /// Returns whether a page is what was written back at this offset last, and overwrites it; `None`
    /// when nothing was, or it was dropped. Only for a thread that keeps the page from being written
    /// back meanwhile.
    #[must_use]
    pub fn is_genuine(&self, offset: u64, page: &mut PageBytes) -> Option<bool> {
        let seal = self.table.get(offset)?;
        Some(self.key.open(self.place(offset), seal, page).is_ok())
    }

    /// Opens consecutive pages from `offset` on. Returns the offset of the first that does not open.
    fn open(&self, offset: u64, pages: &mut [PageBytes]) -> Result<(), u64> {
        let mut at = offset;
        for page in pages {
            // A page of which nothing is known was never written back, so it cannot be requested.
            let seal = self.table.get(at).ok_or(NotGenuine);
            let opened = seal.and_then(|seal| self.key.open(self.place(at), seal, page));
            if opened.is_err() {
                self.stats.rejected.increment();
                return Err(at);
            }
            self.stats.opened.increment();
            at += PAGE_SIZE as u64;
        }
        Ok(())
    }
}

/// A read of the pager.
#[derive(Clone, Copy, Debug)]
struct Read {
    ticket: Ticket,
    offset: u64,
    /// `None` for a single page.
    run: Option<u32>,
    /// Whether no thread waits for it: it is read ahead of its use, or to be moved.
    is_ahead: bool,
    /// Whether it did not open once.
    suspicious: bool,
    /// How often it was judged.
    verdicts: u32,
}

impl Read {
    /// Has a page judged that this read does not open.
    fn judge(&mut self, judge: &dyn Judge, donor: Option<usize>, offset: u64) -> Verdict {
        self.verdicts += 1;
        let is_ahead = self.is_ahead;
        match (self.verdicts < VERDICTS_MAX, is_ahead) {
            (true, _) => judge.judge(Fault::NotGenuine {
                donor,
                offset,
                is_ahead,
            }),
            (false, true) => Verdict::Later,
            (false, false) => {
                let _ = judge.judge(Fault::NeverGenuine { donor, offset });
                Verdict::Lost
            }
        }
    }
}

/// Seals and opens the pages of another transport.
#[derive(Debug)]
pub struct SealedTransport {
    inner: Box<dyn PageTransport>,
    reads: Reads,
    /// The page that is being sealed.
    outgoing: Box<PageBytes>,
    /// Writes that were not sent, and never complete.
    unsent: usize,
    /// Whether pages are read here only to be moved.
    is_bulk: bool,
}

/// The outstanding reads.
#[derive(Debug)]
struct Reads {
    seal: Arc<LinkSeal>,
    /// By the ticket that the inner transport knows.
    all: Box<[Option<Read>]>,
    free: Vec<u32>,
    /// Those to be requested again.
    again: VecDeque<u32>,
    /// Number of those that are lost.
    lost: usize,
    /// The pages that are being opened: the receive buffer of a transport is not ours to change.
    incoming: Box<[PageBytes]>,
}

impl Reads {
    /// Ends a read.
    fn end(&mut self, index: u32) -> Read {
        self.free.push(index);
        self.all[index as usize].take().expect("an open read")
    }

    /// Takes what came for a read: opens it and completes the read, or has it read again.
    fn arrived(
        &mut self,
        index: u32,
        donor: Option<usize>,
        bytes: &[u8],
        complete: &mut dyn FnMut(Completion<'_>),
    ) {
        let read = self.all[index as usize].as_mut().expect("an open read");
        let (sealed, _) = bytes.as_chunks::<PAGE_SIZE>();
        let pages = &mut self.incoming[..sealed.len()];
        pages.copy_from_slice(sealed);
        if let Err(offset) = self.seal.open(read.offset, pages) {
            if read.suspicious {
                match read.judge(&*self.seal.judge, donor, offset) {
                    Verdict::ReadAgain => {}
                    Verdict::Later if read.is_ahead => {
                        complete(Completion::Unread(self.end(index).ticket));
                        return;
                    }
                    Verdict::Later | Verdict::Lost => {
                        self.lost += 1;
                        return;
                    }
                }
            }
            // After a change of donors it is a first attempt again.
            read.suspicious = !read.suspicious;
            self.again.push_back(index);
            return;
        }
        let Read { ticket, run, .. } = *read;
        self.all[index as usize] = None;
        self.free.push(index);
        complete(match (run, donor) {
            (Some(_), None) => Completion::ReadRun(ticket, pages.as_flattened()),
            (Some(_), Some(donor)) => Completion::ReadRunFrom(donor, ticket, pages.as_flattened()),
            (None, None) => Completion::Read(ticket, &pages[0]),
            (None, Some(donor)) => Completion::ReadFrom(donor, ticket, &pages[0]),
        });
    }
}

impl SealedTransport {
    /// Creates a transport over `inner` for a class of traffic, with at most `requests_max` reads
    /// at once.
    ///
    /// # Panics
    ///
    /// With more than 2^32 requests.
    #[must_use]
    pub fn new(
        inner: Box<dyn PageTransport>,
        seal: Arc<LinkSeal>,
        class: TrafficClass,
        requests_max: usize,
    ) -> Self {
        let pages_max = match class {
            TrafficClass::Urgent | TrafficClass::Bulk => 1,
            TrafficClass::Prefetch | TrafficClass::Probe => RUN_PAGES_MAX as usize,
        };
        let numbers = u32::try_from(requests_max).expect("a few donors");
        Self {
            inner,
            reads: Reads {
                seal,
                all: vec![None; requests_max].into(),
                free: (0..numbers).rev().collect(),
                again: VecDeque::with_capacity(requests_max),
                lost: 0,
                incoming: vec![[0; PAGE_SIZE]; pages_max].into(),
            },
            outgoing: Box::new([0; PAGE_SIZE]),
            unsent: 0,
            is_bulk: class == TrafficClass::Bulk,
        }
    }

    fn begin(&mut self, ticket: Ticket, offset: u64, run: Option<u32>) -> Result<(), Full> {
        let index = self.reads.free.pop().ok_or(Full)?;
        self.reads.all[index as usize] = Some(Read {
            ticket,
            offset,
            run,
            is_ahead: run.is_some() || self.is_bulk,
            suspicious: false,
            verdicts: 0,
        });
        self.request(index).inspect_err(|_| {
            self.reads.all[index as usize] = None;
            self.reads.free.push(index);
        })
    }

    /// Requests an open read from the inner transport.
    fn request(&mut self, index: u32) -> Result<(), Full> {
        let read = self.reads.all[index as usize].expect("an open read");
        let ticket = Ticket(index);
        match read.run {
            run if read.suspicious => self.inner.post_reread(ticket, read.offset, run),
            Some(pages) => self.inner.post_read_run(ticket, read.offset, pages),
            None => self.inner.post_read(ticket, read.offset),
        }
    }

    /// Requests again what did not open, as far as there is room.
    fn request_again(&mut self) {
        let mut requested = false;
        while let Some(&index) = self.reads.again.front() {
            if self.request(index).is_err() {
                break;
            }
            self.reads.again.pop_front();
            requested = true;
        }
        if requested {
            self.inner.flush();
        }
    }
}

impl PageTransport for SealedTransport {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.begin(ticket, offset, None)
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        self.begin(ticket, offset, Some(pages))
    }

    fn post_probe(&mut self, _: Ticket, _: u64, _: u32) -> Result<(), Full> {
        unreachable!("measurements use connections of their own, on which nothing is sealed");
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        let Reads { seal, .. } = &self.reads;
        self.outgoing.copy_from_slice(page);
        let entry = match seal.key.seal(seal.place(offset), &mut self.outgoing) {
            Ok(entry) => entry,
            Err(error) => {
                self.unsent += 1;
                let _ = seal.judge.judge(Fault::NotSealed(error));
                return Ok(());
            }
        };
        self.inner.post_write(ticket, offset, &self.outgoing)?;
        // Not before it was posted: otherwise the donor holds the page before.
        seal.table.set(offset, entry);
        seal.stats.sealed.increment();
        Ok(())
    }

    fn post_drop(&mut self, offset: u64, pages: u32) -> Result<(), Full> {
        self.inner.post_drop(offset, pages)?;
        // Donors may hold the page or zeroes from now on, each for itself. No read of the pages is
        // outstanding: they are untouched.
        let pages = (0..u64::from(pages)).map(|page| offset + page * PAGE_SIZE as u64);
        pages.for_each(|at| self.reads.seal.table.clear(at));
        Ok(())
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        let Self { inner, reads, .. } = self;
        inner.poll(&mut |completion| match completion {
            Completion::Read(Ticket(index), page) => reads.arrived(index, None, page, complete),
            Completion::ReadFrom(donor, Ticket(index), page) => {
                reads.arrived(index, Some(donor), page, complete);
            }
            Completion::ReadRun(Ticket(index), pages) => {
                reads.arrived(index, None, pages, complete);
            }
            Completion::ReadRunFrom(donor, Ticket(index), pages) => {
                reads.arrived(index, Some(donor), pages, complete);
            }
            Completion::Unread(Ticket(index)) => {
                complete(Completion::Unread(reads.end(index).ticket));
            }
            Completion::Written(_) | Completion::Dropped(_) => complete(completion),
        });
        self.request_again();
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.reads.again.len() + self.reads.lost + self.unsent
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn wake_by(&mut self) -> Option<Instant> {
        self.inner.wake_by()
    }

    fn interests(&self, watch: &mut dyn FnMut(Interest)) {
        self.inner.interests(watch);
    }
}

#[cfg(test)]
mod tests;
