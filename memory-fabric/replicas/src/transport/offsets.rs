//! Where pages are: in a block, and at a donor.

use crate::placement::Place;
use fabric_homes::BLOCK_BYTES;
use fabric_pages::page::PAGE_SHIFT;

/// Returns the bit of a donor.
pub(super) fn bit(donor: u8) -> u64 {
    1 << donor
}

/// Returns the block of an offset, and the offset in it.
pub(crate) fn split(offset: u64) -> (u32, u64) {
    let block = u32::try_from(offset / BLOCK_BYTES).expect("inside the replicated memory");
    (block, offset % BLOCK_BYTES)
}

/// Returns the number of the page of a block at this offset in it.
pub(crate) fn page_in(in_block: u64) -> u32 {
    u32::try_from(in_block >> PAGE_SHIFT).expect("inside a block")
}

/// Returns where a place holds what is at an offset of its block, which is in `split` pieces.
pub(crate) fn offset_at(place: Place, in_block: u64, split: usize) -> u64 {
    let split = split as u64;
    u64::from(place.slot) * (BLOCK_BYTES / split) + in_block / split
}
