//! The time between a page's eviction and its return, counted in evictions.

use std::sync::atomic::{AtomicU32, Ordering};

/// Counts evictions. Only the evictor advances it.
#[derive(Debug, Default)]
pub(super) struct EvictionClock {
    now: AtomicU32,
    /// Number of evictions within which a page's return shows that it should have stayed.
    recent: AtomicU32,
}

impl EvictionClock {
    /// For the evictor: returns the stamp of a page that is evicted now.
    pub fn tick(&self) -> u32 {
        // Relaxed here and below: the ranking tolerates slightly outdated values.
        self.now.fetch_add(1, Ordering::Relaxed)
    }

    /// For the evictor: returns the stamp of a page that is evicted unused. It counts as evicted
    /// long ago.
    pub fn never_used(&self) -> u32 {
        self.now.load(Ordering::Relaxed).wrapping_sub(u32::MAX / 2)
    }

    /// For the evictor: sets the number of active pages. A page that returns after fewer evictions
    /// would still be resident, had it been active.
    pub fn set_recent(&self, active: usize) {
        let recent = u32::try_from(active).unwrap_or(u32::MAX);
        self.recent.store(recent, Ordering::Relaxed);
    }

    /// Returns whether a page with this stamp was evicted recently.
    pub fn is_recent(&self, stamp: u32) -> bool {
        let away = self.now.load(Ordering::Relaxed).wrapping_sub(stamp);
        away < self.recent.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_away_for_less_than_the_active_ones_is_recent() {
        let clock = EvictionClock::default();
        let stamp = clock.tick();
        assert!(!clock.is_recent(stamp), "nothing is known yet");
        clock.set_recent(10);
        assert!(clock.is_recent(stamp));
        for _ in 0..10 {
            clock.tick();
        }
        assert!(!clock.is_recent(stamp));
        clock.set_recent(1 << 30);
        assert!(clock.is_recent(stamp));
        assert!(!clock.is_recent(clock.never_used()));
    }
}
