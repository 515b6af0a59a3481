//! `ssi-hv status` without processes, with the remains of ended processes, and with running VMs and
//! nodes.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;

use serde_json::Value;
use ssi_hv::exit::ExitCode;

use crate::running::{LIMIT, Place, count, node, until, vm};
use crate::support;

#[test]
fn nothing_running_is_said_and_no_error() {
    let place = Place::new();
    // First the directory does not exist, then it does.
    for _ in 0..2 {
        let text = place.printed(&["status"]);
        assert_eq!(text, "no VM and no node of this user runs here\n");
        assert_eq!(
            place.printed(&["status", "--heat"]),
            "no VM of this user runs here\n"
        );
        let json = place.json(&["status", "--json"]);
        assert_eq!(
            json,
            serde_json::json!({"schema": 1, "vms": [], "nodes": []})
        );
        let line = place.failed(&["status", "web"], ExitCode::HostError);
        assert!(line.contains("`web` does not run here"), "{line}");
        if place.files() == 0 {
            fs::create_dir_all(place.sockets()).expect("is made");
            let private = fs::Permissions::from_mode(0o700);
            fs::set_permissions(place.sockets(), private).expect("is changed");
        }
    }
}

#[test]
fn a_directory_of_others_is_not_looked_into() {
    let place = Place::new();
    fs::create_dir(place.sockets()).expect("is made");
    fs::set_permissions(place.sockets(), fs::Permissions::from_mode(0o777)).expect("is changed");
    let line = place.failed(&["status"], ExitCode::HostError);
    assert!(
        line.contains("open to other users") && line.contains("SSI_HV_RUNTIME_DIR"),
        "{line}"
    );
}

#[test]
fn a_process_that_talks_nonsense_is_told_of_and_not_believed() {
    let place = Place::new();
    fs::create_dir(place.sockets()).expect("is made");
    fs::set_permissions(place.sockets(), fs::Permissions::from_mode(0o700)).expect("is changed");
    for (file, said) in [
        ("vm-1-bad.sock", "{\"version\":1,\"answer\":{\"name\":3}}\n"),
        (
            "vm-1-worse.sock",
            "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{\"name\":3}",
        ),
    ] {
        let path = place.sockets().join(file);
        let listener = UnixListener::bind(path).expect("is bound");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let lines = BufReader::new(&stream).lines();
                let head =
                    lines.take_while(|line| line.as_ref().is_ok_and(|line| !line.is_empty()));
                let _ = head.count();
                let _ = (&stream).write_all(said.as_bytes());
            }
        });
    }
    for name in ["bad", "worse"] {
        let line = place.failed(&["status", name], ExitCode::HostError);
        assert!(line.contains("not understood"), "{line}");
    }
    let output = place.output(&["status"]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("process 1"));
}

#[test]
fn a_node_is_shown_and_ends_without_a_trace() {
    let place = Place::new();
    let (node, address) = node(&place, &[]);
    let text = place.printed(&["status"]);
    assert!(text.contains(&format!("listens on {address}")), "{text}");
    let json = place.json(&["status", &node.pid(), "--json"]);
    assert_eq!(json["nodes"][0]["memory_bytes"], 64 << 20);
    assert_eq!(json["nodes"][0]["lent_bytes"], 0);
    assert_eq!(place.files(), 1);
    assert_eq!(node.end(libc::SIGTERM), Some(0));
    assert_eq!(place.files(), 0);
}

/// Sums a number over all blocks of the first VM's heat map.
fn sum(json: &Value, key: &str) -> u64 {
    let extents = json["vms"][0]["heat"]["extents"]
        .as_array()
        .expect("extents");
    let blocks = extents
        .iter()
        .flat_map(|extent| extent["blocks"].as_array());
    blocks
        .flatten()
        .map(|block| block[key].as_u64().expect("a number"))
        .sum()
}

