//! `--drain-failing on`: a donor whose connections fail again and again.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fabric_test_support::proxy::{Mischief, Proxy};

use super::*;
use crate::running::until;

/// Time between two cuts: the 2 s in which breaks are one failure, and as much again for a busy
/// machine.
const APART: Duration = Duration::from_secs(4);

/// Limit of cuts until a donor is drained: one that is seen late counts with the next.
const CUTS_MAX: u32 = 10;

/// A donor behind a network that can be cut.
fn behind_proxy(place: &Place) -> (Running, Proxy) {
    let (node, address) = node(place, &[]);
    let address: SocketAddr = address.parse().expect("an address");
    (node, Proxy::new(address, Mischief::None, 0))
}

/// Cuts the connections to a donor until the VM has noticed it, and waits until the guest runs.
fn cut_once(place: &Place, proxy: &Proxy, node: u32) {
    let began = Instant::now();
    let outages = |now: &Value| count(now, &format!("/nodes/{node}/link/outages"));
    let before = outages(&status(place));
    proxy.cut(true);
    wait_beyond(place, &format!("/nodes/{node}/link/outages"), before);
    proxy.cut(false);
    until(|| {
        let now = status(place);
        let is_over = now["state"] == "running" && began.elapsed() >= APART;
        is_over.then_some(()).ok_or_else(|| now.to_string())
    });
}

#[test]
fn it_is_drained_and_one_with_an_outage_is_not() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (failing, to_failing) = behind_proxy(&place);
    let (_healthy, to_healthy) = behind_proxy(&place);
    let [first, second] = [&to_failing, &to_healthy].map(|proxy| proxy.address.to_string());
    let donors = ["--donor", &first, "--donor", &second];
    let vm = counting(&place, &[&donors[..], &["--drain-failing", "on"]].concat());
    cut_once(&place, &to_healthy, 2);
    for _ in 0..4 {
        cut_once(&place, &to_failing, 1);
    }
    let now = status(&place);
    assert!(now["memory"]["drain"].is_null(), "four are too few: {now}");
    let is_drained = |now: &Value| !now["memory"]["drain"].is_null();
    for _ in 4..CUTS_MAX {
        cut_once(&place, &to_failing, 1);
        if is_drained(&status(&place)) {
            break;
        }
    }
    let now = until(|| {
        let now = status(&place);
        let is_done = now["memory"]["drain"]["state"] == "done";
        if is_done {
            Ok(now)
        } else {
            Err(now.to_string())
        }
    });
    assert_eq!(now["memory"]["drain"]["node"], 1, "{now}");
    assert_eq!(count(&now, "/nodes/1/memory_bytes"), 0, "{now}");
    lends_nothing(&place, &failing);
    let placement = place.json(&["status", "leaves", "--placement", "--json"]);
    let donors = &placement["vms"][0]["placement"]["donors"];
    assert_eq!(
        (&donors[0]["state"], &donors[1]["state"]),
        (&"left".into(), &"in-use".into())
    );
    assert_eq!(failing.end(libc::SIGKILL), None);
    counted_right(&place, vm);
}

#[test]
fn it_stays_where_that_is_not_asked_for() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_failing, to_failing) = behind_proxy(&place);
    let (_other, other) = node(&place, &[]);
    let first = to_failing.address.to_string();
    let vm = counting(&place, &["--donor", &first, "--donor", &other]);
    for _ in 0..6 {
        cut_once(&place, &to_failing, 1);
    }
    let now = status(&place);
    assert!(now["memory"]["drain"].is_null(), "{now}");
    counted_right(&place, vm);
}
