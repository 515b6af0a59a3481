//! Counters of an engine, which its thread updates and any thread may read.

use fabric_coherence::members::MEMBERS_MAX;
use fabric_host::metrics::{Counter, Gauge, Histogram};

use crate::hot::HotPages;
use crate::sources::Sources;
use crate::waits::Waits;

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
    /// The same, by the place of the node that sent them.
    pub from_each: [Counter; MEMBERS_MAX],
    /// Pages that came from their home.
    pub from_home: Counter,
    /// Pages that were all zero, so that no bytes travelled.
    pub zeroes: Counter,
    /// Pages sent to another compute node.
    pub sent: Counter,
    /// Copies given up because another node writes.
    pub invalidated: Counter,
    /// Pages with bytes on this node, in its guest view or stored as a home.
    pub local_pages: Gauge,
    /// The most that these ever were.
    pub local_pages_max: Gauge,
    /// Pages evicted.
    pub evictions: Counter,
    /// Of these, pages that were written to their home.
    pub write_backs: Counter,
    /// Pages whose bytes were dropped because the guest does not need them.
    pub discarded: Counter,
    /// Pages of which this node is the home that were sent to its depot.
    pub sent_away: Counter,
    /// The same that came from there.
    pub from_depot: Counter,
    /// Pages whose unblock was delayed.
    pub holds: Counter,
    /// How long pages were held.
    pub hold: Histogram,
    /// Pages that a thread lost before it progressed.
    pub early: Counter,
    /// Pages requested ahead of their fault, because their thread needs them with another one.
    pub ahead: Counter,
    /// Starvation tokens received.
    pub tokens: Counter,
    /// Blocks given to this node.
    pub blocks_taken: Counter,
    /// Blocks of this node that were split.
    pub blocks_split: Counter,
    /// Blocks in this node's directory that are split now.
    pub split_blocks: Gauge,
    /// Faults that had to wait because no local memory was free.
    pub stalled_for_memory: Counter,
    /// Merged tables on this node now.
    pub merged_tables: Gauge,
    /// Changes of merged tables that vCPUs of this node made.
    pub table_changes: Counter,
    /// Messages that waited for merged tables.
    pub held_for_tables: Counter,
    /// From the fault to the page mapped, for requests that another node takes part in.
    pub request: Histogram,
    /// The pages that this node got most often because another node had them.
    pub hot: HotPages,
    /// The threads that wait for a page now.
    pub waits: Waits,
    /// How long threads waited for the pages of each node.
    pub sources: Sources,
}
