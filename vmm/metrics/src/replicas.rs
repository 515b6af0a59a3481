//! Metrics of replicated memory.

use super::families::{Families, float};
use ssi_hv_api::report::ReplicasUsed;

/// Adds those of a VM with two copies of its pages.
pub(super) fn add(all: &mut Families, replicas: Option<&ReplicasUsed>) {
    let Some(replicas) = replicas else {
        return;
    };
    for (name, help, bytes) in [
        (
            "ssi_hv_replicated_bytes",
            "Memory on donors with two copies, unless it is degraded.",
            replicas.bytes,
        ),
        (
            "ssi_hv_degraded_bytes",
            "How much of it has one copy only.",
            replicas.degraded_bytes,
        ),
        (
            "ssi_hv_in_one_zone_bytes",
            "How much of it has both copies in one zone.",
            replicas.in_one_zone_bytes,
        ),
    ] {
        all.gauge(name, help, float(bytes));
    }
    all.counter(
        "ssi_hv_repaired_bytes_total",
        "How much of it got its second copy back.",
        replicas.repaired_bytes,
    );
    all.counter(
        "ssi_hv_donor_losses_total",
        "How often a donor of replicated memory went out of use.",
        replicas.losses,
    );
    all.counter(
        "ssi_hv_wrong_pieces_total",
        "Pieces of pages that were not what was written back last, and that others replaced.",
        replicas.wrong_pieces,
    );
}

/// Adds what moved between donors by its heat, which memory with one copy does.
pub(super) fn add_moved_by_heat(all: &mut Families, bytes: u64) {
    all.counter(
        "ssi_hv_moved_by_heat_bytes_total",
        "Memory that has moved between donors because of its heat.",
        bytes,
    );
}
