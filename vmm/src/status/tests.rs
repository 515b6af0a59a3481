//! Tests of the displayed status.

use ssi_hv_api::fixtures::{block, drain, node_status, rebalance, status, status_of_nodes};

use super::heat::ExtentStatus;
use super::*;
use crate::report::{DrainState, NodeClock, PolicyUsed};

#[test]
fn a_node_tells_of_its_connections_and_what_they_take() {
    let text = screen::node(&node_status());
    for part in [
        "7 pages read, 8 written; 1 RDMA connections\n",
        "rdma       rxe0: in use 4 of 1048576 queue pairs, 4 of 1048576 completion queues,\n",
        "           2 of 524287 regions, 1 domains; 5 MiB pinned\n",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let quiet = NodeStatus {
        counters: NodeCounters {
            rdma: rdma::NodeRdma::default(),
            ..node_status().counters
        },
        ..node_status()
    };
    assert!(!screen::node(&quiet).to_lowercase().contains("rdma"));
}

#[test]
fn a_screen_has_what_matters_and_fits_80_columns() {
    let text = screen::vm(&status());
    assert!(text.lines().all(|line| line.len() <= 84), "{text}");
    assert!(text.lines().count() <= 35, "{text}");
    for part in [
        "VM web (process 17): running, up 2 h 1 min",
        "init after 8.2 s; transport tcp, tier slow",
        "pinned     each vCPU to a CPU of the host, in order: 3,1\n",
        "cache 128 MiB of 256 MiB",
        "130 MiB in memory here, 2 MiB of it in huge pages",
        "copies     degraded: 48 MiB of 192 MiB have one copy; 16 MiB restored; 1 out\n",
        "           8 MiB have both copies in one zone\n",
        "           donors sent 3 wrong pieces\n",
        "lost       128 KiB in 32 pages with 1 donor(s); 14 machine checks\n",
        "           now at 0x2000000-0x201cfff\n",
        "cluster    3 node(s) in etcd, which has not answered for 12 s\n",
        "evictions  99:",
        "4 faults waited",
        "ahead      640 pages fetched: 512 used, 32 wasted; 3 touched on their way",
        "wire       300 MiB of pages as 250 MiB; 50 compressed; now on: prefetch, write-back",
        "rdma       rxe0: in use 4 of 1048576 queue pairs",
        "61.4 fast-tcp       3  10.0.0.1:7000",
        "away",
        "from node 1",
        "error: donor node 2 cannot be reached",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let remote = text.lines().find(|line| line.starts_with("remote"));
    let words: Vec<_> = remote.expect("a line").split_whitespace().collect();
    assert_eq!(words, ["remote", "1234", "31.7", "63.4", "95.1", "158.5"]);
}

#[test]
fn a_drain_has_a_line_with_its_progress_and_why_it_failed() {
    let mut now = status();
    let drain = now.memory.drain.insert(drain());
    drain.state = DrainState::Failed;
    drain.error = Some("a donor was lost".into());
    let text = screen::vm(&now);
    let line = "drain      node 1: failed, 24 MiB of 96 MiB have moved; a donor was lost\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn a_rebalancing_has_a_line_with_its_progress() {
    let mut now = status();
    now.memory.rebalance = Some(rebalance());
    let text = screen::vm(&now);
    let line = "rebalance  moving, 16 MiB of 64 MiB have moved\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn a_vm_on_several_nodes_shows_them_and_what_its_vcpus_wait_for() {
    let text = screen::vm(&status_of_nodes());
    assert!(text.lines().count() <= 36, "{text}");
    for part in [
        "0    0-1      up             600      400      700      10        -  -\n",
        "1    2        up            1200      800     1400      10     52.0  10.0.0.1:7000\n",
        "2    3        silent        1800",
        "travels    0-1 rdma  0-2 rdma  1-2 tcp+tls\n",
        "time       1: within 31.2 us, -3.5 ppm, 40 steps\n",
        "           2: within 62.5 us, -7.0 ppm, 80 steps, scaled\n",
        "shared     600 reads, 1200 writes, 1800 upgrades; 8 invalidations\n",
        "2400 pages moved, 5 from home, 6 zero; 14 split blocks of 2 MiB\n",
        "vCPUs      0 on 0: running  1 on 0: waits for 0x2a10000  2 on 1: halted",
        "3 on 2: unknown\n",
        "policy     follow: 1 moves, 2 failed  1 moved (26 s)  1 watched  2 waits little\n",
        "hot pages  0x2a10000 moved 5898, read + write: 0: 20 + 2930, 1: 3 + 2945\n",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(
        !text.contains("outages") && !text.contains("write protect"),
        "{text}"
    );
}

#[test]
fn what_is_not_known_of_clocks_is_omitted_and_what_is_absurd_is_short() {
    let mut status = status_of_nodes();
    status.vcpu_policy = Some(PolicyUsed::default());
    status.nodes[1].node.clock = None;
    let clock = status.nodes[2].node.clock.as_mut().expect("has one");
    clock.rate_ppm = None;
    let text = screen::vm(&status);
    assert!(text.contains("time       2: within 62.5 us, 80 steps, scaled\n"));
    assert!(text.contains("policy     static\n"), "{text}");
    for absurd in [f64::MAX, f64::MIN] {
        status.nodes[2].node.clock = Some(NodeClock {
            error_us_max: absurd,
            rate_ppm: Some(absurd),
            steps: u64::MAX,
            ..NodeClock::default()
        });
        let text = screen::vm(&status);
        let line = text.lines().find(|line| line.starts_with("time"));
        assert!(line.is_some_and(|line| line.len() <= 80), "{text}");
    }
    status.nodes[2].node.clock = None;
    status.vcpu_policy = None;
    let text = screen::vm(&status);
    assert!(
        !text.contains("policy") && !text.contains("\ntime"),
        "{text}"
    );
}

#[test]
fn interrupt_controllers_are_shown_where_they_are_not_in_the_kernel() {
    let mut status = status();
    assert!(screen::vm(&status).contains("vCPU(s), irqchip user, init"));
    status.guest.irqchip = "kernel".into();
    assert!(!screen::vm(&status).contains("irqchip"));
}

#[test]
fn pinning_is_shown_where_there_is_some_and_cut_where_it_is_long() {
    let pinned = |cpus: Option<Vec<u32>>| {
        let mut status = status();
        status.guest.dedicated_cpus = cpus.as_ref().is_some_and(|cpus| cpus.len() == 1);
        status.guest.cpu_pinning = cpus;
        screen::vm(&status)
    };
    assert!(!pinned(None).contains("each vCPU"));
    assert!(pinned(Some((8..72).collect())).contains("in order: 8-71\n"));
    assert!(pinned(Some(vec![8])).contains("each vCPU to its own CPU, in order: 8\n"));
    let text = pinned(Some((0..254).map(|cpu| cpu * 2 % 251).collect()));
    assert!(text.lines().all(|line| line.len() <= 84), "{text}");
    assert!(text.contains("in order: 0,2,4,") && text.contains(",...\n"));
}

#[test]
fn a_character_tells_what_part_of_a_block_is_here() {
    for (block, character) in [
        (block(0, 0, 64, 0), '.'),
        (block(0, 1, 63, 0), '-'),
        (block(1, 63, 0, 0), '1'),
        (block(32, 32, 0, 0), '5'),
        (block(63, 1, 0, 0), '9'),
        (block(1, 0, 63, 0), '#'),
        (block(64, 0, 0, 15), '#'),
        (block(10, 54, 0, 16), '*'),
        (block(0, 64, 0, 99), '-'),
    ] {
        assert_eq!(screen::heat::character(&block), character, "{block:?}");
    }
}

#[test]
fn a_heat_map_has_rows_by_address_and_says_what_was_looked_at() {
    let blocks = vec![block(64, 0, 0, 3); 70];
    let mut heat = heat::HeatStatus {
        block_pages: 64,
        pages: 70 * 64,
        pages_looked_at: 70 * 64,
        extents: vec![ExtentStatus {
            first_page: 0x100,
            pages: 70 * 64,
            home: 1,
            blocks,
        }],
    };
    let text = screen::heat::map(&heat, false);
    assert!(
        text.contains("a character is 256 KiB; every page was looked at"),
        "{text}"
    );
    assert!(text.contains("17.5 MiB at home on node 1"), "{text}");
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with("0x")).collect();
    assert_eq!(rows[0], format!("0x0000000100000  {}", "#".repeat(64)));
    assert_eq!(rows[1], format!("0x0000001100000  {}", "#".repeat(6)));
    assert!(text.lines().all(|line| line.len() <= 81), "{text}");
    assert!(screen::heat::map(&heat, true).contains("\x1b[33m#\x1b[0m"));
    heat.pages_looked_at = 64;
    assert!(screen::heat::map(&heat, false).contains("64 of 4480 pages were looked at"));
}
