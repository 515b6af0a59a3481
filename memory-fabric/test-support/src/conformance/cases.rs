//! The conformance cases of all transports.
//!
//! Each case opens a lease of its own, uses it as the pager does, and compares every byte. All
//! waits have a deadline; a case that fails panics.

use super::pieces::pieces;
use fabric_transport::{Completion, Full, IN_FLIGHT_MAX, Interest, PageTransport, Ticket};
use fabric_wire::{PIECE_BYTES, RUN_PAGES_MAX};
use memory_fabric::fabric::Compression;
use memory_fabric::page::{PAGE_SIZE, PageBytes};
use std::any::Any;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Pages of a lease.
pub const PAGES: u32 = 512;

/// Timeout of every wait, far longer than any takes unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How long a user polls for completions before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Longest sleep: nothing here wakes the user after a reconnect.
const NAP_MAX: Duration = Duration::from_millis(20);

/// Options of a lease.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub compression: Compression,
    pub checksum: bool,
}

/// Opens leases.
pub trait Bed {
    /// Opens a lease of [`PAGES`] pages, with a transport of each class.
    fn open(&self, options: Options) -> Lines;

    /// Returns the number of current leases.
    fn leases(&self) -> usize;

    /// Returns whether a dropped page is zero from then on. Otherwise its contents are undefined
    /// until it is written: the pager does not read such a page.
    fn forgets_drops(&self) -> bool;
}

/// A lease with its transports.
pub struct Lines {
    pub urgent: User,
    pub bulk: User,
    pub ahead: User,
    /// Ends the lease on drop, after the transports.
    pub _lease: Box<dyn Any>,
}

/// The name and the function of a case.
pub type Case = (&'static str, fn(&dyn Bed, Options));

/// All cases.
pub const CASES: &[Case] = &[
    ("contents", contents),
    ("zero pages", zero_pages),
    ("matching", matching),
    ("pieces of pages", pieces),
    ("order of writes and drops", order),
    ("write-backs and reads", write_backs_and_reads),
    ("concurrent users", concurrent_users),
    ("cancellation", cancellation),
];

/// A request to a transport.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Request {
    Read(u32),
    ReadRun(u32, u32),
    /// A page, and the version of its contents.
    Write(u32, u32),
    Drop(u32, u32),
    /// A page, the eighth of it at which a piece begins, the number of eighths, and the version.
    WritePiece(u32, u32, u32, u32),
    /// The same without a version; the piece may end in a later page.
    ReadPiece(u32, u32, u32),
}

impl Request {
    /// The pages that it changes.
    fn changed(self) -> std::ops::Range<u32> {
        match self {
            Self::Write(page, _) | Self::WritePiece(page, ..) => page..page + 1,
            Self::Drop(first, count) => first..first + count,
            Self::Read(_) | Self::ReadRun(..) | Self::ReadPiece(..) => 0..0,
        }
    }

    fn changes_what(self, other: Self) -> bool {
        let (this, other) = (self.changed(), other.changed());
        this.start < other.end && other.start < this.end
    }
}

/// A user of a transport.
#[derive(Debug)]
pub struct User {
    transport: Box<dyn PageTransport>,
    next_ticket: u32,
}

fn offset(page: u32) -> u64 {
    u64::from(page) * PAGE_SIZE as u64
}

/// Returns the contents of a page after its write `version`: zeroes, compressible text, noise, or
/// half of each. Version 0 is memory that was never written.
pub fn content(page: u32, version: u32) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    let mut state = (u64::from(page) << 32 | u64::from(version)).wrapping_add(1);
    let mut noise = || {
        // SplitMix64 (Steele, Lea and Flood, 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) ^ (mixed >> 31)
    };
    let (noisy, textual) = match (version, (page + version) % 4) {
        (0, _) | (_, 0) => (0, 0),
        (_, 1) => (0, PAGE_SIZE),
        (_, 2) => (PAGE_SIZE, PAGE_SIZE),
        _ => (PAGE_SIZE / 2, PAGE_SIZE),
    };
    let text = format!("page {page} version {version}; ");
    for (place, byte) in bytes[..textual].iter_mut().enumerate() {
        *byte = text.as_bytes()[place % text.len()];
    }
    for chunk in bytes[..noisy].chunks_mut(8) {
        chunk.copy_from_slice(&noise().to_le_bytes()[..chunk.len()]);
    }
    bytes
}

