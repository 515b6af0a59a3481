//! Tests of the page: its contents, and that no value of a report breaks it.

use proptest::prelude::*;

use super::*;
use ssi_hv_api::report::{
    Coherence, Distributions, Exec, FaultCounts, Host, HotPage, HotPageNode, Node, Role, Timeline,
    Transfers,
};

fn node(id: u32, role: Role) -> Node {
    Node {
        id,
        role,
        address: (id > 0).then(|| "10.0.0.2:7000".to_owned()),
        memory_bytes: 1 << 30,
        pages_fetched: 1234,
        pages_written_back: 56,
        ..Node::default()
    }
}

fn full() -> Report {
    let mut report = Report::new(Host {
        cpu_model: "AMD EPYC".into(),
        kernel: "6.18.0".into(),
        ..Host::default()
    });
    report.outcome = "shutdown".into();
    report.guest.kernel = Some("/boot/vmlinuz".into());
    report.faults.remote.count = 1000;
    report.faults.remote.latency_us = Percentiles {
        p50: 16.4,
        p90: 30.0,
        p99: 100.0,
        p999: 900.0,
        max: 2500.0,
    };
    report.nodes = vec![node(0, Role::Compute), node(1, Role::Donor)];
    report.prefetch.issued = 100;
    report.prefetch.used = 90;
    report.distributions = Some(Distributions {
        remote: vec![(16.0, 900), (2500.0, 100)],
        ..Distributions::default()
    });
    report.timeline = Some(Timeline {
        interval_s: 0.25,
        intervals: vec![
            FaultCounts {
                remote: 10,
                ..FaultCounts::default()
            };
            8
        ],
    });
    report.exec = Some(Exec {
        command: "make <check>".into(),
        exit_status: Some(2),
        ..Exec::default()
    });
    report.errors = vec!["donor <1> is away".into()];
    report
}

/// Checks that the tags are well-formed, and that nothing is loaded from elsewhere.
pub(crate) fn check(page: &str) {
    assert!(page.starts_with("<!DOCTYPE html>"));
    for tag in [
        "svg", "section", "main", "table", "ol", "header", "text", "title", "p",
    ] {
        let opened =
            page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    for outside in [
        "<script", "http://", "src=", "@import", "url(", "NaN", "inf\"", "inf ",
    ] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn a_report_of_everything_has_every_chart() {
    let page = render(&full());
    check(&page);
    assert_eq!(page.matches("<svg ").count(), 5);
    for part in [
        "16.4 \u{b5}s",
        "1\u{202f}234",
        "make &lt;check&gt;",
        "donor &lt;1&gt; is away",
        "exit status 2",
        "used: 90 (90.0 %)",
        "not representative",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn a_report_of_a_run_that_failed_says_what_is_missing() {
    let mut report = Report::new(Host::default());
    report.outcome = "donor-unavailable".into();
    report.exit_code = 6;
    let page = render(&report);
    check(&page);
    assert_eq!(page.matches("<svg ").count(), 0);
    assert_eq!(
        page.matches("No faults of the pager in this report.")
            .count(),
        2
    );
    assert!(page.contains("donor-unavailable \u{b7} exit code 6"));
}

#[test]
fn nodes_with_vcpus_have_a_column_each_and_their_hottest_pages_a_row() {
    let mut report = full();
    report.nodes = vec![node(0, Role::Compute), node(1, Role::Compute)];
    report.nodes[1].transfers = Some(Transfers {
        reads: 1_234,
        pages_sent: u64::MAX,
        ..Transfers::default()
    });
    let got = |node, reads| HotPageNode {
        node,
        reads,
        writes: 2,
    };
    report.coherence = Some(Coherence {
        total: Transfers::default(),
        hottest: vec![HotPage {
            address: 0x2a1_0000,
            transfers: 77,
            more_max: 0,
            nodes: vec![got(0, u64::MAX), got(1, 5)],
        }],
    });
    let page = render(&report);
    check(&page);
    for part in [
        "<th>node 0 (here)</th><th>node 1 (10.0.0.2:7000)</th><th>all</th>",
        "<tr><th>requests to read</th><td>0</td><td>1\u{202f}234</td><td>0</td></tr>",
        "<code>0x2a10000</code></th><td>77</td>",
        ", 1: 5 + 2</td>",
        "No donors: nodes with vCPUs share the memory.",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

proptest! {
    #[test]
    fn no_numbers_break_the_page(
        text in ".{0,40}",
        times in proptest::collection::vec(-1e300f64..1e300, 5),
        counts in proptest::collection::vec(any::<u64>(), 8),
        pairs in proptest::collection::vec((-1.0f64..1e12, 0..u64::MAX / 64), 0..40),
    ) {
        let mut report = full();
        report.outcome = text.clone();
        report.host.cpu_model = text.clone();
        report.errors = vec![text];
        report.faults.remote.count = counts[0];
        report.faults.remote.latency_us = Percentiles {
            p50: times[0], p90: times[1], p99: times[2], p999: times[3], max: times[4],
        };
        report.nodes[1].pages_fetched = counts[1];
        report.nodes[1].memory_bytes = counts[2];
        report.prefetch.issued = counts[3];
        report.prefetch.used = counts[4];
        report.prefetch.wasted = counts[5];
        report.distributions = Some(Distributions { remote: pairs, ..Distributions::default() });
        report.timeline = Some(Timeline {
            interval_s: times[0] * 1e8,
            intervals: vec![
                FaultCounts { remote: counts[6], zero: counts[7], ..FaultCounts::default() };
                usize::from(counts[0].to_le_bytes()[0] % 9)
            ],
        });
        check(&render(&report));
    }
}
