//! Tests of values that are not known, and of lists that have a limit.

use ssi_hv_api::fixtures::status_of_nodes;
use ssi_hv_api::report::{Coherence, HotPage, HotPageNode, PolicyUsed};

use super::hot::RANKS;

#[test]
fn a_clock_that_was_not_compared_and_a_static_policy_have_no_values() {
    let mut status = status_of_nodes();
    let clock = status.nodes[1].node.clock.as_mut().expect("compared");
    (clock.rate_ppm, clock.error_us_max) = (None, f64::NAN);
    status.nodes[2].node.clock = None;
    status.vcpu_policy = Some(PolicyUsed::default());
    let text = crate::vm(&status, &[], &[], &[]);
    assert!(text.contains("ssi_hv_compute_clock_offset_seconds{node=\"1\"}"));
    for absent in ["clock_error_", "clock_rate_ratio", "policy_staying", "NaN"] {
        assert!(!text.contains(absent), "{absent}");
    }
    assert!(!text.contains("clock_offset_seconds{node=\"2\"}"));
    assert!(text.contains("ssi_hv_vcpu_policy_info{kind=\"static\"} 1"));
}

#[test]
fn the_hottest_pages_have_ranks_and_those_who_took_them() {
    let mut status = status_of_nodes();
    let text = crate::vm(&status, &[], &[], &[]);
    for line in [
        "ssi_hv_compute_hot_page_address{rank=\"1\"} 44105728",
        "ssi_hv_compute_hot_page_transfers{rank=\"1\",node=\"0\",kind=\"read\"} 20",
        "ssi_hv_compute_hot_page_transfers{rank=\"1\",node=\"1\",kind=\"write\"} 2945",
        "ssi_hv_compute_hot_page_transfers{rank=\"2\",node=\"1\",kind=\"write\"} 0",
        "ssi_hv_compute_peer_pages_received_total{node=\"2\",peer=\"1\"} 201",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    // Each node that there can be took each page.
    let coherence = status.coherence.as_mut().expect("it shares");
    let nodes = (0..16).map(|node| HotPageNode {
        node,
        ..HotPageNode::default()
    });
    let page = HotPage {
        nodes: nodes.collect(),
        ..HotPage::default()
    };
    coherence.hottest = vec![page; 50];
    let text = crate::vm(&status, &[], &[], &[]);
    let series = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
    assert_eq!(series("ssi_hv_compute_hot_page_address{"), RANKS);
    assert_eq!(series("ssi_hv_compute_hot_page_transfers{"), RANKS * 16 * 2);
    status.coherence = Some(Coherence::default());
    let text = crate::vm(&status, &[], &[], &[]);
    assert!(!text.contains("hot_page"), "no page moved yet: {text}");
}
