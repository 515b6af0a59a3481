//! Where each page is at home: extents, the layout made of them, and the plan that a guest's
//! size, a local budget and the donors' loans lead to.

use crate::guest_memory::HUGE_PAGE_BYTES;
use crate::hotplug::{BLOCK_PAGES, Region};
use crate::page::{PAGE_SHIFT, PAGE_SIZE, PageIndex, PageRange};
use std::fmt;
use std::sync::Arc;

/// The number of a node in a VM's layout. The compute node is 0, donors follow in the order
/// in which they were named.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NodeId(pub u16);

impl NodeId {
    /// The compute node that runs the VM.
    pub const COMPUTE: Self = Self(0);
    /// The home of pages that have none: those of blocks that are not plugged.
    pub const NOWHERE: Self = Self(u16::MAX);
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// Consecutive guest-physical pages with one home.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Extent {
    /// The pages.
    pub pages: PageRange,
    /// The node whose memory backs them.
    pub home: NodeId,
    /// Offset in bytes of the first page in what that node lends this VM. 0 at home here.
    pub base: u64,
}

impl Extent {
    /// Which donor its pages are at home on, counted from 0; also while their block is being unplugged.
    pub(crate) fn donor(&self) -> Option<usize> {
        match self.home {
            NodeId::COMPUTE | NodeId::NOWHERE => None,
            NodeId(number) => Some(usize::from(number) - 1),
        }
    }

    /// Offset in bytes of a page of this extent in its home's loan.
    #[must_use]
    pub fn offset_of(&self, page: PageIndex) -> u64 {
        debug_assert!(self.pages.contains(page));
        self.base + (u64::from(page.number() - self.pages.first.number()) << PAGE_SHIFT)
    }
}

/// The home of every page of a VM. A new layout has a higher epoch.
#[derive(Clone, Debug)]
pub struct Layout {
    epoch: u64,
    /// Sorted by first page, not overlapping, none empty.
    extents: Vec<Extent>,
    /// What may come on top while the guest runs, above all extents.
    region: Option<Arc<Region>>,
}

/// What becomes of the bytes of a page that is to leave this node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Lot {
    /// They go to this donor, counted from 0.
    Donor(usize),
    /// They stay.
    Here,
    /// They are of no use.
    Nowhere,
}

/// Pages of a huge page.
const HUGE_PAGE_PAGES: u64 = (HUGE_PAGE_BYTES / PAGE_SIZE) as u64;

/// Smallest cache for pages at home elsewhere: 16 MiB. With less, the pages of a few
/// instructions and their operands push each other out.
pub const CACHE_PAGES_MIN: u64 = (16 << 20) >> PAGE_SHIFT;

/// What local memory is for, where donors could lend all of the guest's.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LocalUse {
    /// A cache of what is at home on donors: for guests that see no difference.
    #[default]
    Cache,
    /// A home of its own, but for a quarter (at least [`CACHE_PAGES_MIN`]) that is a cache: for
    /// guests that see nodes, and choose themselves what is near.
    Home,
}

impl LocalUse {
    /// How many of a guest's pages are to be at home here, if the donors lend the rest.
    #[must_use]
    pub fn home_here(self, guest_pages: u64, local_pages: u64) -> u64 {
        let wanted = match self {
            _ if local_pages >= guest_pages => return guest_pages,
            Self::Cache => 0,
            Self::Home => local_pages - (local_pages / 4).max(CACHE_PAGES_MIN).min(local_pages),
        };
        // Whole huge pages, so that none is cut by the border.
        wanted - wanted % HUGE_PAGE_PAGES
    }
}

/// What a donor lends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Loan {
    /// The donor.
    pub node: NodeId,
    /// How many pages.
    pub pages: u64,
}

/// How a guest's memory is divided.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Every page's home.
    pub layout: Layout,
    /// Pages at home on the compute node: always resident.
    pub home_here_pages: u64,
    /// How many pages that are at home elsewhere may be resident at once.
    pub cache_pages: u64,
    /// How many pages of the cache go beyond the local budget, because the loans leave no
    /// room for one within it.
    pub cache_beyond_budget_pages: u64,
}

/// A guest that its budget and loans cannot hold.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Local memory and loans together are too little.
    #[error(
        "guest memory of {guest_mib} MiB is more than local memory of {local_mib} MiB and the \
         {lent_mib} MiB that donors lend; raise --local-memory by {missing_mib} MiB, add a \
         donor, or lower --memory"
    )]
    TooLittle {
        /// Guest memory, MiB.
        guest_mib: u64,
        /// Local budget, MiB.
        local_mib: u64,
        /// Sum of the loans, MiB.
        lent_mib: u64,
        /// What is missing, MiB, rounded up.
        missing_mib: u64,
    },
}

