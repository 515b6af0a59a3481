//! Where blocks that are plugged find their memory.

use super::Place;
use crate::layout::NodeId;

/// What a donor that joined lends.
#[derive(Debug)]
struct Pool {
    blocks: u32,
    /// Blocks from here on were never given out.
    next: u32,
    returned: Vec<u32>,
    used: u32,
    /// Whether the donor can be reached.
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

/// All there is, in blocks.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    requested: u32,
    /// How many may be at home here.
    local_max: u32,
    local_used: u32,
    /// By the number of the donor, from 0 on.
    donors: Vec<Option<Pool>>,
}

impl Pools {
    /// What donors lend that joined, and may be given out.
    fn lent(&self) -> u32 {
        let pools = self.donors.iter().flatten();
        let usable = |pool: &Pool| if pool.usable { pool.blocks } else { pool.used };
        pools.map(usable).sum()
    }

    /// What is missing to what is asked for: beyond donors, and what is at home here already.
    pub fn missing(&self, requested: u32) -> u32 {
        requested.saturating_sub(self.lent() + self.local_used)
    }

    /// So much is asked for from now on; what donors do not lend of it comes from here.
    pub fn request(&mut self, requested: u32) {
        self.requested = requested;
        let rest = requested.saturating_sub(self.lent());
        self.local_max = rest.max(self.local_used);
    }

    /// A donor lends so much from now on.
    pub fn join(&mut self, donor: usize, blocks: u32, usable: bool) {
        while self.donors.len() <= donor {
            self.donors.push(None);
        }
        self.donors[donor] = Some(Pool {
            blocks,
            next: 0,
            returned: Vec::new(),
            used: 0,
            usable,
        });
    }

    /// A donor of which nothing is used does not lend any more. False when something is, or it
    /// never did.
    pub fn leave(&mut self, donor: usize) -> bool {
        let unused = self.used_of(donor) == Some(0);
        if unused {
            self.donors[donor] = None;
        }
        unused
    }

    /// Whether something of a donor may be given out.
    pub fn set_usable(&mut self, donor: usize, usable: bool) {
        if let Some(Some(pool)) = self.donors.get_mut(donor) {
            pool.usable = usable;
        }
    }

    /// Blocks at home on a donor that lends.
    pub fn used_of(&self, donor: usize) -> Option<u32> {
        Some(self.donors.get(donor)?.as_ref()?.used)
    }

    /// Donors of which nothing is used, and without which there is enough; the last first.
    pub fn idle(&self) -> Vec<usize> {
        let mut lent = self.lent();
        let mut idle = Vec::new();
        for (donor, pool) in self.donors.iter().enumerate().rev() {
            let Some(pool) = pool.as_ref().filter(|pool| pool.used == 0) else {
                continue;
            };
            let of_it = if pool.usable { pool.blocks } else { 0 };
            if lent - of_it + self.local_max >= self.requested {
                lent -= of_it;
                idle.push(donor);
            }
        }
        idle
    }

    /// Memory for `count` blocks, of the donors that joined first, and then of this node. `None`
    /// when there is not enough for all.
    pub fn take(&mut self, count: u32) -> Option<Vec<Place>> {
        let of_donors: u32 = self.donors.iter().flatten().map(Pool::free).sum();
        if count > of_donors + (self.local_max - self.local_used) {
            return None;
        }
        let mut places = Vec::with_capacity(count as usize);
        let mut left = count;
        let donors = (1..).zip(&mut self.donors);
        for (node, pool) in donors.filter_map(|(node, pool)| Some((node, pool.as_mut()?))) {
            let part = pool.free().min(left);
            left -= part;
            pool.used += part;
            for _ in 0..part {
                let block = pool.returned.pop().unwrap_or_else(|| {
                    pool.next += 1;
                    pool.next - 1
                });
                let home = NodeId(node);
                places.push(Place { home, block });
            }
        }
        self.local_used += left;
        let here = Place {
            home: NodeId::COMPUTE,
            block: 0,
        };
        places.extend(std::iter::repeat_n(here, left as usize));
        Some(places)
    }

