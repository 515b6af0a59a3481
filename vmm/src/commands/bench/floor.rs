//! The floor of a remote fault: a pager that does only what none can avoid.
//!
//! A thread touches random pages that are not there. Another one reads the fault from userfaultfd,
//! sends a request to a donor, receives the page and copies it into place. There is no page map, no
//! limit of memory and no eviction. Threads, connection and donor are those of the product, on the
//! same CPUs, and wait as they do; memory and donor are as large as the product's, so that both
//! find as little of them in the CPUs' caches.

mod source;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use fabric_host::Spin;
use fabric_host::poll::poll_until;
use fabric_host::slices::request_short_slices;
use fabric_pages::uffd::{EventBuffer, Protection, Uffd};
use fabric_transport::stream::Carrier;
use memory_fabric::fabric::SPIN_DEFAULT;
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::page::{PAGE_SIZE, PageBytes, PageIndex};
use memory_fabric::stats::Histogram;
use ssi_hv::exit::ExitCode;
use ssi_hv::{forced_end, logging};

use super::placement::Placement;
use super::random::next;
use super::usage;
use super::view::{View, page_bytes};
use source::TIMEOUT;
pub(super) use source::{Source, attach, ends};

/// Pages that each thread touches in a try.
const SAMPLES: usize = 2000;
/// The largest memory, however large the product's is: no CPU caches more.
const BYTES_MAX: u64 = 256 << 20;
/// One page of so many is there from the start, so that no touch has to allocate a page table or a
/// node of the page cache: with a quarter of its pages local, the product finds both.
const KEPT: usize = 64;
/// Longest sleep of the handler: then it looks whether it is to end.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// Times that a round measures the floor. The fastest counts: the scheduler lets the donor's
/// thread, which polls, keep the CPU of the thread that touches in some of them, whatever the pager
/// does.
const TRIES: u64 = 8;

/// Returns the size of the floor's memory beside a product's of this size, and of what it leases
/// from donors for it.
pub(super) fn bytes(memory: u64) -> u64 {
    memory.min(BYTES_MAX)
}

/// What the touches of one round took.
#[derive(Debug)]
pub(super) struct Touched {
    pub(super) times: Histogram,
    /// How long all of them took together.
    pub(super) time: Duration,
    /// CPU time of the process for one touch, with the donors'.
    pub(super) cpu: Duration,
}

/// Memory of which each page comes from the next one of some donors, or from the handler itself.
pub(super) struct Bare {
    memory: Arc<GuestMemory>,
    uffd: Uffd,
    sources: Vec<Source>,
}

impl Bare {
    /// Creates the floor's memory beside a product's of this size, and gives the donors its pages.
    pub(super) fn new(
        donors: &[(SocketAddr, &Carrier)],
        checksum: bool,
        memory: u64,
    ) -> Result<Self> {
        let pages = usize::try_from(bytes(memory))? / PAGE_SIZE;
        let memory = GuestMemory::new(pages * PAGE_SIZE).context("cannot create memory")?;
        let uffd = Uffd::new()?;
        uffd.register(memory.guest_view(), memory.bytes())?;
        for page in (0..pages).step_by(KEPT) {
            let target = memory.guest_page(index(page)?);
            uffd.copy(target, &page_bytes(page), Protection::WriteProtected)?;
        }
        let share = pages.div_ceil(donors.len().max(1));
        let sources = donors
            .iter()
            .map(|&(donor, carrier)| Source::connect(donor, carrier, checksum, share));
        Ok(Self {
            sources: sources.collect::<Result<_>>()?,
            memory: Arc::new(memory),
            uffd,
        })
    }

    /// Measures touches of random pages by each of some threads; the fastest of several tries.
    pub(super) fn touch(&mut self, threads: u32, placement: &Placement) -> Result<Touched> {
        let tries = (1..=TRIES).map(|seed| self.touch_once(threads, seed, Some(placement)));
        let tries = tries.collect::<Result<Vec<_>>>()?;
        let fastest = tries.into_iter().min_by_key(|one| one.times.summary().p50);
        fastest.context("no try")
    }

