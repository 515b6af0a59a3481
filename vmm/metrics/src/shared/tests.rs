//! Tests of values that are not known.

use ssi_hv_api::fixtures::status_of_nodes;
use ssi_hv_api::report::PolicyUsed;

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
