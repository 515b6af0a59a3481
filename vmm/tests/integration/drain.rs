//! `ssi-hv drain`: donors leave while a guest counts in its memory.

mod copies;
mod failing;
mod shares;

use std::fs;
use std::io::{BufRead, Read};
use std::process::{Child, Stdio};
use std::time::Instant;

use serde_json::Value;
use ssi_hv::exit::ExitCode;
use ssi_hv_membership::testing::HeldPort;

use crate::running::{LIMIT, Place, Running, count, end, node, vm, vm_with};
use crate::support;

const MIB: u64 = 1 << 20;
/// What each of two donors of a guest of 64 MiB holds.
const HALF: u64 = 32 * MIB;

fn status(place: &Place) -> Value {
    let mut all = place.json(&["status", "leaves", "--json"]);
    all["vms"][0].take()
}

/// Asserts that a node lends nothing.
#[track_caller]
fn lends_nothing(place: &Place, node: &Running) {
    let status = place.json(&["status", &node.pid(), "--json"]);
    let of_node = |pointer: &str| count(&status["nodes"][0], pointer);
    assert_eq!((of_node("/leases"), of_node("/lent_bytes")), (0, 0));
}

/// Waits until this number of the status exceeds `least`.
#[track_caller]
fn wait_beyond(place: &Place, pointer: &str, least: u64) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let now = status(place);
        if count(&now, pointer) > least {
            return now;
        }
        assert!(Instant::now() < deadline, "{pointer}: {now}");
    }
}

/// Starts a guest that counts, and waits until donor 1 has pages of it.
fn counting(place: &Place, flags: &[&str]) -> Running {
    let flags = [&["--name", "leaves"][..], flags].concat();
    let running = vm_with(place, tiny_guests::count_until_power_button::code(), &flags);
    wait_beyond(place, "/nodes/1/pages_written_back", 2_000);
    running
}

/// Lets the guest run on, and then check all its counts.
#[track_caller]
fn counted_right(place: &Place, mut vm: Running) {
    let faults = "/faults/remote/count";
    wait_beyond(place, faults, count(&status(place), faults) + 5_000);
    place.printed(&["shutdown", "leaves"]);
    let mut said = [0];
    assert!(
        end::is_readable(vm.console.get_ref(), 2 * LIMIT),
        "it counts"
    );
    vm.console.read_exact(&mut said).expect("it checks");
    assert_eq!(&said, b"k");
    assert_eq!(vm.code(), Some(0));
}

/// Starts a node that listens here, with this memory.
fn node_with(place: &Place, listen: &str, memory: &str) -> (Running, String) {
    let arguments = ["node", "--listen", listen, "--memory", memory];
    let mut node = Running::start(&mut place.command(&arguments));
    let mut line = String::new();
    assert!(
        end::is_readable(node.console.get_ref(), LIMIT),
        "it is silent"
    );
    node.console.read_line(&mut line).expect("it prints");
    let address = line.trim().rsplit(' ').next().expect("an address");
    (node, address.to_owned())
}

/// Starts `ssi-hv drain --wait` for node 1.
fn draining(place: &Place, to: &str) -> Child {
    let arguments = ["drain", "leaves", "--node", "1", "--to", to, "--wait", "50"];
    let mut command = place.command(&arguments);
    let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("it starts")
}

