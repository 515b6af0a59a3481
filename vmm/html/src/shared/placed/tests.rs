//! Tests of the tables of time and of moved vCPUs.

use crate::render;
use crate::tests::check;
use proptest::prelude::*;
use ssi_hv_api::report::{
    Coherence, Host, Node, NodeClock, PolicyKind, PolicyUsed, Report, Role, StayReason, VcpuStays,
};

fn report(clock: NodeClock, policy: PolicyUsed) -> Report {
    let node = |id, cpus: &[u32], clock| Node {
        id,
        role: Role::Compute,
        address: (id > 0).then(|| "10.0.0.2:7000".to_owned()),
        cpus: cpus.to_vec(),
        clock,
        ..Node::default()
    };
    let mut report = Report::new(Host::default());
    report.guest.cpus = 3;
    report.nodes = vec![node(0, &[0, 1], None), node(1, &[2], Some(clock))];
    report.coherence = Some(Coherence::default());
    report.vcpu_policy = Some(policy);
    report
}

fn clock() -> NodeClock {
    NodeClock {
        offset_us: -7.5e6,
        error_us_max: 31.25,
        rate_ppm: Some(-3.5),
        rate_ppm_error_max: Some(0.25),
        scaled: true,
        steps: 1_234,
        steps_us: 1250.0,
    }
}

fn stays(cpu: u32, reason: StayReason, stays_s: Option<f64>) -> VcpuStays {
    VcpuStays {
        cpu,
        moves: 2,
        waited_ms: 1_250.0,
        reason,
        stays_s,
    }
}

#[test]
fn each_compared_clock_has_a_row() {
    let page = render(&report(clock(), PolicyUsed::default()));
    check(&page);
    let row = "<tr><th>node 1 (10.0.0.2:7000)</th><td>\u{2212}7.5 s</td><td>31.2 \u{b5}s</td>\
               <td>\u{2212}3.50 \u{b1} 0.25</td><td>yes</td><td>1\u{202f}234</td><td>+1.25 ms</td></tr>";
    assert!(page.contains(row), "{page}");
    assert_eq!(page.matches("<tr><th>node ").count(), 1, "not node 0");
    let mut without = report(clock(), PolicyUsed::default());
    without.nodes[1].clock = None;
    assert!(!render(&without).contains("Time of the nodes"));
}

#[test]
fn each_vcpu_has_the_reason_for_which_it_stays() {
    let used = PolicyUsed {
        kind: PolicyKind::Follow,
        moves: 5_000,
        moves_failed: 3,
        vcpus: vec![
            stays(1, StayReason::Little, None),
            stays(2, StayReason::Moved, Some(25.5)),
        ],
    };
    let page = render(&report(clock(), used));
    check(&page);
    for part in [
        "<code>follow</code>: 5\u{202f}000 moves, 3 failed",
        "<tr><th>1</th><td>0</td><td>2</td><td>1.25 s</td><td>waits little</td></tr>",
        "<tr><th>2</th><td>1</td><td>2</td><td>1.25 s</td><td>moved, for 25.5 s</td></tr>",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let page = render(&report(clock(), PolicyUsed::default()));
    assert!(page.contains("<code>static</code>: only commands"));
    assert!(!page.contains("stays because"));
}

proptest! {
    #[test]
    fn no_values_of_another_host_break_the_page(
        values in proptest::collection::vec(any::<f64>(), 6),
        steps in any::<u64>(),
        cpu in any::<u32>(),
    ) {
        let clock = NodeClock {
            offset_us: values[0],
            error_us_max: values[1],
            rate_ppm: Some(values[2]),
            rate_ppm_error_max: Some(values[3]),
            scaled: false,
            steps,
            steps_us: values[4],
        };
        let used = PolicyUsed {
            kind: PolicyKind::Follow,
            moves: steps,
            moves_failed: steps,
            vcpus: vec![stays(cpu, StayReason::Moved, Some(values[5]))],
        };
        check(&render(&report(clock, used)));
    }
}
