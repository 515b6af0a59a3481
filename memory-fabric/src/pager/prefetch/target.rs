//! Where ordered pages are at home.

use super::Shared;
use crate::page::PageIndex;
use crate::pager::detect::Order;

/// The home of what an order begins with. Of memory that was added it may be another one at any
/// time, unless the caller holds the order's first page: a block whose pages are not all let go of
/// keeps its home.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub donor: usize,
    /// The place of the first page there.
    pub offset: u64,
    /// Pages that one request may ask for: no more than the order has, and all at this home.
    pub most: u32,
    /// Most pages on their way from there.
    pub in_flight_max: u32,
}

impl Target {
    /// `None` when there is nothing to fetch: the first page is at home here, or nowhere, or is
    /// no guest memory.
    pub(super) fn of(shared: &Shared, order: Order) -> Option<Self> {
        let page = PageIndex::new(order.first);
        let home = shared.homes.remote_home_of(page)?;
        let donor = shared.link_to(home);
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

/// Releases a page that was taken to be fetched and is not: it is remote again.
pub(super) fn give_back(shared: &Shared, page: PageIndex) {
    let contended = shared.map.entry(page).abandon_fetch();
    if contended {
        shared.faults.retry(page);
    }
    if shared.budget.release(1) || contended {
        shared.faults.wake();
    }
}
