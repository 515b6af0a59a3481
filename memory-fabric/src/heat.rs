//! The heat map: which part of memory is local, and which was touched recently.
//!
//! Accesses to mapped pages are invisible to user space. Faults are visible: pages that arrive, and
//! pages on probation that are touched again. The pager counts them for groups of pages
//! ([`Touches`]); the page map has the locations of pages.

use crate::guest_memory::GuestMemory;
use crate::homes::{HomeTable, NodeId};
use crate::mapping::Mapping;
use crate::page::{PageIndex, PageRange};
use crate::page_map::{Kind, PageMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pages whose touches are counted together: 256 KiB of guest memory, 8 bytes of metadata.
pub const GROUP_PAGES: u32 = 64;

/// Touches expire after one to two of these.
const TICK: Duration = Duration::from_secs(10);

/// Limit of blocks in a heat map, except those that extents cut: 16 rows of 64.
pub const BLOCKS_MAX: u64 = 1024;

/// Limit of pages examined for one heat map: the entries of 4 GiB, which takes a few milliseconds.
/// In larger guests each block is sampled.
pub const PAGES_LOOKED_AT_MAX: u64 = 1 << 20;

/// Pages examined between yields of the CPU: well below a millisecond.
const PAGES_BEFORE_YIELD: u32 = 1 << 16;

/// Positions at which a block is sampled.
const SAMPLES: u64 = 4;

/// Counts touches by group of pages. One relaxed read-modify-write per fault.
#[derive(Debug)]
pub(crate) struct Touches {
    /// An `AtomicU64` for each group, allocated by the kernel at the first write.
    words: Mapping,
    started: Instant,
}

impl Touches {
    /// Creates counters for `pages` pages.
    pub fn new(pages: u64) -> io::Result<Self> {
        let groups = usize::try_from(pages.div_ceil(GROUP_PAGES.into()))
            .expect("64-bit host")
            .max(1);
        Ok(Self {
            words: Mapping::anonymous(groups * size_of::<AtomicU64>())?,
            started: Instant::now(),
        })
    }

    /// Records a touch that caused a fault.
    pub fn record(&self, page: PageIndex, at: Instant) {
        let tick = self.tick(at);
        let word = &self.words.words()[(page.number() / GROUP_PAGES) as usize];
        // Relaxed: nothing else depends on the count.
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            Some(counted(word, tick))
        });
    }

    /// Returns the touches of a group in the last one to two ticks.
    fn recent(&self, group: u32, tick: u32) -> u32 {
        let word = self.words.words().get(group as usize);
        word.map_or(0, |word| recent(word.load(Ordering::Relaxed), tick))
    }

    /// Returns the touches of all groups with a page of these in the last one to two ticks.
    pub fn recent_in(&self, pages: PageRange, at: Instant) -> u32 {
        let Some(last) = pages.count.checked_sub(1) else {
            return 0;
        };
        let tick = self.tick(at);
        let first = pages.first.number();
        let groups = first / GROUP_PAGES..=(first + last) / GROUP_PAGES;
        groups.map(|group| self.recent(group, tick)).sum()
    }

    /// Returns the current tick, starting at 2, so that a zero word is long ago.
    fn tick(&self, at: Instant) -> u32 {
        let ticks = at.saturating_duration_since(self.started).as_secs() / TICK.as_secs();
        u32::try_from(ticks + 2).unwrap_or(u32::MAX)
    }
}

/// Packs the tick of the last touch, the touches of the tick before it, and those of that tick.
const fn word(tick: u32, before: u16, now: u16) -> u64 {
    ((tick as u64) << 32) | ((before as u64) << 16) | now as u64
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "the parts of a word are cut out of it"
)]
const fn parts(word: u64) -> (u32, u16, u16) {
    ((word >> 32) as u32, (word >> 16) as u16, word as u16)
}

/// Returns the word after one more touch.
const fn counted(seen: u64, tick: u32) -> u64 {
    let (last, before, now) = parts(seen);
    if last == tick {
        word(tick, before, now.saturating_add(1))
    } else if last + 1 == tick {
        word(tick, now, 1)
    } else {
        word(tick, 0, 1)
    }
}

