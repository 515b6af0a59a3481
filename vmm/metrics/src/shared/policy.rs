//! Metrics of what moves vCPUs between nodes.

use crate::families::{Families, Labels, float};
use ssi_hv_api::report::{PolicyKind, PolicyUsed, StayReason};

/// The reasons, by their names in the report.
const REASONS: [(StayReason, &str); 5] = [
    (StayReason::Moved, "moved"),
    (StayReason::Watched, "watched"),
    (StayReason::Little, "little"),
    (StayReason::Spread, "spread"),
    (StayReason::Full, "full"),
];

/// Adds what a policy did, and how many vCPUs stay for which reason.
pub(super) fn add(all: &mut Families, used: &PolicyUsed) {
    let kind: Labels = vec![("kind", used.kind.name().to_owned())];
    all.gauges(
        "ssi_hv_vcpu_policy_info",
        "What moves vCPUs: always 1, with the policy as a label.",
        [(kind, 1.0)],
    );
    all.counter(
        "ssi_hv_vcpu_policy_moves_total",
        "Moves of vCPUs that the policy made; those by command do not count.",
        used.moves,
    );
    all.counter(
        "ssi_hv_vcpu_policy_moves_failed_total",
        "Moves that the policy ordered and that did not take place.",
        used.moves_failed,
    );
    if used.kind == PolicyKind::Static {
        return;
    }
    all.gauges(
        "ssi_hv_vcpu_policy_staying",
        "Virtual CPUs that stay where they are, by the reason; absent with `static`.",
        REASONS.map(|(reason, name)| {
            let stays = used.vcpus.iter().filter(|vcpu| vcpu.reason == reason);
            let labels = vec![("reason", name.to_owned())];
            (labels, float(stays.count() as u64))
        }),
    );
}
