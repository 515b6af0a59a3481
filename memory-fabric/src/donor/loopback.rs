//! Pages of a slab in this process: the reference for other transports.

use super::pool::Lease;
use crate::page::{PAGE_SIZE, PageBytes};
use crate::transport::{Completion, Full, IN_FLIGHT_MAX, Interest, PageTransport, Ticket};
use crate::wire::{PROBE_BYTES_MAX, RUN_PAGES_MAX};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Reads and writes a lease directly.
#[derive(Debug)]
pub struct LoopbackTransport {
    lease: Arc<Lease>,
    posted: VecDeque<Posted>,
    page: Box<PageBytes>,
    /// The run that is being read. Allocated once, at the first run.
    run: Vec<u8>,
}

#[derive(Debug)]
enum Posted {
    Read(Ticket, u64),
    ReadRun(Ticket, u64, u32),
    Probe(Ticket, u64, u32),
    Pieces(Ticket, u64, u32),
    Written(Ticket),
    Dropped(u32),
}

impl LoopbackTransport {
    /// Creates a transport to `lease`.
    #[must_use]
    pub fn new(lease: Arc<Lease>) -> Self {
        let posted = VecDeque::with_capacity(IN_FLIGHT_MAX);
        Self {
            lease,
            posted,
            page: Box::new([0; PAGE_SIZE]),
            run: Vec::new(),
        }
    }

    fn push(&mut self, posted: Posted) -> Result<(), Full> {
        if self.posted.len() == IN_FLIGHT_MAX {
            return Err(Full);
        }
        self.posted.push_back(posted);
        Ok(())
    }
}

impl PageTransport for LoopbackTransport {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.push(Posted::Read(ticket, offset))
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        assert!((1..=RUN_PAGES_MAX).contains(&pages), "a run of {pages}");
        self.push(Posted::ReadRun(ticket, offset, pages))
    }

    fn probe_bytes(&self) -> RangeInclusive<u32> {
        1..=PROBE_BYTES_MAX
    }

    fn post_probe(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        assert!(self.probe_bytes().contains(&bytes), "a probe of {bytes}");
        self.push(Posted::Probe(ticket, offset, bytes))
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        self.push(Posted::Written(ticket))?;
        self.lease
            .write(offset, page)
            .expect("the layout stays inside the lease");
        Ok(())
    }

    fn post_read_piece(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        self.push(Posted::Pieces(ticket, offset, bytes))
    }

    fn post_write_piece(&mut self, ticket: Ticket, offset: u64, piece: &[u8]) -> Result<(), Full> {
        self.push(Posted::Written(ticket))?;
        self.lease
            .write_piece(offset, piece)
            .expect("the layout stays inside the lease");
        Ok(())
    }

    fn post_drop(&mut self, offset: u64, pages: u32) -> Result<(), Full> {
        self.push(Posted::Dropped(pages))?;
        self.lease
            .drop_pages(offset, pages)
            .expect("the layout stays inside the lease");
        Ok(())
    }

    fn flush(&mut self) {}

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        while let Some(posted) = self.posted.pop_front() {
            match posted {
                Posted::Read(ticket, offset) => {
                    let read = self.lease.read(offset, &mut self.page);
                    read.expect("the layout stays inside the lease");
                    complete(Completion::Read(ticket, &self.page));
                }
                Posted::ReadRun(ticket, offset, pages) => {
                    self.run.clear();
                    let read = self.lease.read_run(offset, pages, &mut self.run);
                    read.expect("the layout stays inside the lease");
                    complete(Completion::ReadRun(ticket, &self.run));
                }
                Posted::Pieces(ticket, offset, bytes) => {
                    self.run.clear();
                    let read = self.lease.read_pieces(offset, bytes, &mut self.run);
                    read.expect("the layout stays inside the lease");
                    complete(Completion::ReadRun(ticket, &self.run));
                }
                Posted::Probe(ticket, offset, bytes) => {
                    self.run.clear();
                    let read = self.lease.read_bytes(offset, bytes, &mut self.run);
                    read.expect("who measures stays inside the lease");
                    complete(Completion::ReadRun(ticket, &self.run));
                }
                Posted::Written(ticket) => complete(Completion::Written(ticket)),
                Posted::Dropped(pages) => complete(Completion::Dropped(pages)),
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.posted.len()
    }

    fn interests(&self, _watch: &mut dyn FnMut(Interest)) {}
}
