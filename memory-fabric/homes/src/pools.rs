//! Homes for blocks that are added to a running guest: loans of donors that joined, and memory of
//! this node.

use super::node::NodeId;
use super::table::Home;
use std::collections::BTreeMap;

/// The loan of a donor that joined.
#[derive(Debug)]
struct Pool {
    blocks: u32,
    /// First block that was never assigned.
    next: u32,
    returned: Vec<u32>,
    used: u32,
    /// Whether the donor is reachable.
    usable: bool,
}

impl Pool {
    fn free(&self) -> u32 {
        if self.usable {
            self.blocks - self.used
        } else {
            0
        }
    }
}

/// All pools, in blocks.
#[derive(Debug)]
pub struct Pools {
    local: NodeId,
    requested: u32,
    /// Limit of blocks with their home here.
    local_max: u32,
    local_used: u32,
    donors: BTreeMap<NodeId, Pool>,
}

impl Pools {
    /// Creates empty pools.
    #[must_use]
    pub fn new(local: NodeId) -> Self {
        Self {
            local,
            requested: 0,
            local_max: 0,
            local_used: 0,
            donors: BTreeMap::new(),
        }
    }

    /// Returns the loans of joined donors, as far as they are usable or used.
    fn lent(&self) -> u32 {
        let usable = |pool: &Pool| if pool.usable { pool.blocks } else { pool.used };
        self.donors.values().map(usable).sum()
    }

    /// Returns the missing blocks: beyond the loans, and those with their home here already.
    #[must_use]
    pub fn missing(&self, requested: u32) -> u32 {
        requested.saturating_sub(self.lent() + self.local_used)
    }

    /// Sets the requested number of blocks; this node provides what donors do not lend.
    pub fn request(&mut self, requested: u32) {
        self.requested = requested;
        let rest = requested.saturating_sub(self.lent());
        self.local_max = rest.max(self.local_used);
    }

    /// Adds the loan of a donor.
    pub fn join(&mut self, donor: NodeId, blocks: u32, usable: bool) {
        let pool = Pool {
            blocks,
            next: 0,
            returned: Vec::new(),
            used: 0,
            usable,
        };
        self.donors.insert(donor, pool);
    }

    /// Removes an unused donor. Returns false if some of its blocks are used, or it does not lend.
    pub fn leave(&mut self, donor: NodeId) -> bool {
        let unused = self.used_of(donor) == Some(0);
        if unused {
            self.donors.remove(&donor);
        }
        unused
    }

    /// Sets whether blocks of a donor may be assigned.
    pub fn set_usable(&mut self, donor: NodeId, usable: bool) {
        if let Some(pool) = self.donors.get_mut(&donor) {
            pool.usable = usable;
        }
    }

    /// Returns the number of blocks with their home on a lending donor.
    #[must_use]
    pub fn used_of(&self, donor: NodeId) -> Option<u32> {
        Some(self.donors.get(&donor)?.used)
    }

    /// Returns the unused donors that are not needed, the last one first.
    #[must_use]
    pub fn idle(&self) -> Vec<NodeId> {
        let mut lent = self.lent();
        let mut idle = Vec::new();
        for (&donor, pool) in self.donors.iter().rev() {
            if pool.used > 0 {
                continue;
            }
            let of_it = if pool.usable { pool.blocks } else { 0 };
            if lent - of_it + self.local_max >= self.requested {
                lent -= of_it;
                idle.push(donor);
            }
        }
        idle
    }

    /// Takes homes for `count` blocks, from the donors with the lowest ids first, and then from
    /// this node. Returns `None` if there are not enough for all.
    pub fn take(&mut self, count: u32) -> Option<Vec<Home>> {
        let of_donors: u32 = self.donors.values().map(Pool::free).sum();
        if count > of_donors + (self.local_max - self.local_used) {
            return None;
        }
        let mut homes = Vec::with_capacity(count as usize);
        let mut left = count;
        for (&node, pool) in &mut self.donors {
            let part = pool.free().min(left);
            left -= part;
            pool.used += part;
            for _ in 0..part {
                let slot = pool.returned.pop().unwrap_or_else(|| {
                    pool.next += 1;
                    pool.next - 1
                });
                homes.push(Home { node, slot });
            }
        }
        self.local_used += left;
        let here = Home {
            node: self.local,
            slot: 0,
        };
        homes.extend(std::iter::repeat_n(here, left as usize));
        Some(homes)
    }

