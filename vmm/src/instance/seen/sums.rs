//! What several nodes report, together.

use std::collections::BTreeMap;

use super::Reported;
use crate::compute::Observed;
use crate::report::{Distribution, HOTTEST_MAX, HotPage, HotPageNode, Percentiles, Transfers};

/// The sum of two counts of other hosts, which may be anything.
fn sum(all: &Reported, of: fn(&Transfers) -> u64) -> u64 {
    let transfers = all.nodes.iter().filter_map(|node| node.transfers.as_ref());
    transfers.map(of).fold(0, u64::saturating_add)
}

pub(super) fn total(all: &Reported) -> Transfers {
    let sum = |of| sum(all, of);
    Transfers {
        faults: sum(|t| t.faults),
        reads: sum(|t| t.reads),
        writes: sum(|t| t.writes),
        upgrades: sum(|t| t.upgrades),
        pages_received: sum(|t| t.pages_received),
        pages_from_home: sum(|t| t.pages_from_home),
        pages_zero: sum(|t| t.pages_zero),
        pages_sent: sum(|t| t.pages_sent),
        invalidations: sum(|t| t.invalidations),
        holds: sum(|t| t.holds),
        hold_us: of_all(&all.holds),
        early_losses: sum(|t| t.early_losses),
        requested_ahead: sum(|t| t.requested_ahead),
        tokens: sum(|t| t.tokens),
        requests: sum(|t| t.requests),
        request_us: of_all(&all.requests),
        blocks_taken: sum(|t| t.blocks_taken),
        blocks_split: sum(|t| t.blocks_split),
        split_blocks: sum(|t| t.split_blocks),
        evictions: sum(|t| t.evictions),
        write_backs: sum(|t| t.write_backs),
        stalled_for_memory: sum(|t| t.stalled_for_memory),
        merged_tables: sum(|t| t.merged_tables),
        table_changes: sum(|t| t.table_changes),
        held_for_tables: sum(|t| t.held_for_tables),
    }
}

/// The percentiles of several distributions together.
fn of_all(distributions: &[Distribution]) -> Percentiles {
    let mut all: Vec<(f64, u64)> = distributions.iter().flatten().copied().collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let add = |count: u64, (_, more): &(f64, u64)| count.saturating_add(*more);
    let count = all.iter().fold(0, add);
    let at = |part: f64| {
        #[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
        let rank = (count as f64 * part).ceil().max(1.0);
        let mut seen = 0_u64;
        let found = all.iter().find(|(_, more)| {
            seen = seen.saturating_add(*more);
            #[allow(clippy::cast_precision_loss, reason = "as above")]
            let reached = seen as f64 >= rank;
            reached
        });
        found.map_or(0.0, |(value, _)| *value)
    };
    Percentiles {
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        max: all.last().map_or(0.0, |(value, _)| *value),
    }
}

/// The pages that nodes take from each other, by address.
#[derive(Debug, Default)]
pub(super) struct Hottest(BTreeMap<u64, HotPage>);

impl Hottest {
    pub(super) fn add(&mut self, place: u8, observed: &Observed) {
        for page in &observed.hottest {
            let (reads, writes) = (page.reads.into(), page.writes.into());
            let all = self.0.entry(page.address).or_insert_with(|| HotPage {
                address: page.address,
                ..HotPage::default()
            });
            all.transfers = all.transfers.saturating_add(reads).saturating_add(writes);
            all.more_max = all.more_max.saturating_add(page.earlier_max.into());
            all.nodes.push(HotPageNode {
                node: place.into(),
                reads,
                writes,
            });
        }
    }

    pub(super) fn list(self) -> Vec<HotPage> {
        let mut list: Vec<HotPage> = self.0.into_values().collect();
        list.sort_by_key(|page| (std::cmp::Reverse(page.transfers), page.address));
        list.truncate(HOTTEST_MAX);
        list
    }
}
