//! What a node holds of the memory.

use fabric_sharing::{LOCAL_PAGES_MIN, SharedMemory};

/// Pages that a node evicts ahead of need.
const RESERVE: usize = 64;

/// A node that lends `lent` blocks has evicted pages, and never had more than it lends, its least copies
/// beside, and what may be on its way to a home: [`RESERVE`] pages of each node.
pub fn is_within_budget(node: &SharedMemory, count: usize, lent: usize) {
    let stats = node.stats();
    assert!(stats.evictions.get() > 100, "{stats:?}");
    let most = lent * 512 + LOCAL_PAGES_MIN + count * RESERVE;
    let peak = stats.local_pages_max.get();
    assert!(
        peak <= most as u64,
        "{peak} pages at once, {most} are the limit"
    );
    let in_file = node.memory().resident_bytes().expect("a memory file");
    assert!(
        in_file <= (most * 4096) as u64,
        "{in_file} bytes in the guest view"
    );
}
