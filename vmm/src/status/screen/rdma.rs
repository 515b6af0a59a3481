//! The use of RDMA devices as text.

use std::fmt::Write;

use crate::size::ByteSize;
use crate::status::rdma::{InUse, RdmaResources};

/// Formats two lines for each device.
pub(super) fn lines(resources: &RdmaResources) -> String {
    let mut text = String::new();
    for used in &resources.resources {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "rdma       {}: in use {} queue pairs, {} completion queues,\n           \
             {} regions, {} domains; {} pinned",
            used.device,
            of_limit(used.queue_pairs),
            of_limit(used.completion_queues),
            of_limit(used.memory_regions),
            of_limit(used.protection_domains),
            ByteSize::from_bytes(resources.pinned_bytes.in_use).rounded(),
        );
    }
    text
}

/// Formats "2 of 10".
fn of_limit(used: InUse) -> String {
    let limit = used.limit.map(|limit| format!(" of {limit}"));
    format!("{}{}", used.in_use, limit.unwrap_or_default())
}