    /// Takes memory back.
    pub fn give_back(&mut self, place: Place) {
        if place.home == NodeId::COMPUTE {
            self.local_used -= 1;
            // What this node gave up is not given out again without being asked for.
            self.request(self.requested);
        } else if let Some(Some(pool)) = self.donors.get_mut(usize::from(place.home.0) - 1) {
            pool.used -= 1;
            pool.returned.push(place.block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn homes(places: &[Place]) -> Vec<u16> {
        places.iter().map(|place| place.home.0).collect()
    }

    #[test]
    fn what_donors_lend_is_used_first_and_this_node_gives_the_rest() {
        let mut pools = Pools::default();
        assert_eq!(pools.take(1), None, "nothing is asked for");
        pools.join(1, 2, true);
        pools.join(3, 1, true);
        assert_eq!(pools.missing(5), 2);
        pools.request(5);
        assert_eq!(pools.take(6), None, "all or nothing");
        assert_eq!(homes(&pools.take(5).expect("enough")), [2, 2, 4, 0, 0]);
        assert_eq!(pools.take(1), None);
        assert_eq!(pools.missing(7), 2);
    }

    #[test]
    fn a_donor_leaves_when_nothing_of_it_is_used_and_the_rest_suffices() {
        let mut pools = Pools::default();
        pools.join(0, 4, true);
        pools.join(1, 4, true);
        pools.request(8);
        assert!(pools.idle().is_empty(), "both are wanted still");
        let places = pools.take(6).expect("enough");
        pools.request(4);
        assert!(pools.idle().is_empty());
        for &place in &places[4..] {
            pools.give_back(place);
        }
        assert_eq!(pools.idle(), [1]);
        assert!(!pools.leave(0) && pools.leave(1) && !pools.leave(1));
        pools.request(0);
        assert!(pools.idle().is_empty());
        for &place in &places[..4] {
            pools.give_back(place);
        }
        assert_eq!(pools.idle(), [0]);
    }

    #[test]
    fn a_donor_that_cannot_be_reached_gets_no_more_blocks() {
        let mut pools = Pools::default();
        pools.join(0, 4, true);
        pools.request(4);
        assert_eq!(pools.take(1).map(|places| places.len()), Some(1));
        pools.set_usable(0, false);
        assert_eq!(pools.take(1), None);
        assert_eq!(pools.missing(4), 3);
        pools.set_usable(0, true);
        assert_eq!(pools.take(3).map(|places| places.len()), Some(3));
    }

    proptest! {
        #[test]
        fn no_place_is_given_out_twice(
            steps in prop::collection::vec((0_u32..6, 0_u32..40, any::<prop::sample::Index>()), 1..60),
        ) {
            let mut pools = Pools::default();
            let mut out: Vec<Place> = Vec::new();
            for (step, number, index) in steps {
                match step {
                    0 => pools.request(number),
                    1 => {
                        let donor = index.index(4);
                        if pools.used_of(donor).is_none() {
                            pools.join(donor, number, true);
                        }
                    }
                    2 => if let Some(places) = pools.take(number) {
                        prop_assert_eq!(places.len(), number as usize);
                        out.extend(places);
                    }
                    3 if !out.is_empty() => pools.give_back(out.swap_remove(index.index(out.len()))),
                    4 => for donor in pools.idle() {
                        prop_assert!(pools.leave(donor));
                    }
                    _ => pools.set_usable(index.index(4), number % 2 == 0),
                }
                let mut seen = HashSet::new();
                for place in out.iter().filter(|place| place.home != NodeId::COMPUTE) {
                    prop_assert!(seen.insert((place.home, place.block)), "{place:?} twice");
                }
                let here = out.iter().filter(|place| place.home == NodeId::COMPUTE).count();
                prop_assert_eq!(here, pools.local_used as usize);
                for donor in 0..4 {
                    let node = NodeId(donor + 1);
                    let used = out.iter().filter(|place| place.home == node).count();
                    let counted = pools.used_of(donor.into()).unwrap_or(0);
                    prop_assert_eq!(used, counted as usize);
                }
            }
        }
    }
}
