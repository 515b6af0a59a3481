//! etcd is killed, restarted or partitioned while a donor is drained, while one joins for copies that were
//! lost, and while copies are made again on donors that are left: nothing is lost, and no memory is lent
//! twice.

use std::io::Read as _;

use ssi_hv::exit::ExitCode;
use ssi_hv_membership::testing::Etcd;

use super::registered;
use super::repairs::{has_lost, is_degraded, is_free, knows, of_two};
use super::vms::{MIB, lent, status};
use crate::replicas::read_round;
use crate::running::{Place, Running, count, until};
use crate::support;

/// What a node lends, all of it to the VM: each donor has room for one of two copies of all memory.
const NODE: u64 = 64 * MIB;

/// What happens to etcd.
#[derive(Clone, Copy)]
enum Disturbance {
    /// It is away from before an operation until after it.
    Killed,
    /// It is away when an operation begins, and comes back while that is in progress.
    Restarted,
    /// Connections to it stay, and nothing is answered.
    Partitioned,
}

impl Disturbance {
    /// Disturbs etcd, and begins an operation.
    fn begin(self, etcd: &mut Etcd, operation: impl FnOnce()) {
        match self {
            Self::Killed => etcd.kill(),
            Self::Restarted => {
                etcd.kill();
                operation();
                return etcd.restart();
            }
            Self::Partitioned => etcd.set_stopped(true),
        }
        operation();
    }

    /// Ends it.
    fn end(self, etcd: &mut Etcd) {
        match self {
            Self::Killed => etcd.restart(),
            Self::Restarted => {}
            Self::Partitioned => etcd.set_stopped(false),
        }
    }
}

/// Asserts that each node lends what the VM has of it, by one lease, and the others nothing.
#[track_caller]
fn lends_once(place: &Place, nodes: &[(&Running, &str)], used: &[&str]) {
    let status = place.json(&["status", "walks", "--placement", "--json"]);
    let placed = status["vms"][0]["placement"]["donors"].as_array();
    let placed = placed.expect("donors");
    let mut sum = 0;
    for (node, address) in nodes {
        let status = place.json(&["status", &node.pid(), "--json"]);
        let now = |pointer: &str| count(&status["nodes"][0], pointer);
        let is_used = used.contains(address);
        let known = placed.iter().filter(|donor| donor["address"] == *address);
        let known: u64 = known.map(|donor| count(donor, "/lent_bytes")).sum();
        assert_eq!(
            (now("/leases"), now("/lent_bytes"), known),
            if is_used { (1, NODE, NODE) } else { (0, 0, 0) },
            "{address}: {status} {placed:?}"
        );
        sum += now("/lent_bytes");
    }
    assert_eq!(sum, NODE * used.len() as u64);
}

/// Has a donor drained, another one lost for which one joins, and a third one lost for which there is
/// room, while etcd is disturbed.
fn nothing_is_lost_or_lent_twice(disturbance: Disturbance) {
    if !support::kvm_is_there() {
        return;
    }
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let place = Place::new();
    let ([(a, of_a), (b, _)], mut vm) = of_two(&place, &etcd);
    let (c, of_c) = registered(&place, &etcd, "name=c,zone=x", &[]);
    let (d, of_d) = registered(&place, &etcd, "name=d,zone=y", &[]);
    let (e, of_e) = registered(&place, &etcd, "name=e,zone=z", &[]);
    knows(&place, 5, true);
    let nodes = [(&a, &of_a), (&c, &of_c), (&d, &of_d), (&e, &of_e)];
    let nodes = nodes.map(|(node, address)| (node, address.as_str()));

    // Drain.
    let to = format!("{of_c},zone=x");
    disturbance.begin(&mut etcd, || {
        place.printed(&["drain", "walks", "--node", &of_a, "--to", &to]);
    });
    read_round(&mut vm, 2);
    until(|| {
        let drain = status(&place)["memory"]["drain"].take();
        let is_done = drain["state"] == "done";
        is_done.then_some(()).ok_or_else(|| drain.to_string())
    });
    is_degraded(&place, false);
    disturbance.end(&mut etcd);
    lends_once(&place, &nodes, &[&of_c]);
    assert_eq!(lent(&place, &b), NODE);
    knows(&place, 5, true);

    // Join: the others have no room, and d is of the zone of the lost one.
    disturbance.begin(&mut etcd, || {
        drop(b);
        has_lost(&place, 1);
    });
    read_round(&mut vm, 3);
    is_degraded(&place, false);
    disturbance.end(&mut etcd);
    lends_once(&place, &nodes, &[&of_c, &of_d]);

    // Repair: d and e have room for the copies of c.
    let said = place.printed(&["rebalance", "walks", "--add", &of_e, "--wait", "50"]);
    assert!(said.contains("each donor has its share: "), "{said}");
    lends_once(&place, &nodes, &[&of_c, &of_d, &of_e]);
    disturbance.begin(&mut etcd, || {
        drop(c);
        has_lost(&place, 2);
    });
    read_round(&mut vm, 4);
    is_degraded(&place, false);
    disturbance.end(&mut etcd);
    let nodes = [(&a, &of_a), (&d, &of_d), (&e, &of_e)];
    let nodes = nodes.map(|(node, address)| (node, address.as_str()));
    lends_once(&place, &nodes, &[&of_d, &of_e]);
    // Both have all of it.
    drop(d);
    has_lost(&place, 3);
    read_round(&mut vm, 5);

    // Nothing of that is forgotten in etcd, nor by the nodes.
    is_free(&etcd, "e", 0);
    vm.signal(libc::SIGTERM);
    let mut rest = Vec::new();
    vm.console.read_to_end(&mut rest).expect("a pipe");
    assert_eq!(vm.code(), Some(ExitCode::Terminated.code().into()));
    for (node, name) in [(&a, "a"), (&e, "e")] {
        // A node that the VM was asking to join keeps that lease for a while.
        until(|| match lent(&place, node) {
            0 => Ok(()),
            bytes => Err(format!("{name} lends {bytes} bytes")),
        });
        is_free(&etcd, name, NODE);
    }
}

#[test]
fn nothing_is_lost_or_lent_twice_while_etcd_is_killed() {
    nothing_is_lost_or_lent_twice(Disturbance::Killed);
}

#[test]
fn nothing_is_lost_or_lent_twice_while_etcd_is_restarted() {
    nothing_is_lost_or_lent_twice(Disturbance::Restarted);
}

#[test]
fn nothing_is_lost_or_lent_twice_while_etcd_is_partitioned() {
    nothing_is_lost_or_lent_twice(Disturbance::Partitioned);
}