#[track_caller]
fn assert_page(bytes: &[u8], page: u32, version: u32) {
    assert_eq!(bytes.len(), PAGE_SIZE, "page {page}");
    let wanted = content(page, version);
    let wrong = bytes.iter().zip(&wanted).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "byte of page {page}, version {version}");
}

impl User {
    pub fn new(transport: Box<dyn PageTransport>) -> Self {
        Self {
            transport,
            next_ticket: 7,
        }
    }

    /// Posts a request. Tickets are unique and not in order.
    fn post(&mut self, request: Request) -> Result<Ticket, Full> {
        let ticket = Ticket(self.next_ticket.wrapping_mul(0x9e37_79b1));
        match request {
            Request::Read(page) => self.transport.post_read(ticket, offset(page))?,
            Request::ReadRun(page, count) => {
                self.transport.post_read_run(ticket, offset(page), count)?;
            }
            Request::Write(page, version) => {
                let mut bytes = content(page, version);
                self.transport.post_write(ticket, offset(page), &bytes)?;
                // The transport has taken the page; changes to it must not matter now.
                bytes.fill(0xee);
                std::hint::black_box(&bytes);
            }
            Request::Drop(page, count) => self.transport.post_drop(offset(page), count)?,
            Request::WritePiece(page, at, count, version) => {
                let start = at as usize * PIECE_BYTES;
                let mut bytes = content(page, version);
                let piece = &bytes[start..start + count as usize * PIECE_BYTES];
                let at = offset(page) + start as u64;
                self.transport.post_write_piece(ticket, at, piece)?;
                bytes.fill(0xee);
                std::hint::black_box(&bytes);
            }
            Request::ReadPiece(page, at, count) => {
                let unit = u32::try_from(PIECE_BYTES).expect("small");
                let eighths = |count: u32| count * unit;
                let at = offset(page) + u64::from(eighths(at));
                self.transport.post_read_piece(ticket, at, eighths(count))?;
            }
        }
        self.next_ticket += 1;
        Ok(ticket)
    }

    /// Executes all requests, as many at once as the transport accepts. Returns the bytes of each
    /// read by its index; every completion must belong to an outstanding request.
    pub fn carry_out(&mut self, requests: &[Request]) -> Vec<Vec<u8>> {
        let deadline = Instant::now() + PATIENCE;
        let mut answers = vec![Vec::new(); requests.len()];
        let mut outstanding: HashMap<u32, usize> = HashMap::new();
        let mut drops: Vec<u32> = Vec::new();
        let (mut posted, mut idle_since) = (0, Instant::now());
        while posted < requests.len() || !outstanding.is_empty() || !drops.is_empty() {
            while let Some(&request) = requests.get(posted) {
                // As the pager does: a page has one write outstanding at most, and none when it is
                // dropped.
                let is_before = |&place: &usize| request.changes_what(requests[place]);
                if outstanding.values().any(is_before) {
                    break;
                }
                match (self.post(request), request) {
                    (Err(Full), _) => break,
                    (Ok(_), Request::Drop(_, count)) => drops.push(count),
                    (Ok(Ticket(ticket)), _) => {
                        outstanding.insert(ticket, posted);
                    }
                }
                posted += 1;
            }
            self.transport.flush();
            let mut any = false;
            self.transport.poll(&mut |completion| {
                any = true;
                let (ticket, bytes) = match completion {
                    Completion::Read(ticket, page) | Completion::ReadFrom(_, ticket, page) => {
                        (ticket, page.as_slice())
                    }
                    Completion::ReadRun(ticket, pages)
                    | Completion::ReadRunFrom(_, ticket, pages) => (ticket, pages),
                    Completion::Written(ticket) | Completion::Unread(ticket) => (ticket, &[][..]),
                    Completion::Dropped(count) => {
                        let place = drops.iter().position(|&drop| drop == count);
                        drops.swap_remove(place.expect("a drop that was asked for"));
                        return;
                    }
                };
                let place = outstanding.remove(&ticket.0);
                let place = place.expect("a request that is outstanding");
                let fits = match requests[place] {
                    Request::Read(_) => matches!(completion, Completion::Read(..)),
                    Request::ReadRun(..) | Request::ReadPiece(..) => {
                        matches!(completion, Completion::ReadRun(..))
                    }
                    Request::Write(..) | Request::WritePiece(..) => {
                        matches!(completion, Completion::Written(..))
                    }
                    Request::Drop(..) => false,
                };
                assert!(fits, "{:?} was answered by another kind", requests[place]);
                answers[place] = bytes.to_vec();
            });
            let left = outstanding.len() + drops.len();
            assert_eq!(self.transport.in_flight(), left);
            assert!(Instant::now() < deadline, "{left} requests hang");
            if any {
                idle_since = Instant::now();
            } else if left > 0 && idle_since.elapsed() < SPIN {
                std::thread::yield_now();
            } else if left > 0 {
                self.sleep();
            }
        }
        answers
    }

