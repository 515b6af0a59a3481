//! VMs that find their donors in a real etcd.

use std::fs;
use std::net::TcpListener;

use serde_json::{Value, json};
use ssi_hv::exit::ExitCode;
use ssi_hv_membership::testing::Etcd;

use super::{entry, registered};
use crate::pki::succeeds;
use crate::running::{Place, Running, count, until, vm_with};
use crate::support;

pub(super) const MIB: u64 = 1 << 20;
/// What a guest of 64 MiB with 16 MiB here needs of nodes.
const REMOTE: u64 = 48 * MIB;

pub(super) fn walking(place: &Place, etcd: &Etcd, more: &[&str]) -> Running {
    let url = etcd.url();
    let flags = [&["--name", "walks", "--cluster", &url][..], more].concat();
    vm_with(place, tiny_guests::walk_for_ever::code(), &flags)
}

pub(super) fn status(place: &Place) -> Value {
    let mut all = place.json(&["status", "walks", "--json"]);
    all["vms"][0].take()
}

/// Returns the addresses of the donors of the VM.
pub(super) fn donors(place: &Place) -> Vec<String> {
    let status = status(place);
    let nodes = status["nodes"].as_array().expect("nodes");
    let addresses = nodes.iter().filter_map(|node| node["address"].as_str());
    addresses.map(str::to_owned).collect()
}

pub(super) fn lent(place: &Place, node: &Running) -> u64 {
    let status = place.json(&["status", &node.pid(), "--json"]);
    count(&status["nodes"][0], "/lent_bytes")
}

/// Waits until the guest has read pages of donors since now.
#[track_caller]
pub(super) fn goes_on(place: &Place) {
    let faults = "/faults/remote/count";
    let before = count(&status(place), faults);
    until(|| match count(&status(place), faults) {
        now if now > before + 500 => Ok(()),
        now => Err(format!("{before} faults before, {now} now")),
    });
}

/// Returns the arguments of a VM that needs 48 MiB of nodes.
pub(super) fn arguments(place: &Place, cluster: &str) -> Vec<String> {
    let kernel = place.path("kernel");
    fs::write(
        &kernel,
        tiny_guests::elf(tiny_guests::walk_for_ever::code()),
    )
    .expect("is written");
    let arguments = [
        "run",
        "--kernel",
        &kernel,
        "--memory",
        "64M",
        "--cluster",
        cluster,
    ];
    arguments.map(str::to_owned).into()
}

/// Returns the error of a VM that must not start.
#[track_caller]
fn refused(place: &Place, cluster: &str, more: &[&str], code: ExitCode) -> String {
    let arguments = arguments(place, cluster);
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    place.failed(&[&arguments, more].concat(), code)
}

/// Registers what no node is.
fn put(etcd: &Etcd, name: &str, address: &str, like: &Value) {
    let mut member = like.clone();
    member["address"] = address.into();
    member["memory_bytes"] = json!(1 << 30);
    member["free_bytes"] = json!(1 << 30);
    let bytes = serde_json::to_vec(&member).expect("JSON");
    etcd.put(&format!("/ssi-hv/nodes/{name}"), &bytes);
}

