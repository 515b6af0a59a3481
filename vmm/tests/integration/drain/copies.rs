//! Donors with copies leave.

use super::*;
use ssi_hv::control_socket::client::ask;
use ssi_hv::control_socket::protocol::RebalanceBody;

#[test]
fn a_donor_of_two_copies_leaves_and_another_one_may_be_killed_then() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let nodes = [(); 3].map(|()| node(&place, &[]));
    let mut flags = vec!["--replicas", "2"];
    for (_, address) in &nodes {
        flags.extend(["--donor", address]);
    }
    let vm = counting(&place, &flags);
    let said = place.printed(&["drain", "leaves", "--node", "1", "--wait", "50"]);
    assert!(said.contains("node 1 has left"), "{said}");
    let now = status(&place);
    let replicas = &now["memory"]["replicas"];
    assert_eq!(count(replicas, "/degraded_bytes"), 0, "{now}");
    assert_eq!(count(replicas, "/losses"), 0, "{now}");
    assert_eq!(replicas["out"], serde_json::json!([]), "{now}");
    assert_eq!(count(&now, "/nodes/1/memory_bytes"), 0, "{now}");
    assert_eq!(count(&now, "/errors_total"), 0, "{now}");
    let [(first, _), (second, _), _third] = nodes;
    lends_nothing(&place, &first);
    assert_eq!(first.end(libc::SIGKILL), None);
    assert_eq!(second.end(libc::SIGKILL), None);
    counted_right(&place, vm);
}

/// Starts a guest with two copies of its memory on these donors, which counts.
fn with_copies(place: &Place, donors: &[&str], flags: &[&str]) -> Running {
    let donors = donors.iter().flat_map(|address| ["--donor", address]);
    let donors: Vec<&str> = donors.collect();
    counting(place, &[&["--replicas", "2"], flags, &donors[..]].concat())
}

/// Asserts that each page has both copies, and that no donor was lost.
#[track_caller]
fn has_both_copies(now: &Value) {
    let replicas = &now["memory"]["replicas"];
    assert_eq!(count(replicas, "/degraded_bytes"), 0, "{now}");
    assert_eq!(count(replicas, "/losses"), 0, "{now}");
    assert_eq!(replicas["out"], serde_json::json!([]), "{now}");
    assert_eq!(count(now, "/errors_total"), 0, "{now}");
}

#[test]
fn both_donors_of_two_copies_leave_for_new_ones_while_a_guest_counts() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let nodes = [(); 4].map(|()| node(&place, &[]));
    let [first_address, second_address, third_address, fourth_address] =
        nodes.each_ref().map(|(_, address)| address.as_str());
    let of_start = [first_address, second_address];
    let vm = with_copies(&place, &of_start, &[]);
    let zoned = format!("{fourth_address},zone=rack-4");
    for (node, to) in [("1", third_address), (second_address, &zoned)] {
        let arguments = ["drain", "leaves", "--node", node, "--to", to];
        let said = place.printed(&[&arguments[..], &["--wait", "50"]].concat());
        assert!(said.contains("has left"), "{said}");
        has_both_copies(&status(&place));
    }
    let now = status(&place);
    let held = |node: u32| count(&now, &format!("/nodes/{node}/memory_bytes"));
    assert_eq!([1, 2].map(held), [0, 0], "{now}");
    assert_eq!(held(3) + held(4), 2 * HALF, "{now}");
    let placement = place.printed(&["status", "leaves", "--placement"]);
    assert!(placement.contains("rack-4"), "{placement}");
    assert!(placement.contains("on 3 and 4"), "{placement}");

    let [(first, _), (second, _), (third, _), (fourth, _)] = nodes;
    lends_nothing(&place, &first);
    lends_nothing(&place, &second);
    assert_eq!(first.end(libc::SIGKILL), None);
    assert_eq!(second.end(libc::SIGKILL), None);
    // Each of the new ones has a copy of everything.
    assert_eq!(third.end(libc::SIGKILL), None);
    counted_right(&place, vm);
    lends_nothing(&place, &fourth);
}

#[test]
fn a_new_donor_gets_its_share_of_the_copies_while_a_guest_counts() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let nodes = [(); 3].map(|()| node(&place, &[]));
    let [of_start_1, of_start_2, new] = nodes.each_ref().map(|(_, address)| address.as_str());
    let vm = with_copies(&place, &[of_start_1, of_start_2], &[]);
    let refused = place.failed(&["rebalance", "leaves", "--stop"], ExitCode::HostError);
    assert!(
        refused.contains("no memory is being rebalanced"),
        "{refused}"
    );
    let socket = place.sockets().join(format!("vm-{}-leaves.sock", vm.pid()));
    let changes = || -> u64 {
        let body: RebalanceBody = ask(&socket, "/v1/rebalance").expect("an answer");
        body.changes
    };
    let before = changes();
    let said = place.printed(&["rebalance", "leaves", "--add", new, "--wait", "50"]);
    assert!(said.contains("each donor has its share: "), "{said}");
    // Who waits is woken when donors are asked, when memory moves, and at the end.
    assert_eq!(changes(), before + 3);
    let now = status(&place);
    has_both_copies(&now);
    let moved = &now["memory"]["rebalance"];
    assert_eq!(moved["state"], "done", "{now}");
    assert!(count(moved, "/bytes") > 0, "{now}");
    assert_eq!(moved["bytes"], moved["moved_bytes"], "{now}");
    let text = place.printed(&["status", "leaves"]);
    assert!(text.contains("rebalance  done, "), "{text}");
    let again = place.printed(&["rebalance", "leaves", "--wait", "50"]);
    assert!(again.contains("has its share already"), "{again}");

    let [(first, _), (second, _), (third, _)] = nodes;
    assert_eq!(first.end(libc::SIGKILL), None);
    counted_right(&place, vm);
    lends_nothing(&place, &second);
    lends_nothing(&place, &third);
}
