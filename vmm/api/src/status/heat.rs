//! The heat map.

use serde::{Deserialize, Serialize};

/// Which part of memory is here, and which was touched lately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HeatStatus {
    /// Pages of a block, but for those that an extent cuts.
    pub block_pages: u32,
    /// Pages of the guest.
    pub pages: u64,
    /// Pages that were looked at; fewer than `pages` when blocks were sampled.
    pub pages_looked_at: u64,
    /// Extents by rising address.
    pub extents: Vec<ExtentStatus>,
}

/// One extent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExtentStatus {
    /// Its first page.
    pub first_page: u32,
    /// How many.
    pub pages: u32,
    /// The node where they are at home.
    pub home: u16,
    /// Its blocks by rising address.
    pub blocks: Vec<BlockStatus>,
}

/// One block: the sums of its pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BlockStatus {
    /// Pages in it.
    pub pages: u32,
    /// Pages that were looked at: the next five add up to them.
    pub looked_at: u32,
    /// Here.
    pub resident: u32,
    /// Here, and about to go unless touched.
    pub leaving: u32,
    /// On their way here.
    pub arriving: u32,
    /// Only at home elsewhere.
    pub remote: u32,
    /// Never written, or all zero.
    pub untouched: u32,
    /// Pages that differ from what is at home.
    pub dirty: u32,
    /// Faults in the block in the last 10 to 20 s that brought a page, or found one about to go.
    pub recent_faults: u32,
}