    /// Sleeps until a completion may be available, as the pager does.
    fn sleep(&mut self) {
        if !self.transport.arm() {
            return;
        }
        let mut fds = Vec::new();
        self.transport.interests(&mut |Interest { fd, writable }| {
            let events = libc::POLLIN | if writable { libc::POLLOUT } else { 0 };
            fds.push(libc::pollfd {
                fd,
                events,
                revents: 0,
            });
        });
        let due = self.transport.wake_by();
        let left = due.map_or(NAP_MAX, |due| due.saturating_duration_since(Instant::now()));
        let nap = libc::timespec {
            tv_sec: 0,
            tv_nsec: left.min(NAP_MAX).subsec_nanos().into(),
        };
        let count = fds.len() as libc::nfds_t;
        // SAFETY: pointer and count describe one vector, and the timeout outlives the call.
        unsafe { libc::ppoll(fds.as_mut_ptr(), count, &raw const nap, std::ptr::null()) };
    }

    /// Writes this version of pages.
    pub fn write(&mut self, pages: std::ops::Range<u32>, version: u32) {
        let requests: Vec<_> = pages.map(|page| Request::Write(page, version)).collect();
        self.carry_out(&requests);
    }

    /// Reads pages one by one and compares them.
    pub fn verify(&mut self, pages: std::ops::Range<u32>, version: u32) {
        let requests: Vec<_> = pages.clone().map(Request::Read).collect();
        for (page, bytes) in pages.zip(self.carry_out(&requests)) {
            assert_page(&bytes, page, version);
        }
    }

    /// Reads pages in runs of up to `longest` and compares them.
    pub fn verify_runs(&mut self, pages: std::ops::Range<u32>, version: u32, longest: u32) {
        let (mut runs, mut next) = (Vec::new(), pages.start);
        while next < pages.end {
            let count = (1 + (next * 7) % longest).min(pages.end - next);
            runs.push(Request::ReadRun(next, count));
            next += count;
        }
        for (run, bytes) in runs.iter().zip(self.carry_out(&runs)) {
            let &Request::ReadRun(first, count) = run else {
                unreachable!("only runs")
            };
            assert_eq!(bytes.len(), count as usize * PAGE_SIZE);
            for (page, bytes) in (first..).zip(bytes.chunks(PAGE_SIZE)) {
                assert_page(bytes, page, version);
            }
        }
    }
}

/// Reads return what was written, by page and by run, and again after each rewrite.
fn contents(bed: &dyn Bed, options: Options) {
    use_all(&mut bed.open(options));
}

/// Runs [`contents`] on an open lease.
pub fn use_all(lines: &mut Lines) {
    for version in 1..=5 {
        lines.bulk.write(0..PAGES, version);
        lines.urgent.verify(0..PAGES, version);
        lines.ahead.verify_runs(0..PAGES, version, RUN_PAGES_MAX);
    }
}

/// Memory that was never written is zero; zeroes replace other contents, and are replaced.
fn zero_pages(bed: &dyn Bed, options: Options) {
    let mut lines = bed.open(options);
    lines.urgent.verify(0..PAGES, 0);
    lines.ahead.verify_runs(0..PAGES, 0, RUN_PAGES_MAX);
    lines.bulk.write(0..PAGES, 3);
    lines.bulk.write(0..PAGES / 2, 0);
    lines.urgent.verify(0..PAGES / 2, 0);
    lines.urgent.verify(PAGES / 2..PAGES, 3);
    // Runs of zeroes, of other pages, and mixed.
    lines.ahead.verify_runs(0..PAGES / 2, 0, 32);
    lines.ahead.verify_runs(PAGES / 2..PAGES, 3, 32);
    lines.bulk.write(0..PAGES, 2);
    lines.urgent.verify(0..PAGES, 2);
}

