//! The division of a guest's memory, from its size, a local budget and the donors' loans.

use super::node::NodeId;
use super::table::{BLOCK_PAGES, Home, HomeTable};
use fabric_pages::page::PAGE_SHIFT;
use std::sync::Arc;

/// Smallest cache of remote pages: 16 MiB. With less, the pages of a few instructions and their
/// operands evict each other.
pub const CACHE_PAGES_MIN: u64 = (16 << 20) >> PAGE_SHIFT;

/// Use of local memory if donors could lend all of the guest's memory.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LocalUse {
    /// A cache of pages with their home on donors: for guests that see no NUMA nodes.
    #[default]
    Cache,
    /// Home memory, except a quarter (at least [`CACHE_PAGES_MIN`]) that is a cache: for guests
    /// that see nodes, and place their data themselves.
    Home,
}

impl LocalUse {
    /// Returns how many of a guest's pages have their home here if the donors lend the rest.
    #[must_use]
    pub fn home_here(self, guest_pages: u64, local_pages: u64) -> u64 {
        let wanted = match self {
            _ if local_pages >= guest_pages => return guest_pages,
            Self::Cache => 0,
            Self::Home => local_pages - (local_pages / 4).max(CACHE_PAGES_MIN).min(local_pages),
        };
        wanted - wanted % u64::from(BLOCK_PAGES)
    }
}

/// The memory that a donor lends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Loan {
    /// The donor.
    pub node: NodeId,
    /// Number of pages.
    pub pages: u64,
    /// The number of its first slot. It is not 0 where the slots of all loans have consecutive
    /// numbers, as with replicas.
    pub first_slot: u32,
}

/// The division of a guest's memory.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The home of every block.
    pub homes: Arc<HomeTable>,
    /// Pages with their home on the local node: always resident.
    pub home_here_pages: u64,
    /// Limit of resident pages with their home elsewhere.
    pub cache_pages: u64,
    /// The part of these pages that exceeds the local budget: the loans leave no room for a cache
    /// within it, or a block cannot be split between a donor and this node.
    pub beyond_budget_pages: u64,
}

/// Why budget and loans cannot hold a guest.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Their sum is less than the guest's memory.
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
        /// Missing memory, MiB, rounded up.
        missing_mib: u64,
    },
}

/// A loan during the assignment of blocks.
#[derive(Debug)]
struct Share {
    loan: Loan,
    /// Number of blocks to assign to it.
    blocks: u64,
    /// Number of assigned slots.
    used: u32,
}

impl Share {
    /// Returns the home of the next block, of which the pages below `end_in_block` belong to the
    /// guest. Returns `None` when the share has all its blocks, or the end of the loan cuts its
    /// last slot too short.
    fn place(&mut self, end_in_block: u64) -> Option<Home> {
        let start = u64::from(self.used) * u64::from(BLOCK_PAGES);
        let fits = u64::from(self.used) < self.blocks && start + end_in_block <= self.loan.pages;
        fits.then(|| {
            let slot = self.loan.first_slot + self.used;
            self.used += 1;
            Home {
                node: self.loan.node,
                slot,
            }
        })
    }
}