/// Returns the line with which it fails.
fn failed(command: Child) -> String {
    let output = end::rest_of(command, LIMIT);
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    let code = output.status.code();
    assert_eq!(code, Some(ExitCode::HostError.code().into()), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

/// Waits until the memory of node 1 moves.
fn wait_for_move(place: &Place) {
    let deadline = Instant::now() + LIMIT;
    while status(place)["memory"]["drain"]["state"] != "moving" {
        assert!(Instant::now() < deadline, "{}", status(place));
    }
}

#[test]
fn both_donors_leave_for_new_ones_while_a_guest_counts() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (first, first_address) = node(&place, &[]);
    let (second, second_address) = node(&place, &[]);
    // Another node gets its port.
    let port = HeldPort::new();
    let (third, third_address) = node_with(&place, &port.address().to_string(), "64M");
    let (_fourth, fourth_address) = node(&place, &[]);
    let report = place.directory.path().join("report.json");
    let file = report.to_str().expect("UTF-8");
    let donors = ["--donor", &first_address, "--donor", &second_address];
    let vm = counting(&place, &[&["--report", file], &donors[..]].concat());
    let shown = place.printed(&["drain", "leaves"]);
    assert_eq!(shown, "leaves: no donor has been drained\n");
    for (node, to) in [("1", &third_address), (&second_address, &fourth_address)] {
        let arguments = ["drain", "leaves", "--node", node, "--to", to];
        let said = place.printed(&[&arguments[..], &["--wait", "50"]].concat());
        assert!(
            said.contains("has left: its 32 MiB are on other donors"),
            "{said}"
        );
    }
    lends_nothing(&place, &first);
    lends_nothing(&place, &second);
    let now = status(&place);
    let held = |node: u32| count(&now, &format!("/nodes/{node}/memory_bytes"));
    assert_eq!([1, 2, 3, 4].map(held), [0, 0, HALF, HALF], "{now}");
    assert!(now["nodes"][1]["link"].is_null() && now["nodes"][3]["link"].is_object());
    assert_eq!(count(&now, "/errors_total"), 0, "{now}");

    // Nothing depends on them any more.
    assert_eq!(first.end(libc::SIGKILL), None);
    assert_eq!(second.end(libc::SIGKILL), None);
    let shown = place.printed(&["status", "leaves"]);
    assert!(
        shown.contains("drain      node 2: done, 32 MiB of 32 MiB have moved\n"),
        "{shown}"
    );
    let gone = place.failed(&["drain", "leaves", "--node", "1"], ExitCode::HostError);
    let left = format!("there is no donor \"1\": the VM has 3 ({third_address}), 4 (");
    assert!(gone.contains(&left), "{gone}");

    counted_right(&place, vm);
    let written: Value =
        serde_json::from_slice(&fs::read(&report).expect("a report")).expect("JSON");
    let drain = serde_json::json!({
        "node": 2, "state": "done", "bytes": HALF, "moved_bytes": HALF, "error": null,
    });
    assert_eq!(written["memory"]["drain"], drain);
    lends_nothing(&place, &third);
}

#[test]
fn a_drain_that_cannot_be_is_refused_with_what_would_help() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_first, first_address) = node(&place, &[]);
    let (_second, second_address) = node_with(&place, "127.0.0.1:0", "32M");
    let (small, small_address) = node_with(&place, "127.0.0.1:0", "16M");
    let donors = ["--donor", &first_address, "--donor", &second_address];
    let flags = [&["--name", "leaves"][..], &donors].concat();
    let code = tiny_guests::walk_for_ever::code();
    let running = vm_with(&place, code, &flags);
    let refused = |more: &[&str]| {
        let arguments = [&["drain", "leaves", "--node"][..], more].concat();
        place.failed(&arguments, ExitCode::HostError)
    };
    let known = format!("the VM has 1 ({first_address}), 2 ({second_address})");
    let memory = format!("{small_address},memory=16M");
    let zone = format!("{small_address},zone=rack-1");
    let itself = format!("{first_address} is node 1 itself");
    for (more, part) in [
        (&["7"][..], known.as_str()),
        (&["1"], "32 MiB have to leave node 1"),
        (&["1", "--to", &small_address], "16 MiB more by --to"),
        (&["1", "--to", &first_address], &itself),
        (&["1", "--to", &memory], "omit memory="),
        (
            &["1", "--to", &zone],
            "zone=rack-1, which only two copies use",
        ),
        (
            &["1", "--to", &small_address, "--to", &small_address],
            "named twice",
        ),
        (&["1", "--to", "127.0.0.1:0"], "port 0"),
    ] {
        let line = refused(more);
        assert!(line.contains(part), "{more:?}: {line}");
    }
    // The last refusal after donors were asked for room is kept, and nothing has changed.
    let shown = place.printed(&["drain", "leaves"]);
    assert!(shown.contains("16 MiB more by --to"), "{shown}");
    assert!(status(&place)["memory"]["drain"].is_null());
    let deadline = Instant::now() + LIMIT;
    while count(
        &place.json(&["status", &small.pid(), "--json"]),
        "/nodes/0/leases",
    ) > 0
    {
        assert!(Instant::now() < deadline, "the lease is kept");
    }
    assert_eq!(running.end(libc::SIGTERM), Some(143));

    let (_third, third_address) = node(&place, &[]);
    let donors = ["--donor", &first_address, "--donor", &third_address];
    let flags = [&["--name", "leaves"][..], &donors].concat();
    for (more, part) in [
        (&["--numa", "expose"][..], "use --numa flat"),
        (&["--replicas", "2"], "room for 0 MiB of them"),
    ] {
        let running = vm_with(&place, code, &[&flags[..], more].concat());
        let line = refused(&["1"]);
        assert!(line.contains(part), "{line}");
        assert_eq!(running.end(libc::SIGTERM), Some(143));
    }
    let alone = vm(&place, &["--name", "leaves"]);
    let line = refused(&["1"]);
    assert!(
        line.contains("--transport loopback has no donors"),
        "{line}"
    );
    assert_eq!(alone.end(libc::SIGTERM), Some(143));
    let kernel = place.directory.path().join("kernel");
    let kernel = kernel.to_str().expect("UTF-8");
    let run = ["run", "--kernel", kernel, "--memory", "64M"];
    let run = [&run[..], &["--name", "leaves"]].concat();
    let mut alone = Running::start(&mut place.command(&run));
    alone.console.read_exact(&mut [0]).expect("the guest talks");
    let line = refused(&["1"]);
    assert!(line.contains("the VM uses no donor"), "{line}");
}

