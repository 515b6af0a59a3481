//! What is lost with a node that ran vCPUs, as its VM reports it.

use std::time::Duration;

use memory_fabric::compute::{NodeLosses, SharedGuest};
use memory_fabric::page::PAGE_SHIFT;
use memory_fabric::{BLOCK_BYTES, Extents as Found};

use super::run_error::RunError;
use crate::exit::ExitCode;
use crate::failure::Failure;
use crate::report::{Extent, Extents, Node, NodeLost, listed};
use crate::size::ByteSize;

/// How long to wait for the list of what was lost. The thread that makes it may look at every page.
const LOSSES_TIME_MAX: Duration = Duration::from_secs(2);

/// Most ranges in a line of the log.
const LOGGED_MAX: usize = 8;

/// Ranges of lost memory, as the report has them.
pub fn extents(found: Found) -> Extents {
    let Found {
        bytes,
        ranges,
        omitted,
    } = found;
    let extent = |(start, bytes)| Extent { start, bytes };
    Extents {
        bytes,
        ranges: ranges.into_iter().map(extent).collect(),
        ranges_omitted: omitted,
    }
}

/// Ends the sharing of a VM that has ended because of a node. Returns what was lost with the node, and
/// logs where that is.
pub fn lost_with(shared: &SharedGuest, place: u8) -> Option<NodeLost> {
    let Some(losses) = shared.lost_with(place, LOSSES_TIME_MAX) else {
        tracing::warn!(
            "what was lost with node {place} is not known: the thread that serves shared memory \
             did not say so within {} s, or had failed before",
            LOSSES_TIME_MAX.as_secs()
        );
        return None;
    };
    let NodeLosses {
        only_copy,
        blocks,
        in_transit,
        at_home,
    } = losses;
    let lost = NodeLost {
        only_copy: extents(only_copy),
        blocks,
        in_transit: extents(in_transit),
        at_home: extents(at_home),
    };
    for (what, extents) in [
        ("only there", &lost.only_copy),
        ("in transit", &lost.in_transit),
        ("at home there", &lost.at_home),
    ] {
        if extents.bytes > 0 {
            tracing::info!(
                node = place,
                "lost, {what}: {}",
                listed(&extents.ranges, extents.ranges_omitted, LOGGED_MAX)
            );
        }
    }
    Some(lost)
}

/// Adds what was lost with a node to the failure of a VM that has ended for that.
pub fn with_losses(failure: Failure, nodes: &[Node]) -> Failure {
    let lost = nodes
        .iter()
        .find_map(|node| Some((node, node.lost.as_ref()?)));
    match lost {
        Some((node, lost)) if failure.code() == ExitCode::NodeLost => {
            let error = format!("{}; {}", failure.one_line(), described(&node.cpus, lost));
            Failure::new(ExitCode::NodeLost, RunError::Ended(error))
        }
        _ => failure,
    }
}

/// Says what was lost, with sizes.
fn described(cpus: &[u32], lost: &NodeLost) -> String {
    let size = ByteSize::from_bytes;
    let pages = |bytes: u64| bytes >> PAGE_SHIFT;
    let mut parts = Vec::new();
    if !cpus.is_empty() {
        let cpus: Vec<_> = cpus.iter().map(u32::to_string).collect();
        parts.push(format!("the registers of vCPU(s) {}", cpus.join(", ")));
    }
    let bytes = lost.only_copy.bytes;
    if bytes > 0 {
        // The guest may lack a part of a block.
        let single = pages(bytes.saturating_sub(lost.blocks * BLOCK_BYTES));
        parts.push(format!(
            "up to {} ({} blocks and {single} pages) that no other node had up to date",
            size(bytes),
            lost.blocks
        ));
    }
    let bytes = lost.in_transit.bytes;
    if bytes > 0 {
        parts.push(format!("{} pages in transit", pages(bytes)));
    }
    let bytes = lost.at_home.bytes;
    if bytes > 0 {
        parts.push(format!("up to {} with its home there", size(bytes)));
    }
    match &parts[..] {
        [] => "nothing was lost with it".to_owned(),
        parts => format!("lost with it: {}", parts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> NodeLost {
        let extents = |bytes| Extents {
            bytes,
            ..Extents::default()
        };
        NodeLost {
            only_copy: extents(BLOCK_BYTES + 3 * 4096),
            blocks: 1,
            in_transit: extents(2 * 4096),
            at_home: extents(32 << 20),
        }
    }

    #[test]
    fn the_failure_says_what_was_lost_with_the_node() {
        let failure = |code| Failure::new(code, RunError::Ended("node b is lost: gone".into()));
        let nodes = [
            Node::default(),
            Node {
                id: 1,
                cpus: vec![1, 2],
                lost: Some(lost()),
                ..Node::default()
            },
        ];
        let with = with_losses(failure(ExitCode::NodeLost), &nodes);
        assert_eq!(with.code(), ExitCode::NodeLost);
        assert_eq!(
            with.one_line(),
            "node b is lost: gone; lost with it: the registers of vCPU(s) 1, 2, up to 2060 KiB (1 \
             blocks and 3 pages) that no other node had up to date, 2 pages in transit, up to 32 \
             MiB with its home there"
        );
        for (code, nodes) in [
            (ExitCode::NodeLost, &nodes[..1]),
            (ExitCode::HostError, &nodes[..]),
        ] {
            let same = with_losses(failure(code), nodes);
            assert_eq!(same.one_line(), "node b is lost: gone");
        }
        let nothing = described(&[], &NodeLost::default());
        assert_eq!(nothing, "nothing was lost with it");
    }
}
