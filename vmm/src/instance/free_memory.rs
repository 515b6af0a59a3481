//! Free memory of the guest, from its balloon to the fabric, or to the memory that nodes share.

use std::sync::Arc;

use devices::virtio::{FreePages, FreeRange};
use memory_fabric::compute::Discards;
use memory_fabric::discard::{DiscardError, Discarder};
use memory_fabric::page::{PAGE_SHIFT, PageIndex, PageRange};
use memory_fabric::stats::PagerStats;

use crate::failure::describe;

/// Discards the guest's free pages.
#[derive(Debug)]
pub enum FreeMemory {
    /// In the fabric of this host alone.
    Paged(Discarder),
    /// In the memory that this host shares with others, as far as it has the pages alone.
    Shared {
        /// Drops them.
        discards: Arc<Discards>,
        /// Counts them.
        stats: Arc<PagerStats>,
    },
}

/// Returns the pages of a range; `None` beyond what guest memory can be.
pub fn pages_of(range: &FreeRange) -> Option<PageRange> {
    let first = PageIndex::containing(range.start.0)?;
    let count = u32::try_from(range.bytes >> PAGE_SHIFT).ok()?;
    Some(PageRange::new(first, count))
}

impl FreePages for FreeMemory {
    fn discard(&self, ranges: &[FreeRange]) {
        // The balloon only passes ranges inside guest memory, which ends below the limit.
        let ranges: Vec<_> = ranges.iter().filter_map(pages_of).collect();
        match self {
            Self::Paged(discarder) => match discarder.discard(&ranges) {
                Ok(()) => {}
                // The pages are unchanged, which only costs memory.
                Err(error @ (DiscardError::Late | DiscardError::Stopped)) => {
                    tracing::debug!(%error, "free pages of the guest are kept");
                }
                Err(error) => {
                    tracing::warn!("free pages of the guest are kept: {}", describe(&error));
                }
            },
            Self::Shared { discards, stats } => {
                let count = ranges.iter().map(|range| u64::from(range.count)).sum();
                stats.free_pages.reported.add(count);
                let (dropped, outcome) = discards.discard(&ranges);
                stats.free_pages.dropped_here.add(dropped);
                if let Err(error) = outcome {
                    tracing::debug!(%error, "free pages of the guest are kept");
                }
            }
        }
    }
}
