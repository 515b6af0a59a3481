//! A donor that stores versions of pages, and connections to it that may break.

use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_transport::{Completion, Full, IN_FLIGHT_MAX, Interest, PageTransport, Ticket};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

pub fn page_with(version: u64) -> PageBytes {
    let mut page = [0; PAGE_SIZE];
    page[..8].copy_from_slice(&version.to_le_bytes());
    page
}

pub fn version_of(page: &[u8]) -> u64 {
    u64::from_le_bytes(page[..8].try_into().expect("8 bytes"))
}

/// A donor.
#[derive(Debug, Default)]
pub struct FakeDonor {
    pages: HashMap<u64, u64>,
    /// While set, nothing arrives.
    pub cut: bool,
    /// Its memory belongs to others.
    pub left: bool,
    /// Grows with each reconnection, after which outstanding requests are sent again.
    pub connection: u32,
}

impl FakeDonor {
    pub fn version_at(&self, offset: u64) -> u64 {
        if self.left {
            return u64::MAX;
        }
        self.pages.get(&offset).copied().unwrap_or(0)
    }

    fn serve(&mut self, request: &Request) -> Vec<u8> {
        let pages =
            |count: u32| (0..u64::from(count)).map(|page| request.offset + page * PAGE_SIZE as u64);
        match request.kind {
            Kind::Read(_, count) => pages(count)
                .flat_map(|offset| page_with(self.version_at(offset)))
                .collect(),
            Kind::Write(_, version) => {
                self.pages.insert(request.offset, version);
                Vec::new()
            }
            Kind::Drop(count) => {
                for offset in pages(count) {
                    self.pages.remove(&offset);
                }
                Vec::new()
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read(Ticket, u32),
    Write(Ticket, u64),
    Drop(u32),
}

#[derive(Debug)]
struct Request {
    kind: Kind,
    is_run: bool,
    offset: u64,
    /// The answer, once the donor has served it.
    served: Option<Vec<u8>>,
}

/// A connection: requests are served and answered in order, a random number at each poll.
#[derive(Debug)]
pub struct FakeTransport {
    donor: Arc<Mutex<FakeDonor>>,
    posted: VecDeque<Request>,
    connection: u32,
    random: u64,
}

impl FakeTransport {
    pub fn new(donor: &Arc<Mutex<FakeDonor>>) -> Self {
        Self {
            donor: Arc::clone(donor),
            posted: VecDeque::new(),
            connection: 0,
            random: 0x1234_5678,
        }
    }

    fn post(&mut self, kind: Kind, is_run: bool, offset: u64) -> Result<(), Full> {
        if self.posted.len() == IN_FLIGHT_MAX {
            return Err(Full);
        }
        if let Kind::Write(..) = kind {
            let is_twice = |request: &Request| {
                matches!(request.kind, Kind::Write(..)) && request.offset == offset
            };
            let twice = self.posted.iter().any(is_twice);
            assert!(!twice, "two writes of one page are outstanding");
        }
        self.posted.push_back(Request {
            kind,
            is_run,
            offset,
            served: None,
        });
        Ok(())
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005) | 1;
        usize::try_from(self.random >> 33).expect("31 bits") % limit
    }
}

impl PageTransport for FakeTransport {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post(Kind::Read(ticket, 1), false, offset)
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        self.post(Kind::Read(ticket, pages), true, offset)
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        self.post(Kind::Write(ticket, version_of(page)), false, offset)
    }

    fn post_drop(&mut self, offset: u64, pages: u32) -> Result<(), Full> {
        self.post(Kind::Drop(pages), false, offset)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        let donor = Arc::clone(&self.donor);
        let mut donor = donor.lock().expect("no panic");
        if donor.cut {
            return;
        }
        if donor.connection != self.connection {
            // All that was not answered is sent again.
            self.connection = donor.connection;
            for request in &mut self.posted {
                request.served = None;
            }
        }
        let served = self.below(self.posted.len() + 2);
        for request in self.posted.iter_mut().take(served) {
            if request.served.is_none() {
                request.served = Some(donor.serve(request));
            }
        }
        drop(donor);
        for _ in 0..self.below(self.posted.len() + 2) {
            let front = self.posted.front();
            if front.is_none_or(|request| request.served.is_none()) {
                break;
            }
            let Some(request) = self.posted.pop_front() else {
                break;
            };
            let bytes = request.served.unwrap_or_default();
            complete(match request.kind {
                Kind::Read(ticket, _) if request.is_run => Completion::ReadRun(ticket, &bytes),
                Kind::Read(ticket, _) => {
                    Completion::Read(ticket, bytes.as_slice().try_into().expect("a page"))
                }
                Kind::Write(ticket, _) => Completion::Written(ticket),
                Kind::Drop(pages) => Completion::Dropped(pages),
            });
        }
    }

    fn in_flight(&self) -> usize {
        self.posted.len()
    }

    fn interests(&self, _: &mut dyn FnMut(Interest)) {}
}
