//! What the pager's threads go by on each link.

use crate::link::path::PathStats;
use crate::policy::{Policy, PolicyCell, Tier};
use std::sync::Arc;

/// The policies of links as they are now.
#[derive(Debug)]
pub(crate) struct Policies {
    /// One for each donor, in order; none for the loopback slab.
    paths: Box<[Arc<PathStats>]>,
    /// Of the slowest.
    all: PolicyCell,
}

impl Policies {
    pub fn new(paths: Vec<Arc<PathStats>>) -> Self {
        let policies = Self {
            paths: paths.into(),
            all: PolicyCell::new(Tier::FastTcp),
        };
        policies.renew();
        policies
    }

    /// To be called when the tier of a link has changed.
    pub fn renew(&self) {
        if let Some(slowest) = self.paths.iter().map(|path| path.tier()).max() {
            self.all.set_tier(slowest);
        }
    }

    /// For the link to a donor.
    pub fn of(&self, donor: usize) -> Policy {
        let path = self.paths.get(donor);
        path.map_or_else(|| self.all(), |path| path.policy())
    }

    /// For what concerns all links alike.
    pub fn all(&self) -> Policy {
        self.all.policy()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_slowest_link_decides_what_is_for_all() {
        let path = |us| {
            let latency = Duration::from_micros(us);
            Arc::new(PathStats::new(Default::default(), None, None, latency))
        };
        let policies = Policies::new(vec![path(50), path(150)]);
        assert_eq!(policies.all(), Policy::of(Tier::FastTcp));
        policies.paths[1].set_tier(Tier::Slow);
        policies.renew();
        assert_eq!(policies.all(), Policy::of(Tier::Slow));
        assert_eq!(policies.of(0), Policy::of(Tier::FastTcp));
        assert_eq!(policies.of(1), Policy::of(Tier::Slow));
        assert_eq!(policies.of(2), policies.all(), "nothing is known of it");
        assert_eq!(Policies::new(Vec::new()).all(), Policy::of(Tier::FastTcp));
    }
}
