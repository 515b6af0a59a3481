//! The floor of a remote fault: a pager that does only what none can avoid.
//!
//! A thread touches pages that are not there. Another one reads the fault from userfaultfd, sends a
//! request to a donor, receives the page and copies it into place. There is no page map, no limit
//! of memory and no eviction. Threads, connection and donor are those of the product, on the same
//! CPUs, and wait as they do.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use fabric_host::Spin;
use fabric_host::poll::poll_until;
use fabric_host::slices::request_short_slices;
use fabric_pages::uffd::{Protection, Uffd};
use fabric_transport::control::ControlStream;
use fabric_transport::stream::{Carrier, Stream};
use fabric_wire::{
    Ends, Frame, FrameKind, HEADER_BYTES, LeaseGrant, LeaseRequest, LeaseStatus, TrafficClass,
};
use memory_fabric::NodeId;
use memory_fabric::fabric::SPIN_DEFAULT;
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::page::{PAGE_SIZE, PageBytes};
use memory_fabric::stats::Histogram;
use userfaultfd::EventBuffer;

use super::placement::Placement;
use super::usage;
use super::view::{View, page_bytes};

/// Pages that each thread touches in a round.
const SAMPLES: usize = 2000;
/// Longest wait for a page.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest sleep of the handler: then it looks whether it is to end.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// Times that a round measures the floor. The fastest counts: the scheduler lets the donor's
/// thread, which polls, keep the CPU of the thread that touches in some of them, whatever the pager
/// does.
const TRIES: usize = 8;

/// What the touches of one round took.
#[derive(Debug)]
pub(super) struct Touched {
    pub(super) times: Histogram,
    /// How long all of them took together.
    pub(super) time: Duration,
    /// CPU time of the process for one touch, with the donors'.
    pub(super) cpu: Duration,
}

/// Measures touches of pages that come from a donor, or without one from the handler itself.
pub(super) fn touch(
    donor: Option<(SocketAddr, &Carrier)>,
    checksum: bool,
    threads: u32,
    placement: &Placement,
) -> Result<Touched> {
    let donors = donor.as_slice();
    let tries = (0..TRIES).map(|_| touch_once(donors, checksum, threads, Some(placement)));
    let tries = tries.collect::<Result<Vec<_>>>()?;
    let fastest = tries.into_iter().min_by_key(|one| one.times.summary().p50);
    fastest.context("no try")
}

/// Measures touches of pages of which each comes from the next one of these donors.
pub(super) fn touch_once(
    donors: &[(SocketAddr, &Carrier)],
    checksum: bool,
    threads: u32,
    placement: Option<&Placement>,
) -> Result<Touched> {
    let threads = threads as usize;
    let memory = GuestMemory::new(threads * SAMPLES * PAGE_SIZE).context("cannot create memory")?;
    let memory = Arc::new(memory);
    let uffd = Uffd::new()?;
    uffd.register(memory.guest_view(), memory.bytes())?;
    // The handler computes addresses in the view.
    let _ = memory.guest_view().expose_provenance();
    let sources = donors.iter().map(|&(donor, carrier)| {
        let source = Source::connect(donor, carrier, checksum)?;
        Ok((source, VecDeque::with_capacity(threads)))
    });
    let handler = Handler {
        uffd: &uffd,
        sources: sources.collect::<Result<_>>()?,
        page: page_bytes(0),
        spin: Spin::new(SPIN_DEFAULT),
        idle_since: None,
    };
    let (stop, times) = (AtomicBool::new(false), Histogram::new());
    let view = View::new(&memory);
    let busy = usage::processor_time()?;
    let corrupt = AtomicU64::new(0);
    let mut time = Duration::ZERO;
    let handler = std::thread::scope(|scope| {
        placement.map_or(Ok(()), Placement::pager)?;
        let serves = scope.spawn(|| handler.run(&stop));
        placement.map_or(Ok(()), Placement::others)?;
        let started = Instant::now();
        std::thread::scope(|touching| {
            for thread in 0..threads {
                let (view, times, corrupt) = (&view, &times, &corrupt);
                touching.spawn(move || {
                    for page in thread * SAMPLES..(thread + 1) * SAMPLES {
                        // As the product's threads do.
                        let _ = view.is_here(page);
                        let started = Instant::now();
                        view.word(page, 0).load(Ordering::Relaxed);
                        times.record(started.elapsed());
                        corrupt.fetch_add(view.bytes_unlike(page, 0), Ordering::Relaxed);
                    }
                });
            }
        });
        time = started.elapsed();
        stop.store(true, Ordering::Relaxed);
        serves.join().expect("the handler does not panic")
    })?;
    let cpu = usage::processor_time()? - busy;
    let corrupt = corrupt.into_inner();
    ensure!(corrupt == 0, "{corrupt} wrong bytes in the floor");
    for (source, _) in handler.sources {
        source.release()?;
    }
    let touches = u32::try_from(threads * SAMPLES)?;
    Ok(Touched {
        times,
        time,
        cpu: cpu / touches,
    })
}