    /// Measures touches of random pages by each of some threads.
    pub(super) fn touch_once(
        &mut self,
        threads: u32,
        seed: u64,
        placement: Option<&Placement>,
    ) -> Result<Touched> {
        self.sources.iter_mut().try_for_each(Source::renew)?;
        let threads = threads as usize;
        let touched = distinct(self.memory.bytes() / PAGE_SIZE, threads * SAMPLES, seed);
        let samples = touched.len() / threads;
        let donors = self.sources.len().max(1);
        let has_donors = !self.sources.is_empty();
        let handler = Handler {
            uffd: &self.uffd,
            memory: &self.memory,
            sources: self.sources.iter_mut().map(Waiting::on).collect(),
            page: page_bytes(0),
            spin: Spin::new(SPIN_DEFAULT),
            idle_since: None,
        };
        let (stop, times) = (AtomicBool::new(false), Histogram::new());
        let view = View::new(&self.memory);
        let busy = usage::processor_time()?;
        let corrupt = AtomicU64::new(0);
        let mut time = Duration::ZERO;
        std::thread::scope(|scope| -> Result<()> {
            placement.map_or(Ok(()), Placement::pager)?;
            let serves = scope.spawn(|| handler.run_or_end(&stop));
            let placed = placement.map_or(Ok(()), Placement::others);
            let started = Instant::now();
            std::thread::scope(|touching| {
                let threads = if placed.is_ok() { threads } else { 0 };
                for pages in touched.chunks(samples).take(threads) {
                    let (view, times, corrupt) = (&view, &times, &corrupt);
                    touching.spawn(move || {
                        for &page in pages {
                            // As the product's threads do.
                            let _ = view.is_here(page);
                            let started = Instant::now();
                            view.word(page, 0).load(Ordering::Relaxed);
                            times.record(started.elapsed());
                            let wanted = if has_donors { page / donors } else { 0 };
                            let wrong = view.bytes_unlike(page, wanted);
                            corrupt.fetch_add(wrong, Ordering::Relaxed);
                        }
                    });
                }
            });
            time = started.elapsed();
            stop.store(true, Ordering::Relaxed);
            serves.join().expect("the handler does not panic");
            placed
        })?;
        let cpu = usage::processor_time()? - busy;
        let corrupt = corrupt.into_inner();
        ensure!(corrupt == 0, "{corrupt} wrong bytes in the floor");
        for &page in &touched {
            self.memory.zap(index(page)?, 1)?;
            self.memory.punch(index(page)?, 1)?;
        }
        let touches = u32::try_from(samples * threads)?;
        Ok(Touched {
            times,
            time,
            cpu: cpu / touches,
        })
    }

    /// Ends the leases.
    pub(super) fn release(self) -> Result<()> {
        self.sources.into_iter().try_for_each(Source::release)
    }
}

fn index(page: usize) -> Result<PageIndex> {
    Ok(PageIndex::new(u32::try_from(page)?))
}

/// Returns at most `count` different pages, without those that are kept, in random order.
fn distinct(pages: usize, count: usize, seed: u64) -> Vec<usize> {
    let mut all: Vec<_> = (0..pages).filter(|page| page % KEPT != 0).collect();
    let count = count.min(all.len());
    let mut random = seed;
    for at in 0..count {
        let other = at + next(&mut random) % (all.len() - at);
        all.swap(at, other);
    }
    all.truncate(count);
    all
}

/// A donor, and the pages that were requested there, in order.
#[derive(Debug)]
struct Waiting<'a> {
    source: &'a mut Source,
    pages: VecDeque<usize>,
}

impl<'a> Waiting<'a> {
    fn on(source: &'a mut Source) -> Self {
        let pages = VecDeque::with_capacity(SAMPLES);
        Self { source, pages }
    }
}

/// The thread that serves faults.
#[derive(Debug)]
struct Handler<'a> {
    uffd: &'a Uffd,
    memory: &'a GuestMemory,
    /// None without a donor.
    sources: Vec<Waiting<'a>>,
    /// The page at hand.
    page: PageBytes,
    spin: Spin,
    idle_since: Option<Instant>,
}

impl Handler<'_> {
    /// Serves faults until it is to stop. Ends the process if it cannot, since threads wait for
    /// pages that would never arrive.
    fn run_or_end(self, stop: &AtomicBool) {
        if let Err(error) = self.run(stop) {
            let reason = format!("the floor cannot be measured: {error:#}");
            logging::report_failure(ExitCode::HostError, &reason);
            forced_end::at_once(ExitCode::HostError);
        }
    }

    fn run(mut self, stop: &AtomicBool) -> Result<()> {
        request_short_slices();
        let mut events = EventBuffer::new(1);
        let mut faults = Vec::with_capacity(1);
        while !stop.load(Ordering::Relaxed) {
            let read = self
                .uffd
                .read_faults(&mut events, |fault| faults.push(fault.address));
            let mut worked = read? > 0;
            for address in faults.drain(..) {
                let page = self.memory.page_at(address).context("a stray fault")?;
                let page = page.number() as usize;
                let donors = self.sources.len();
                match self.sources.get_mut(page % donors.max(1)) {
                    Some(waiting) => {
                        waiting.source.request(page / donors)?;
                        waiting.pages.push_back(page);
                    }
                    None => self.install(page)?,
                }
            }
            for at in 0..self.sources.len() {
                let waiting = &mut self.sources[at];
                if let Some(&page) = waiting.pages.front()
                    && waiting.source.receive(&mut self.page)?
                {
                    waiting.pages.pop_front();
                    self.install(page)?;
                    worked = true;
                }
            }
            if worked {
                self.idle_since = None;
            } else {
                self.idle()?;
            }
        }
        Ok(())
    }

    fn install(&self, page: usize) -> Result<()> {
        let target = self.memory.guest_page(index(page)?);
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
            self.sources.iter().all(|donor| donor.pages.is_empty()) || now - since < TIMEOUT,
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
        for Waiting { source, .. } in &self.sources {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_differ_and_none_is_kept() {
        let mut touched = distinct(4096, 2000, 1);
        assert_ne!(touched, distinct(4096, 2000, 2));
        touched.sort_unstable();
        touched.dedup();
        assert_eq!(touched.len(), 2000);
        let is_touched = |&page: &usize| page < 4096 && page % KEPT != 0;
        assert!(touched.iter().all(is_touched));
        assert_eq!(distinct(128, 2000, 1).len(), 126, "all there are");
    }
}
