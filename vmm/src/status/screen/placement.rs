//! The places of a VM's memory as text.

use std::fmt::Write;

use crate::size::ByteSize;
use crate::status::placement::{DonorPlaced, PlacementStatus};

/// Limit of lines about memory at the same donors.
const HELD_LINES_MAX: usize = 16;

fn size(bytes: u64) -> String {
    ByteSize::from_bytes(bytes).rounded()
}

/// Formats a table of the donors, and how much is where.
#[must_use]
pub fn text(placement: &PlacementStatus) -> String {
    let mut text = format!("{} at home here", size(placement.home_here_bytes));
    if placement.copies == 2 {
        let (degraded, crowded) = (placement.degraded_bytes, placement.in_one_zone_bytes);
        let _ = write!(
            text,
            "; two copies of the rest: {} have one, {} both in one zone",
            size(degraded),
            size(crowded)
        );
    }
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "\n{:<4} {:<21} {:<8} {:<6} {:<8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "node", "address", "zone", "state", "tier", "page", "lent", "home", "copies", "free"
    );
    for donor in &placement.donors {
        let _ = writeln!(text, "{}", line(donor));
    }
    for donor in placement.donors.iter().filter(|donor| donor.home_bytes > 0) {
        if let (Some(hot), Some(cold)) = (donor.hot_bytes, donor.cold_bytes) {
            let _ = writeln!(
                text,
                "heat at {:<3} {:>8} hot, {:>8} cold",
                donor.node,
                size(hot),
                size(cold)
            );
        }
    }
    if placement.moved_by_heat_bytes > 0 {
        let moved = size(placement.moved_by_heat_bytes);
        let _ = writeln!(text, "{moved} moved because of heat");
    }
    let mut held: Vec<_> = placement.held.iter().collect();
    held.sort_by(|one, other| (other.bytes, &one.nodes).cmp(&(one.bytes, &other.nodes)));
    for part in held.iter().take(HELD_LINES_MAX) {
        let nodes: Vec<String> = part.nodes.iter().map(u32::to_string).collect();
        let _ = writeln!(
            text,
            "on {:<22} {:>8}",
            nodes.join(" and "),
            size(part.bytes)
        );
    }
    if held.len() > HELD_LINES_MAX {
        let rest = &held[HELD_LINES_MAX..];
        let bytes = rest.iter().map(|part| part.bytes).sum();
        let _ = writeln!(text, "{} more places {:>12}", rest.len(), size(bytes));
    }
    text
}

fn line(donor: &DonorPlaced) -> String {
    let or_dash = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".into());
    let page = donor.page_us.map(|us| format!("{us:.0} us"));
    format!(
        "{:<4} {:<21} {:<8} {:<6} {:<8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        donor.node,
        or_dash(&donor.address),
        or_dash(&donor.zone),
        donor.state,
        or_dash(&donor.tier),
        or_dash(&page),
        size(donor.lent_bytes),
        size(donor.home_bytes),
        size(donor.copy_bytes),
        size(donor.free_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::placement::Held;

    #[test]
    fn each_donor_has_a_line_and_the_largest_parts_are_shown() {
        let donor = DonorPlaced {
            node: 3,
            address: Some("10.0.0.3:7000".into()),
            zone: Some("rack-1".into()),
            state: "in-use".into(),
            tier: Some("fast-tcp".into()),
            page_us: Some(51.6),
            lent_bytes: 8 << 30,
            home_bytes: 2 << 30,
            copy_bytes: 1 << 30,
            free_bytes: 5 << 30,
            hot_bytes: Some(512 << 20),
            cold_bytes: Some(1536 << 20),
        };
        let held = |index: u32| Held {
            nodes: vec![index, index + 1],
            bytes: u64::from(index) << 20,
        };
        let status = PlacementStatus {
            copies: 2,
            home_here_bytes: 64 << 20,
            donors: vec![donor, DonorPlaced::default()],
            held: (1..=20).map(held).collect(),
            degraded_bytes: 2 << 20,
            in_one_zone_bytes: 4 << 20,
            moved_by_heat_bytes: 6 << 20,
        };
        let text = text(&status);
        let first =
            "64 MiB at home here; two copies of the rest: 2 MiB have one, 4 MiB both in one zone\n";
        assert!(text.starts_with(first), "{text}");
        let line = "3    10.0.0.3:7000         rack-1   in-use fast-tcp    52 us    8 GiB    2 GiB    1 GiB    \
                    5 GiB\n";
        assert!(text.contains(line), "{text}");
        assert!(text.lines().all(|line| line.len() <= 100), "{text}");
        assert!(
            text.contains("on 20 and 21                20 MiB\n"),
            "{text}"
        );
        let heat = "heat at 3    512 MiB hot,  1.5 GiB cold\n6 MiB moved because of heat\n";
        assert!(text.contains(heat), "{text}");
        // The parts of 1 to 4 MiB.
        assert!(text.ends_with("4 more places       10 MiB\n"), "{text}");
        assert_eq!(text.lines().count(), 4 + 2 + HELD_LINES_MAX + 1, "{text}");
    }
}
