//! Tests of the page that compares transports.

use proptest::prelude::*;
use ssi_hv_api::bench::{OfSize, Skipped, Transport, TransportBench, Trips};
use ssi_hv_api::report::Percentiles;

use super::*;
use crate::tests::check;

fn trips(p50: f64) -> Trips {
    Trips {
        round_trips: 1000,
        latency_us: Percentiles {
            p50,
            p90: p50 * 1.5,
            p99: p50 * 3.0,
            p999: p50 * 10.0,
            max: p50 * 100.0,
        },
        p95_us: p50 * 2.0,
        mean_us: p50 * 1.1,
        jitter: 3.0,
    }
}

fn transport(kind: &str, p50: f64) -> Transport {
    let of_size = |bytes: u32| OfSize {
        bytes,
        trips: trips(p50),
        in_flight: 64,
        messages_per_second: 1e5,
        stream_bytes_per_second: 1e5 * f64::from(bytes),
        cpu_us_per_page: 1.5,
    };
    Transport {
        kind: kind.to_owned(),
        writes: Some(trips(p50 * 7.0)),
        write_bytes_per_second: Some(1e9),
        sizes: [64, 4096, 1 << 20].map(of_size).to_vec(),
        page_distribution: vec![(p50, 900), (p50 * 10.0, 100)],
        ..Transport::default()
    }
}

fn full() -> TransportBench {
    TransportBench {
        donor: Some("10.0.0.2:7700".to_owned()),
        transports: vec![transport("rdma", 6.0), transport("tcp", 31.0)],
        skipped: vec![Skipped {
            kind: "udp".to_owned(),
            reason: "no <way>".to_owned(),
        }],
        verified_bytes: 1_234_567,
        ..TransportBench::default()
    }
}

#[test]
fn transports_are_side_by_side_in_every_chart() {
    let page = render(&full());
    check(&page);
    assert_eq!(page.matches("<svg ").count(), 5);
    for part in [
        "rdma write: p50 42 \u{b5}s, p95 84 \u{b5}s",
        "tcp read: p50 31 \u{b5}s, p95 62 \u{b5}s, p99 93 \u{b5}s",
        "tcp, 4 KiB: 391 MiB/s",
        "rdma, 1 MiB: 1.5 \u{b5}s",
        "no &lt;way&gt;",
        "1\u{202f}234\u{202f}567 bytes right",
        "<td>4K written</td>",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // A transport has one colour: a curve each in four charts, and rows.
    assert_eq!(page.matches("class=\"remote curve\"").count(), 4);
    assert_eq!(page.matches("class=\"minor curve\"").count(), 4);
}

#[test]
fn a_faster_transport_is_left_of_a_slower_one() {
    let page = render(&full());
    let start = |name: &str| {
        let title = page.find(&format!("<title>{name}: p50")).expect(name);
        let bar = &page[..title];
        let x = &bar[bar.rfind(" x=\"").or(bar.rfind("x=\"")).expect("x")..];
        let x = x.split('"').nth(1).expect("a number");
        x.parse::<f64>().expect("a number")
    };
    assert!(start("rdma read") < start("rdma write"));
    assert!(start("rdma read") < start("tcp read"));
    assert!(start("tcp read") < start("tcp write"));
}

#[test]
fn wrong_bytes_and_an_empty_result_are_shown_as_that() {
    let mut bench = full();
    bench.corrupt_bytes = 3;
    assert!(render(&bench).contains("badge bad\">3 bytes wrong"));
    let page = render(&TransportBench::default());
    check(&page);
    assert_eq!(page.matches("Nothing was measured.").count(), 5);
}

proptest! {
    #[test]
    fn no_numbers_break_the_page(
        text in ".{0,40}",
        times in proptest::collection::vec(-1e300_f64..1e300, 4),
        pairs in proptest::collection::vec((-1.0_f64..1e12, any::<u64>()), 0..40),
        bytes: u32,
    ) {
        let mut bench = full();
        bench.transports[0].kind = text.clone();
        bench.donor = Some(text);
        bench.transports[0].page_distribution = pairs;
        let of_size = &mut bench.transports[1].sizes[1];
        of_size.bytes = bytes;
        of_size.trips.latency_us.p50 = times[0];
        of_size.trips.p95_us = times[1];
        of_size.stream_bytes_per_second = times[2];
        of_size.cpu_us_per_page = times[3];
        check(&render(&bench));
    }
}
