//! Parts of the report on memory that was lost with nodes and donors.

use serde::{Deserialize, Serialize};

/// A range of the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Extent {
    /// Its guest-physical address.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
}

/// The first `most` of these ranges, as a line of text has them, with the first and the last address of
/// each.
#[must_use]
pub fn listed(ranges: &[Extent], omitted: u64, most: usize) -> String {
    let shown = ranges.iter().take(most).map(|range| {
        let last = range.start.saturating_add(range.bytes).saturating_sub(1);
        format!("{:#x}-{last:#x}", range.start)
    });
    let shown: Vec<_> = shown.collect();
    let more = omitted.saturating_add((ranges.len() - shown.len()) as u64);
    match more {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Parts of the guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Extents {
    /// All of them together.
    pub bytes: u64,
    /// The first 64 ranges, by address.
    pub ranges: Vec<Extent>,
    /// How many ranges follow these.
    pub ranges_omitted: u64,
}

/// What was lost with a node beside the registers of its vCPUs, as node 0 knows it. No page is in two
/// of the lists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeLost {
    /// Memory with its home at node 0, whose only up-to-date copy was on the lost node, or could
    /// have been.
    pub only_copy: Extents,
    /// Of this, how many whole blocks of 2 MiB the lost node owned; it may have used a part of each.
    pub blocks: u64,
    /// Memory with its home at node 0 that was on its way between nodes.
    pub in_transit: Extents,
    /// Memory with its home at the lost node, of which node 0 has no copy. Other nodes may have
    /// one, and it may be unused.
    pub at_home: Extents,
}

/// Pages of the guest that were lost with donors, and the guest's use of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LostUsed {
    /// The ids of the donors.
    pub nodes: Vec<u32>,
    /// Pages of which they had the only copy.
    pub pages: u64,
    /// The same in bytes.
    pub bytes: u64,
    /// The first 64 ranges of pages that are lost now, by address: those that the guest may use
    /// again are not.
    #[serde(default)]
    pub ranges: Vec<Extent>,
    /// How many ranges follow these.
    #[serde(default)]
    pub ranges_omitted: u64,
    /// How often one of them was poisoned, because it was used.
    pub poisoned: u64,
    /// How many of them the guest has freed, and may use again.
    pub recovered: u64,
    /// Machine checks that the guest got.
    pub machine_checks: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_lists_few_ranges_and_counts_the_others() {
        let ranges = |count: u64| -> Vec<Extent> {
            let range = |place| Extent {
                start: place << 16,
                bytes: 4096,
            };
            (1..=count).map(range).collect()
        };
        assert_eq!(listed(&ranges(1), 0, 4), "0x10000-0x10fff");
        assert_eq!(
            listed(&ranges(5), 2, 4),
            "0x10000-0x10fff, 0x20000-0x20fff, 0x30000-0x30fff, 0x40000-0x40fff and 3 more"
        );
        assert_eq!(listed(&[], 0, 4), "");
    }
}
