//! `ssi-hv run --user --chroot`: what is left of root, and what still works.

mod donors;

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use ssi_hv::exit::ExitCode;

use crate::running::{Place, Running, count, end, node, vm_with};
use crate::sandbox::all_are;
use crate::support::kvm_is_there;

/// No user of any host.
const ID: u32 = 64_123;
const USER: &str = "64123:64123";

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: only root becomes another user");
    }
    root
}

/// Creates an empty root directory `new` with a directory of the user in it.
fn new_root(place: &Place) -> PathBuf {
    let root = place.directory.path().join("new");
    let out = root.join("out");
    fs::create_dir_all(&out).expect("is created");
    fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).expect("is set");
    chown(&out, Some(ID), Some(ID)).expect("is given away");
    root
}

fn is_of_user(vm: &Running) -> bool {
    let four = [ID.to_string().as_str(); 4].join("\t");
    [
        ("Uid", four.as_str()),
        ("Gid", &four),
        ("Groups", ""),
        ("CapEff", "0000000000000000"),
        ("CapPrm", "0000000000000000"),
        ("NoNewPrivs", "1"),
    ]
    .into_iter()
    .all(|(field, value)| all_are(vm, field, value))
}

#[test]
fn a_vm_of_root_runs_to_its_end_as_another_user_in_an_empty_root() {
    if !kvm_is_there() || !is_root() {
        return;
    }
    let place = Place::new();
    let root = new_root(&place);
    let out = root.join("out");
    let path = |name: &str| out.join(name).to_str().expect("UTF-8").to_owned();
    let (node, address) = node(&place, &[]);
    let vsock = format!("cid=3,path={}", path("v.sock"));
    let code = tiny_guests::count_until_power_button::code();
    let mut vm = vm_with(
        &place,
        code,
        &[
            "--name",
            "jailed",
            "--user",
            USER,
            "--chroot",
            root.to_str().expect("UTF-8"),
            "--donor",
            &address,
            "--hotplug-memory",
            "32M",
            "--report",
            &path("report.json"),
            "--record-working-set",
            &path("set"),
            "--vsock",
            &vsock,
        ],
    );
    assert!(is_of_user(&vm));
    assert!(all_are(&vm, "Seccomp", "2"));
    for link in ["root", "cwd"] {
        let link = format!("/proc/{}/{link}", vm.pid());
        assert_eq!(fs::read_link(link).expect("procfs"), root);
    }
    // No directory outside is open.
    for entry in fs::read_dir(format!("/proc/{}/fd", vm.pid())).expect("procfs") {
        let link = entry.expect("a descriptor").path();
        let target = fs::read_link(&link).expect("a link");
        let is_directory = fs::metadata(&link).is_ok_and(|found| found.is_dir());
        assert!(!is_directory || target.starts_with(&root), "{target:?}");
    }

    let status = place.json(&["status", "jailed", "--json"]);
    assert!(status.to_string().contains("\"running\""), "{status}");
    let plug = |donor| {
        let arguments = ["hotplug", "jailed", "--memory", "4M", "--donor", donor];
        place.failed(&arguments, ExitCode::HostError)
    };
    let line = plug("localhost:1");
    assert!(line.contains("--chroot resolves no names"), "{line}");
    // Sockets are still made.
    let line = plug("127.0.0.1:1");
    assert!(line.contains("refused"), "{line}");

    place.printed(&["shutdown", "jailed"]);
    let mut said = String::new();
    vm.console.read_to_string(&mut said).expect("a pipe");
    assert!(said.starts_with('k'), "memory is wrong: {said}");
    assert_eq!(vm.code(), Some(0));
    let report = fs::read(out.join("report.json")).expect("a report");
    let report: Value = serde_json::from_slice(&report).expect("JSON");
    assert_eq!(report["outcome"], "shutdown", "{report}");
    assert!(count(&report, "/faults/remote/count") > 0);
    assert!(
        report["memory"]["huge_bytes"].is_number(),
        "{}",
        report["memory"]
    );
    for name in ["report.json", "set"] {
        assert_eq!(fs::metadata(out.join(name)).expect(name).uid(), ID);
    }
    assert!(!out.join("v.sock").exists());
    // The lease was returned, and the control socket is removed by the next process that looks.
    let status = place.json(&["status", "--json"]);
    assert!(!status.to_string().contains("jailed"), "{status}");
    assert_eq!(place.files(), 1);
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

#[test]
fn a_user_alone_keeps_the_root() {
    if !kvm_is_there() || !is_root() {
        return;
    }
    let place = Place::new();
    let report = place.path("report.json");
    let code = tiny_guests::walk_for_ever::code();
    let flags = [
        "--transport",
        "loopback",
        "--user",
        USER,
        "--sandbox",
        "off",
    ];
    let vm = vm_with(&place, code, &flags);
    assert!(is_of_user(&vm));
    let link = format!("/proc/{}/root", vm.pid());
    assert_eq!(fs::read_link(link).expect("procfs"), Path::new("/"));
    assert_eq!(vm.end(libc::SIGINT), Some(130));

    // A directory of root alone: found out before the guest runs, not at its end.
    let kernel = place.path("kernel");
    let output = place.output(&[
        "run", "-q", "--kernel", &kernel, "--memory", "64M", "--user", USER, "--report", &report,
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let part = "report.json: the user 64123:64123 of --user cannot create it";
    assert!(said.contains(part), "{said}");

    // By a directory outside, a process leaves its root.
    let new = new_root(&place);
    let new = new.to_str().expect("UTF-8");
    let mut command = place.command(&[
        "run", "-q", "--kernel", &kernel, "--memory", "64M", "--user", USER, "--chroot", new,
    ]);
    command.stdin(fs::File::open("/proc").expect("a directory"));
    let output = end::output_of(&mut command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("descriptor 0 is the directory /proc"),
        "{said}"
    );
}

#[test]
fn what_cannot_be_given_up_safely_is_refused_at_the_start() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let root = new_root(&place);
    let open = place.directory.path().join("open");
    fs::create_dir_all(open.join("inner")).expect("is created");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o775)).expect("is set");
    symlink("/etc/passwd", root.join("link")).expect("a link");
    let text = |path: PathBuf| path.to_str().expect("UTF-8").to_owned();
    let (new, open, inner) = (
        text(root.clone()),
        text(open.clone()),
        text(open.join("inner")),
    );
    let (out, link) = (text(root.join("out")), text(root.join("link")));
    let absent = text(root.join("absent"));
    let beside = place.path("report.json");
    for (flags, part) in [
        (&["--user", "no-such-user"][..], "has no such user"),
        (&["--user", "root"], "is root"),
        (&["--chroot", &new], "--chroot needs --user"),
        (
            &["--user", USER, "--chroot", &absent],
            "a directory that exists",
        ),
        (&["--user", USER, "--chroot", "/"], "it is the root already"),
        (
            &["--user", USER, "--chroot", &open],
            "can be written by others",
        ),
        (
            &["--user", USER, "--chroot", &inner],
            "can be written by others",
        ),
        (
            &["--user", USER, "--chroot", &out],
            "belongs to another user",
        ),
        (
            &["--user", USER, "--on-reboot", "restart"],
            "cannot be combined with --user",
        ),
        (
            &["--user", USER, "--chroot", &new, "--transport", "rdma"],
            "--transport rdma cannot be combined with --user",
        ),
        (
            &["--user", USER, "--chroot", &new, "--report", &beside],
            "is not below --chroot",
        ),
        (
            &["--user", USER, "--chroot", &new, "--report", &link],
            "is not below --chroot",
        ),
        (
            &["--user", USER, "--chroot", &new, "--hvc", "/none/hvc"],
            "in a directory that exists",
        ),
    ] {
        let arguments = [&["run", "--kernel", "/etc/passwd"], flags].concat();
        let line = place.failed(&arguments, ExitCode::Usage);
        assert!(line.contains(part), "{flags:?}: {line}");
    }
}

#[test]
fn who_is_not_root_learns_what_is_missing() {
    let place = Place::new();
    let arguments = ["run", "--kernel", "/etc/passwd", "--user", USER];
    let mut command = place.command(&arguments);
    if is_root() {
        command.uid(ID).gid(ID);
    }
    let output = end::output_of(&mut command);
    let line = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert!(line.contains("--user needs root"), "{line}");
}
