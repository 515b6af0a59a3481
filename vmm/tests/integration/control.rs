//! Requests to the control socket of a VM, and its answers, through the real binary.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};
use ssi_hv::control_socket::client::{ClientError, ask, call};
use ssi_hv::control_socket::protocol::RefusalCode;
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;

use crate::running;
use crate::running::{LIMIT, Place, Running, count, end, node, vm, vm_with};
use crate::support;

/// Fails unless a value conforms to a published schema.
fn validate(schema: &str, value: &Value) {
    let path = format!("{}/../docs/{schema}", env!("CARGO_MANIFEST_DIR"));
    let schema: Value =
        serde_json::from_str(&fs::read_to_string(path).expect("a schema")).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let errors: Vec<_> = validator
        .iter_errors(value)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{errors:#?}");
}

fn socket(place: &Place, vm: &Running, name: &str) -> PathBuf {
    place.sockets().join(format!("vm-{}-{name}.sock", vm.pid()))
}

/// Returns the number of remote faults so far.
fn faults(socket: &Path) -> u64 {
    let status: Value = ask(socket, "/v1/status").expect("an answer");
    count(&status, "/faults/remote/count")
}

/// Waits until a number exceeds `least`.
fn wait_beyond(least: f64, mut now: impl FnMut() -> f64) {
    let deadline = Instant::now() + LIMIT;
    while now() <= least {
        assert!(Instant::now() < deadline, "it is paused");
    }
}

/// Waits until the VM has more remote faults.
fn wait_for_faults(socket: &Path) {
    let before = faults(socket);
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    wait_beyond(before as f64 + 10.0, || faults(socket) as f64);
}

#[test]
fn a_vm_is_paused_with_its_lease_kept_resumed_and_shut_down_by_its_button() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--lease-seconds", "5"]);
    let report = place.directory.path().join("report.json");
    let file = report.to_str().expect("UTF-8");
    let code = tiny_guests::walk_until_power_button::code();
    let flags = ["--name", "web", "--donor", &address, "--report", file];
    let mut vm = vm_with(&place, code, &flags);
    let socket = socket(&place, &vm, "web");
    wait_for_faults(&socket);

    for _ in 0..2 {
        assert_eq!(place.printed(&["pause", "web"]), "web: paused\n");
    }
    let paused = place.json(&["status", "--json"]);
    assert_eq!(paused["vms"][0]["state"], "paused");
    assert_eq!(paused["vms"][0]["paused_by_user"], true);
    validate("status.schema.json", &paused);
    assert!(
        place
            .printed(&["status", "web"])
            .contains("paused by `ssi-hv pause`")
    );
    // Longer than two leases, by the node's own clock.
    let node_now = || -> Value { place.json(&["status", &node.pid(), "--json"]) };
    let uptime = |now: &Value| now["nodes"][0]["uptime_s"].as_f64().expect("a number");
    let since = uptime(&node_now());
    wait_beyond(since + 11.0, || uptime(&node_now()));
    let lent = node_now();
    assert_eq!(count(&lent, "/nodes/0/leases"), 1);
    assert_eq!(count(&lent, "/nodes/0/leases_expired"), 0);
    let after = place.json(&["status", "web", "--json"]);
    for kind in ["remote", "zero", "minor", "write_protect"] {
        let pointer = format!("/vms/0/faults/{kind}/count");
        assert_eq!(
            count(&after, &pointer),
            count(&paused, &pointer),
            "it was not paused"
        );
    }

    assert_eq!(place.printed(&["resume", "web"]), "web: running\n");
    wait_for_faults(&socket);
    assert_eq!(place.printed(&["pause", &vm.pid()]), "web: paused\n");
    let said = place.printed(&["shutdown", "web", "--wait", "60"]);
    assert_eq!(said, "web: ended\n");
    assert_eq!(vm.code(), Some(0));
    let mut said = String::new();
    vm.console.read_to_string(&mut said).expect("UTF-8");
    assert_eq!(said, "b", "the guest has seen its button");
    let text = fs::read_to_string(&report).expect("a report");
    validate(
        "report.schema.json",
        &serde_json::from_str(&text).expect("JSON"),
    );
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

#[test]
fn a_paused_vm_ends_when_it_is_killed_or_interrupted() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let mut killed = vm(&place, &["--name", "one"]);
    place.printed(&["pause", "one"]);
    assert_eq!(place.printed(&["kill", "one"]), "one: ended\n");
    assert_eq!(killed.code(), Some(ExitCode::Terminated.code().into()));
    let interrupted = vm(&place, &["--name", "one"]);
    place.printed(&["pause", "one"]);
    assert_eq!(
        interrupted.end(libc::SIGINT),
        Some(ExitCode::Interrupted.code().into())
    );
    assert_eq!(place.files(), 0);
    for verb in ["pause", "resume", "shutdown", "kill"] {
        let line = place.failed(&[verb, "one"], ExitCode::HostError);
        assert!(line.contains("`one` does not run here"), "{line}");
    }
}

