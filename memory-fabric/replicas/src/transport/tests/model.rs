//! A pager without memory: it knows the version of each page, and checks what it reads.

mod settle;

use super::fake::{page_with, version_of};
use super::hostile::{FORGERIES, Seals, seal};
use super::*;
use fabric_pages::page::PAGE_SIZE;
use std::collections::BTreeSet;

/// Donors that may join.
const JOINERS: usize = 2;

/// State of a page, as in the page map; the number is its current version.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Page {
    Untouched,
    Local(u64),
    /// Being written back; the flag says that it was touched since, so that it stays.
    Writing(u64, bool),
    Remote(u64),
    Fetching(u64),
}

/// A pager, its donors, and what may happen to them.
pub struct World {
    bed: Bed,
    reader: ReplicatedTransport,
    evictor: ReplicatedTransport,
    /// The pages in use: some of each block, so that they meet often.
    offsets: Vec<u64>,
    pages: Vec<Page>,
    /// The first page and the count of each run that was requested, by ticket.
    runs: Vec<(usize, usize)>,
    version: u64,
    random: u64,
    down: Vec<bool>,
    lost: Vec<bool>,
    /// The donor that leaves, and how many of its copies stayed once that has ended.
    leaving: Option<(usize, Arc<Mutex<Option<u32>>>)>,
    /// Set when a rebalancing has ended.
    rebalancing: Option<Arc<Mutex<Option<u32>>>>,
    rebalanced: u32,
    /// Donors that began to leave, and those that have left.
    leaves: u32,
    left: u32,
    /// The place of a donor that joins, and the thread that waits for it.
    joining: Option<(usize, JoinHandle<bool>)>,
    joined: u32,
    slots: Vec<u32>,
    layout: Option<Layout>,
    /// A donor that sends wrong pieces, and what opens pages then.
    hostile: Option<(usize, Seals)>,
    /// What did not open, by ticket, and is being read again or is to be.
    again: BTreeSet<u32>,
    unposted: Vec<u32>,
    seed: u64,
}

const BLOCKS: u32 = 4;
/// As many as two pages of a donor have pieces of, and some of a third one.
const PAGES_PER_BLOCK: usize = 18;

impl World {
    pub fn new(seed: u64) -> Self {
        let slots = match seed % 3 {
            0 => vec![4, 4],
            1 => vec![4, 4, 4],
            _ => vec![3, 3, 3, 3],
        };
        let bed = Bed::with_joiners(&slots, BLOCKS, JOINERS);
        Self::of(bed, slots, None, seed)
    }

    /// Stripes, in every second history with a donor more than they need.
    pub fn striped(seed: u64) -> Self {
        let layout = ["2+1", "2+2", "4+2", "8+2"][usize::try_from(seed % 4).expect("small")];
        let layout: Layout = layout.parse().expect("possible");
        let donors = layout.pieces() + usize::from(seed % 8 < 4);
        let slots = vec![BLOCKS; donors];
        let bed = Bed::striped_with_joiners(&slots, layout, BLOCKS, JOINERS);
        Self::of(bed, slots, Some(layout), seed)
    }

    /// Stripes, and a donor that forges some of its answers. Of the others, one may be lost or out
    /// at once.
    pub fn hostile(seed: u64) -> Self {
        let choice = usize::try_from(seed).expect("small");
        let layout: Layout = ["2+2", "4+2", "8+2"][choice % 3].parse().expect("possible");
        let donors = layout.pieces() + usize::from(seed % 6 < 3);
        let slots = vec![BLOCKS; donors];
        let bed = Bed::striped(&slots, layout, BLOCKS);
        let hostile = choice % donors;
        bed.donors[hostile].lock().expect("no panic").forgery =
            Some((FORGERIES[choice / 3 % 4], 1 + seed % 5));
        let seals = seal(&bed.set);
        Self {
            hostile: Some((hostile, seals)),
            ..Self::of(bed, slots, Some(layout), seed)
        }
    }

