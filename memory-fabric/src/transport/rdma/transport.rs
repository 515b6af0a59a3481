//! Pages by READ, with TCP beside it for all else and for when a lane fails.

use super::RdmaError;
use crate::link::rdma::LanePort;
use crate::page::{PAGE_SIZE, PageBytes};
use crate::transport::tcp::TcpTransport;
use crate::transport::{
    Completion, Full, IN_FLIGHT_MAX, Interest, PageSource, PageTransport, Ticket,
};
use crate::wire::RUN_PAGES_MAX;
use std::collections::VecDeque;
use std::os::fd::RawFd;

/// A way to read pages of a lease without its donor's processor.
pub(crate) trait ReadLane: Send + std::fmt::Debug {
    /// Adds a READ of `pages` pages from `offset` of the lease on to the next batch, under a
    /// number below [`IN_FLIGHT_MAX`] that is not in use. False when there is no room for the
    /// answer just now.
    fn add(&mut self, number: u16, offset: u64, pages: usize) -> bool;

    /// Posts the batch.
    ///
    /// # Errors
    ///
    /// When the lane is of no more use; here and in [`poll`](Self::poll).
    fn post(&mut self) -> Result<(), RdmaError>;

    /// Gives what has completed to `complete`: its number and bytes, which are valid during the
    /// call. True when there was something. What has completed before an error was given all
    /// the same.
    fn poll(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError>;

    /// To be called before sleeping: false when something has completed already. Otherwise the
    /// descriptor becomes readable when something does.
    fn arm(&mut self) -> bool;

    /// The descriptor.
    fn event_fd(&self) -> Option<RawFd>;
}

/// Requests to one donor: READs on a lane while there is one, all else over TCP.
///
/// A lane that fails is handed back, and what was outstanding on it is sent over TCP. That is
/// safe at any time: a READ changes nothing, and where its answer may still be put is the old
/// lane's own. A new lane is taken when there is one.
#[derive(Debug)]
pub(crate) struct RdmaTransport {
    tcp: TcpTransport,
    port: LanePort,
    lane: Option<Box<dyn ReadLane>>,
    /// READs on the lane, by number.
    reads: Box<[Option<Read>]>,
    free: Vec<u16>,
    /// Those that wait for room on the lane.
    waiting: VecDeque<u16>,
}

#[derive(Clone, Copy, Debug)]
struct Read {
    ticket: Ticket,
    offset: u64,
    pages: u32,
    /// Whether it was asked for as a run.
    run: bool,
}

impl RdmaTransport {
    /// A transport with lanes from `port`, and `tcp` for the rest.
    pub(crate) fn new(port: LanePort, tcp: TcpTransport) -> Self {
        let most = u16::try_from(IN_FLIGHT_MAX).expect("a small constant");
        Self {
            tcp,
            port,
            lane: None,
            reads: vec![None; IN_FLIGHT_MAX].into_boxed_slice(),
            free: (0..most).rev().collect(),
            waiting: VecDeque::with_capacity(IN_FLIGHT_MAX),
        }
    }

    fn post(&mut self, read: Read) -> Result<(), Full> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return Err(Full);
        }
        let Some(lane) = &mut self.lane else {
            return over_tcp(&mut self.tcp, read);
        };
        let number = self.free.pop().ok_or(Full)?;
        self.reads[usize::from(number)] = Some(read);
        // In order: a long run must not wait for ever because short ones find room.
        let placed = self.waiting.is_empty() && lane.add(number, read.offset, read.pages as usize);
        if !placed {
            self.waiting.push_back(number);
        }
        Ok(())
    }

    /// Puts on the lane what finds room there now.
    fn place_waiting(&mut self) {
        let Some(lane) = &mut self.lane else {
            return;
        };
        while let Some(&number) = self.waiting.front() {
            let read = self.reads[usize::from(number)].expect("a number in use");
            if !lane.add(number, read.offset, read.pages as usize) {
                break;
            }
            self.waiting.pop_front();
        }
    }

    /// Gives up the lane: what was outstanding on it goes over TCP.
    fn fail_over(&mut self, why: RdmaError) {
        if let Some(lane) = self.lane.take() {
            self.port.give_back(lane, Some(why));
        }
        self.waiting.clear();
        for number in 0..self.reads.len() {
            if let Some(read) = self.reads[number].take() {
                self.free
                    .push(u16::try_from(number).expect("a small number"));
                over_tcp(&mut self.tcp, read).expect("as many places as READs");
            }
        }
        self.tcp.flush();
    }

    fn poll_lane(&mut self, complete: &mut dyn FnMut(Completion<'_>)) -> Result<(), RdmaError> {
        let Some(lane) = &mut self.lane else {
            return Ok(());
        };
        let (reads, free) = (&mut self.reads, &mut self.free);
        let (port, tcp) = (&self.port, &self.tcp);
        lane.poll(&mut |number, bytes| {
            let read = reads[usize::from(number)].take().expect("a READ of ours");
            free.push(number);
            port.note_read(read.pages);
            tcp.note_progress();
            if read.run {
                complete(Completion::ReadRun(read.ticket, bytes));
            } else {
                let page: &PageBytes = bytes.try_into().expect("one page");
                complete(Completion::Read(read.ticket, page));
            }
        })?;
        self.place_waiting();
        self.lane.as_mut().map_or(Ok(()), |lane| lane.post())
    }
}

fn over_tcp(tcp: &mut TcpTransport, read: Read) -> Result<(), Full> {
    if read.run {
        tcp.post_read_run(read.ticket, read.offset, read.pages)
    } else {
        tcp.post_read(read.ticket, read.offset)
    }
}

impl PageTransport for RdmaTransport {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post(Read {
            ticket,
            offset,
            pages: 1,
            run: false,
        })
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        assert!((1..=RUN_PAGES_MAX).contains(&pages), "a run of {pages}");
        debug_assert!(offset.is_multiple_of(PAGE_SIZE as u64));
        self.post(Read {
            ticket,
            offset,
            pages,
            run: true,
        })
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: PageSource) -> Result<(), Full> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return Err(Full);
        }
        self.tcp.post_write(ticket, offset, page)
    }

    fn post_drop(&mut self, offset: u64, pages: u32) -> Result<(), Full> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return Err(Full);
        }
        self.tcp.post_drop(offset, pages)
    }

    fn flush(&mut self) {
        if let Some(lane) = &mut self.lane
            && let Err(why) = lane.post()
        {
            self.fail_over(why);
        }
        self.tcp.flush();
    }

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        if self.lane.is_none() {
            self.lane = self.port.take_lane();
        }
        if let Err(why) = self.poll_lane(complete) {
            self.fail_over(why);
        }
        self.tcp.poll(complete);
    }

    fn in_flight(&self) -> usize {
        self.reads.len() - self.free.len() + self.tcp.in_flight()
    }

    fn arm(&mut self) -> bool {
        self.lane.as_mut().is_none_or(|lane| lane.arm())
    }

    fn interests(&self, watch: &mut dyn FnMut(Interest)) {
        // An event may be left over from what was found without it.
        let reading = self.free.len() < self.reads.len();
        let lane = self.lane.as_ref().filter(|_| reading);
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
            self.port.give_back(lane, None);
        }
    }
}

#[cfg(test)]
#[path = "transport_tests.rs"]
mod tests;