#[test]
fn a_vm_is_looked_at_while_it_pages() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let report = place.directory.path().join("report.json");
    let name = report.to_str().expect("UTF-8");
    // It walks sequentially: with prefetching it would have almost no remote faults.
    let flags = ["--name", "walker", "--prefetch", "off", "--report", name];
    let vm = vm(&place, &flags);

    // It pages: the counts grow from one query to the next, each at its own time.
    let deadline = Instant::now() + LIMIT;
    let first = loop {
        let now = place.json(&["status", "walker", "--json"]);
        let counts = [
            "faults/remote/count",
            "nodes/1/faults/count",
            "nodes/1/pages_fetched",
        ];
        let is_beyond = |name: &&str| count(&now, &format!("/vms/0/{name}")) > 1000;
        if counts.iter().all(is_beyond) {
            break now;
        }
        assert!(Instant::now() < deadline, "{now}");
    };
    let vm_now = &first["vms"][0];
    assert_eq!(vm_now["name"], "walker");
    assert_eq!(vm_now["state"], "running");
    assert_eq!(vm_now["pid"].to_string(), vm.pid());
    assert_eq!(count(&first, "/vms/0/memory/cache_bytes"), 16 << 20);
    assert!(count(&first, "/vms/0/memory/cached_bytes") <= 16 << 20);
    assert!(count(&first, "/vms/0/memory/resident_bytes") > 8 << 20);
    for stage in ["queue", "fetch", "install"] {
        let pointer = format!("/vms/0/faults/remote/stages/{stage}/max");
        let found = first.pointer(&pointer).and_then(Value::as_f64);
        assert!(found.is_some_and(|us| us > 0.0), "{pointer} in {first}");
    }

    // Blocks are looked at in turn: a page that has left since counts, and so does one that came.
    let heat = until(|| {
        let heat = place.json(&["status", &vm.pid(), "--json", "--heat"]);
        let here = sum(&heat, "resident") + sum(&heat, "leaving");
        let is_within = here <= (16 << 20) / 4096 + 64;
        is_within
            .then_some(heat)
            .ok_or_else(|| format!("{here} pages are here"))
    });
    assert_eq!(sum(&heat, "looked_at"), (64 << 20) / 4096);
    assert!(sum(&heat, "resident") > 1000, "{heat}");
    assert!(sum(&heat, "remote") > 4000, "{heat}");
    assert!(sum(&heat, "recent_faults") > 500, "{heat}");
    let text = place.printed(&["status", "--heat"]);
    assert!(text.contains("VM walker") && text.contains('*'), "{text}");
    let text = place.printed(&["status"]);
    assert!(
        text.contains("loopback") && text.contains("remote"),
        "{text}"
    );
    println!("{text}");

    // A second VM of that name is refused; hostile clients have no effect.
    let line = place.failed(
        &[
            "run",
            "--kernel",
            concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
            "--name",
            "walker",
        ],
        ExitCode::Usage,
    );
    assert!(line.contains("taken by the VM of process"), "{line}");
    let socket = place.sockets().join(format!("vm-{}-walker.sock", vm.pid()));
    let silent: Vec<_> = (0..50)
        .map(|_| UnixStream::connect(&socket).expect("it listens"))
        .collect();
    let before = count(&heat, "/vms/0/faults/remote/count");
    drop(silent);
    let deadline = Instant::now() + LIMIT;
    let after = loop {
        let now = place.json(&["status", "--json"]);
        if count(&now, "/vms/0/faults/remote/count") > before {
            break now;
        }
        assert!(Instant::now() < deadline, "it pages no more: {now}");
    };

    assert_eq!(vm.end(libc::SIGINT), Some(130));
    assert_eq!(place.files(), 0);
    let text = fs::read_to_string(&report).expect("a report");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert!(count(&report, "/faults/remote/count") >= count(&after, "/vms/0/faults/remote/count"));
    assert_eq!(
        count(&report, "/faults/remote/count"),
        count(&report, "/nodes/1/faults/count")
    );
}

#[test]
fn what_a_killed_vm_leaves_is_cleaned_up_and_its_name_is_free() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let killed = vm(&place, &["--name", "same"]);
    assert_eq!(place.files(), 1);
    assert_eq!(killed.end(libc::SIGKILL), None);
    assert_eq!(place.files(), 1, "nobody was there to remove it");
    let again = vm(&place, &["--name", "same"]);
    assert_eq!(place.files(), 1, "the stale socket is gone");
    assert_eq!(again.end(libc::SIGKILL), None);
    assert!(place.printed(&["status"]).starts_with("no VM"));
    assert_eq!(place.files(), 0);
}

#[test]
fn a_vm_runs_where_nobody_can_ask_it() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    // A file blocks the directory's path.
    fs::write(place.sockets(), "").expect("is written");
    let vm = vm(&place, &[]);
    assert!(Path::new(&place.sockets()).is_file());
    assert_eq!(vm.end(libc::SIGTERM), Some(143));
}

/// Returns the CPUs on which a process's thread with this name may run.
fn cpus_of(pid: &str, thread: &str) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let read = |task: &Path, file: &str| fs::read_to_string(task.join(file)).unwrap_or_default();
    let mut tasks = tasks.map(|task| task.expect("a thread").path());
    let task = tasks.find(|task| read(task, "comm").trim() == thread);
    let status = read(&task.expect("that thread"), "status");
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    line.expect("its CPUs").trim().to_owned()
}

#[test]
fn each_vcpu_runs_on_the_cpu_that_it_was_given_and_other_threads_where_they_did() {
    if !support::kvm_is_there() {
        return;
    }
    let allowed = ssi_hv::machine::allowed_cpus().expect("a set");
    let (first, last) = (allowed[0], allowed[allowed.len() - 1]);
    let place = Place::new();
    let pinning = format!("{last},{first}");
    let report = place.directory.path().join("report.json");
    let name = report.to_str().expect("UTF-8");
    let mut flags = vec!["--cpus", "2", "--cpu-pinning", &pinning];
    flags.extend(["--report", name]);
    let vm = vm(&place, &flags);
    assert_eq!(cpus_of(&vm.pid(), "vcpu0"), last.to_string());
    assert_eq!(cpus_of(&vm.pid(), "vcpu1"), first.to_string());
    let all = ssi_hv::config::cpu_list::CpuList(allowed).to_string();
    assert_eq!(cpus_of(&vm.pid(), "ssi-hv"), all);
    assert_eq!(cpus_of(&vm.pid(), "virtio-balloon"), all);

    let pinning = serde_json::json!([last, first]);
    let json = place.json(&["status", "--json"]);
    assert_eq!(json["vms"][0]["guest"]["cpu_pinning"], pinning);
    let list = ssi_hv::config::cpu_list::CpuList(vec![last, first]);
    let line = format!("pinned     each vCPU to a CPU of the host, in order: {list}\n");
    let text = place.printed(&["status"]);
    assert!(text.contains(&line), "{text}");
    assert_eq!(vm.end(libc::SIGINT), Some(130));
    let text = fs::read_to_string(&report).expect("a report");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["guest"]["cpu_pinning"], pinning);
}
