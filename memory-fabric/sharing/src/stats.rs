//! Counters of an engine, which its thread updates and any thread may read.

use fabric_host::metrics::{Counter, Histogram};

/// Counters of this node's part of the shared memory.
#[derive(Debug, Default)]
pub struct SharingStats {
    /// Faults read.
    pub faults: Counter,
    /// Pages requested for a read.
    pub reads: Counter,
    /// Pages requested for a write, without a copy.
    pub writes: Counter,
    /// Writes requested for a page of which this node had a copy.
    pub upgrades: Counter,
    /// Pages that came from another compute node.
    pub from_member: Counter,
    /// Pages that came from their home.
    pub from_home: Counter,
    /// Pages that were all zero, so that no bytes travelled.
    pub zeroes: Counter,
    /// Pages sent to another compute node.
    pub sent: Counter,
    /// Copies given up because another node writes.
    pub invalidated: Counter,
    /// Pages evicted.
    pub evictions: Counter,
    /// Of these, pages that were written to their home.
    pub write_backs: Counter,
    /// Pages whose unblock was delayed.
    pub holds: Counter,
    /// Pages that a thread lost before it progressed.
    pub early: Counter,
    /// Starvation tokens received.
    pub tokens: Counter,
    /// Blocks given to this node.
    pub blocks_taken: Counter,
    /// Blocks of this node that were split.
    pub blocks_split: Counter,
    /// Faults that had to wait because no local memory was free.
    pub stalled_for_memory: Counter,
    /// From the fault to the page mapped, for requests that another node takes part in.
    pub request: Histogram,
}