/// The thread that serves faults.
#[derive(Debug)]
struct Handler<'a> {
    uffd: &'a Uffd,
    /// None without a donor. With each one the addresses of the pages that were requested there, in
    /// order.
    sources: Vec<(Source, VecDeque<usize>)>,
    /// The page at hand.
    page: PageBytes,
    spin: Spin,
    idle_since: Option<Instant>,
}

impl Handler<'_> {
    fn run(mut self, stop: &AtomicBool) -> Result<Self> {
        request_short_slices();
        let mut events = EventBuffer::new(1);
        let mut faults = Vec::with_capacity(1);
        while !stop.load(Ordering::Relaxed) {
            let read = self.uffd.read_faults(&mut events, |fault| {
                faults.push(fault.address & !(PAGE_SIZE - 1));
            });
            let mut worked = read? > 0;
            for start in faults.drain(..) {
                let at = start / PAGE_SIZE % self.sources.len().max(1);
                match self.sources.get_mut(at) {
                    Some((source, waiting)) => {
                        source.request()?;
                        waiting.push_back(start);
                    }
                    None => self.install(start)?,
                }
            }
            for at in 0..self.sources.len() {
                let (source, waiting) = &mut self.sources[at];
                if let Some(start) = waiting.front().copied()
                    && source.receive(&mut self.page)?
                {
                    waiting.pop_front();
                    self.install(start)?;
                    worked = true;
                }
            }
            if worked {
                self.idle_since = None;
            } else {
                self.idle()?;
            }
        }
        Ok(self)
    }

    fn install(&self, start: usize) -> Result<()> {
        let target = std::ptr::with_exposed_provenance_mut(start);
        Ok(self
            .uffd
            .copy(target, &self.page, Protection::WriteProtected)?)
    }

    /// Polls again or sleeps, as the pager's threads do.
    fn idle(&mut self) -> Result<()> {
        let now = Instant::now();
        let since = *self.idle_since.get_or_insert(now);
        if self.spin.keeps_polling(now - since) {
            return Ok(());
        }
        ensure!(
            self.sources.iter().all(|(_, waiting)| waiting.is_empty()) || now - since < TIMEOUT,
            "no page from the donor for {} s",
            TIMEOUT.as_secs()
        );
        let mut fds = Vec::with_capacity(1 + self.sources.len());
        let mut watch = |fd| {
            fds.push(libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            });
        };
        watch(self.uffd.as_raw_fd());
        for (source, _) in &self.sources {
            if source.stream.is_ready() {
                return Ok(());
            }
            watch(source.stream.interest(false).0);
        }
        poll_until(&mut fds, Some(now + SLEEP_MAX))?;
        self.spin.slept(now.elapsed());
        Ok(())
    }
}