#[test]
fn a_target_that_is_lost_leaves_all_where_it_was_and_a_second_try_ends_well() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (first, first_address) = node(&place, &[]);
    let (_second, second_address) = node(&place, &[]);
    let (third, third_address) = node(&place, &[]);
    let (_fourth, fourth_address) = node(&place, &[]);
    let flags = ["--donor-grace", "50", "--donor", &first_address];
    let vm = counting(
        &place,
        &[&flags[..], &["--donor", &second_address]].concat(),
    );

    // Of a donor that does not answer nothing can be read.
    first.signal(libc::SIGSTOP);
    let asker = draining(&place, &third_address);
    wait_for_move(&place);
    let busy = place.failed(&["drain", "leaves", "--node", "1"], ExitCode::HostError);
    assert!(busy.contains("node 1 is being drained"), "{busy}");
    let other = ["drain", "leaves", "--node", "2"];
    let busy = place.failed(&other, ExitCode::HostError);
    assert!(busy.contains("node 1 is being drained"), "{busy}");
    // Another node answers instead of it, which knows no lease.
    assert_eq!(third.end(libc::SIGKILL), None);
    let (_third, _) = node_with(&place, &third_address, "64M");
    let said = failed(asker);
    assert!(said.contains("32 MiB stay on node 1"), "{said}");
    let now = status(&place);
    assert_eq!(now["memory"]["drain"]["state"], "failed", "{now}");
    assert_eq!(count(&now, "/memory/drain/moved_bytes"), 0, "{now}");
    first.signal(libc::SIGCONT);

    let to = ["--to", &fourth_address, "--wait", "50"];
    place.printed(&[&["drain", "leaves", "--node", "1"][..], &to].concat());
    lends_nothing(&place, &first);
    counted_right(&place, vm);
}

#[test]
fn a_donor_that_dies_while_it_is_drained_is_lost_with_what_it_still_held() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (first, first_address) = node(&place, &[]);
    let (second, second_address) = node(&place, &[]);
    let mut vm = counting(&place, &["--donor-grace", "1", "--donor", &first_address]);
    first.signal(libc::SIGSTOP);
    let asker = draining(&place, &second_address);
    wait_for_move(&place);
    assert_eq!(first.end(libc::SIGKILL), None);
    assert_eq!(vm.code(), Some(ExitCode::DonorLost.code().into()));
    failed(asker);
    let deadline = Instant::now() + LIMIT;
    while count(
        &place.json(&["status", &second.pid(), "--json"]),
        "/nodes/0/leases",
    ) > 0
    {
        assert!(Instant::now() < deadline, "the lease is kept");
    }
}

#[test]
fn a_guest_that_reboots_after_a_drain_uses_the_donors_that_took_over() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (first, first_address) = node(&place, &[]);
    let (_second, second_address) = node(&place, &[]);
    let flags = ["--name", "leaves", "--on-reboot", "restart"];
    let flags = [&flags[..], &["--donor", &first_address]].concat();
    let mut vm = vm_with(&place, tiny_guests::wander::code(), &flags);
    let to = ["--to", &second_address, "--wait", "50"];
    place.printed(&[&["drain", "leaves", "--node", "1"][..], &to].concat());
    assert_eq!(first.end(libc::SIGKILL), None);
    // It reboots at the second press.
    place.printed(&["shutdown", "leaves"]);
    let deadline = Instant::now() + LIMIT;
    while count(&status(&place), "/faults/remote/count") == 0 {
        assert!(Instant::now() < deadline, "it does not walk");
    }
    place.printed(&["shutdown", "leaves"]);
    let mut said = [0];
    vm.console.read_exact(&mut said).expect("it starts again");
    assert_eq!(&said, b"r");
    let now = status(&place);
    assert_eq!(count(&now, "/boot/restarts"), 1, "{now}");
    assert_eq!(now["nodes"][1]["address"], second_address.as_str(), "{now}");
    assert_eq!(vm.end(libc::SIGTERM), Some(143));
}