#[test]
fn a_vm_without_a_name_has_the_one_it_is_shown_under() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let mut nameless = vm(&place, &[]);
    let shown = place.json(&["status", "--json"])["vms"][0]["name"].clone();
    let name = shown.as_str().expect("a name");
    assert_eq!(name, format!("ssi-hv-{}", nameless.pid()));
    assert!(place.printed(&["pause", name]).ends_with(": paused\n"));

    // The name stays reserved in the meantime.
    let kernel = place.directory.path().join("kernel");
    let kernel = kernel.to_str().expect("UTF-8");
    let log = place.directory.path().join("console");
    fs::write(&log, "of the first").expect("is written");
    let log_name = log.to_str().expect("UTF-8");
    let second = ["run", "--memory", "64M", "--kernel", kernel];
    let second = [&second[..], &["--name", name, "--console", log_name]].concat();
    let line = place.failed(&second, ExitCode::Usage);
    assert!(line.contains(&format!("--name {name} is taken")), "{line}");
    assert_eq!(fs::read(&log).expect("a file"), b"of the first");
    assert_eq!(place.printed(&["kill", name]), format!("{name}: ended\n"));
    assert_eq!(nameless.code(), Some(ExitCode::Terminated.code().into()));
}

#[test]
fn what_cannot_be_done_is_said() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let vm = vm(&place, &["--name", "deaf"]);
    let socket = socket(&place, &vm, "deaf");
    let line = place.failed(&["shutdown", "deaf"], ExitCode::HostError);
    assert!(
        line.contains("does not listen to its power button"),
        "{line}"
    );
    wait_for_faults(&socket);

    let refused = |method, path: &str, body: Option<Value>| match call::<Value>(
        &socket,
        method,
        path,
        body.as_ref(),
    ) {
        Err(ClientError::Refused(refusal)) => (refusal.code, refusal.text),
        other => panic!("{path}: {other:?}"),
    };
    let (code, text) = refused(Method::Get, "/v1/hotplug", None);
    assert!(
        code == RefusalCode::State && text.contains("--hotplug-memory"),
        "{text}"
    );
    for body in [json!({}), json!({"requested_bytes": 0, "donor": "nowhere"})] {
        let (code, _) = refused(Method::Put, "/v1/hotplug", Some(body));
        assert_eq!(code, RefusalCode::Malformed);
    }
    for body in [
        json!({}),
        json!({"target_bytes": -1}),
        json!({"target_bytes": 1}),
        json!({"target_bytes": 4096}),
        json!({"target_bytes": 0, "more": 1}),
    ] {
        // A guest of 64 MiB must keep all of it.
        let (code, text) = refused(Method::Put, "/v1/balloon", Some(body));
        assert!(
            code == RefusalCode::Malformed && text.contains("target_bytes"),
            "{text}"
        );
    }
    let none: Value = call(
        &socket,
        Method::Put,
        "/v1/balloon",
        Some(&json!({"target_bytes": 0})),
    )
    .expect("an answer");
    assert_eq!(none, json!({"target_bytes": 0, "actual_bytes": 0}));

    let (node, _) = node(&place, &[]);
    let line = place.failed(&["pause", &node.pid()], ExitCode::HostError);
    assert!(line.contains("is a node"), "{line}");
    assert_eq!(vm.end(libc::SIGTERM), Some(143));

    let place = Place::new();
    let without = running::vm(&place, &["--name", "none", "--balloon", "off"]);
    let socket = place
        .sockets()
        .join(format!("vm-{}-none.sock", without.pid()));
    match ask::<Value>(&socket, "/v1/balloon") {
        Err(ClientError::Refused(refusal)) => assert_eq!(refusal.code, RefusalCode::State),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_told_while_it_runs_is_as_the_published_schemas_say() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &[]);
    let vm = vm_with(
        &place,
        tiny_guests::walk_for_ever::code(),
        &["--name", "web", "--donor", &address],
    );
    let socket = socket(&place, &vm, "web");
    wait_for_faults(&socket);
    for flags in [&["status", "--json"][..], &["status", "--json", "--heat"]] {
        let everything = place.json(flags);
        assert_eq!(everything["vms"].as_array().map(Vec::len), Some(1));
        assert_eq!(everything["nodes"].as_array().map(Vec::len), Some(1));
        validate("status.schema.json", &everything);
    }
    let report: Value = ask(&socket, "/v1/report").expect("an answer");
    validate("report.schema.json", &report);
    assert_eq!(report["outcome"], "running");
    assert!(count(&report, "/faults/remote/count") > 0);
    assert_eq!(count(&report, "/guest/memory_bytes"), 64 << 20);
    let of_node = place.sockets().join(format!("node-{}.sock", node.pid()));
    let report: Value = ask(&of_node, "/v1/report").expect("an answer");
    validate("node-report.schema.json", &report);
    // The schema must reject invalid values.
    let mut wrong = place.json(&["status", "--json"]);
    wrong["vms"][0]["faults"]["remote"]["count"] = json!("many");
    let result = std::panic::catch_unwind(|| validate("status.schema.json", &wrong));
    assert!(result.is_err());
}

