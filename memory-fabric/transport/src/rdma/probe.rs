//! READs on an otherwise idle lane, for measurements.

use super::RdmaError;
use super::connection::Lane;
use super::port::PageLane as _;
use crate::{Completion, Full, IN_FLIGHT_MAX, Interest, PAGE_BYTES, PageTransport, Ticket};
use crossbeam_channel::Sender;
use fabric_host::Mapping;
use fabric_host::describe;
use fabric_pages::page::PageBytes;
use fabric_verbs::device::Device;
use fabric_verbs::memory::{Access, MemoryRegion, Paging, ProtectionDomain};
use fabric_verbs::settings::Settings;
use fabric_verbs::staging::Staging;
use fabric_wire::{PROBE_BYTES_MAX, RUN_PAGES_MAX};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// READs of one lease, and WRITEs if the lane may write. Ends when the lane fails.
#[derive(Debug)]
pub struct ProbeLane {
    lane: Lane,
    /// Indexed by number: ticket, requested bytes, and whether it was requested as a page.
    reads: Box<[(Ticket, u32, bool)]>,
    free: Vec<u16>,
    failed: Sender<String>,
    writes: bool,
}

impl ProbeLane {
    /// Wraps a lane; sends the reason to `failed` if it fails.
    pub fn new(lane: Lane, failed: Sender<String>) -> Self {
        let most = u16::try_from(IN_FLIGHT_MAX).expect("a small constant");
        Self {
            lane,
            reads: vec![(Ticket(0), 0, false); IN_FLIGHT_MAX].into_boxed_slice(),
            free: (0..most).rev().collect(),
            failed,
            writes: false,
        }
    }

    /// Like [`new`](Self::new), for a lane that also writes.
    pub fn writing(lane: Lane, failed: Sender<String>) -> Self {
        Self {
            writes: true,
            ..Self::new(lane, failed)
        }
    }

    fn post(&mut self, ticket: Ticket, offset: u64, bytes: u32, page: bool) -> Result<(), Full> {
        let number = self.free.pop().ok_or(Full)?;
        if !self.lane.add_bytes(number, offset, bytes) {
            self.free.push(number);
            return Err(Full);
        }
        self.reads[usize::from(number)] = (ticket, bytes, page);
        Ok(())
    }

    fn report(&self, result: Result<(), RdmaError>) {
        if let Err(error) = result {
            // If it is full, the first failure counts.
            let _ = self.failed.try_send(describe(&error));
        }
    }
}

impl PageTransport for ProbeLane {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post(ticket, offset, PAGE_BYTES, true)
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        assert!((1..=RUN_PAGES_MAX).contains(&pages), "a run of {pages}");
        self.post(ticket, offset, pages * PAGE_BYTES, false)
    }

    fn probe_bytes(&self) -> RangeInclusive<u32> {
        1..=PROBE_BYTES_MAX
    }

    fn post_probe(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        assert!(self.probe_bytes().contains(&bytes), "a probe of {bytes}");
        self.post(ticket, offset, bytes, false)
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        if !self.writes {
            return Err(Full);
        }
        let number = self.free.pop().ok_or(Full)?;
        if !self.lane.add_write(number, offset, page) {
            self.free.push(number);
            return Err(Full);
        }
        // A READ of no bytes does not exist.
        self.reads[usize::from(number)] = (ticket, 0, false);
        Ok(())
    }

    fn post_drop(&mut self, _: u64, _: u32) -> Result<(), Full> {
        Err(Full)
    }

    fn flush(&mut self) {
        let posted = self.lane.post();
        self.report(posted);
    }

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        let (reads, free) = (&self.reads, &mut self.free);
        let polled = self.lane.poll(&mut |number, bytes| {
            let (ticket, asked, page) = reads[usize::from(number)];
            free.push(number);
            if asked == 0 {
                complete(Completion::Written(ticket));
                return;
            }
            // A request for a part of a page uses whole pages of the staging buffer.
            let bytes = &bytes[..asked as usize];
            match <&PageBytes>::try_from(bytes) {
                Ok(bytes) if page => complete(Completion::Read(ticket, bytes)),
                _ => complete(Completion::ReadRun(ticket, bytes)),
            }
        });
        self.report(polled.map(drop));
    }

    fn in_flight(&self) -> usize {
        self.reads.len() - self.free.len()
    }

    fn arm(&mut self) -> bool {
        self.lane.arm()
    }

    fn interests(&self, watch: &mut dyn FnMut(Interest)) {
        if let Some(fd) = self.lane.event_fd().filter(|_| self.in_flight() > 0) {
            watch(Interest {
                fd,
                writable: false,
            });
        }
    }
}

/// Times of a memory registration.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// Size of the memory.
    pub bytes: usize,
    /// For memory that was never accessed: includes allocating its pages.
    pub first: Duration,
    /// For the same memory with its pages allocated.
    pub again: Duration,
    /// For the deregistration.
    pub end: Duration,
}

/// Registers memory of these sizes with the device that has the address `local`, from which another
/// node is reached.
///
/// # Errors
///
/// Fails when there is no such device, or a registration fails.
pub fn registrations(local: IpAddr, sizes: &[usize]) -> Result<Vec<Registration>, RdmaError> {
    let (device, _) = Device::for_peer(&Settings::default(), local)?;
    let domain = ProtectionDomain::new(&device)?;
    let measure = |&bytes: &usize| {
        let memory =
            Mapping::anonymous(bytes).map_err(|error| RdmaError::System("map memory", error))?;
        let memory = Arc::new(memory);
        let register = || {
            let began = Instant::now();
            let region = MemoryRegion::register(&domain, &memory, Access::Local, Paging::Pinned)?;
            Ok((began.elapsed(), region))
        };
        let (first, region) = register()?;
        drop(region);
        let (again, region) = register()?;
        let began = Instant::now();
        drop(region);
        Ok(Registration {
            bytes,
            first,
            again,
            end: began.elapsed(),
        })
    };
    sizes.iter().map(measure).collect()
}

/// Returns the time to create a staging buffer of this many pages: memory and registration.
///
/// # Errors
///
/// As for [`registrations`].
pub fn staging_time(local: IpAddr, pages: usize) -> Result<Duration, RdmaError> {
    let (device, _) = Device::for_peer(&Settings::default(), local)?;
    let domain = ProtectionDomain::new(&device)?;
    let began = Instant::now();
    Staging::new(&domain, pages).map(|_| began.elapsed())
}
