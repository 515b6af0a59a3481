//! What the pager's threads go by on each link.

use crate::link::path::PathStats;
use crate::policy::{Policy, PolicyCell, Tier};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The policies of links as they are now.
#[derive(Debug)]
pub(crate) struct Policies {
    /// One for each donor, in order; none for the loopback slab.
    paths: Box<[Arc<PathStats>]>,
    /// Which of these donors have left.
    left: Box<[AtomicBool]>,
    /// Donors of the start.
    fixed: usize,
    /// What donors have that joined since, as it is looked up.
    joined: Box<[PolicyCell]>,
    /// Where that comes from.
    joined_paths: Mutex<Vec<Option<Arc<PathStats>>>>,
    /// Of the slowest.
    all: PolicyCell,
}

impl Policies {
    /// For `fixed` donors of the start, and up to `joiners` that join.
    pub fn new(paths: Vec<Arc<PathStats>>, fixed: usize, joiners: usize) -> Self {
        let cells = (0..joiners).map(|_| PolicyCell::new(Tier::FastTcp));
        let policies = Self {
            left: paths.iter().map(|_| AtomicBool::new(false)).collect(),
            paths: paths.into(),
            fixed,
            joined: cells.collect(),
            joined_paths: Mutex::new(vec![None; joiners]),
            all: PolicyCell::new(Tier::FastTcp),
        };
        policies.renew();
        policies
    }

    /// To be called when the tier of a link has changed.
    pub fn renew(&self) {
        let joined = self.joined_paths.lock();
        let joined = joined.unwrap_or_else(PoisonError::into_inner);
        for (cell, path) in self.joined.iter().zip(joined.iter()) {
            if let Some(path) = path {
                path.show_in(cell);
            }
        }
        let paths = self.paths.iter().zip(&self.left);
        // Relaxed: it changes once, and what follows from it is a hint.
        let paths = paths.filter(|(_, left)| !left.load(Ordering::Relaxed));
        let paths = paths.map(|(path, _)| path).chain(joined.iter().flatten());
        if let Some(slowest) = paths.map(|path| path.tier()).max() {
            self.all.set_tier(slowest);
        }
    }

    /// A donor has joined in this place, or left it.
    pub fn join(&self, donor: usize, path: Option<Arc<PathStats>>) {
        let joined = self.joined_paths.lock();
        let mut joined = joined.unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = joined.get_mut(donor - self.fixed) {
            *place = path;
        }
        drop(joined);
        self.renew();
    }

    /// A donor of the start has left.
    pub fn leave(&self, donor: usize) {
        if let Some(left) = self.left.get(donor) {
            left.store(true, Ordering::Relaxed);
        }
        self.renew();
    }

    /// For the link to a donor.
    pub fn of(&self, donor: usize) -> Policy {
        if let Some(cell) = donor
            .checked_sub(self.fixed)
            .and_then(|at| self.joined.get(at))
        {
            return cell.policy();
        }
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
    use crate::transport::PathKind;
    use crate::transport::select::Selection;
    use std::time::Duration;

    /// A way that takes so many microseconds.
    fn path(us: u64) -> Arc<PathStats> {
        let latency = Duration::from_micros(us);
        let path = PathStats::new(
            Selection::all(PathKind::Tcp),
            (PathKind::Tcp, None),
            None,
            latency,
        );
        Arc::new(path)
    }

    #[test]
    fn a_donor_that_joins_counts_until_it_leaves() {
        let policies = Policies::new(vec![path(50)], 1, 2);
        policies.join(2, Some(path(10_000)));
        assert_eq!(policies.all(), Policy::of(Tier::Slow));
        assert_eq!(policies.of(2), Policy::of(Tier::Slow));
        assert_eq!(policies.of(0), Policy::of(Tier::FastTcp));
        policies.join(2, None);
        assert_eq!(policies.all(), Policy::of(Tier::FastTcp));
    }

    #[test]
    fn the_slowest_link_decides_what_is_for_all() {
        let policies = Policies::new(vec![path(50), path(150)], 2, 0);
        assert_eq!(policies.all(), Policy::of(Tier::FastTcp));
        policies.paths[1].set_tier(Tier::Slow);
        policies.renew();
        assert_eq!(policies.all(), Policy::of(Tier::Slow));
        assert_eq!(policies.of(0), Policy::of(Tier::FastTcp));
        assert_eq!(policies.of(1), Policy::of(Tier::Slow));
        assert_eq!(policies.of(2), policies.all(), "nothing is known of it");
        policies.leave(1);
        assert_eq!(policies.all(), Policy::of(Tier::FastTcp), "it has left");
        assert_eq!(
            Policies::new(Vec::new(), 0, 0).all(),
            Policy::of(Tier::FastTcp)
        );
    }
}
