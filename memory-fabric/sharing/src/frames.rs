//! The pages of the guest view as the protocol needs them: installed, protected, unmapped, freed.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::{PAGE_SIZE, PageBytes, PageIndex, PageRange};
use fabric_pages::protection;
use fabric_pages::uffd::{EventBuffer, Fault, Mapped, Protection, Uffd};

use crate::Failure;

/// Faults read at once where several threads fault.
const FAULT_BATCH: usize = 32;

static ZEROES: PageBytes = [0; PAGE_SIZE];

/// Pages that are freed together: the kernel frees some in a row in little more time than one.
const FREE_BATCH: usize = 32;

/// The page has bytes in the memory file.
const RESIDENT: u8 = 1;
/// The page is in the evictor's queue.
const QUEUED: u8 = 1 << 1;
/// The page is unmapped, and its bytes are freed after an answer.
const LEAVING: u8 = 1 << 2;
/// The page counts as freed, and its bytes are freed by [`Frames::finish_frees`].
const FREED: u8 = 1 << 3;

/// The guest's memory on this node, and what is in it. Only the engine's thread uses it.
pub(crate) struct Frames {
    memory: Arc<GuestMemory>,
    uffd: Uffd,
    events: EventBuffer,
    /// For one fault.
    event: EventBuffer,
    faulting: Faulting,
    /// Flags of each page.
    flags: Vec<u8>,
    resident: usize,
    leaving: usize,
    /// Pages with [`FREED`].
    freed: Vec<PageIndex>,
    /// The bytes of the page that was read last.
    bytes: Box<PageBytes>,
}

/// The threads that fault. One alone has one fault at a time, and the kernel takes longer to find that
/// there is no second one than to be asked for one.
#[derive(Debug, Default)]
struct Faulting {
    /// Of the last fault; 0 is an unknown one.
    thread: u32,
    /// The last two faults were of one thread.
    is_one: bool,
}

impl Faulting {
    const fn note(&mut self, thread: u32) {
        self.is_one = thread != 0 && thread == self.thread;
        self.thread = thread;
    }
}

fn failed(call: &'static str, page: PageIndex) -> impl FnOnce(io::Error) -> Failure {
    move |source| Failure::Userfaultfd { call, page, source }
}

const fn protection(writable: bool) -> Protection {
    if writable {
        Protection::Writable
    } else {
        Protection::WriteProtected
    }
}

/// Attempts to find out whether write protection is kept: a host may be too busy for one.
const PROBES_MAX: usize = 3;

/// Whether a page that nodes share stays write-protected whatever the kernel does: found once in a
/// process. What cannot be found out does not count.
fn is_protection_kept() -> bool {
    static KEPT: OnceLock<bool> = OnceLock::new();
    for _ in 0..PROBES_MAX {
        if let Some(kept) = KEPT.get() {
            return *kept;
        }
        match protection::is_kept() {
            Ok(kept) => return *KEPT.get_or_init(|| kept),
            Err(error) => {
                tracing::warn!("cannot find out whether write protection is kept: {error}");
            }
        }
    }
    false
}

impl Frames {
    /// Registers the whole guest view.
    pub(crate) fn new(memory: Arc<GuestMemory>) -> Result<Self, Failure> {
        let uffd = Uffd::new()?;
        if !uffd.can_continue_write_protected() {
            return Err(Failure::OldKernel);
        }
        if !is_protection_kept() {
            return Err(Failure::LostProtection);
        }
        uffd.register(memory.guest_view(), memory.bytes())?;
        let pages = memory.bytes() / PAGE_SIZE;
        Ok(Self {
            memory,
            uffd,
            events: EventBuffer::new(FAULT_BATCH),
            event: EventBuffer::new(1),
            faulting: Faulting::default(),
            flags: vec![0; pages],
            resident: 0,
            leaving: 0,
            freed: Vec::new(),
            bytes: Box::new(ZEROES),
        })
    }

    /// Ends all access to the guest view, and lets those who still wait for a page continue: they fail
    /// instead of seeing a page without its bytes.
    pub(crate) fn end(self) {
        if let Err(error) = self.uffd.end(&self.memory) {
            tracing::warn!("guest memory stays accessible until the process ends: {error}");
            std::mem::forget(self);
        }
    }