    fn of(bed: Bed, slots: Vec<u32>, layout: Option<Layout>, seed: u64) -> Self {
        let of_start = |donor: usize| donor < slots.len();
        let donors = 0..bed.donors.len();
        let (reader, evictor) = (bed.transport(Role::Reader), bed.transport(Role::Evictor));
        let pages = (0..PAGES_PER_BLOCK as u64).map(|page| page * PAGE_SIZE as u64);
        let blocks = (0..u64::from(BLOCKS)).map(|block| block * BLOCK_BYTES);
        let offsets: Vec<u64> = blocks
            .flat_map(|block| pages.clone().map(move |page| block + page))
            .collect();
        Self {
            pages: vec![Page::Untouched; offsets.len()],
            runs: Vec::new(),
            offsets,
            reader,
            evictor,
            version: 0,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            down: vec![false; donors.len()],
            lost: donors.map(|donor| !of_start(donor)).collect(),
            leaving: None,
            rebalancing: None,
            rebalanced: 0,
            leaves: 0,
            left: 0,
            joining: None,
            joined: 0,
            slots,
            layout,
            hostile: None,
            again: BTreeSet::new(),
            unposted: Vec::new(),
            bed,
            seed,
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).expect("31 bits") % limit
    }

    /// Returns how many donors have left, and have joined, and the copies that were to be rebalanced.
    pub fn run(mut self, steps: usize) -> (u32, u32, u32) {
        for _ in 0..steps {
            match self.below(40) {
                0..11 => self.use_page(),
                11 => self.free_pages(),
                12..15 => self.fetch_run(),
                15..22 => self.poll_reader(),
                22..39 => self.poll_evictor(),
                _ => self.disturb(),
            }
            self.see_off();
            self.welcome();
        }
        self.settle()
    }

    /// Returns how many wrong pieces were found, all of them sent by the hostile donor.
    pub fn run_hostile(self, steps: usize) -> u64 {
        let (set, events) = (Arc::clone(&self.bed.set), Arc::clone(&self.bed.events));
        let hostile = self.hostile.as_ref().expect("it is hostile").0;
        let seed = self.seed;
        self.run(steps);
        for event in events.lock().expect("no panic").iter() {
            if let ReplicaEvent::WrongPieces { donor, .. } = event {
                assert_eq!(*donor, hostile, "seed {seed}");
            }
        }
        set.wrong_pieces.get()
    }

    /// A new donor joins in a place without one, or which one that is lost has left.
    fn join(&mut self, donor: usize) {
        if self.joining.is_some() || self.leaving.is_some() {
            return;
        }
        let copies = self.bed.set.copies();
        if !copies.has_left(as_u8(donor)) {
            self.bed.set.retire(donor, Instant::now());
            return;
        }
        self.joining = Some((donor, self.bed.join(donor, BLOCKS)));
    }

    /// Uses a donor that has joined.
    fn welcome(&mut self) {
        let has_ended = |joining: &mut (usize, JoinHandle<bool>)| joining.1.is_finished();
        let Some((donor, thread)) = self.joining.take_if(has_ended) else {
            return;
        };
        // False while a thread is connected to the last one in that place.
        if thread.join().expect("no panic") {
            self.lost[donor] = false;
            self.down[donor] = false;
            self.joined += 1;
        }
    }

    /// A donor begins to leave.
    fn leave(&mut self, donor: usize) {
        let end = Arc::<Mutex<Option<u32>>>::default();
        let ended = Arc::clone(&end);
        let observer = move |event| {
            if let LeaveEvent::Ended { stayed } = event {
                *ended.lock().expect("no panic") = Some(stayed);
            }
        };
        if self.bed.set.leave(donor, &[], Box::new(observer)).is_ok() {
            self.leaves += 1;
            self.leaving = Some((donor, end));
        }
    }

    /// Copies begin to move to donors with less than their share, or stop.
    fn rebalance(&mut self) {
        if self.rebalancing.is_some() && self.below(4) == 0 {
            self.bed.set.stop_rebalancing();
            return;
        }
        let end = Arc::<Mutex<Option<u32>>>::default();
        let ended = Arc::clone(&end);
        let observer = move |event| {
            if let LeaveEvent::Ended { stayed } = event {
                *ended.lock().expect("no panic") = Some(stayed);
            }
        };
        if let Ok(moves) = self.bed.set.rebalance(Box::new(observer)) {
            self.rebalanced += moves;
            self.rebalancing = Some(end);
        }
    }

