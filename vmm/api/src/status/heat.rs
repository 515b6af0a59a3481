//! The heat map.

use serde::{Deserialize, Serialize};

/// Which part of memory is local, and which was touched recently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HeatStatus {
    /// Pages per block, except for those that an extent cuts.
    pub block_pages: u32,
    /// Pages of the guest.
    pub pages: u64,
    /// Pages that were examined; fewer than `pages` when blocks were sampled.
    pub pages_looked_at: u64,
    /// Extents by ascending address.
    pub extents: Vec<ExtentStatus>,
}

/// One extent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExtentStatus {
    /// Its first page.
    pub first_page: u32,
    /// Its number of pages.
    pub pages: u32,
    /// Their home node.
    pub home: u16,
    /// Its blocks by ascending address.
    pub blocks: Vec<BlockStatus>,
}

/// One block: the sums of its pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BlockStatus {
    /// Pages in it.
    pub pages: u32,
    /// Pages that were examined: the sum of the next five.
    pub looked_at: u32,
    /// Local.
    pub resident: u32,
    /// Local, and about to be evicted unless touched.
    pub leaving: u32,
    /// In transit to this node.
    pub arriving: u32,
    /// Only at a home elsewhere.
    pub remote: u32,
    /// Never written, or all zero.
    pub untouched: u32,
    /// Pages that differ from what is at home.
    pub dirty: u32,
    /// Faults in the block in the last 10 to 20 s that fetched a page, or found one about to be
    /// evicted.
    pub recent_faults: u32,
}
