//! Free memory of the guest, from its balloon to the fabric.

use devices::virtio::{FreePages, FreeRange};
use memory_fabric::discard::{DiscardError, Discarder};
use memory_fabric::page::{PAGE_SHIFT, PageIndex, PageRange};

use crate::failure::describe;

/// Discards the guest's free pages in the fabric.
#[derive(Debug)]
pub struct FreeMemory(pub Discarder);

impl FreePages for FreeMemory {
    fn discard(&self, ranges: &[FreeRange]) {
        let pages = |range: &FreeRange| {
            let first = PageIndex::containing(range.start.0)?;
            let count = u32::try_from(range.bytes >> PAGE_SHIFT).ok()?;
            Some(PageRange::new(first, count))
        };
        // The balloon only passes ranges inside guest memory, which ends below the limit.
        let ranges: Vec<_> = ranges.iter().filter_map(pages).collect();
        match self.0.discard(&ranges) {
            Ok(()) => {}
            // The pages are unchanged, which only costs memory.
            Err(error @ (DiscardError::Late | DiscardError::Stopped)) => {
                tracing::debug!(%error, "free pages of the guest are kept");
            }
            Err(error) => tracing::warn!("free pages of the guest are kept: {}", describe(&error)),
        }
    }
}
