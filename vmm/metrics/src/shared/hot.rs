//! Metrics of the pages that nodes take from each other most often.

use crate::families::{Families, float};
use ssi_hv_api::report::{HotPage, HotPageNode};

/// Pages that have metrics. Ranks are labels and addresses values, so that the number of
/// series has a limit: two for each rank and node, however many pages become hot over time.
pub(super) const RANKS: usize = 8;

/// Adds the hottest pages, the first of which has rank 1, and which nodes got them.
pub(super) fn add(all: &mut Families, hottest: &[HotPage]) {
    type Of = fn(&HotPageNode) -> u64;
    let ranked = || (1..=RANKS).zip(hottest);
    let label = |rank: usize| ("rank", rank.to_string());
    all.gauges(
        "ssi_hv_compute_hot_page_address",
        "Guest-physical address of one of the 8 pages that nodes took from each other most often.",
        ranked().map(|(rank, page)| (vec![label(rank)], float(page.address))),
    );
    let transfers = ranked().flat_map(|(rank, page)| {
        page.nodes.iter().flat_map(move |got| {
            let kinds: [(&str, Of); 2] = [("read", |got| got.reads), ("write", |got| got.writes)];
            kinds.map(|(kind, of)| {
                let node = ("node", got.node.to_string());
                let labels = vec![label(rank), node, ("kind", kind.to_owned())];
                (labels, float(of(got)))
            })
        })
    });
    all.gauges(
        "ssi_hv_compute_hot_page_transfers",
        "How often the node got the page that has this rank now, at least, by what for.",
        transfers,
    );
}