impl Plan {
    /// Divides the RAM in `ranges` over a local budget of `local_pages` and the loans.
    ///
    /// What the loans do not cover is at home here, and what [`LocalUse`] says: one half at the lowest addresses, where a
    /// kernel is loaded, the other at the highest, from which it takes the memory for its own
    /// tables while it starts. The rest, in between, is divided over the donors in proportion to their loans,
    /// one contiguous extent for each (two where the hole below 4 GiB cuts it).
    ///
    /// # Errors
    ///
    /// [`PlanError::TooLittle`] when budget and loans together are smaller than the guest.
    pub fn new(
        ranges: &[PageRange],
        local_pages: u64,
        local_use: LocalUse,
        loans: &[Loan],
    ) -> Result<Self, PlanError> {
        let guest: u64 = ranges.iter().map(|range| u64::from(range.count)).sum();
        let lent: u64 = loans.iter().map(|loan| loan.pages).sum();
        if guest > local_pages.saturating_add(lent) {
            let mib = |pages: u64| pages >> (20 - PAGE_SHIFT);
            return Err(PlanError::TooLittle {
                guest_mib: mib(guest),
                local_mib: mib(local_pages),
                lent_mib: mib(lent),
                missing_mib: (guest - local_pages - lent).div_ceil(1 << (20 - PAGE_SHIFT)),
            });
        }
        let remote = lent.min(guest - local_use.home_here(guest, local_pages));
        let home_here = guest - remote;
        let within_budget = local_pages.saturating_sub(home_here).min(remote);
        let cache = within_budget.max(CACHE_PAGES_MIN.min(remote));

        // The lower part is rounded up to whole huge pages, so that none of what could be huge
        // is cut by the border.
        let home_low = if remote == 0 {
            home_here
        } else {
            let half = home_here.div_ceil(2);
            half.next_multiple_of(HUGE_PAGE_PAGES).min(home_here)
        };
        let home_high = home_here - home_low;
        let mut shares = vec![Loan {
            node: NodeId::COMPUTE,
            pages: home_low,
        }];
        let mut left = remote;
        let mut lent_left = lent;
        for loan in loans {
            // Proportional, and exact in the end: the last donor takes what is left.
            let pages = if lent_left == 0 {
                0
            } else {
                let share = u128::from(left) * u128::from(loan.pages);
                u64::try_from(share.div_ceil(u128::from(lent_left))).unwrap_or(left)
            };
            let most = left.min(loan.pages);
            // Borders between huge pages, where the loan reaches so far.
            let pages = match pages.next_multiple_of(HUGE_PAGE_PAGES) {
                whole if whole <= most => whole,
                _ => pages.min(most),
            };
            shares.push(Loan {
                node: loan.node,
                pages,
            });
            left -= pages;
            lent_left -= loan.pages;
        }
        shares.push(Loan {
            node: NodeId::COMPUTE,
            pages: home_high,
        });
        Ok(Self {
            layout: Layout::from_shares(ranges, &shares),
            home_here_pages: home_here,
            cache_pages: cache,
            cache_beyond_budget_pages: cache - within_budget,
        })
    }
}

impl Layout {
    /// Gives the pages of `ranges` in order to the nodes of `shares` in order.
    fn from_shares(ranges: &[PageRange], shares: &[Loan]) -> Self {
        let mut extents = Vec::new();
        let mut shares = shares.iter().copied();
        let mut share = shares.next();
        let mut base = 0;
        for &range in ranges {
            let mut rest = range;
            while rest.count > 0 {
                let Some(current) = share else { break };
                let take = u32::try_from(current.pages)
                    .unwrap_or(u32::MAX)
                    .min(rest.count);
                if take == 0 {
                    share = shares.next();
                    base = 0;
                    continue;
                }
                let (pages, after) = rest.split_at(take);
                extents.push(Extent {
                    pages,
                    home: current.node,
                    base,
                });
                base += if current.node == NodeId::COMPUTE {
                    0
                } else {
                    pages.bytes()
                };
                share = Some(Loan {
                    pages: current.pages - u64::from(take),
                    ..current
                });
                rest = after;
            }
        }
        Self {
            epoch: 1,
            extents,
            region: None,
        }
    }

    /// The version of this layout.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Lets pages be added while the guest runs.
    pub(crate) fn add_region(&mut self, region: Arc<Region>) {
        self.region = Some(region);
    }

    /// What may be added while the guest runs.
    #[must_use]
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.region.as_ref()
    }

    /// All extents of the guest's start, by rising address.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The extent that holds `page`; `None` for a page outside the guest's memory.
    #[must_use]
    pub fn extent_of(&self, page: PageIndex) -> Option<Extent> {
        let after = self
            .extents
            .partition_point(|extent| extent.pages.first <= page);
        self.extents[..after]
            .last()
            .filter(|extent| extent.pages.contains(page))
            .copied()
            .or_else(|| self.region.as_ref()?.extent_of(page))
    }

    /// What becomes of a page that leaves this node.
    pub(crate) fn lot_of(&self, page: PageIndex) -> Lot {
        if let Some(region) = &self.region
            && let Some(block) = region.block_of(page)
            && !region.stays(block)
        {
            return Lot::Nowhere;
        }
        match self.extent_of(page).map(|extent| extent.home) {
            None | Some(NodeId::NOWHERE) => Lot::Nowhere,
            Some(NodeId::COMPUTE) => Lot::Here,
            Some(NodeId(donor)) => Lot::Donor(usize::from(donor) - 1),
        }
    }

    /// The extents at home on `node`, by rising address.
    pub fn extents_at(&self, node: NodeId) -> impl Iterator<Item = &Extent> {
        self.extents
            .iter()
            .filter(move |extent| extent.home == node)
    }

    /// Pages at home on `node`, with those that were added.
    #[must_use]
    pub fn pages_at(&self, node: NodeId) -> u64 {
        let extents = self.extents_at(node);
        let pages: u64 = extents.map(|extent| u64::from(extent.pages.count)).sum();
        let region = self.region.as_ref();
        let added = region.map_or(0, |region| region.plugged_at(node) * BLOCK_PAGES);
        pages + u64::from(added)
    }

    /// The number after the last page's of the guest's start.
    #[must_use]
    pub fn boot_span_pages(&self) -> u64 {
        self.extents.last().map_or(0, |extent| extent.pages.end())
    }

    /// The number after the last page's that there may ever be.
    #[must_use]
    pub fn span_pages(&self) -> u64 {
        let region = self.region.as_ref();
        region.map_or_else(|| self.boot_span_pages(), |region| region.pages().end())
    }
}

#[cfg(test)]
mod tests;