/// A connection to a donor that has one page.
#[derive(Debug)]
pub(super) struct Source {
    control: ControlStream,
    grant: LeaseGrant,
    stream: Stream,
    request: [u8; HEADER_BYTES],
    answer: Box<[u8; HEADER_BYTES + PAGE_SIZE]>,
    filled: usize,
}

impl Source {
    pub(super) fn connect(donor: SocketAddr, carrier: &Carrier, checksum: bool) -> Result<Self> {
        let (control, grant, stream) =
            attach(donor, carrier, PAGE_SIZE as u64, TrafficClass::Urgent)?;
        stream.set_nonblocking()?;
        let frame = |kind| Frame::new(kind, 1, 0, checksum).with_stamp(ends().stamp());
        let mut source = Self {
            control,
            grant,
            stream,
            request: frame(FrameKind::ReadPage).encode(&[]),
            answer: Box::new([0; HEADER_BYTES + PAGE_SIZE]),
            filled: 0,
        };
        let page = page_bytes(0);
        let header = frame(FrameKind::WritePage).encode(&page);
        Self::send(
            &mut source.stream,
            &[IoSlice::new(&header), IoSlice::new(&page)],
        )?;
        let started = Instant::now();
        while !source.has(HEADER_BYTES)? {
            ensure!(started.elapsed() < TIMEOUT, "the donor stores no page");
            std::thread::yield_now();
        }
        source.filled = 0;
        Ok(source)
    }

    /// Sends parts of a frame, for which there is room unless the donor reads nothing.
    fn send(stream: &mut Stream, parts: &[IoSlice<'_>]) -> Result<()> {
        let all: usize = parts.iter().map(|part| part.len()).sum();
        let written = stream.write_vectored(parts)?;
        ensure!(written == all, "a frame of {all} bytes finds no room");
        Ok(())
    }

    pub(super) fn request(&mut self) -> Result<()> {
        Self::send(&mut self.stream, &[IoSlice::new(&self.request)])
    }

    /// Receives what has come, up to so many bytes of a frame; returns whether they are there.
    fn has(&mut self, bytes: usize) -> Result<bool> {
        match self.stream.read(&mut self.answer[self.filled..bytes]) {
            Ok(0) => bail!("the donor closed the connection"),
            Ok(count) => {
                self.filled += count;
                Ok(self.filled == bytes)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns whether a page has come.
    pub(super) fn receive(&mut self, page: &mut PageBytes) -> Result<bool> {
        let is_here = self.has(HEADER_BYTES + PAGE_SIZE)?;
        if is_here {
            page.copy_from_slice(&self.answer[HEADER_BYTES..]);
            self.filled = 0;
        }
        Ok(is_here)
    }

    pub(super) fn release(mut self) -> Result<()> {
        let token = self.grant.token;
        let _: LeaseStatus = self
            .control
            .call(FrameKind::Release, &token, FrameKind::Status)?;
        Ok(())
    }
}

/// This host and the donor.
pub(super) fn ends() -> Ends {
    Ends {
        local: NodeId(0).into(),
        donor: NodeId(1),
    }
}

/// Obtains a separate lease of `bytes`, and a connection for its pages.
pub(super) fn attach(
    donor: SocketAddr,
    carrier: &Carrier,
    bytes: u64,
    class: TrafficClass,
) -> Result<(ControlStream, LeaseGrant, Stream)> {
    let mut control = ControlStream::connect_by(donor, carrier)?;
    let request = LeaseRequest {
        vm: "floor".to_owned(),
        bytes,
        or_less: false,
        duration_ms: 60_000,
    };
    let grant: LeaseGrant = control.call(FrameKind::Lease, &request, FrameKind::Granted)?;
    let mut attached = ControlStream::connect_by(donor, carrier)?;
    attached.attach(grant.token, class, &ends())?;
    Ok((control, grant, attached.into_stream()))
}
