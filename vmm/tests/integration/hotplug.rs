//! `ssi-hv hotplug --wait` and requests that wait, through the real binary.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ssi_hv::control_socket::changes::Seen;
use ssi_hv::control_socket::client::{ClientError, ask, call};
use ssi_hv::control_socket::protocol::{CHANGE_WAIT_TIME_MAX, HotplugBody, RefusalCode};
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;

use crate::running;
use crate::running::{Place, end, node, vm, vm_with};
use crate::support;

const PATH: &str = "/v1/hotplug";

/// Returns the answer to a request that waits.
fn next(socket: &Path, seen: &HotplugBody) -> HotplugBody {
    let seen = Seen {
        changes: seen.changes,
        wait: CHANGE_WAIT_TIME_MAX,
    };
    ask(socket, &format!("{PATH}?{seen}")).expect("an answer")
}

/// Requests a change, and retries while the previous change is in progress: its effect is visible
/// before its answer.
fn change(socket: &Path, body: &Value) -> Result<HotplugBody, ClientError> {
    let deadline = Instant::now() + running::LIMIT;
    loop {
        match call(socket, Method::Put, PATH, Some(body)) {
            Err(ClientError::Refused(refusal))
                if refusal.code == RefusalCode::Busy && Instant::now() < deadline => {}
            answer => return answer,
        }
    }
}

/// Starts `ssi-hv hotplug --wait`, which waits because the guest has no driver.
fn waiting(place: &Place, memory: &str) -> Child {
    let mut command = place.command(&["hotplug", "grows", "--memory", memory, "--wait", "60"]);
    let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("it starts")
}

/// Returns the line with which it fails.
fn failed(command: Child) -> String {
    // It may wait for a minute.
    let output = end::rest_of(command, 2 * running::LIMIT);
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    let code = output.status.code();
    assert_eq!(code, Some(ExitCode::HostError.code().into()), "{said}");
    said
}

#[test]
fn who_waits_is_told_of_each_change_and_of_the_end() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_node, address) = node(&place, &[]);
    let flags = [
        "--name",
        "grows",
        "--hotplug-memory",
        "32M",
        "--donor",
        &address,
    ];
    let mut vm = vm_with(&place, tiny_guests::walk_for_ever::code(), &flags);
    let socket = place.sockets().join(format!("vm-{}-grows.sock", vm.pid()));
    let first: HotplugBody = ask(&socket, PATH).expect("an answer");
    assert_eq!((first.requested_bytes, first.plugged_bytes), (0, 0));

    // Another process requests a change and waits for the guest as well.
    let asker = waiting(&place, "4M");
    let asked = next(&socket, &first);
    assert_eq!((asked.requested_bytes, asked.plugged_bytes), (4 << 20, 0));
    assert!(asked.changes > first.changes);

    // A donor that does not join is reported at once; the request itself continues.
    let nowhere = json!({"requested_bytes": 8 << 20, "donor": "127.0.0.1:1"});
    let refused = change(&socket, &nowhere);
    assert!(
        matches!(&refused, Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::Donor),
        "{refused:?}"
    );
    let mut body = next(&socket, &asked);
    while body.joining.is_some() {
        body = next(&socket, &body);
    }
    let error = body.error.expect("it has not joined");
    assert!(error.contains("127.0.0.1:1"), "{error}");
    assert!(failed(asker).contains(&error));

    // Memory of this node does not depend on the result of the donor.
    let asker = waiting(&place, "6M");
    let deadline = Instant::now() + running::LIMIT;
    let mut body: HotplugBody = ask(&socket, PATH).expect("an answer");
    while body.requested_bytes != 6 << 20 {
        assert!(Instant::now() < deadline, "{body:?}");
        body = next(&socket, &body);
    }
    assert_eq!(body.error, None);

    // Other requests are not blocked, and the end is reported at once.
    let began = Instant::now();
    assert_eq!(place.printed(&["pause", "grows"]), "grows: paused\n");
    assert_eq!(place.printed(&["resume", "grows"]), "grows: running\n");
    assert_eq!(place.printed(&["kill", "grows"]), "grows: ended\n");
    let said = failed(asker);
    assert!(began.elapsed() < CHANGE_WAIT_TIME_MAX, "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    vm.code();
}

#[test]
fn a_guest_that_does_not_follow_is_waited_for_no_longer_than_was_said() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let _vm = vm(&place, &["--name", "idle", "--hotplug-memory", "32M"]);
    let began = Instant::now();
    let line = place.failed(
        &["hotplug", "idle", "--memory", "2M", "--wait", "1"],
        ExitCode::HostError,
    );
    assert!(
        line.contains("0 B of the 2 MiB plugged after 1 s"),
        "{line}"
    );
    let took = began.elapsed();
    assert!(
        (Duration::from_secs(1)..CHANGE_WAIT_TIME_MAX).contains(&took),
        "{took:?}"
    );
}

/// Returns the metrics of a VM.
fn metrics(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).expect("it listens");
    stream
        .set_read_timeout(Some(running::LIMIT))
        .expect("is set");
    stream
        .write_all(b"GET /v1/metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        .expect("is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

#[test]
fn of_a_donor_that_has_left_there_are_counts_and_no_link() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_first, address) = node(&place, &[]);
    let (_second, joins) = node(&place, &[]);
    let more = ["--name", "grows", "--hotplug-memory", "32M"];
    let flags = [&more[..], &["--donor", &address]].concat();
    let vm = vm_with(&place, tiny_guests::walk_for_ever::code(), &flags);
    let socket = place.sockets().join(format!("vm-{}-grows.sock", vm.pid()));
    let (tier, fetched) = (
        "ssi_hv_donor_tier{node=\"2\"",
        "ssi_hv_donor_pages_fetched_total{node=\"2\"",
    );
    let until = |there: bool| {
        let deadline = Instant::now() + running::LIMIT;
        let link = |status: &Value| status["nodes"][2]["link"].is_object();
        while link(&ask(&socket, "/v1/status").expect("an answer")) != there {
            assert!(Instant::now() < deadline, "it stays as it is");
        }
    };
    let asked = json!({"requested_bytes": 32 << 20, "donor": joins});
    change(&socket, &asked).expect("it joins");
    until(true);
    assert!(metrics(&socket).contains(tier));
    change(&socket, &json!({"requested_bytes": 0})).expect("it leaves");
    until(false);
    let left = metrics(&socket);
    assert!(left.contains(fetched) && !left.contains(tier), "{left}");
    assert_eq!(vm.end(libc::SIGTERM), Some(143));
}
