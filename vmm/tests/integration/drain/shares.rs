//! A donor joins a VM with one copy, and gets its share.

use super::*;

#[test]
fn a_new_donor_gets_its_share_of_memory_with_one_copy_while_a_guest_counts() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let nodes = [(); 3].map(|()| node(&place, &[]));
    let [first, second, new] = nodes.each_ref().map(|(_, address)| address.as_str());
    let vm = counting(&place, &["--donor", first, "--donor", second]);
    let zoned = format!("{new},zone=rack-1");
    let arguments = ["rebalance", "leaves", "--add", &zoned];
    let refused = place.failed(&arguments, ExitCode::HostError);
    assert!(refused.contains("only two copies use"), "{refused}");
    let said = place.printed(&["rebalance", "leaves", "--add", new, "--wait", "50"]);
    assert!(said.contains("each donor has its share: "), "{said}");
    let now = status(&place);
    let moved = &now["memory"]["rebalance"];
    assert_eq!(moved["state"], "done", "{now}");
    assert_eq!(moved["bytes"], moved["moved_bytes"], "{now}");
    let held = [1, 2, 3].map(|node| count(&now, &format!("/nodes/{node}/memory_bytes")));
    assert_eq!(held.iter().sum::<u64>(), 2 * HALF, "{now}");
    assert!(held.iter().all(|&bytes| bytes >= 20 * MIB), "{now}");
    assert_eq!(count(&now, "/errors_total"), 0, "{now}");
    let placement = place.printed(&["status", "leaves", "--placement"]);
    assert!(placement.contains(new), "{placement}");
    let again = place.printed(&["rebalance", "leaves", "--wait", "50"]);
    assert!(again.contains("has its share already"), "{again}");

    // What the first one held moves to the new one, which lends more.
    let arguments = [
        "drain", "leaves", "--node", "1", "--to", new, "--wait", "50",
    ];
    let said = place.printed(&arguments);
    assert!(said.contains("node 1 has left"), "{said}");
    counted_right(&place, vm);
    for (node, _) in &nodes {
        lends_nothing(&place, node);
    }
}