    /// Ends the use of a donor whose copies have all moved. Its memory belongs to others as soon as
    /// no transport has a connection to it.
    fn see_off(&mut self) {
        let has_ended = |end: &mut Arc<Mutex<Option<u32>>>| end.lock().expect("no panic").is_some();
        self.rebalancing.take_if(has_ended);
        let Some((donor, end)) = &self.leaving else {
            return;
        };
        let (donor, Some(stayed)) = (*donor, *end.lock().expect("no panic")) else {
            return;
        };
        if stayed > 0 {
            self.leaving = None;
            return;
        }
        let now = Instant::now();
        // False while a transport has a connection.
        if self.bed.set.retire(donor, now) {
            self.bed.donors[donor].lock().expect("no panic").left = true;
            self.leaving = None;
            self.lost[donor] = true;
            self.left += 1;
        }
    }

    /// Moves a random page on: from local to its homes, or back.
    fn use_page(&mut self) {
        let index = self.below(self.pages.len());
        let ticket = Ticket(u32::try_from(index).expect("small"));
        let offset = self.offsets[index];
        self.pages[index] = match self.pages[index] {
            Page::Untouched | Page::Local(_) => {
                self.version += 1;
                let page = page_with(self.version);
                match self.evictor.post_write(ticket, offset, &page) {
                    Ok(()) => {
                        if let Some((_, seals)) = &self.hostile {
                            let mut seals = seals.lock().expect("no panic");
                            seals.insert(offset, self.version);
                        }
                        Page::Writing(self.version, false)
                    }
                    Err(Full) => Page::Local(self.version),
                }
            }
            Page::Writing(version, _) => Page::Writing(version, true),
            Page::Remote(version) => match self.reader.post_read(ticket, offset) {
                Ok(()) => Page::Fetching(version),
                Err(Full) => Page::Remote(version),
            },
            Page::Fetching(version) => Page::Fetching(version),
        };
    }

    /// The guest frees the pages from a random one on, in its block, as far as no request is
    /// outstanding.
    fn free_pages(&mut self) {
        let first = self.below(self.pages.len());
        let end = (first / PAGES_PER_BLOCK + 1) * PAGES_PER_BLOCK;
        let most = 1 + self.below(2 * PAGES_PER_BLOCK);
        let is_idle = |page: &&Page| !matches!(page, Page::Writing(..) | Page::Fetching(_));
        let pages = self.pages[first..end].iter_mut().take(most);
        let mut count = 0;
        for page in pages.take_while(|page| is_idle(&&**page)) {
            *page = Page::Untouched;
            count += 1;
        }
        let offsets = &self.offsets[first..first + count];
        if let Some((_, seals)) = &self.hostile {
            let mut seals = seals.lock().expect("no panic");
            for offset in offsets {
                seals.remove(offset);
            }
        }
        if let Some(&offset) = offsets.first() {
            // Donors keep them where there is no room for it.
            let count = u32::try_from(count).expect("small");
            let _ = self.evictor.post_drop(offset, count);
        }
    }

    /// Fetches the remote pages from a random one on, in its block.
    fn fetch_run(&mut self) {
        let first = self.below(self.pages.len());
        let end = (first / PAGES_PER_BLOCK + 1) * PAGES_PER_BLOCK;
        let is_remote = |page: &&Page| matches!(page, Page::Remote(_));
        let count = self.pages[first..end].iter().take_while(is_remote).count();
        if count == 0 {
            return;
        }
        let number = self.pages.len() + self.runs.len();
        let ticket = Ticket(u32::try_from(number).expect("small"));
        let pages = u32::try_from(count).expect("small");
        let posted = self
            .reader
            .post_read_run(ticket, self.offsets[first], pages);
        if posted.is_ok() {
            self.runs.push((first, count));
            for page in &mut self.pages[first..first + count] {
                if let Page::Remote(version) = *page {
                    *page = Page::Fetching(version);
                }
            }
        }
    }

