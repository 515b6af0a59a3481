//! Nodes of a real etcd that join a running VM for copies that were lost.

use std::io::Read as _;

use ssi_hv::exit::ExitCode;
use ssi_hv_membership::testing::{Etcd, HeldPort};

use super::vms::{MIB, arguments, donors, goes_on, lent, status, walking};
use super::{entry, registered};
use crate::replicas::read_round;
use crate::running::{Place, Running, count, next_address, until, vm_with};
use crate::support;

/// Flags of a VM whose donors are lost soon.
const COPIES: [&str; 4] = ["--replicas", "2", "--donor-grace", "1"];

/// Starts nodes `a` and `b`, of zones of their own, and a VM with copies on both, whose guest goes through
/// its memory when it is told to, and has done so once.
pub(super) fn of_two(place: &Place, etcd: &Etcd) -> ([(Running, String); 2], Running) {
    let nodes = ["name=a,zone=x", "name=b,zone=y"];
    let nodes = nodes.map(|member| registered(place, etcd, member, &[]));
    let url = etcd.url();
    let flags = [&["--name", "walks", "--cluster", &url], &COPIES[..]].concat();
    let mut vm = vm_with(place, tiny_guests::talk_and_walk::code(), &flags);
    read_round(&mut vm, 1);
    (nodes, vm)
}

/// Waits until the VM knows of so many nodes in an etcd that answers, or does not.
#[track_caller]
pub(super) fn knows(place: &Place, nodes: u64, is_connected: bool) {
    until(|| {
        let now = status(place)["cluster"].take();
        let is_right = now["nodes"] == nodes && now["connected"] == is_connected;
        is_right.then_some(()).ok_or_else(|| now.to_string())
    });
}

/// Waits until the VM has lost so many donors since its start. From then on memory has one copy, until
/// all is copied again.
#[track_caller]
pub(super) fn has_lost(place: &Place, donors: u64) {
    until(|| match count(&status(place), "/memory/replicas/losses") {
        lost if lost >= donors => Ok(()),
        lost => Err(format!("{lost} donors are lost")),
    });
}

/// Waits until some memory has one copy, or none has.
#[track_caller]
pub(super) fn is_degraded(place: &Place, is_degraded: bool) {
    let degraded = "/memory/replicas/degraded_bytes";
    until(|| match count(&status(place), degraded) {
        bytes if (bytes > 0) == is_degraded => Ok(()),
        bytes => Err(format!("{bytes} bytes have one copy")),
    });
}

/// Waits until etcd has it that so much of a node is free.
#[track_caller]
pub(super) fn is_free(etcd: &Etcd, name: &str, bytes: u64) {
    until(|| {
        let found = entry(etcd, name)?;
        let is_right = found["free_bytes"] == bytes;
        is_right.then_some(()).ok_or_else(|| found.to_string())
    });
}

#[test]
fn a_node_that_is_started_again_takes_its_copies_again() {
    if !support::kvm_is_there() {
        return;
    }
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let place = Place::new();
    // Started again, it gets the same port.
    let port = HeldPort::new();
    let (address, url) = (port.address().to_string(), etcd.url());
    let mut arguments = vec!["node", "--listen", &address, "--memory", "64M"];
    arguments.extend(["--cluster", &url, "--member", "name=a,zone=x"]);
    let mut a = Running::start(&mut place.command(&arguments));
    assert_eq!(next_address(&mut a), address);
    until(|| entry(&etcd, "a"));
    let (_b, _) = registered(&place, &etcd, "name=b,zone=y", &[]);
    let vm = walking(&place, &etcd, &COPIES);
    knows(&place, 2, true);
    // Nothing of what follows needs etcd to be there all the time.
    etcd.kill();
    knows(&place, 2, false);
    let shown = place.printed(&["status", "walks"]);
    assert!(
        shown.contains("etcd, which has not answered for"),
        "{shown}"
    );
    drop(a);
    is_degraded(&place, true);
    goes_on(&place);
    etcd.restart();
    let mut again = Running::start(&mut place.command(&arguments));
    assert_eq!(next_address(&mut again), address);
    is_degraded(&place, false);
    assert!(donors(&place).contains(&address), "{:?}", donors(&place));
    assert!(lent(&place, &again) > 0);
    let in_one_zone = "/memory/replicas/in_one_zone_bytes";
    assert_eq!(count(&status(&place), in_one_zone), 0);
    goes_on(&place);
    // It is lost again, and rests: another one joins, although that is in the zone of the others.
    drop(again);
    has_lost(&place, 2);
    let mut again = Running::start(&mut place.command(&arguments));
    assert_eq!(next_address(&mut again), address);
    let (e, _) = registered(&place, &etcd, "name=e,zone=y", &[]);
    is_degraded(&place, false);
    assert!(lent(&place, &e) > 0 && lent(&place, &again) == 0);
    goes_on(&place);
    assert_eq!(
        vm.end(libc::SIGTERM),
        Some(ExitCode::Terminated.code().into())
    );
}

