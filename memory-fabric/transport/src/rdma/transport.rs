//! Pages by READ and WRITE, with TCP for all other requests and as the fallback for a failed lane.
//!
//! # Pages that are written twice
//!
//! A lane that fails may have WRITEs in progress whose result is unknown: in the network, or in the
//! other adapter. Their pages are sent again over TCP. If one of these WRITEs were executed later,
//! after the page was fetched, changed, and written back again, it would replace the new bytes with
//! the old ones. Therefore a *fence* precedes the pages on the TCP connection: the donor destroys
//! its end of the lane, after which nothing that arrives on it is executed, and only then processes
//! the requests behind the fence. No new lane is used before the fence was answered.
//!
//! Drops travel over TCP, and a WRITE could overtake one that concerns its page. Therefore pages
//! are written over TCP, behind the drops, while drops are outstanding. A drop that overtakes a
//! WRITE is harmless: it concerns pages that are not read before they are written again, and a page
//! has at most one write in progress.

use super::RdmaError;
use super::port::{LanePort, PageLane};
use super::write_times::WriteTimes;
use crate::tcp::TcpTransport;
use crate::{Completion, Full, IN_FLIGHT_MAX, Interest, PageTransport, Ticket};
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_wire::RUN_PAGES_MAX;
use std::collections::VecDeque;
use std::time::Instant;

/// Number of WRITEs after which they are posted: the first travel while others are copied, and with
/// SoftRoCE, whose adapter is the posting thread, faults are served in between.
const WRITES_PER_DOORBELL: usize = 16;

/// Requests to one donor: READs and WRITEs on a lane while there is one, all others over TCP.
///
/// A lane that fails is returned, and its outstanding requests are sent over TCP. For a READ that
/// is always safe: it changes nothing, and a late answer goes to the old lane's own buffer. A new
/// lane is used when there is one.
#[derive(Debug)]
pub struct RdmaTransport {
    tcp: TcpTransport,
    port: LanePort,
    lane: Option<Box<dyn PageLane>>,
    /// Requests on the lane, by number.
    requests: Box<[Option<Request>]>,
    free: Vec<u16>,
    /// Requests that wait for room on the lane.
    waiting: VecDeque<u16>,
    /// WRITEs that were added and not posted yet.
    unposted_writes: usize,
    write_times: WriteTimes,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    ticket: Ticket,
    offset: u64,
    kind: RequestKind,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum RequestKind {
    Read,
    /// The number of pages.
    ReadRun(u32),
    Write,
}

impl Request {
    fn pages(self) -> u32 {
        match self.kind {
            RequestKind::ReadRun(pages) => pages,
            RequestKind::Read | RequestKind::Write => 1,
        }
    }
}

impl RdmaTransport {
    /// Creates a transport with lanes from `port`, and `tcp` for the rest.
    pub fn new(port: LanePort, tcp: TcpTransport) -> Self {
        let most = u16::try_from(IN_FLIGHT_MAX).expect("a small constant");
        Self {
            tcp,
            port,
            lane: None,
            requests: vec![None; IN_FLIGHT_MAX].into_boxed_slice(),
            free: (0..most).rev().collect(),
            waiting: VecDeque::with_capacity(IN_FLIGHT_MAX),
            unposted_writes: 0,
            write_times: WriteTimes::new(),
        }
    }

    /// Takes a lane from the port if none is in use, unless the donor may still execute WRITEs of
    /// the previous one.
    pub fn take_lane(&mut self) {
        if self.lane.is_none() && !self.tcp.is_fencing() {
            self.lane = self.port.take_lane();
        }
    }