/// Accepts exactly the limit of outstanding requests; each is answered once, with its own page, in
/// any order.
fn matching(bed: &dyn Bed, options: Options) {
    let mut lines = bed.open(options);
    lines.bulk.write(0..PAGES, 1);
    for round in 0..8 {
        let scattered = |n: u32| (n * 37 + round * 11) % PAGES;
        let most = u32::try_from(IN_FLIGHT_MAX).expect("small");
        let pages: Vec<_> = (0..most).map(scattered).collect();
        let mut posted = HashMap::new();
        for &page in &pages {
            let ticket = lines.urgent.post(Request::Read(page)).expect("room");
            posted.insert(ticket.0, page);
        }
        assert_eq!(lines.urgent.post(Request::Read(0)), Err(Full));
        let deadline = Instant::now() + PATIENCE;
        while !posted.is_empty() {
            let transport = &mut lines.urgent.transport;
            transport.flush();
            transport.poll(&mut |completion| {
                let Completion::Read(Ticket(ticket), bytes) = completion else {
                    panic!("{completion:?} answers a read");
                };
                let page = posted.remove(&ticket).expect("a ticket that is out");
                assert_page(bytes, page, 1);
            });
            assert!(Instant::now() < deadline, "{} hang", posted.len());
            std::thread::yield_now();
        }
        // The transport accepts requests again.
        lines.urgent.verify(0..3, 1);
    }
}

/// Writes to one page take effect in order, and so do drops between them.
fn order(bed: &dyn Bed, options: Options) {
    let mut lines = bed.open(options);
    let mut requests = Vec::new();
    for version in 1..=40 {
        requests.extend((0..5).map(|page| Request::Write(page, version)));
        if version % 7 == 0 {
            requests.push(Request::Drop(1, 3));
        }
    }
    // The last request for page 4 is a write, and for pages 2 and 3 a drop.
    requests.push(Request::Drop(2, 3));
    requests.push(Request::Write(4, 41));
    lines.bulk.carry_out(&requests);
    let written = [(0, 40), (1, 40), (4, 41)];
    let dropped = [(2, 0), (3, 0)];
    let dropped = dropped.iter().filter(|_| bed.forgets_drops());
    for &(page, version) in written.iter().chain(dropped) {
        lines.urgent.verify(page..page + 1, version);
        lines.ahead.verify_runs(page..page + 1, version, 1);
    }
}

/// A page that was written back can be read at once over another connection.
fn write_backs_and_reads(bed: &dyn Bed, options: Options) {
    let mut lines = bed.open(options);
    for version in 1..=60 {
        let page = version * 13 % (PAGES - 8);
        lines.bulk.write(page..page + 8, version);
        lines.urgent.verify(page..page + 8, version);
        lines.ahead.verify_runs(page..page + 8, version, 4);
    }
}

/// Concurrent faults, write-backs and prefetches get their own pages.
fn concurrent_users(bed: &dyn Bed, options: Options) {
    use_at_once(&mut bed.open(options));
}

/// Runs [`concurrent_users`] on an open lease.
pub fn use_at_once(lines: &mut Lines) {
    let half = PAGES / 2;
    lines.bulk.write(0..PAGES, 1);
    let Lines {
        urgent,
        bulk,
        ahead,
        ..
    } = &mut *lines;
    std::thread::scope(|scope| {
        scope.spawn(|| (2..8).for_each(|version| bulk.write(half..PAGES, version)));
        scope.spawn(|| (0..8).for_each(|_| urgent.verify(0..half, 1)));
        scope.spawn(|| (0..8).for_each(|_| ahead.verify_runs(0..half, 1, RUN_PAGES_MAX)));
    });
    lines.urgent.verify(half..PAGES, 7);
}

/// Dropping transports with outstanding requests has no later effect: the next lease has fresh
/// memory.
fn cancellation(bed: &dyn Bed, options: Options) {
    for _ in 0..4 {
        let mut lines = bed.open(options);
        lines.bulk.write(0..PAGES, 1);
        let started = Instant::now();
        for page in 0..u32::try_from(IN_FLIGHT_MAX).expect("small") {
            lines.urgent.post(Request::Read(page)).expect("room");
            lines.bulk.post(Request::Write(page, 2)).expect("room");
            let run = Request::ReadRun(page, RUN_PAGES_MAX / 2);
            lines.ahead.post(run).expect("room");
        }
        for user in [&mut lines.urgent, &mut lines.bulk, &mut lines.ahead] {
            user.transport.flush();
        }
        drop(lines);
        assert!(started.elapsed() < Duration::from_secs(10), "ending hangs");
        assert_eq!(bed.leases(), 0, "the lease is kept");
        let mut next = bed.open(options);
        next.urgent.verify(0..PAGES, 0);
        next.ahead.verify_runs(0..PAGES, 0, RUN_PAGES_MAX);
    }
}