    /// Returns a block to its pool.
    pub fn release(&mut self, home: Home) {
        if home.node == self.local {
            self.local_used -= 1;
            // Memory that this node gave up is not assigned again without a request.
            self.request(self.requested);
        } else if let Some(pool) = self.donors.get_mut(&home.node) {
            pool.used -= 1;
            pool.returned.push(home.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    /// Ids without a meaningful order.
    const LOCAL: NodeId = NodeId(7);
    const DONORS: [NodeId; 4] = [NodeId(0), NodeId(2), NodeId(4), NodeId(9)];

    fn nodes(homes: &[Home]) -> Vec<u8> {
        homes.iter().map(|home| home.node.0).collect()
    }

    #[test]
    fn what_donors_lend_is_used_first_and_this_node_gives_the_rest() {
        let mut pools = Pools::new(LOCAL);
        assert_eq!(pools.take(1), None, "nothing is asked for");
        pools.join(DONORS[1], 2, true);
        pools.join(DONORS[3], 1, true);
        assert_eq!(pools.missing(5), 2);
        pools.request(5);
        assert_eq!(pools.take(6), None, "all or nothing");
        assert_eq!(nodes(&pools.take(5).expect("enough")), [2, 2, 9, 7, 7]);
        assert_eq!(pools.take(1), None);
        assert_eq!(pools.missing(7), 2);
    }

    #[test]
    fn a_donor_leaves_when_nothing_of_it_is_used_and_the_rest_suffices() {
        let mut pools = Pools::new(LOCAL);
        pools.join(DONORS[0], 4, true);
        pools.join(DONORS[1], 4, true);
        pools.request(8);
        assert!(pools.idle().is_empty(), "both are wanted still");
        let places = pools.take(6).expect("enough");
        pools.request(4);
        assert!(pools.idle().is_empty());
        for &place in &places[4..] {
            pools.release(place);
        }
        assert_eq!(pools.idle(), [DONORS[1]]);
        assert!(!pools.leave(DONORS[0]) && pools.leave(DONORS[1]) && !pools.leave(DONORS[1]));
        pools.request(0);
        assert!(pools.idle().is_empty());
        for &place in &places[..4] {
            pools.release(place);
        }
        assert_eq!(pools.idle(), [DONORS[0]]);
    }

    #[test]
    fn a_donor_that_cannot_be_reached_gets_no_more_blocks() {
        let mut pools = Pools::new(LOCAL);
        pools.join(DONORS[0], 4, true);
        pools.request(4);
        assert_eq!(pools.take(1).map(|places| places.len()), Some(1));
        pools.set_usable(DONORS[0], false);
        assert_eq!(pools.take(1), None);
        assert_eq!(pools.missing(4), 3);
        pools.set_usable(DONORS[0], true);
        assert_eq!(pools.take(3).map(|places| places.len()), Some(3));
    }

    proptest! {
        #[test]
        fn no_place_is_given_out_twice(
            steps in prop::collection::vec((0_u32..6, 0_u32..40, any::<prop::sample::Index>()), 1..60),
        ) {
            let mut pools = Pools::new(LOCAL);
            let mut out: Vec<Home> = Vec::new();
            for (step, number, index) in steps {
                match step {
                    0 => pools.request(number),
                    1 => {
                        let donor = DONORS[index.index(4)];
                        if pools.used_of(donor).is_none() {
                            pools.join(donor, number, true);
                        }
                    }
                    2 => if let Some(places) = pools.take(number) {
                        prop_assert_eq!(places.len(), number as usize);
                        out.extend(places);
                    }
                    3 if !out.is_empty() => pools.release(out.swap_remove(index.index(out.len()))),
                    4 => for donor in pools.idle() {
                        prop_assert!(pools.leave(donor));
                    }
                    _ => pools.set_usable(DONORS[index.index(4)], number % 2 == 0),
                }
                let mut seen = HashSet::new();
                for home in out.iter().filter(|home| home.node != LOCAL) {
                    prop_assert!(seen.insert(*home), "{home:?} twice");
                }
                let here = out.iter().filter(|home| home.node == LOCAL).count();
                prop_assert_eq!(here, pools.local_used as usize);
                for node in DONORS {
                    let used = out.iter().filter(|home| home.node == node).count();
                    let counted = pools.used_of(node).unwrap_or(0);
                    prop_assert_eq!(used, counted as usize);
                }
            }
        }
    }
}