/// Counts the entries in a directory of the process.
fn entries(pid: &str, what: &str) -> usize {
    fs::read_dir(format!("/proc/{pid}/{what}"))
        .expect("it runs")
        .count()
}

#[test]
fn crowds_and_hostile_clients_leave_nothing_behind_and_the_guest_alone() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let vm = vm(&place, &["--name", "busy"]);
    let socket = socket(&place, &vm, "busy");
    wait_for_faults(&socket);
    let (descriptors, threads) = (entries(&vm.pid(), "fd"), entries(&vm.pid(), "task"));

    // The guest makes progress while the clients send requests, which they do until then.
    let (deadline, gone_on) = (Instant::now() + LIMIT, AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..50 {
            scope.spawn(|| {
                let mut answers = 0;
                while answers < 4 || !gone_on.load(Ordering::Relaxed) {
                    let status: Value = ask(&socket, "/v1/status").expect("an answer");
                    assert_eq!(status["state"], "running");
                    assert!(Instant::now() < deadline, "the guest made no progress");
                    answers += 1;
                }
            });
        }
        wait_for_faults(&socket);
        gone_on.store(true, Ordering::Relaxed);
    });

    let mut hostile = Vec::new();
    for number in 0..60 {
        let mut stream = UnixStream::connect(&socket).expect("it listens");
        let bytes: &[u8] = match number % 4 {
            0 => b"",
            1 => b"POST /v1/pau",
            2 => b"PUT /v1/balloon HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
            _ => b"\xff\xff\xff\xff\r\n\r\n",
        };
        stream.write_all(bytes).expect("is taken");
        hostile.push(stream);
    }
    wait_for_faults(&socket);
    drop(hostile);
    assert_eq!(
        entries(&vm.pid(), "task"),
        threads,
        "a client takes no thread"
    );
    let deadline = Instant::now() + LIMIT;
    while entries(&vm.pid(), "fd") > descriptors {
        assert!(Instant::now() < deadline, "descriptors leak");
    }
    assert_eq!(vm.end(libc::SIGTERM), Some(143));
}

#[test]
fn a_name_is_refused_when_nobody_can_tell_whether_another_vm_has_it() {
    let place = Place::new();
    let mut directory = fs::DirBuilder::new();
    let made = directory.mode(0o700).create(place.sockets());
    made.expect("is made");
    // As a process that was stopped during its start does.
    let directory = fs::File::open(place.sockets()).expect("is there");
    directory.lock().expect("nobody has it");
    let kernel = ["run", "--kernel", "/etc/hostname", "--name", "web"];
    let said = place.failed(&kernel, ExitCode::HostError);
    assert!(
        said.contains("another process keeps") && said.contains("locked"),
        "{said}"
    );
}

#[test]
fn of_two_vms_of_one_name_that_start_at_once_one_runs() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let kernel = place.directory.path().join("kernel");
    let code = tiny_guests::walk_until_power_button::code();
    fs::write(&kernel, tiny_guests::elf(code)).expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let arguments = [
        "run", "--kernel", kernel, "--memory", "64M", "--name", "same",
    ];
    let outcomes: Vec<_> = (0..6)
        .map(|_| {
            place
                .command(&arguments)
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::piped())
                .spawn()
                .expect("it starts")
        })
        .collect();
    let mut refused = 0;
    let mut left = Vec::new();
    let deadline = Instant::now() + LIMIT;
    for mut child in outcomes {
        // All but one end by themselves.
        loop {
            if let Some(status) = child.try_wait().expect("is a child") {
                assert_eq!(status.code(), Some(ExitCode::Usage.code().into()));
                let mut said = String::new();
                let stderr = child.stderr.as_mut().expect("a pipe");
                stderr.read_to_string(&mut said).expect("UTF-8");
                assert!(
                    said.contains("--name same is taken by the VM of process"),
                    "{said}"
                );
                refused += 1;
                break;
            }
            let name = format!("vm-{}-same.sock", child.id());
            // A socket is there before it listens.
            if UnixStream::connect(place.sockets().join(name)).is_ok() {
                left.push(child);
                break;
            }
            assert!(Instant::now() < deadline, "neither runs nor ends");
        }
    }
    assert_eq!((refused, left.len()), (5, 1));
    place.printed(&["kill", "same"]);
    let output = end::rest_of(left.remove(0), LIMIT);
    assert_eq!(output.status.code(), Some(143), "{output:?}");
}