    pub(crate) fn fd(&self) -> RawFd {
        use std::os::fd::AsRawFd;
        self.uffd.as_raw_fd()
    }

    /// Reads waiting faults.
    pub(crate) fn read_faults(
        &mut self,
        found: &mut Vec<(PageIndex, Fault)>,
    ) -> Result<(), Failure> {
        let Self {
            memory, faulting, ..
        } = self;
        let events = match faulting.is_one {
            true => &mut self.event,
            false => &mut self.events,
        };
        let mut stray = None;
        let read = self.uffd.read_faults(events, |fault| {
            faulting.note(fault.thread);
            match memory.page_at(fault.address) {
                Some(page) => found.push((page, fault)),
                None => stray = Some(fault.address),
            }
        });
        read.map_err(|source| Failure::System("reading userfaultfd", source))?;
        stray.map_or(Ok(()), |address| Err(Failure::Stray(address)))
    }

    /// The guest's pages.
    pub(crate) fn pages(&self) -> usize {
        self.flags.len()
    }

    /// Pages with bytes in the memory file.
    pub(crate) const fn resident(&self) -> usize {
        self.resident
    }

    pub(crate) fn is_resident(&self, page: PageIndex) -> bool {
        self.flags[page.index()] & RESIDENT != 0
    }

    /// Pages whose bytes are freed after an answer.
    pub(crate) const fn leaving(&self) -> usize {
        self.leaving
    }

    /// The page's bytes are freed after an answer, unless it is mapped again before.
    pub(crate) fn leaves(&mut self, page: PageIndex) {
        let flags = &mut self.flags[page.index()];
        if *flags & (RESIDENT | LEAVING) == RESIDENT {
            *flags |= LEAVING;
            self.leaving += 1;
        }
    }

    /// The page's bytes are not freed after an answer.
    pub(crate) fn stays(&mut self, page: PageIndex) {
        let flags = &mut self.flags[page.index()];
        self.leaving -= usize::from(*flags & LEAVING != 0);
        *flags &= !LEAVING;
    }

    /// Marks the page as queued for eviction; false if it was.
    pub(crate) fn enqueue(&mut self, page: PageIndex) -> bool {
        let flags = &mut self.flags[page.index()];
        let is_new = *flags & QUEUED == 0;
        *flags |= QUEUED;
        is_new
    }

    /// The page left the evictor's queue. Returns whether it has bytes.
    pub(crate) fn dequeue(&mut self, page: PageIndex) -> bool {
        self.flags[page.index()] &= !QUEUED;
        self.is_resident(page)
    }

