//! The display as text.

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::report::{FaultKind, Percentiles, Stages};
use crate::status::heat::{BlockStatus, ExtentStatus};
use ssi_hv_api::fixtures::{drain, rebalance, status, status_of_nodes};

fn choice(pid: u32, name: &str) -> Choice {
    Choice {
        pid,
        name: name.into(),
    }
}

fn map() -> HeatStatus {
    let block = BlockStatus {
        pages: 64,
        looked_at: 64,
        resident: 16,
        remote: 48,
        ..BlockStatus::default()
    };
    HeatStatus {
        block_pages: 64,
        pages: 640,
        pages_looked_at: 640,
        extents: vec![ExtentStatus {
            first_page: 0x100,
            pages: 640,
            home: 1,
            blocks: vec![block; 10],
        }],
    }
}

/// The VM of [`status`], and the same VM a second later.
fn two_looks() -> (VmStatus, VmStatus) {
    let before = status();
    let mut after = before.clone();
    after.uptime_s += 2.0;
    after.faults.remote.count += 2468;
    after.faults.minor.count += 20;
    after.evictions.total += 400;
    after.evictions.cancelled += 6;
    after.stalled_for_memory += 2;
    after.prefetch.issued += 1280;
    after.prefetch.used += 90;
    after.prefetch.wasted += 10;
    after.nodes[1].node.pages_fetched += 1024;
    after.nodes[1].node.pages_written_back += 512;
    (before, after)
}

fn view_of(before: VmStatus, after: VmStatus) -> View {
    let mut view = View::new(vec![choice(17, "web"), choice(18, "db")], false);
    view.see(17, Seen::Status(Box::new(before), Some(map())));
    view.see(17, Seen::Status(Box::new(after), None));
    view
}

fn drawn(view: &View, columns: u16, rows: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("no terminal fails");
    terminal
        .draw(|frame| screen::draw(view, frame))
        .expect("is drawn");
    let buffer = terminal.backend().buffer();
    let lines = buffer.content.chunks(columns.into()).map(|row| {
        let line: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        line.trim_end().to_owned() + "\n"
    });
    lines.collect()
}

fn words<'a>(text: &'a str, line: &str) -> Vec<&'a str> {
    let found = text
        .lines()
        .find(|candidate| candidate.trim_start().starts_with(line));
    found
        .unwrap_or_else(|| panic!("no {line} in {text}"))
        .split_whitespace()
        .collect()
}

#[test]
fn what_is_still_to_leave_a_donor_is_shown_while_it_moves() {
    let (mut before, mut after) = two_looks();
    before.memory.replicas = None;
    after.memory.replicas = None;
    after.memory.drain = Some(drain());
    let text = drawn(&view_of(before, after), 80, 24);
    assert!(
        text.contains("90 % of them used; 72 MiB leave node 1\n"),
        "{text}"
    );
}

#[test]
fn what_is_left_to_rebalance_is_shown() {
    let (before, mut after) = two_looks();
    after.memory.rebalance = Some(rebalance());
    let text = drawn(&view_of(before, after), 100, 24);
    assert!(text.contains("; 48 MiB to move\n"), "{text}");
}

#[test]
fn a_screen_of_80_by_24_has_all_numbers() {
    let (before, after) = two_looks();
    let text = drawn(&view_of(before, after), 80, 24);
    assert!(
        text.starts_with("web (17) running, up 2 h 1 min; 2 vCPU, 1 GiB by tcp"),
        "{text}"
    );
    assert!(
        text.lines().next().expect("a line").ends_with("VM 1 of 2"),
        "{text}"
    );
    // 2468 in 2 s.
    assert_eq!(words(&text, "1234")[0], "1234");
    assert_eq!(
        words(&text, "remote  "),
        [
            "remote", "1234", "3702", "31.7", "us", "63.4", "us", "95.1", "us", "158.5", "us"
        ]
    );
    assert_eq!(words(&text, "queue")[..3], ["queue", "31.7", "us"]);
    assert_eq!(words(&text, "minor")[..3], ["minor", "10", "20"]);
    assert!(
        text.contains("cache 128 MiB of 256 MiB; 64 MiB at home here; 130 MiB resident"),
        "{text}"
    );
    assert!(text.contains("; degraded: 48 MiB"), "{text}");
    assert!(
        text.contains("evictions  200/s; 3/s cancelled; 1/s faults wait"),
        "{text}"
    );
    assert!(
        text.contains("ahead      640/s pages fetched, 90 % of them used"),
        "{text}"
    );
    assert!(
        text.contains("errors     1; donor node 2 cannot be reached"),
        "{text}"
    );
    assert_eq!(
        words(&text, "1  "),
        [
            "1", "1", "GiB", "25", "%", "2", "MiB/s", "1", "MiB/s", "61.4", "us", "fast-tcp", "-"
        ]
    );
    assert!(words(&text, "2  ").contains(&"away"), "{text}");
    assert!(
        text.contains("q quit  |  Tab next VM  |  h heat map  |  p hold"),
        "{text}"
    );
    assert!(text.contains('█'), "the rate as a picture: {text}");
}

