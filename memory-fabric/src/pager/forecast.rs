//! Predicts whether a page that is read first will be written soon.
//!
//! A page that is mapped read-only costs one more fault when it is written after all; one that is
//! mapped writable must be written back when it is evicted, changed or not. Neither is always
//! better, so the pager runs trials, and follows the guest's recent pages.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// Pages mapped read-only in one trial.
const TRIAL: u32 = 512;
/// Pages mapped writable at once after a failed trial.
const TRUST: u32 = 8 * TRIAL;
/// A trial fails when at least one of this many of its pages was written. A write fault delays a
/// vCPU; a needless write-back takes bandwidth, but nothing waits for it.
const WRITTEN_SHARE: u32 = 3;

/// Decides the protection of pages that were touched by a read, or by an unknown access. Shared by
/// the threads that map; concurrent decisions may make the counts slightly wrong.
#[derive(Debug, Default)]
pub(crate) struct WriteForecast {
    /// Pages mapped read-only in this trial.
    tried: AtomicU32,
    /// Faults for writing on read-only pages in this trial.
    written: AtomicU32,
    /// Pages that are still to be mapped writable at once.
    trusted: AtomicU32,
}

impl WriteForecast {
    /// Returns whether to map the next pages, which arrive in one run and of which one was only
    /// read, writable at once.
    pub fn map_writable(&self, pages: u32) -> bool {
        // Relaxed here and below: these are counts whose order does not matter.
        let trusted = self.trusted.load(Relaxed);
        if trusted > 0 {
            self.trusted.store(trusted.saturating_sub(pages), Relaxed);
            return true;
        }
        let tried = self.tried.load(Relaxed);
        if tried < TRIAL {
            self.tried.store(tried + pages, Relaxed);
            return false;
        }
        if self.written.swap(0, Relaxed) >= tried / WRITTEN_SHARE {
            self.trusted.store(TRUST, Relaxed);
        }
        self.tried.store(pages, Relaxed);
        false
    }

    /// Records that a page that was mapped read-only is written now.
    pub fn was_written(&self) {
        self.written.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves this many read faults of a guest that writes every `nth` page that it has read;
    /// returns how many were mapped writable at once.
    fn writable_of(faults: u32, nth: u32, forecast: &WriteForecast) -> u32 {
        let mut writable = 0;
        for fault in 0..faults {
            if forecast.map_writable(1) {
                writable += 1;
            } else if fault % nth == 0 {
                forecast.was_written();
            }
        }
        writable
    }

    #[test]
    fn a_guest_that_writes_everything_seldom_pays_twice() {
        let writable = writable_of(100_000, 1, &WriteForecast::default());
        assert!(writable > 85_000, "{writable}");
    }

    #[test]
    fn a_guest_that_mostly_reads_keeps_its_pages_clean() {
        assert_eq!(writable_of(100_000, 4, &WriteForecast::default()), 0);
    }

    #[test]
    fn a_change_of_habit_is_noticed() {
        let forecast = WriteForecast::default();
        writable_of(50_000, 1, &forecast);
        let before_noticed = writable_of(2 * TRUST, 1000, &forecast);
        assert!(before_noticed <= TRUST, "{before_noticed}");
        assert_eq!(writable_of(50_000, 1000, &forecast), 0);
    }

    #[test]
    fn runs_count_as_so_many_pages() {
        let forecast = WriteForecast::default();
        let (mut writable, mut written) = (0, 0);
        for run in 0..10_000_u32 {
            if forecast.map_writable(32) {
                writable += 32;
            } else if run % 4 == 0 {
                // The guest writes one run of four.
                (0..32).for_each(|_| forecast.was_written());
                written += 32;
            }
        }
        assert_eq!(writable, 0, "{written} pages of 320,000 were written");
        for _ in 0..10_000 {
            if forecast.map_writable(32) {
                writable += 32;
            } else {
                (0..32).for_each(|_| forecast.was_written());
            }
        }
        assert!(writable > 270_000, "{writable}");
    }
}
