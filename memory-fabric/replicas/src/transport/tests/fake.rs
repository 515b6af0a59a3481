//! A donor that stores pages, and connections to it that may break.

use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_transport::{Completion, Full, IN_FLIGHT_MAX, Interest, PageTransport, Ticket};
use fabric_wire::PIECE_BYTES;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Returns a page that has its version in every piece, which nothing else has.
pub fn page_with(version: u64) -> PageBytes {
    let mut page = [0; PAGE_SIZE];
    for (at, piece) in page.chunks_exact_mut(PIECE_BYTES).enumerate() {
        let number = if version == 0 {
            0
        } else {
            version << 8 | at as u64
        };
        piece[..8].copy_from_slice(&number.to_le_bytes());
    }
    page
}

/// Returns the version of a page, all of whose pieces must have it.
pub fn version_of(page: &[u8]) -> u64 {
    let first = u64::from_le_bytes(page[..8].try_into().expect("8 bytes"));
    let version = first >> 8;
    assert!(page == page_with(version), "version {version} and others");
    version
}

/// What a hostile donor sends, from what it has, what that was before, and what is at another page;
/// the number differs from one answer to the next.
pub type Forgery = fn(&[u8], &[u8], &[u8], u64) -> Vec<u8>;

/// A donor.
#[derive(Debug, Default)]
pub struct FakeDonor {
    pages: HashMap<u64, Box<PageBytes>>,
    /// What pages were before the last write of a piece.
    before: HashMap<u64, Box<PageBytes>>,
    /// While set, this is sent, once in so many answers.
    pub forgery: Option<(Forgery, u64)>,
    /// Reads that were answered.
    pub answers: u64,
    /// Pages, or pieces of them, that were written.
    pub writes: u64,
    /// Answers that were forged.
    pub forged: u64,
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
        self.pages
            .get(&offset)
            .map_or(0, |page| version_of(&**page))
    }

    /// Returns bytes of one page.
    pub fn bytes_at(&self, offset: u64, count: usize) -> Vec<u8> {
        let within = usize::try_from(offset % PAGE_SIZE as u64).expect("small");
        let page = self.pages.get(&(offset - within as u64));
        match (self.left, page) {
            (true, _) => vec![0xff; count],
            (false, Some(page)) => page[within..within + count].to_vec(),
            (false, None) => vec![0; count],
        }
    }

    fn read(&self, offset: u64, count: usize) -> Vec<u8> {
        let parts = (0..count).step_by(PIECE_BYTES);
        let parts = parts.map(|at| offset + at as u64);
        parts
            .flat_map(|offset| self.bytes_at(offset, PIECE_BYTES))
            .collect()
    }

    /// Replaces an answer, if the donor is hostile.
    fn forge(&mut self, offset: u64, bytes: Vec<u8>) -> Vec<u8> {
        self.answers += 1;
        let Some((forgery, _)) = self
            .forgery
            .filter(|one| self.answers.is_multiple_of(one.1))
        else {
            return bytes;
        };
        let count = bytes.len();
        let other = self.read(offset ^ PAGE_SIZE as u64, count);
        std::mem::swap(&mut self.pages, &mut self.before);
        let before = self.read(offset, count);
        std::mem::swap(&mut self.pages, &mut self.before);
        let forged = forgery(&bytes, &before, &other, self.answers);
        self.forged += u64::from(forged != bytes);
        forged
    }

    fn serve(&mut self, request: &Request) -> Vec<u8> {
        match &request.kind {
            Kind::Read(_, bytes) => {
                let bytes = self.read(request.offset, *bytes);
                self.forge(request.offset, bytes)
            }
            Kind::Write(_, bytes) => {
                self.writes += 1;
                let within = usize::try_from(request.offset % PAGE_SIZE as u64).expect("small");
                let start = request.offset - within as u64;
                let page = self.pages.entry(start);
                let page = page.or_insert_with(|| Box::new([0; PAGE_SIZE]));
                let before = self.before.entry(start);
                let before = before.or_insert_with(|| Box::new([0; PAGE_SIZE]));
                before[within..within + bytes.len()]
                    .copy_from_slice(&page[within..within + bytes.len()]);
                page[within..within + bytes.len()].copy_from_slice(bytes);
                Vec::new()
            }
            Kind::Drop(count) => {
                for page in 0..u64::from(*count) {
                    self.pages
                        .remove(&(request.offset + page * PAGE_SIZE as u64));
                }
                Vec::new()
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Kind {
    /// A number of bytes.
    Read(Ticket, usize),
    Write(Ticket, Vec<u8>),
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
        if let Kind::Write(_, bytes) = &kind {
            let end = offset + bytes.len() as u64;
            let is_twice = |request: &Request| match &request.kind {
                Kind::Write(_, other) => {
                    request.offset < end && offset < request.offset + other.len() as u64
                }
                _ => false,
            };
            let twice = self.posted.iter().any(is_twice);
            assert!(!twice, "two writes of the same bytes are outstanding");
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
        self.post(Kind::Read(ticket, PAGE_SIZE), false, offset)
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        self.post(Kind::Read(ticket, pages as usize * PAGE_SIZE), true, offset)
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        self.post(Kind::Write(ticket, page.to_vec()), false, offset)
    }

    fn post_read_piece(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        self.post(Kind::Read(ticket, bytes as usize), true, offset)
    }

    fn post_write_piece(&mut self, ticket: Ticket, offset: u64, piece: &[u8]) -> Result<(), Full> {
        self.post(Kind::Write(ticket, piece.to_vec()), false, offset)
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