    fn poll_reader(&mut self) {
        let (pages, runs, seed) = (&mut self.pages, &self.runs, self.seed);
        let (is_hostile, again, unposted) =
            (self.hostile.is_some(), &mut self.again, &mut self.unposted);
        let arrived = |pages: &mut [Page], index: usize, found: u64| {
            let Page::Fetching(version) = pages[index] else {
                let page = pages[index];
                panic!("seed {seed}: page {index} was not fetched: {page:?}");
            };
            assert_eq!(found, version, "seed {seed}: page {index} is stale");
            pages[index] = Page::Local(version);
        };
        self.reader.poll(&mut |completion| {
            let (ticket, bytes, first, count) = match completion {
                Completion::ReadFrom(_, Ticket(ticket), page) => {
                    (ticket, page.as_slice(), ticket as usize, 1)
                }
                Completion::ReadRunFrom(_, Ticket(ticket), bytes) => {
                    let (first, count) = runs[ticket as usize - pages.len()];
                    (ticket, bytes, first, count)
                }
                other => panic!("seed {seed}: unexpected {other:?}"),
            };
            assert_eq!(bytes.len(), count * PAGE_SIZE);
            let opens = |(page, bytes): (&Page, &[u8])| {
                matches!(page, Page::Fetching(version) if bytes == page_with(*version))
            };
            let mut all = pages[first..].iter().zip(bytes.chunks(PAGE_SIZE));
            if is_hostile && !all.all(opens) {
                let is_first = again.insert(ticket);
                assert!(is_first, "seed {seed}: page {first} is lost");
                unposted.push(ticket);
                return;
            }
            again.remove(&ticket);
            for (index, page) in (first..).zip(bytes.chunks(PAGE_SIZE)) {
                arrived(pages, index, version_of(page));
            }
        });
        let (reader, offsets) = (&mut self.reader, &self.offsets);
        unposted.retain(|&ticket| {
            let at = ticket as usize;
            let (first, run) = match at.checked_sub(offsets.len()) {
                None => (at, None),
                Some(run) => (
                    runs[run].0,
                    Some(u32::try_from(runs[run].1).expect("small")),
                ),
            };
            reader
                .post_reread(Ticket(ticket), offsets[first], run)
                .is_err()
        });
    }

    /// Returns whether a donor besides one that is hostile may go out.
    fn may_disturb(&self) -> bool {
        let Some((hostile, _)) = self.hostile else {
            return true;
        };
        let copies = self.bed.set.copies();
        let lacks = |block: u32| {
            let mut all = copies.all(block).enumerate();
            all.any(|(at, copy)| {
                usize::from(copy.place.donor) != hostile && copies.readable_at(block, at).is_none()
            })
        };
        !(0..BLOCKS).any(lacks)
    }

    fn poll_evictor(&mut self) {
        let (pages, seed) = (&mut self.pages, self.seed);
        self.evictor.poll(&mut |completion| {
            let index = match completion {
                Completion::Written(Ticket(index)) => index,
                Completion::Dropped(_) => return,
                other => panic!("seed {seed}: unexpected {other:?}"),
            };
            let page = &mut pages[index as usize];
            *page = match *page {
                Page::Writing(version, false) => Page::Remote(version),
                Page::Writing(version, true) => Page::Local(version),
                other => panic!("seed {seed}: page {index} was not written: {other:?}"),
            };
        });
    }

    /// A donor's connections break, it is cut off, returns, or is lost for good.
    fn disturb(&mut self) {
        let donor = self.below(self.down.len());
        let leaves = self.leaving.as_ref();
        let has_no_copy = leaves.is_some_and(|(leaving, end)| {
            *leaving == donor && *end.lock().expect("no panic") == Some(0)
        });
        if has_no_copy {
            return;
        }
        if self.lost[donor] {
            self.join(donor);
            return;
        }
        if self.down[donor] {
            self.down[donor] = false;
            self.bed.restore(donor);
            self.bed.set.up(donor);
            return;
        }
        let is_hostile = self.hostile.as_ref().is_some_and(|one| one.0 == donor);
        if is_hostile || !self.may_disturb() {
            return;
        }
        let left = self.lost.iter().filter(|lost| !**lost).count();
        match self.below(8) {
            // Outstanding requests are sent again.
            0 => self.bed.restore(donor),
            1 => self.leave(donor),
            2 => self.rebalance(),
            3 if left > 2 && self.bed.set.copies().exclude(as_u8(donor)).is_ok() => {
                self.bed.cut(donor);
                self.lost[donor] = true;
                assert_ne!(self.bed.set.lost(donor, "killed"), Loss::OfBlocks);
            }
            _ => {
                self.bed.cut(donor);
                self.down[donor] = true;
                self.bed.set.down(donor, "cut");
            }
        }
    }
}

pub fn as_u8(donor: usize) -> u8 {
    u8::try_from(donor).expect("a few donors")
}
