//! How long an evicted page was away, counted in evictions.

use std::sync::atomic::{AtomicU32, Ordering};

/// Counts evictions. Only the evictor advances it.
#[derive(Debug, Default)]
pub(super) struct EvictionClock {
    now: AtomicU32,
    /// A page evicted fewer evictions ago than this should have stayed.
    recent: AtomicU32,
}

impl EvictionClock {
    /// The evictor: the stamp of a page that is evicted now.
    pub fn tick(&self) -> u32 {
        // Relaxed here and below: the ranking tolerates a value that is slightly out of date.
        self.now.fetch_add(1, Ordering::Relaxed)
    }

    /// The evictor: the stamp of a page that is evicted without having been used. It counts as
    /// evicted long ago.
    pub fn never_used(&self) -> u32 {
        self.now.load(Ordering::Relaxed).wrapping_sub(u32::MAX / 2)
    }

    /// The evictor: sets how many pages are settled. A page that was away for fewer evictions
    /// would still be here, had it been settled.
    pub fn set_recent(&self, settled: usize) {
        let recent = u32::try_from(settled).unwrap_or(u32::MAX);
        self.recent.store(recent, Ordering::Relaxed);
    }

    /// Whether a page with this stamp was evicted recently.
    pub fn is_recent(&self, stamp: u32) -> bool {
        let away = self.now.load(Ordering::Relaxed).wrapping_sub(stamp);
        away < self.recent.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_away_for_less_than_the_settled_ones_is_recent() {
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