#[test]
fn a_node_joins_while_etcd_is_partitioned_and_nothing_is_lost_or_lent_twice() {
    if !support::kvm_is_there() {
        return;
    }
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let place = Place::new();
    let ([(a, _), (b, _)], mut vm) = of_two(&place, &etcd);
    let url = etcd.url();
    let (c, joined) = registered(&place, &etcd, "name=c,zone=x", &[]);
    knows(&place, 3, true);
    // Connections stay, and nothing is answered.
    etcd.set_stopped(true);
    drop(a);
    has_lost(&place, 1);
    read_round(&mut vm, 2);
    is_degraded(&place, false);
    assert!(donors(&place).contains(&joined), "{:?}", donors(&place));
    knows(&place, 3, false);
    // All copies of this one are on the new one as well.
    drop(b);
    read_round(&mut vm, 3);
    etcd.restart();
    let held = lent(&place, &c);
    assert!(held >= 48 * MIB, "{held}");
    is_free(&etcd, "c", 64 * MIB - held);
    // Another VM does not get what this one has.
    let arguments = arguments(&place, &url);
    let mut arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    arguments.extend(["--local-memory", "16M"]);
    let output = place.output(&arguments);
    let code = ExitCode::DonorUnavailable.code();
    assert_eq!(output.status.code(), Some(code.into()), "{output:?}");
    assert_eq!(lent(&place, &c), held);
    vm.signal(libc::SIGTERM);
    let mut rest = Vec::new();
    vm.console.read_to_end(&mut rest).expect("a pipe");
    assert_eq!(vm.code(), Some(ExitCode::Terminated.code().into()));
    assert_eq!(lent(&place, &c), 0);
    is_free(&etcd, "c", 64 * MIB);
}

#[test]
fn a_guest_that_reboots_finds_nodes_in_place_of_those_that_are_lost() {
    if !support::kvm_is_there() {
        return;
    }
    let Some(etcd) = Etcd::start() else { return };
    let place = Place::new();
    let (a, _) = registered(&place, &etcd, "name=a,zone=x", &[]);
    let (_b, left) = registered(&place, &etcd, "name=b,zone=y", &[]);
    let url = etcd.url();
    let flags = ["--name", "walks", "--cluster", &url];
    let flags = [&flags[..], &["--on-reboot", "restart"], &COPIES].concat();
    let mut vm = vm_with(&place, tiny_guests::wander::code(), &flags);
    // It reboots at the second press.
    place.printed(&["shutdown", "walks"]);
    goes_on(&place);
    let (c, joined) = registered(&place, &etcd, "name=c,zone=x", &[]);
    drop(a);
    has_lost(&place, 1);
    is_degraded(&place, false);
    assert!(donors(&place).contains(&joined), "{:?}", donors(&place));
    // One that does not answer while it is stopped. It has no lease at etcd, so its entry stays.
    let arguments = ["node", "--listen", "127.0.0.1:0", "--memory", "256M"];
    let mut d = Running::start(&mut place.command(&arguments));
    let other = next_address(&mut d);
    d.signal(libc::SIGSTOP);
    let mut like = entry(&etcd, "b").expect("it is registered");
    like["address"] = other.clone().into();
    like["zone"] = "x".into();
    like["free_bytes"] = (64 * MIB).into();
    let bytes = serde_json::to_vec(&like).expect("JSON");
    etcd.put("/ssi-hv/nodes/d", &bytes);
    // One donor is left, which is too few for two copies.
    drop(c);
    has_lost(&place, 2);
    place.printed(&["shutdown", "walks"]);
    // It starts again, and asks for donors: from here on it can join by the reboot only.
    until(|| {
        let output = place.output(&["status", "walks", "--json"]);
        let said = String::from_utf8_lossy(&output.stderr);
        let is_starting = said.contains("the VM is starting");
        is_starting
            .then_some(())
            .ok_or_else(|| format!("{output:?}"))
    });
    d.signal(libc::SIGCONT);
    let mut said = [0];
    vm.console.read_exact(&mut said).expect("it starts again");
    assert_eq!(&said, b"r");
    assert_eq!(count(&status(&place), "/boot/restarts"), 1);
    let used = donors(&place);
    assert!(used.contains(&left) && used.contains(&other), "{used:?}");
    is_degraded(&place, false);
    assert_eq!(
        vm.end(libc::SIGTERM),
        Some(ExitCode::Terminated.code().into())
    );
}
