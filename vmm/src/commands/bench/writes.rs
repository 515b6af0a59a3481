//! A working set that is rewritten completely, with decreasing parts of it local.

use std::time::Duration;

use anyhow::Result;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::stats::Histogram;
use serde::Serialize;
use ssi_hv::size::ByteSize;

use super::fault::Tally;
use super::working_set::WorkingSet;
use super::{ROUNDS, median};

/// Local part of the working set, in percent; the first is the reference for the others.
const LOCAL_PERCENT: [u64; 4] = [100, 75, 50, 25];
/// Duration of each in each round.
const TIME: Duration = Duration::from_millis(500);

/// The results for one local part.
#[derive(Debug, Serialize)]
pub(super) struct Writes {
    pub(super) local_percent: u64,
    /// Rate of pages whose bytes were all compared and rewritten.
    pub(super) pages_per_second: f64,
    /// Median over the rounds of the rate with all memory local divided by this one.
    pub(super) slowdown: f64,
}

pub(super) fn measure(memory: ByteSize, tally: &Tally) -> Result<Vec<Writes>> {
    let mut sets = Vec::new();
    for percent in LOCAL_PERCENT {
        let pages = memory.bytes() / PAGE_SIZE as u64 * percent / 100;
        let (local, donors) = if percent == 100 {
            (memory, 0)
        } else {
            (ByteSize::from_bytes(pages * PAGE_SIZE as u64), 1)
        };
        sets.push(WorkingSet::start(memory, local, donors)?);
    }
    let mut rates = vec![Vec::new(); sets.len()];
    for round in 0..ROUNDS {
        for (set, rates) in sets.iter_mut().zip(&mut rates) {
            rates.push(set.write(round, TIME, &Histogram::new(), tally));
        }
    }
    for set in &sets {
        set.verify(tally);
    }
    let all_local = rates[0].clone();
    let results = LOCAL_PERCENT.into_iter().zip(rates);
    let results = results.map(|(local_percent, rates)| Writes {
        local_percent,
        slowdown: median(
            all_local
                .iter()
                .zip(&rates)
                .map(|(all, rate)| all / rate)
                .collect(),
        ),
        pages_per_second: median(rates),
    });
    Ok(results.collect())
}
