//! `ssi-hv run` with devices, and tiny guests with and without drivers for them.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::running::end;
use crate::support;

/// Returns `ssi-hv run` of a guest, with files in `directory`.
fn run(directory: &Path, code: &[u8], more: &[&str]) -> Command {
    fs::write(directory.join("kernel"), tiny_guests::elf(code)).expect("is written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    command
        .current_dir(directory)
        .args(["run", "--kernel", "kernel", "--memory", "64M"])
        .args(more)
        .env("SSI_HV_RUNTIME_DIR", directory.join("run"))
        .stdin(Stdio::null());
    command
}

#[test]
fn a_guest_reads_the_disks_that_the_command_line_names() {
    if !support::kvm_is_there() {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    for name in ["a", "b"] {
        fs::write(directory.path().join(name), name.repeat(512)).expect("is written");
    }
    let more = [
        "--balloon",
        "off",
        "--rng",
        "off",
        "--disk",
        "path=a",
        "--disk",
        "path=b,readonly",
        "--vsock",
        "cid=3,path=v.sock",
    ];
    let code = tiny_guests::read_two_disks::code();
    let output = end::output_of(&mut run(directory.path(), code, &more));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(output.stdout, b"ba", "{errors}");
    assert!(
        !directory.path().join("v.sock").exists(),
        "it is left behind"
    );
}

#[test]
fn a_guest_that_is_ended_leaves_no_socket_and_no_lock() {
    if !support::kvm_is_there() {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = directory.path().join("disk.img");
    fs::write(&image, [0; 4096]).expect("is written");
    let more = ["--disk", "disk.img", "--vsock", "cid=3,path=v.sock"];
    let mut child = run(directory.path(), tiny_guests::count_for_ever::code(), &more)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut said = [0];
    let mut console = child.stdout.take().expect("a pipe");
    console.read_exact(&mut said).expect("it runs");
    assert!(directory.path().join("v.sock").exists());
    assert!(devices::virtio::Disk::open(&image, true).is_err());
    let pid = i32::try_from(child.id()).expect("a process id");
    // SAFETY: kill takes two integers; the process is our child and has not been reaped.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let status = end::end_within(&mut child, end::LIMIT).expect("it ends");
    assert_eq!(status.code(), Some(143));
    assert!(!directory.path().join("v.sock").exists());
    devices::virtio::Disk::open(&image, false).expect("nobody has it");
}

#[test]
fn a_guest_that_reboots_is_booted_again_with_new_memory_and_its_disk() {
    if !support::kvm_is_there() {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = directory.path().join("disk.img");
    fs::write(&image, "a".repeat(512)).expect("is written");
    let report = directory.path().join("report.json");
    let mut more = vec![
        "--balloon",
        "off",
        "--rng",
        "off",
        "--disk",
        "path=disk.img",
    ];
    more.extend(["--report", "report.json"]);
    let code = tiny_guests::reboot_until_c::code();
    let read_report = || -> serde_json::Value {
        let text = fs::read_to_string(&report).expect("there is a report");
        serde_json::from_str(&text).expect("it is JSON")
    };

    let output = end::output_of(&mut run(directory.path(), code, &more));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert_eq!(output.stdout, b"a", "{errors}");
    assert_eq!(read_report()["boot"]["restarts"], 0);

    fs::write(&image, "a".repeat(512)).expect("is written");
    more.extend(["--on-reboot", "restart"]);
    let output = end::output_of(&mut run(directory.path(), code, &more));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    assert_eq!(output.stdout, b"abc", "{errors}");
    assert_eq!(read_report()["boot"]["restarts"], 2);
    assert!(errors.contains("start 3"), "{errors}");
}
