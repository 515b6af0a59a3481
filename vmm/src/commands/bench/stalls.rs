//! The longest stall of writes while memory is evicted.

use std::time::Duration;

use anyhow::Result;
use memory_fabric::stats::Histogram;
use serde::Serialize;
use ssi_hv::instance::percentiles;
use ssi_hv::report::Percentiles;
use ssi_hv::size::ByteSize;

use super::fault::Tally;
use super::working_set::{THREADS, WorkingSet};

/// Divisor of the time that gives the duration of the preceding run with all memory local.
const ALL_LOCAL_SHARE: u32 = 6;

/// Durations for single pages: comparing and rewriting all bytes, faults included.
#[derive(Debug, Serialize)]
pub(super) struct Stalls {
    pub(super) seconds: u32,
    pub(super) writers: usize,
    pub(super) page_us: Percentiles,
    /// The same with all memory local, which shows how long the machine itself stalls a thread.
    pub(super) all_local_page_us: Percentiles,
    pub(super) pages: u64,
    pub(super) evictions: u64,
    /// Faults that waited until memory was free.
    pub(super) stalled_for_memory: u64,
}

pub(super) fn measure(
    memory: ByteSize,
    local: ByteSize,
    seconds: u32,
    tally: &Tally,
) -> Result<Stalls> {
    let time = Duration::from_secs(seconds.into());
    let write = |local, donors, time| -> Result<_> {
        let mut set = WorkingSet::start(memory, local, donors)?;
        let times = Histogram::new();
        set.write(0, time, &times, tally);
        set.verify(tally);
        Ok((set, times.summary()))
    };
    let (_, all_local) = write(memory, 0, time / ALL_LOCAL_SHARE)?;
    let (set, ours) = write(local, 1, time)?;
    let stats = set.bed.stats();
    Ok(Stalls {
        seconds,
        writers: THREADS,
        page_us: percentiles(&ours),
        all_local_page_us: percentiles(&all_local),
        pages: ours.count,
        evictions: stats.evictions.get(),
        stalled_for_memory: stats.stalled_for_memory.get(),
    })
}