/// Returns the touches in this tick and the one before.
const fn recent(seen: u64, tick: u32) -> u32 {
    let (last, before, now) = parts(seen);
    if last == tick {
        before as u32 + now as u32
    } else if last + 1 == tick {
        now as u32
    } else {
        0
    }
}

/// State of a block of pages. The counts cover the examined pages, and are not a snapshot of one
/// moment.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct BlockHeat {
    /// Pages in it.
    pub pages: u32,
    /// Examined pages.
    pub looked_at: u32,
    /// Local pages that are mapped, or mapped at the next touch.
    pub resident: u32,
    /// Local pages that are not mapped: on probation, being written back or dropped.
    pub leaving: u32,
    /// Pages in transit to this node, being mapped, or prefetched and not touched yet.
    pub arriving: u32,
    /// Pages whose bytes are only at home.
    pub remote: u32,
    /// Pages that were never written, or are all zero.
    pub untouched: u32,
    /// Pages that differ from the copy at home.
    pub dirty: u32,
    /// Faults in the block that fetched a page, or found it on probation, in the last 10 to 20
    /// seconds. Home memory of this node has none.
    pub recent_faults: u32,
}

impl BlockHeat {
    fn add(&mut self, kind: Kind, dirty: bool) {
        self.looked_at += 1;
        self.dirty += u32::from(dirty);
        *match kind {
            Kind::Untouched => &mut self.untouched,
            // The bytes of a lost page were only at home as well.
            Kind::Remote | Kind::Lost => &mut self.remote,
            Kind::Fetching | Kind::Installing => &mut self.arriving,
            Kind::Resident => &mut self.resident,
            Kind::Probation | Kind::WritingBack | Kind::Dropping => &mut self.leaving,
        } += 1;
    }
}

/// The blocks of one extent.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ExtentHeat {
    /// Its pages.
    pub pages: PageRange,
    /// Its home.
    pub home: NodeId,
    /// Its blocks by ascending address. They start at multiples of [`Heat::block_pages`]; the
    /// extent cuts the first and the last.
    pub blocks: Vec<BlockHeat>,
}

/// The heat map of a guest.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Heat {
    /// Pages of a block, a power of two of at least [`GROUP_PAGES`].
    pub block_pages: u32,
    /// Pages of the guest.
    pub pages: u64,
    /// Examined pages, at most [`PAGES_LOOKED_AT_MAX`]. If they are fewer than `pages`, each block
    /// was sampled at 4 positions.
    pub pages_looked_at: u64,
    /// Every extent by ascending address.
    pub extents: Vec<ExtentHeat>,
}

/// Examines the pages of a guest. Without a pager all of them are home pages of this node.
pub(crate) fn look(
    homes: &HomeTable,
    memory: &GuestMemory,
    pager: Option<(&PageMap, &Touches)>,
) -> Heat {
    let all = [homes.ram_extents(), homes.added_extents()].concat();
    let ranges: Vec<PageRange> = all.iter().map(|e| e.pages).collect();
    let block_pages = block_pages(&ranges);
    let blocks: u64 = ranges.iter().map(|&r| blocks_of(r, block_pages)).sum();
    let in_each = PAGES_LOOKED_AT_MAX / blocks.max(1);
    let now = Instant::now();
    let mut seen = vec![0; usize::try_from(in_each).expect("64-bit host")];
    let mut extents = Vec::with_capacity(ranges.len());
    let mut since_yield = 0;
    for extent in &all {
        let paged = extent.home != homes.local() || homes.is_added(extent.pages.first);
        let mut heats = Vec::new();
        let mut rest = extent.pages;
        while rest.count > 0 {
            let first = rest.first.number();
            let to_border = block_pages - first % block_pages;
            let (block, after) = rest.split_at(to_border);
            rest = after;
            let mut heat = BlockHeat {
                pages: block.count,
                ..BlockHeat::default()
            };
            for sample in samples(block, in_each) {
                match pager {
                    Some((map, _)) if paged => {
                        for page in sample.iter() {
                            let state = map.entry(page).state();
                            // A prefetched page waits for its first touch.
                            let kind = match state.kind() {
                                Kind::Probation if state.is_ahead() => Kind::Fetching,
                                kind => kind,
                            };
                            heat.add(kind, state.is_dirty());
                        }
                    }
                    _ => look_here(memory, sample, &mut seen, &mut heat),
                }
            }
            if let Some((_, touches)) = pager {
                heat.recent_faults = touches.recent_in(block, now);
            }
            heats.push(heat);
            // Yields occasionally to vCPUs and the pager: on a busy host each yield costs a slice
            // of the scheduler.
            since_yield += heat.looked_at;
            if since_yield >= PAGES_BEFORE_YIELD {
                since_yield = 0;
                std::thread::yield_now();
            }
        }
        extents.push(ExtentHeat {
            pages: extent.pages,
            home: extent.home,
            blocks: heats,
        });
    }
    let all = extents.iter().flat_map(|extent| &extent.blocks);
    Heat {
        block_pages,
        pages: ranges.iter().map(|range| u64::from(range.count)).sum(),
        pages_looked_at: all.map(|block| u64::from(block.looked_at)).sum(),
        extents,
    }
}