    fn post(&mut self, read: Request) -> Result<(), Full> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return Err(Full);
        }
        let Some(lane) = &mut self.lane else {
            return read_over_tcp(&mut self.tcp, read);
        };
        let number = self.free.pop().ok_or(Full)?;
        self.requests[usize::from(number)] = Some(read);
        // In order: a long run must not starve because short ones find room.
        let placed =
            self.waiting.is_empty() && lane.add(number, read.offset, read.pages() as usize);
        if !placed {
            self.waiting.push_back(number);
        }
        Ok(())
    }

    /// Moves waiting requests to the lane while there is room.
    fn place_waiting(&mut self) {
        let Some(lane) = &mut self.lane else {
            return;
        };
        while let Some(&number) = self.waiting.front() {
            let read = self.requests[usize::from(number)].expect("a number in use");
            if !lane.add(number, read.offset, read.pages() as usize) {
                break;
            }
            self.waiting.pop_front();
        }
    }

    /// Closes the lane, and sends its outstanding requests over TCP.
    fn fail_over(&mut self, why: RdmaError) {
        let Some(lane) = self.lane.take() else {
            return;
        };
        self.waiting.clear();
        self.unposted_writes = 0;
        self.write_times.clear();
        let is_write = |request: &Request| request.kind == RequestKind::Write;
        if self.requests.iter().flatten().any(is_write) {
            self.tcp.post_fence();
        }
        for (number, request) in (0..).zip(&mut self.requests) {
            let Some(request) = request.take() else {
                continue;
            };
            self.free.push(number);
            let posted = match request.kind {
                RequestKind::Write => {
                    let page = lane.page_of(number);
                    self.tcp.post_write(request.ticket, request.offset, page)
                }
                _ => read_over_tcp(&mut self.tcp, request),
            };
            posted.expect("as many places as requests");
        }
        self.port.return_lane(lane, Some(why));
        self.tcp.flush();
    }

    fn poll_lane(&mut self, complete: &mut dyn FnMut(Completion<'_>)) -> Result<(), RdmaError> {
        let Some(lane) = &mut self.lane else {
            return Ok(());
        };
        let (requests, free) = (&mut self.requests, &mut self.free);
        let (port, tcp) = (&self.port, &self.tcp);
        let (write_times, mut now) = (&mut self.write_times, None);
        lane.poll(&mut |number, bytes| {
            let request = requests[usize::from(number)].take();
            let request = request.expect("a request of ours");
            free.push(number);
            tcp.note_progress();
            match request.kind {
                RequestKind::Write => {
                    let now = *now.get_or_insert_with(Instant::now);
                    port.note_written(write_times.complete(now));
                }
                _ => port.note_read(request.pages()),
            }
            complete(match request.kind {
                RequestKind::Read => {
                    let page: &PageBytes = bytes.try_into().expect("one page");
                    Completion::Read(request.ticket, page)
                }
                RequestKind::ReadRun(_) => Completion::ReadRun(request.ticket, bytes),
                RequestKind::Write => Completion::Written(request.ticket),
            });
        })?;
        self.place_waiting();
        self.post_lane()
    }

    /// Posts what was added to the lane.
    fn post_lane(&mut self) -> Result<(), RdmaError> {
        let Some(lane) = &mut self.lane else {
            return Ok(());
        };
        let writes = std::mem::take(&mut self.unposted_writes);
        if writes > 0 {
            self.write_times.post(writes, Instant::now());
        }
        lane.post()
    }
}

fn read_over_tcp(tcp: &mut TcpTransport, read: Request) -> Result<(), Full> {
    match read.kind {
        RequestKind::ReadRun(pages) => tcp.post_read_run(read.ticket, read.offset, pages),
        _ => tcp.post_read(read.ticket, read.offset),
    }
}

impl PageTransport for RdmaTransport {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        let kind = RequestKind::Read;
        self.post(Request {
            ticket,
            offset,
            kind,
        })
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        assert!((1..=RUN_PAGES_MAX).contains(&pages), "a run of {pages}");
        debug_assert!(offset.is_multiple_of(PAGE_SIZE as u64));
        let kind = RequestKind::ReadRun(pages);
        self.post(Request {
            ticket,
            offset,
            kind,
        })
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return Err(Full);
        }
        let behind_drops = self.tcp.is_dropping();
        if let Some(lane) = self.lane.as_mut().filter(|_| !behind_drops) {
            let number = self.free.pop().ok_or(Full)?;
            if lane.add_write(number, offset, page) {
                let kind = RequestKind::Write;
                self.requests[usize::from(number)] = Some(Request {
                    ticket,
                    offset,
                    kind,
                });
                self.unposted_writes += 1;
                if self.unposted_writes == WRITES_PER_DOORBELL {
                    self.flush();
                }
                return Ok(());
            }
            self.free.push(number);
        }
        self.tcp.post_write(ticket, offset, page)
    }

    fn post_read_piece(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        // Lanes carry whole pages.
        match self.in_flight() < IN_FLIGHT_MAX {
            true => self.tcp.post_read_piece(ticket, offset, bytes),
            false => Err(Full),
        }
    }

    fn post_write_piece(&mut self, ticket: Ticket, offset: u64, piece: &[u8]) -> Result<(), Full> {
        match self.in_flight() < IN_FLIGHT_MAX {
            true => self.tcp.post_write_piece(ticket, offset, piece),
            false => Err(Full),
        }
    }

    fn post_drop(&mut self, offset: u64, pages: u32) -> Result<(), Full> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return Err(Full);
        }
        self.tcp.post_drop(offset, pages)
    }

    fn flush(&mut self) {
        if let Err(why) = self.post_lane() {
            self.fail_over(why);
        }
        self.tcp.flush();
    }

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        self.take_lane();
        if let Err(why) = self.poll_lane(complete) {
            self.fail_over(why);
        }
        self.tcp.poll(complete);
    }

    fn in_flight(&self) -> usize {
        self.requests.len() - self.free.len() + self.tcp.in_flight()
    }

    fn arm(&mut self) -> bool {
        self.lane.as_mut().is_none_or(|lane| lane.arm())
    }

    fn interests(&self, watch: &mut dyn FnMut(Interest)) {
        // An event may remain from completions that were polled without it.
        let waiting = self.free.len() < self.requests.len();
        let lane = self.lane.as_ref().filter(|_| waiting);
        if let Some(fd) = lane.and_then(|lane| lane.event_fd()) {
            watch(Interest {
                fd,
                writable: false,
            });
        }
        self.tcp.interests(watch);
    }
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            self.port.return_lane(lane, None);
        }
    }
}