#[test]
fn a_vm_finds_a_node_and_runs_on_while_etcd_is_away() {
    if !support::kvm_is_there() {
        return;
    }
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let place = Place::new();
    let (alpha, address) = registered(&place, &etcd, "name=alpha", &[]);
    let vm = walking(&place, &etcd, &[]);
    assert_eq!(donors(&place), [address]);
    assert_eq!(lent(&place, &alpha), REMOTE);
    let free = |bytes: u64| {
        until(|| {
            let found = entry(&etcd, "alpha")?;
            let is_right = found["free_bytes"] == bytes;
            is_right.then_some(()).ok_or_else(|| found.to_string())
        });
    };
    free(64 * MIB - REMOTE);
    let url = etcd.url();
    let listed = place.printed(&["nodes", "--cluster", &url]);
    assert!(
        listed.contains("alpha") && listed.contains("16 MiB of 64 MiB free"),
        "{listed}"
    );
    let listed = place.json(&["nodes", "--cluster", &url, "--json"]);
    assert_eq!(listed["nodes"][0]["name"], "alpha", "{listed}");
    etcd.set_stopped(true);
    goes_on(&place);
    etcd.set_stopped(false);
    etcd.kill();
    goes_on(&place);
    assert_eq!(lent(&place, &alpha), REMOTE);
    etcd.restart();
    goes_on(&place);
    assert_eq!(
        vm.end(libc::SIGTERM),
        Some(ExitCode::Terminated.code().into())
    );
    until(|| {
        let found = entry(&etcd, "alpha")?;
        let is_right = found["free_bytes"] == 64 * MIB;
        is_right.then_some(()).ok_or_else(|| found.to_string())
    });
}

#[test]
fn a_node_that_is_listed_and_dead_is_passed_over() {
    if !support::kvm_is_there() {
        return;
    }
    let Some(etcd) = Etcd::start() else { return };
    let place = Place::new();
    let (_alpha, address) = registered(&place, &etcd, "name=alpha", &[]);
    let like = entry(&etcd, "alpha").expect("it is registered");
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = closed.local_addr().expect("an address").to_string();
    drop(closed);
    put(&etcd, "dead", &dead, &like);
    let vm = walking(&place, &etcd, &[]);
    assert_eq!(donors(&place), [address]);
    drop(vm);
}

#[test]
fn two_vms_that_want_the_same_memory_never_both_have_it() {
    if !support::kvm_is_there() {
        return;
    }
    let Some(etcd) = Etcd::start() else { return };
    let place = Place::new();
    let (alpha, address) = registered(&place, &etcd, "name=alpha", &[]);
    // As if no lease had been noticed: etcd names all as free, and more than there is.
    let like = entry(&etcd, "alpha").expect("it is registered");
    put(
        &etcd,
        "stale",
        &address.replace("127.0.0.1", "localhost"),
        &like,
    );
    let vm = walking(&place, &etcd, &[]);
    assert_eq!(lent(&place, &alpha), REMOTE);
    let url = etcd.url();
    let arguments = arguments(&place, &url);
    let mut arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    arguments.extend(["--local-memory", "16M"]);
    let output = place.output(&arguments);
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    let code = ExitCode::DonorUnavailable.code();
    assert_eq!(output.status.code(), Some(code.into()), "{said}");
    let last = said.lines().last().expect("an error");
    assert!(last.contains("it did not lend"), "{said}");
    assert_eq!(lent(&place, &alpha), REMOTE);
    goes_on(&place);
    // Another node lends what this one cannot.
    let (beta, _) = registered(&place, &etcd, "name=beta", &[]);
    let flags = ["--cluster", &url];
    let second = vm_with(&place, tiny_guests::walk_for_ever::code(), &flags);
    assert_eq!(
        [lent(&place, &alpha), lent(&place, &beta)],
        [REMOTE, REMOTE]
    );
    drop((vm, second));
}

#[test]
fn copies_are_on_nodes_of_different_zones() {
    if !support::kvm_is_there() {
        return;
    }
    let Some(etcd) = Etcd::start() else { return };
    let place = Place::new();
    let (_a, _) = registered(&place, &etcd, "name=a,zone=x", &[]);
    let (_b, _) = registered(&place, &etcd, "name=b,zone=x", &[]);
    let url = etcd.url();
    let copies = ["--replicas", "2"];
    let (_c, apart) = registered(&place, &etcd, "name=c,zone=y", &[]);
    let vm = walking(&place, &etcd, &copies);
    let used = donors(&place);
    assert_eq!(used.len(), 2, "{used:?}");
    assert!(used.contains(&apart), "{used:?}");
    let status = status(&place);
    assert_eq!(
        count(&status, "/memory/replicas/in_one_zone_bytes"),
        0,
        "{status}"
    );
    drop(vm);
    let pieces = ["--redundancy", "4+2", "--local-memory", "16M"];
    let line = refused(&place, &url, &pieces, ExitCode::DonorUnavailable);
    assert!(
        line.contains("48 MiB") && line.contains("in stripes of 4+2"),
        "{line}"
    );
}

