//! The floor of a sequential scan: each page is received, copied into place and mapped, read,
//! unmapped and freed, in runs, and nothing else is done.
//!
//! One thread receives and installs, another one reads, as in the product; nobody handles a fault:
//! a thread that reads ahead of the pages waits in the kernel until they are installed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use fabric_pages::uffd::{Protection, Uffd};
use fabric_transport::IN_FLIGHT_MAX;
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::page::{PAGE_SIZE, PageIndex};

use super::placement::Placement;
use super::stream::Stream;
use super::view::View;

/// Pages that are installed, and freed, by one call. The next ones are on their way meanwhile.
const RUN: usize = IN_FLIGHT_MAX / 2;
/// Longest wait for the thread that reads.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Scans as many pages as the stream has, with up to `local_pages` of them in memory. Returns the
/// duration and the number of wrong bytes.
pub(super) fn scan(
    stream: &mut Stream,
    local_pages: usize,
    placement: &Placement,
) -> Result<(Duration, u64)> {
    let pages = stream.pages();
    let memory = Arc::new(GuestMemory::new(pages * PAGE_SIZE)?);
    let uffd = Uffd::new()?;
    uffd.register(memory.guest_view(), memory.bytes())?;
    let view = View::new(&memory);
    let (read, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let started = Instant::now();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut corrupt = 0;
            for page in 0..pages {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                corrupt += view.corrupt_bytes(page);
                // With the loads before it: the page is freed after this.
                read.store(page + 1, Ordering::Release);
            }
            (corrupt, started.elapsed())
        });
        placement.pager()?;
        let installed = install(stream, &memory, &uffd, &read, pages, local_pages);
        placement.others()?;
        if installed.is_err() {
            // The reader ends at its next page, which may be one that does not come.
            stop.store(true, Ordering::Relaxed);
            let reached = read.load(Ordering::Relaxed);
            for page in reached..pages.min(reached + 2) {
                let page = memory.guest_page(PageIndex::new(u32::try_from(page)?));
                let _ = uffd.zero(page, 1);
            }
        }
        let (corrupt, time) = reader.join().expect("the reader does not panic");
        installed?;
        Ok((time, corrupt))
    })
}

/// Installs all pages in order, and frees those that were read.
fn install(
    stream: &mut Stream,
    memory: &GuestMemory,
    uffd: &Uffd,
    read: &AtomicUsize,
    pages: usize,
    local_pages: usize,
) -> Result<()> {
    let mut run = vec![[0; PAGE_SIZE]; RUN];
    let mut freed = 0;
    stream.request(0..RUN.min(pages))?;
    for first in (0..pages).step_by(RUN) {
        let next = (first + RUN).min(pages);
        let run = &mut run[..next - first];
        stream.request(next..(next + RUN).min(pages))?;
        stream.receive(run)?;
        let waiting = Instant::now();
        loop {
            let until = read.load(Ordering::Acquire) / RUN * RUN;
            if until > freed {
                memory.punch(PageIndex::new(u32::try_from(freed)?), until - freed)?;
                freed = until;
            }
            if next - freed <= local_pages.max(2 * RUN) {
                break;
            }
            ensure!(waiting.elapsed() < TIMEOUT, "the scan does not go on");
            std::thread::yield_now();
        }
        let target = memory.guest_page(PageIndex::new(u32::try_from(first)?));
        uffd.copy_run(target, run, Protection::WriteProtected)?;
    }
    Ok(())
}
