//! The home of ordered pages.

use super::Shared;
use crate::page::PageIndex;
use crate::pager::detect::Order;

/// The home of the first page of an order. The home of a block can change at any time: a block of
/// added memory loses its home unless a page of it is held, and one of initial memory moves. A home
/// that is read while a page is held, even if it is an old one by now, has the page's bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub donor: usize,
    /// Offset of the first page there.
    pub offset: u64,
    /// Limit of pages in one request: at most those of the order, and all with this home.
    pub most: u32,
    /// Limit of pages in transit from there.
    pub in_flight_max: u32,
}

impl Target {
    /// Returns whether both are the same place.
    pub(super) fn is_same_home(&self, other: &Self) -> bool {
        (self.donor, self.offset) == (other.donor, other.offset) && self.most >= other.most
    }

    /// Returns `None` when there is nothing to fetch: the first page has its home here or nowhere,
    /// its home is lost, or it is not guest memory.
    pub(super) fn of(shared: &Shared, order: Order) -> Option<Self> {
        let page = PageIndex::new(order.first);
        let home = shared.homes.remote_home_of(page)?;
        if shared.homes.is_lost(page) {
            return None;
        }
        let donor = shared.homes.link_to_home(home);
        let policy = shared.policies.of(donor);
        let most = if order.stride == 1 {
            let most = order.count.min(policy.run_pages);
            shared.homes.contiguous(page, home, most)
        } else {
            1
        };
        Some(Self {
            donor,
            offset: home.offset_of(page),
            most,
            in_flight_max: policy.in_flight_pages,
        })
    }
}

/// Releases a page that was taken to be fetched but is not: it is remote again.
pub(super) fn abandon(shared: &Shared, page: PageIndex) {
    let contended = shared.map.entry(page).abandon_fetch();
    if contended {
        shared.faults.retry(page);
    }
    if shared.budget.release(1) || contended {
        shared.faults.wake();
    }
}