impl Plan {
    /// Divides a guest's memory over a local budget of `local_pages` and the loans, and assigns
    /// homes in a table without any.
    ///
    /// The home is the local node for what the loans do not cover, and for the part that
    /// [`LocalUse`] defines: half of it at the lowest addresses, where a kernel is loaded, and half
    /// at the highest, where the kernel allocates its own tables during its start. The blocks in
    /// between are divided among the donors in proportion to their loans, consecutive ones for
    /// each. A block has one home, so the part of a loan beyond whole blocks is used only for the
    /// last block of a guest that ends inside it.
    ///
    /// # Errors
    ///
    /// [`PlanError::TooLittle`] when budget and loans together are smaller than the guest.
    pub fn new(
        homes: HomeTable,
        local_pages: u64,
        local_use: LocalUse,
        loans: &[Loan],
    ) -> Result<Self, PlanError> {
        let guest_pages = homes.ram_pages();
        let lent: u64 = loans.iter().map(|loan| loan.pages).sum();
        if guest_pages > local_pages.saturating_add(lent) {
            let mib = |pages: u64| pages >> (20 - PAGE_SHIFT);
            return Err(PlanError::TooLittle {
                guest_mib: mib(guest_pages),
                local_mib: mib(local_pages),
                lent_mib: mib(lent),
                missing_mib: (guest_pages - local_pages - lent).div_ceil(1 << (20 - PAGE_SHIFT)),
            });
        }
        let here = local_use.home_here(guest_pages, local_pages);
        assign(&homes, guest_pages - here, loans);
        let home_here = homes.pages_at(homes.local());
        let remote = guest_pages - home_here;
        let within_budget = local_pages.saturating_sub(home_here).min(remote);
        let mut cache = within_budget.max(CACHE_PAGES_MIN.min(remote));
        if homes.added().is_some() {
            if loans.is_empty() {
                // There is nothing to cache yet: the cache is what the guest leaves.
                cache = local_pages.saturating_sub(guest_pages);
            }
            cache = cache.max(CACHE_PAGES_MIN);
        }
        Ok(Self {
            homes: Arc::new(homes),
            home_here_pages: home_here,
            cache_pages: cache,
            beyond_budget_pages: (home_here + cache).saturating_sub(local_pages),
        })
    }
}

/// Assigns all initial blocks: to donors as many as `remote_pages` fill, if the loans suffice, and
/// the others to the local node.
fn assign(homes: &HomeTable, remote_pages: u64, loans: &[Loan]) {
    let mut blocks: Vec<u32> = Vec::new();
    for range in homes.ram().iter().filter(|range| range.count > 0) {
        let last = (range.end() - 1) / u64::from(BLOCK_PAGES);
        let last = u32::try_from(last).expect("below the limit of guest memory");
        let first = HomeTable::block_of(range.first);
        // Two ranges may meet inside a block.
        let first = blocks.last().map_or(first, |&before| first.max(before + 1));
        blocks.extend(first..=last);
    }
    let end_in_block = |block: u32| {
        let first = u64::from(block) * u64::from(BLOCK_PAGES);
        homes.pages_of(block).end() - first
    };
    let mut shares = shares(remote_pages, loans, blocks.last().map(|&b| end_in_block(b)));
    let lent: u64 = shares.iter().map(|share| share.blocks).sum();
    let here = (blocks.len() as u64).saturating_sub(lent);
    let low = if lent == 0 { here } else { here.div_ceil(2) };
    let mut donors = shares.iter_mut().peekable();
    for (number, &block) in (0..).zip(&blocks) {
        let mut home = None;
        while number >= low && home.is_none() {
            let Some(share) = donors.peek_mut() else {
                break;
            };
            home = share.place(end_in_block(block));
            if home.is_none() {
                donors.next();
            }
        }
        homes.assign_at_start(
            block,
            home.unwrap_or(Home {
                node: homes.local(),
                slot: 0,
            }),
        );
    }
}

/// Returns the number of blocks for each loan, in proportion to its size. `tail` is the length of
/// the guest's last block.
fn shares(remote_pages: u64, loans: &[Loan], tail: Option<u64>) -> Vec<Share> {
    let block_pages = u64::from(BLOCK_PAGES);
    let slots = |loan: &Loan, is_last: bool| {
        // The last block may need less than a slot.
        let rest = loan.pages % block_pages;
        let tail_fits = is_last && tail.is_some_and(|tail| rest >= tail);
        loan.pages / block_pages + u64::from(tail_fits)
    };
    let slots: Vec<u64> = (1..)
        .zip(loans)
        .map(|(number, loan)| slots(loan, number == loans.len()))
        .collect();
    let mut slots_left: u64 = slots.iter().sum();
    let mut left = remote_pages.div_ceil(block_pages).min(slots_left);
    let mut shares = Vec::with_capacity(loans.len());
    for (&loan, slots) in loans.iter().zip(slots) {
        // Proportional, with an exact sum: the last donor gets the remainder.
        let share = u128::from(left) * u128::from(slots);
        let share = share.div_ceil(u128::from(slots_left).max(1));
        let blocks = u64::try_from(share).unwrap_or(left).min(left).min(slots);
        left -= blocks;
        slots_left -= slots;
        shares.push(Share {
            loan,
            blocks,
            used: 0,
        });
    }
    shares
}

#[cfg(test)]
mod tests;