    /// Fills the page, which has no bytes, maps it, and wakes its waiters.
    pub(crate) fn install(
        &mut self,
        page: PageIndex,
        bytes: &PageBytes,
        writable: bool,
    ) -> Result<(), Failure> {
        self.finish_free(page)?;
        let target = self.memory.guest_page(page);
        let copied = self.uffd.copy(target, bytes, protection(writable));
        self.now_resident(page);
        match copied {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                // The host made a huge page around it, or could not split one when it was freed.
                self.memory.write_by_view();
                let written = self.memory.write(page, bytes);
                written.map_err(failed("writing into the memory file", page))?;
                self.map(page, writable)
            }
            copied => copied.map_err(failed("COPY", page)),
        }
    }

    /// Fills the page, which has no bytes, with zeroes, maps it, and wakes its waiters.
    pub(crate) fn install_zeroes(
        &mut self,
        page: PageIndex,
        writable: bool,
    ) -> Result<(), Failure> {
        if writable {
            return self.install_zero_run(PageRange::new(page, 1));
        }
        self.install(page, &ZEROES, false)
    }

    /// Fills pages that have no bytes with zeroes, maps them writable, and wakes their waiters.
    pub(crate) fn install_zero_run(&mut self, run: PageRange) -> Result<(), Failure> {
        for page in run.iter() {
            self.finish_free(page)?;
        }
        let mut rest = run;
        while rest.count > 0 {
            let target = self.memory.guest_page(rest.first);
            let made = self.uffd.zero(target, rest.count as usize);
            let made = made.map_err(failed("ZEROPAGE", rest.first))?;
            let (done, left) = rest.split_at(u32::try_from(made).unwrap_or(rest.count));
            done.iter().for_each(|page| self.now_resident(page));
            rest = left;
            if rest.count > 0 {
                self.install(rest.first, &ZEROES, true)?;
                (_, rest) = rest.split_at(1);
            }
        }
        Ok(())
    }

    fn now_resident(&mut self, page: PageIndex) {
        let flags = &mut self.flags[page.index()];
        self.resident += usize::from(*flags & RESIDENT == 0);
        *flags |= RESIDENT;
    }

    /// Maps the page, whose bytes are here, and wakes its waiters. A mapping that allows writes
    /// stays.
    pub(crate) fn map(&mut self, page: PageIndex, writable: bool) -> Result<(), Failure> {
        if self.flags[page.index()] & FREED != 0 {
            return Err(Failure::Defect("mapping freed bytes", page));
        }
        self.stays(page);
        let target = self.memory.guest_page(page);
        let mapped = self.uffd.map_existing(target, protection(writable));
        if mapped.map_err(failed("CONTINUE", page))? == Mapped::Now {
            return Ok(());
        }
        if writable {
            return self.allow_writes(page);
        }
        self.wake(page)
    }

    /// Allows writes to the page, whose bytes are here, and wakes its waiters. If an eviction that was
    /// cancelled has unmapped it, they fault once more, and [`Self::map`] follows.
    pub(crate) fn upgrade(&mut self, page: PageIndex) -> Result<(), Failure> {
        self.stays(page);
        self.allow_writes(page)
    }

    fn allow_writes(&self, page: PageIndex) -> Result<(), Failure> {
        let allowed = self.uffd.allow_writes(self.memory.guest_page(page));
        allowed.map_err(failed("WRITEPROTECT", page))
    }

    pub(crate) fn wake(&self, page: PageIndex) -> Result<(), Failure> {
        let woken = self.uffd.wake(self.memory.guest_page(page));
        woken.map_err(failed("WAKE", page))
    }

    /// Forbids writes to the page. When this returns, no CPU can write it.
    pub(crate) fn protect(&self, page: PageIndex) -> Result<(), Failure> {
        let protected = self.uffd.forbid_writes(self.memory.guest_page(page));
        protected.map_err(failed("WRITEPROTECT", page))
    }

    /// Unmaps the page; its bytes stay. When this returns, no CPU can use it.
    pub(crate) fn zap(&self, page: PageIndex) -> Result<(), Failure> {
        self.memory.zap(page, 1).map_err(failed("DONTNEED", page))
    }

    /// Frees the bytes of an unmapped page, at a later call of [`Self::finish_frees`]: what waits for
    /// an answer of this node does not wait for the kernel to free a page. The page does not come back
    /// in between without being freed first.
    pub(crate) fn free(&mut self, page: PageIndex) {
        self.stays(page);
        let flags = &mut self.flags[page.index()];
        if *flags & RESIDENT != 0 {
            self.resident -= 1;
            *flags = *flags & !RESIDENT | FREED;
            self.freed.push(page);
        }
    }

    /// Unmaps pages that have bytes, and frees these.
    pub(crate) fn discard(&mut self, run: PageRange) -> Result<(), Failure> {
        let (first, count) = (run.first, run.count as usize);
        let zapped = self.memory.zap(first, count);
        zapped.map_err(failed("DONTNEED", first))?;
        for page in run.iter() {
            self.stays(page);
            let flags = &mut self.flags[page.index()];
            self.resident -= usize::from(*flags & RESIDENT != 0);
            *flags &= !RESIDENT;
        }
        let punched = self.memory.punch(first, count);
        punched.map_err(failed("PUNCH_HOLE", first))
    }

    /// Fills an unmapped page, which has bytes, with zeroes.
    pub(crate) fn clear(&self, page: PageIndex) -> Result<(), Failure> {
        let written = self.memory.write(page, &ZEROES);
        written.map_err(failed("writing into the memory file", page))
    }

    /// Frees the bytes of the pages that count as freed when there are enough of them.
    pub(crate) fn finish_some_frees(&mut self) -> Result<(), Failure> {
        if self.freed.len() < FREE_BATCH {
            return Ok(());
        }
        self.finish_frees()
    }

    /// Frees the bytes of all pages that count as freed, those in a row at once.
    pub(crate) fn finish_frees(&mut self) -> Result<(), Failure> {
        let Self {
            freed,
            flags,
            memory,
            ..
        } = self;
        freed.sort_unstable();
        let mut left = freed.drain(..).filter(|page| {
            // One that came back has been freed, and is here twice if it was given up again.
            let flags = &mut flags[page.index()];
            let is_left = *flags & FREED != 0;
            *flags &= !FREED;
            is_left
        });
        let mut next = left.next();
        while let Some(first) = next {
            let mut count = 1;
            next = left.next();
            while next.is_some_and(|page| page.index() == first.index() + count) {
                count += 1;
                next = left.next();
            }
            let punched = memory.punch(first, count);
            punched.map_err(failed("PUNCH_HOLE", first))?;
        }
        Ok(())
    }

    fn finish_free(&mut self, page: PageIndex) -> Result<(), Failure> {
        let flags = &mut self.flags[page.index()];
        if *flags & FREED == 0 {
            return Ok(());
        }
        *flags &= !FREED;
        self.memory
            .punch(page, 1)
            .map_err(failed("PUNCH_HOLE", page))
    }

    /// Whether there is such a page.
    pub(crate) fn is_in_memory(&self, page: PageIndex) -> bool {
        page.index() < self.flags.len()
    }

    /// The words of a page that has bytes here, which vCPUs may write.
    pub(crate) fn words(&self, page: PageIndex) -> &[AtomicU64] {
        self.memory.words_of(page)
    }

    /// Copies the bytes of a page that no CPU can write: it is unmapped or protected, which only the
    /// thread that has `self` changes.
    pub(crate) fn bytes(&mut self, page: PageIndex) -> &PageBytes {
        self.memory.read(page, &mut self.bytes);
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    const PAGES: u32 = 64;

    #[test]
    fn faults_are_read_one_by_one_while_one_thread_has_them() {
        let mut faulting = Faulting::default();
        let mut is_one = |thread| {
            faulting.note(thread);
            faulting.is_one
        };
        assert_eq!(
            [7, 7, 8, 7, 7].map(&mut is_one),
            [false, true, false, false, true]
        );
        assert_eq!([0, 0].map(is_one), [false; 2], "unknown threads");
    }

    #[test]
    fn pages_are_freed_together_but_none_that_came_back() {
        let memory = Arc::new(GuestMemory::new(PAGES as usize * PAGE_SIZE).expect("memory"));
        let mut frames = Frames::new(Arc::clone(&memory)).expect("userfaultfd");
        let first_word = |page: u32| memory.words_of(PageIndex::new(page))[0].load(Relaxed);
        for page in 0..PAGES {
            let installed = frames.install(PageIndex::new(page), &[7; PAGE_SIZE], true);
            installed.expect("COPY");
        }
        let full = u64::from_ne_bytes([7; 8]);
        let give_up = |frames: &mut Frames, page: u32| {
            frames.zap(PageIndex::new(page)).expect("DONTNEED");
            frames.free(PageIndex::new(page));
        };
        let few = u32::try_from(FREE_BATCH).expect("few") - 1;
        // Two rows and one page alone, from the last to the first.
        let gone = |page: u32| page < 20 || page == 40 || page >= 54;
        let pages: Vec<u32> = (0..PAGES).rev().filter(|page| gone(*page)).collect();
        assert_eq!(pages.len(), few as usize);
        for page in &pages {
            give_up(&mut frames, *page);
        }
        frames.finish_some_frees().expect("none");
        assert_eq!(first_word(40), full, "freed at once");
        // One comes back, and another one comes back and goes again.
        for page in [3, 60] {
            let installed = frames.install(PageIndex::new(page), &[9; PAGE_SIZE], true);
            installed.expect("COPY");
        }
        give_up(&mut frames, 60);
        frames.finish_some_frees().expect("all of them");
        for page in 0..PAGES {
            let expected = match page {
                3 => u64::from_ne_bytes([9; 8]),
                page if gone(page) => 0,
                _ => full,
            };
            assert_eq!(first_word(page), expected, "page {page}");
        }
        assert_eq!(frames.resident(), PAGES as usize - pages.len() + 1);
    }
}