/// Home pages of this node have no state: they are in memory, or were never written.
fn look_here(memory: &GuestMemory, range: PageRange, seen: &mut [u8], heat: &mut BlockHeat) {
    let seen = &mut seen[..range.count as usize];
    if memory.in_memory(range.first, seen).is_err() {
        return;
    }
    for found in seen {
        let kind = if *found & 1 == 1 {
            Kind::Resident
        } else {
            Kind::Untouched
        };
        heat.add(kind, false);
    }
}

/// Returns the smallest block size that does not exceed the limit of blocks.
fn block_pages(ranges: &[PageRange]) -> u32 {
    let mut pages = GROUP_PAGES;
    // One cut block for each extent is not counted: larger blocks would not avoid it.
    let most = BLOCKS_MAX + ranges.len() as u64;
    while pages < 1 << 31 && ranges.iter().map(|&r| blocks_of(r, pages)).sum::<u64>() > most {
        pages *= 2;
    }
    pages
}

fn blocks_of(range: PageRange, block_pages: u32) -> u64 {
    let first = u64::from(range.first.number() / block_pages);
    range.end().div_ceil(block_pages.into()) - first
}

/// Returns the parts of a block to examine: all of it, or `allowed` pages at several positions.
fn samples(block: PageRange, allowed: u64) -> impl Iterator<Item = PageRange> {
    let pages = u64::from(block.count);
    let (places, length) = if pages <= allowed {
        (1, pages)
    } else {
        (SAMPLES, allowed / SAMPLES)
    };
    (0..places).map(move |place| {
        let number = |pages: u64| u32::try_from(pages).expect("inside the block");
        let (_, from_there) = block.split_at(number(pages * place / places));
        from_there.split_at(number(length)).0
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::homes::{HomeTable, Loan, LocalUse, Plan};
    use proptest::prelude::*;

    fn range(first: u32, count: u32) -> PageRange {
        PageRange::new(PageIndex::new(first), count)
    }

    /// A guest of node 0, to which node 1 lends.
    fn plan(ram: &[PageRange], local_pages: u64, lent: u64) -> Plan {
        let loan = Loan {
            first_slot: 0,
            node: NodeId(1),
            pages: lent,
        };
        let table = HomeTable::new(NodeId(0), ram, None);
        let plan = Plan::new(table, local_pages, LocalUse::Cache, &[loan]);
        plan.expect("fits")
    }

    #[test]
    fn touches_are_counted_and_forgotten() {
        let mut seen = 0;
        for _ in 0..3 {
            seen = counted(seen, 7);
        }
        assert_eq!(recent(seen, 7), 3);
        assert_eq!(recent(seen, 8), 3);
        assert_eq!(recent(seen, 9), 0);
        seen = counted(seen, 8);
        assert_eq!((recent(seen, 8), recent(seen, 9)), (4, 1));
        assert_eq!(recent(counted(seen, 20), 20), 1);
        let full = word(8, 0, u16::MAX);
        assert_eq!(counted(full, 8), full);
    }

    #[test]
    fn a_map_of_a_small_guest_looks_at_every_page() {
        let ram = [range(0, 1000), range(2000, 600)];
        let plan = plan(&ram, 700, 1600);
        let memory = GuestMemory::new(2600 << 12).expect("a small memory");
        memory.guest_words()[5 << 9].store(1, Ordering::Relaxed);
        let map = PageMap::new(2600).expect("small");
        let touches = Touches::new(2600).expect("small");
        for number in 690..700 {
            let entry = map.entry(PageIndex::new(number));
            assert!(entry.begin_install(entry.state()));
            entry.mark_dirty();
            assert!(entry.list());
            assert!(!entry.finish_install());
            touches.record(PageIndex::new(number), Instant::now());
        }
        let probation = map.entry(PageIndex::new(690));
        assert!(probation.begin_probation());
        let heat = look(&plan.homes, &memory, Some((&map, &touches)));
        assert_eq!((heat.pages, heat.pages_looked_at), (1600, 1600));
        assert_eq!(heat.block_pages, GROUP_PAGES);
        let sum = |of: fn(&BlockHeat) -> u32| -> u32 {
            heat.extents.iter().flat_map(|e| &e.blocks).map(of).sum()
        };
        assert_eq!(sum(|b| b.pages), 1600);
        assert_eq!(sum(|b| b.resident), 1 + 9);
        assert_eq!((sum(|b| b.leaving), sum(|b| b.dirty)), (1, 10));
        assert_eq!(sum(|b| b.untouched), 1600 - 11);
        assert_eq!(sum(|b| b.recent_faults), 10);
        assert_eq!(heat.extents[0].blocks[0].resident, 1, "page 5");
        let there = &heat.extents[1];
        assert_eq!(there.home, NodeId(1));
        let block = &there.blocks[(690 / 64 - there.pages.first.number() / 64) as usize];
        assert_eq!((block.resident, block.leaving), (9, 1));
        assert_eq!(
            memory.resident_bytes().expect("fstat"),
            4096,
            "looking makes no page"
        );
    }

    #[test]
    fn a_map_of_4_tib_looks_at_a_bounded_number_of_pages() {
        let ram = [range(0, 1 << 30)];
        let plan = plan(&ram, 1 << 18, 1 << 30);
        let map = PageMap::new(1 << 30).expect("address space");
        let touches = Touches::new(1 << 30).expect("address space");
        let memory = GuestMemory::new(1 << 42).expect("address space");
        let heat = look(&plan.homes, &memory, Some((&map, &touches)));
        assert_eq!(heat.pages, 1 << 30);
        assert!(heat.pages_looked_at <= PAGES_LOOKED_AT_MAX);
        assert!(heat.pages_looked_at >= PAGES_LOOKED_AT_MAX / 2);
        assert_eq!(heat.extents[0].blocks.len(), 1024);
    }

    proptest! {
        #[test]
        fn blocks_are_few_and_cover_each_extent_once(
            extents in prop::collection::vec((0_u32..5000, 1_u32..50_000_000), 1..70),
        ) {
            let mut at = 0;
            let ranges: Vec<_> = extents.iter().map(|&(gap, count)| {
                at += gap;
                let found = range(at, count);
                at += count;
                found
            }).collect();
            let pages = block_pages(&ranges);
            let blocks: u64 = ranges.iter().map(|&r| blocks_of(r, pages)).sum();
            prop_assert!(blocks <= BLOCKS_MAX + 70);
            prop_assert!(pages.is_power_of_two() && pages >= GROUP_PAGES);
        }

        #[test]
        fn samples_lie_inside_their_block_and_do_not_overlap(
            first in 0_u32..1000, count in 1_u32..3_000_000, allowed in 4_u64..5000,
        ) {
            let block = range(first, count);
            let mut end = u64::from(first);
            let mut looked_at = 0;
            for sample in samples(block, allowed) {
                prop_assert!(u64::from(sample.first.number()) >= end);
                end = sample.end();
                looked_at += u64::from(sample.count);
            }
            prop_assert!(end <= block.end());
            prop_assert!(looked_at <= allowed.max(1));
            prop_assert_eq!(looked_at == u64::from(count), u64::from(count) <= allowed);
        }
    }
}