#[test]
fn nodes_with_certificates_are_found_with_one() {
    if !support::kvm_is_there() {
        return;
    }
    let Some(etcd) = Etcd::start() else { return };
    let place = Place::new();
    let directory = place.directory.path();
    succeeds(directory, "init ca --cluster test");
    succeeds(directory, "issue ca node/alpha -o alpha");
    succeeds(directory, "issue ca vm/web -o web");
    let shown = ["--credentials", &place.path("alpha")];
    let (alpha, _) = registered(&place, &etcd, "name=alpha", &shown);
    // One with the name of none, at the address of another that comes later: not even asked for
    // memory.
    let like = entry(&etcd, "alpha").expect("it is registered");
    let address = like["address"].as_str().expect("an address").to_owned();
    put(
        &etcd,
        "aaron",
        &address.replace("127.0.0.1", "localhost"),
        &like,
    );
    let local = ["--local-memory", "16M"];
    let line = refused(&place, &etcd.url(), &local, ExitCode::DonorUnavailable);
    assert!(line.contains("alpha: it needs --credentials DIR"), "{line}");
    let web = place.path("web");
    let line = {
        let url = etcd.url();
        let arguments = arguments(&place, &url);
        let mut arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        arguments.extend(["--local-memory", "16M", "--credentials", &web]);
        let output = place.output(&arguments);
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    assert!(line.contains("no memory from donor"), "{line}");
    assert_eq!(lent(&place, &alpha), 0);
    let _ = etcd.ask(
        "/v3/kv/deleterange",
        &json!({ "key": "L3NzaS1odi9ub2Rlcy9hYXJvbg==" }),
    );
    // One that comes after it is left out instead.
    put(&etcd, "mallory", &address, &like);
    let vm = walking(&place, &etcd, &["--credentials", &web]);
    assert_eq!(lent(&place, &alpha), REMOTE);
    drop(vm);
}

#[test]
fn what_is_missing_is_said_with_what_is_there() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let place = Place::new();
    let url = etcd.url();
    let unavailable = ExitCode::DonorUnavailable;
    let local = ["--local-memory", "16M"];
    let line = refused(&place, &url, &local, unavailable);
    assert!(
        line.contains("48 MiB") && line.contains("no node is registered"),
        "{line}"
    );
    let (_alpha, _) = registered(&place, &etcd, "name=alpha", &[]);
    let less = ["--memory=512M", "--local-memory", "16M"];
    let arguments = ["run", "--kernel", &place.path("kernel"), "--cluster", &url];
    let line = place.failed(&[&arguments[..], &less].concat(), unavailable);
    assert!(
        line.contains("496 MiB") && line.contains("alpha has 64 MiB free"),
        "{line}"
    );
    for (more, part) in [
        (&[][..], "needs --local-memory SIZE"),
        (&["--local-memory", "64M"], "no node is used"),
        (
            &["--donor", "127.0.0.1:7", "--local-memory", "16M"],
            "does not go with --donor",
        ),
    ] {
        let line = refused(&place, &url, more, ExitCode::Usage);
        assert!(line.contains(part), "{more:?}: {line}");
    }
    let line = refused(&place, "etcd://192.0.2.1:1", &local, ExitCode::Usage);
    assert!(line.contains("--cluster-credentials DIR"), "{line}");
    etcd.kill();
    let line = refused(&place, &url, &local, unavailable);
    assert!(
        line.contains("cannot be asked") && line.contains("--donor HOST:PORT"),
        "{line}"
    );
}