#[test]
fn a_screen_of_200_by_60_has_more() {
    let (before, after) = two_looks();
    let text = drawn(&view_of(before, after), 200, 60);
    for part in [
        "10.0.0.1:7000",
        "10.0.0.2:7000",
        "round trip",
        "80.0 us",
        "0x0000000100000  2222222222",
        "at home on node 1",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_vm_on_several_nodes_has_rates_of_each_and_what_its_vcpus_wait_for() {
    let before = status_of_nodes();
    let mut after = before.clone();
    after.uptime_s += 2.0;
    let transfers = after.nodes[1].node.transfers.as_mut().expect("has some");
    transfers.reads += 20;
    transfers.pages_received += 8;
    transfers.pages_sent += 6;
    transfers.early_losses += 4;
    after.coherence.as_mut().expect("it shares").total.reads += 20;
    let view = view_of(before, after);
    for (columns, rows) in [(80, 24), (200, 60)] {
        let text = drawn(&view, columns, rows);
        assert!(text.contains("requests a second"), "{text}");
        assert_eq!(words(&text, "10  ")[0], "10", "{text}");
        let node = words(&text, "1  ");
        let expected = ["1", "2", "up", "10/s", "4/s", "3/s", "2/s", "52.0", "us"];
        assert_eq!(node[..9], expected, "{text}");
        assert!(words(&text, "2  ").contains(&"silent"), "{text}");
        assert!(text.contains("0-2 rdma  1-2 tcp+tls"), "{text}");
        assert!(text.contains("1 on 0: waits for 0x2a10000"), "{text}");
        assert!(text.contains("time       1: within 31.2 us"), "{text}");
        assert!(text.contains("2: within 62.5 us, -7.0 ppm"), "{text}");
        assert!(text.contains("policy     follow: 1 moves"), "{text}");
        let hot = "hot pages  0x2a10000 moved 5898, read + write: 0: 20 + 2930, 1: 3 + 2945";
        assert!(text.contains(hot), "{text}");
        assert!(text.contains("errors     1; donor node 2"), "{text}");
        assert_eq!(text.contains("10.0.0.2:7000"), columns > 80, "{text}");
    }
}

#[test]
fn a_donor_beside_nodes_with_vcpus_has_rates_too() {
    let mut before = status_of_nodes();
    let mut donor = status().nodes[1].clone();
    donor.node.id = 3;
    before.nodes.push(donor);
    let mut after = before.clone();
    after.uptime_s += 2.0;
    let donor = after.nodes.last_mut().expect("a donor");
    donor.node.pages_fetched += 6;
    donor.node.pages_written_back += 8;
    let text = drawn(&view_of(before.clone(), after.clone()), 200, 60);
    let expected = ["3", "donor", "up", "-", "4/s", "3/s", "-", "80.0", "us"];
    assert_eq!(words(&text, "3  ")[..9], expected, "{text}");
    let link = after.nodes.last_mut().and_then(|donor| donor.link.as_mut());
    link.expect("a link").reachable = false;
    let text = drawn(&view_of(before, after), 200, 60);
    assert_eq!(words(&text, "3  ")[2], "away", "{text}");
}

/// Returns answers with the largest possible values everywhere.
fn enormous() -> (VmStatus, VmStatus) {
    let times = Percentiles {
        p50: 1e12,
        p90: 1e12,
        p99: 1e12,
        p999: 1e12,
        max: 1e12,
    };
    let kind = |count| FaultKind {
        count,
        latency_us: times,
        stages: Stages {
            queue: times,
            fetch: times,
            install: times,
        },
    };
    let of = |count: u64| {
        let mut status = status();
        status.name = "a-name-of-thirty-two-characters-".into();
        status.pid = 4_194_304;
        status.guest.cpus = 64;
        status.guest.memory_bytes = 8 << 40;
        status.memory.cache_bytes = (8 << 40) - (1 << 20);
        status.memory.cached_bytes = (8 << 40) - (1 << 20);
        status.memory.home_here_bytes = (8 << 40) - (1 << 20);
        status.memory.resident_bytes = (8 << 40) - (1 << 20);
        for faults in [
            &mut status.faults.remote,
            &mut status.faults.zero,
            &mut status.faults.minor,
            &mut status.faults.write_protect,
        ] {
            *faults = kind(count);
        }
        status.evictions.total = count;
        status.evictions.cancelled = count;
        status.stalled_for_memory = count;
        status.prefetch.issued = count;
        status.prefetch.used = count;
        status.errors_total = u64::MAX;
        status.errors = vec!["x".repeat(500)];
        let node = status.nodes[1].clone();
        status.nodes.truncate(1);
        for id in 1..=64 {
            let mut node = node.clone();
            node.node.id = id;
            node.node.memory_bytes = (8 << 40) - (1 << 20);
            node.node.pages_fetched = count;
            node.node.pages_written_back = count;
            node.node.path.as_mut().expect("a path").latency_estimate_us = 1e12;
            node.node.path.as_mut().expect("a path").faults = "loopback".into();
            node.node.address = Some("[2001:db8:1111:2222:3333:4444:5555:6666]:65535".into());
            status.nodes.push(node);
        }
        status
    };
    let (before, mut after) = (of(0), of(1 << 40));
    after.uptime_s += 1.0;
    (before, after)
}

#[test]
fn nothing_is_cut_however_large() {
    let (before, after) = enormous();
    for (columns, rows) in [(80, 24), (109, 30), (110, 43), (200, 60)] {
        let mut view = View::new(vec![choice(4_194_304, "x")], false);
        view.see(
            4_194_304,
            Seen::Status(Box::new(before.clone()), Some(map())),
        );
        view.see(4_194_304, Seen::Status(Box::new(after.clone()), None));
        let text = drawn(&view, columns, rows);
        assert_eq!(text.contains("by tcp"), columns >= 109, "{text}");
        // Each fault and stage has its four times, with their unit at the end.
        for row in [
            "remote  ",
            "queue",
            "fetch",
            "install",
            "zero",
            "minor",
            "first write",
        ] {
            let words = words(&text, row);
            assert_eq!(words.last(), Some(&"s"), "{text}");
            assert_eq!(
                words.iter().filter(|word| **word == "1.00M").count(),
                4,
                "{text}"
            );
        }
        let node = words(&text, "1  ");
        for part in ["25", "TiB", "1.00M", "fast-tcp", "loopback"] {
            assert!(node.contains(&part), "{part} in {node:?}");
        }
        assert!(text.contains("x..."), "a long error has a sign: {text}");
        assert!(text.contains("TiB resident"), "{text}");
        assert!(text.contains("faults wait for memory"), "{text}");
        assert!(text.contains("more; `ssi-hv status` has all"), "{text}");
        assert_eq!(text.contains("]:65535"), columns >= 200, "{text}");
    }
}

#[test]
fn a_terminal_that_is_too_small_is_told_kindly() {
    let (before, after) = two_looks();
    let view = view_of(before, after);
    for (columns, rows) in [(79, 24), (80, 23), (20, 5), (1, 1)] {
        let text = drawn(&view, columns, rows);
        assert!(!text.contains("remote"), "{text}");
    }
    let text = drawn(&view, 40, 10).replace('\n', " ");
    assert!(text.contains("40 x 10; top needs 80 x 24"), "{text}");
}

#[test]
fn keys_switch_between_numbers_map_and_vms() {
    let (before, after) = two_looks();
    let mut view = view_of(before, after.clone());
    assert!(view.press(Key::Heat) && view.shows_heat());
    let text = drawn(&view, 80, 24);
    assert!(
        text.contains("2222222222") && text.contains("h numbers"),
        "{text}"
    );
    assert!(text.contains("a character is 256 KiB"), "{text}");
    for _ in 0..100 {
        view.press(Key::Down);
    }
    assert_eq!(
        drawn(&view, 80, 24),
        text,
        "all of it is seen: nothing to scroll"
    );
    view.press(Key::Heat);

    view.press(Key::Next);
    assert_eq!(view.chosen(), Some(18));
    let text = drawn(&view, 80, 24);
    assert!(
        text.starts_with("db  VM 2 of 2") && text.contains("Asking..."),
        "{text}"
    );
    // A late answer of the other VM is not displayed.
    view.see(17, Seen::Status(Box::new(after), None));
    assert!(!drawn(&view, 80, 24).contains("web"));
    view.press(Key::Next);
    assert_eq!(view.chosen(), Some(17));
    view.press(Key::Previous);
    assert_eq!(view.chosen(), Some(18));
    assert!(!view.press(Key::Quit));
}

#[test]
fn a_held_picture_stands_still_and_says_so() {
    let (before, mut after) = two_looks();
    let mut view = view_of(before, after.clone());
    view.press(Key::Hold);
    let text = drawn(&view, 80, 24);
    assert!(
        text.contains("picture held") && text.contains("p go on"),
        "{text}"
    );
    after.uptime_s += 1.0;
    after.faults.remote.count += 7;
    view.see(17, Seen::Status(Box::new(after.clone()), None));
    assert_eq!(drawn(&view, 80, 24), text);
    view.press(Key::Hold);
    view.see(17, Seen::Status(Box::new(after), None));
    // From before the pause until now: 7 in 1 s.
    assert_eq!(words(&drawn(&view, 80, 24), "remote  ")[1], "7");
}

#[test]
fn a_vm_that_ends_stays_on_the_screen_and_says_how_as_far_as_is_known() {
    let (before, after) = two_looks();
    let mut view = view_of(before, after.clone());
    view.see(
        17,
        Seen::Silent("process 17 does not answer within 20 s".into()),
    );
    assert!(drawn(&view, 80, 24).contains("does not answer within 20 s"));
    view.see(17, Seen::Status(Box::new(after.clone()), None));
    assert!(
        !drawn(&view, 80, 24).contains("does not answer"),
        "it does again"
    );

    view.see(17, Seen::Ended);
    let text = drawn(&view, 80, 24);
    assert!(text.contains("web (17) ended"), "{text}");
    assert!(text.contains("ended; last error: donor node 2"), "{text}");
    assert!(
        text.contains("remote"),
        "the last numbers are still there: {text}"
    );
    // It stays in the list while it is displayed.
    view.list(vec![choice(18, "db")]);
    assert!(drawn(&view, 80, 24).contains("VM 1 of 2"));

    let mut ended = view_of(
        after.clone(),
        VmStatus {
            state: VmState::Ending,
            errors: Vec::new(),
            uptime_s: after.uptime_s + 1.0,
            ..after
        },
    );
    ended.see(17, Seen::Ended);
    assert!(drawn(&ended, 80, 24).contains("The VM has ended on request"));
}

#[test]
fn a_guest_that_was_booted_anew_has_no_rates_of_two_lives() {
    let (before, mut after) = two_looks();
    after.boot.restarts = 1;
    assert_eq!(Rates::between(&before, &after), None);
    let view = view_of(before.clone(), before);
    assert_eq!(
        words(&drawn(&view, 80, 24), "remote  ")[1],
        "-",
        "no time has passed"
    );
}

#[test]
fn colours_are_used_only_if_wanted() {
    let (before, after) = two_looks();
    for colour in [false, true] {
        let mut view = View::new(vec![choice(17, "web")], colour);
        view.see(17, Seen::Status(Box::new(before.clone()), Some(map())));
        view.see(17, Seen::Status(Box::new(after.clone()), None));
        for _ in 0..2 {
            let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("no terminal fails");
            terminal
                .draw(|frame| screen::draw(&view, frame))
                .expect("is drawn");
            let cells = &terminal.backend().buffer().content;
            let coloured = cells
                .iter()
                .any(|cell| cell.fg != ratatui::style::Color::Reset);
            assert_eq!(coloured, colour);
            view.press(Key::Heat);
        }
    }
}
