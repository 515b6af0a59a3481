//! Donors over each transport, certificates, disks and commands, for the VM of another user in a root
//! of its own. Connections to donors are cut, and made again from there.

use std::fs;
use std::io::{self, Read as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::{ID, USER, is_of_user, is_root, new_root};
use crate::pki::succeeds;
use crate::running::{Place, Running, count, end, next_address, node, until, vm_with};
use crate::support::kvm_is_there;

/// Passes connections on to a node, and cuts them.
struct Cutter {
    address: SocketAddr,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cutter {
    fn new(node: SocketAddr) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let streams = Arc::new(Mutex::new(Vec::new()));
        let made = Arc::clone(&streams);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for vm in listener.incoming().flatten() {
                let node = TcpStream::connect(node).expect("it listens");
                for (from, to) in [(&vm, &node), (&node, &vm)] {
                    let copy = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
                    let (mut from, mut to) = (copy(from), copy(to));
                    std::thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                made.lock().expect("no panic").extend([vm, node]);
            }
        });
        Self { address, streams }
    }

    /// Cuts the connections, of which there has to be one.
    fn cut(&self) {
        let mut streams = self.streams.lock().expect("no panic");
        assert!(!streams.is_empty(), "nothing is connected");
        for stream in streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Starts a guest that checks its memory until its power button is pressed.
fn jailed(place: &Place, root: &Path, more: &[&str]) -> Running {
    let report = place.path("new/out/report.json");
    let root = root.to_str().expect("UTF-8");
    let code = tiny_guests::count_until_power_button::code();
    let flags = ["--name", "jailed", "--user", USER, "--chroot", root];
    let flags = [&flags, &["--report", &report][..], more].concat();
    let vm = vm_with(place, code, &flags);
    assert!(is_of_user(&vm));
    vm
}

fn status(place: &Place) -> Value {
    place.json(&["status", "jailed", "--json"])
}

/// Ends the guest, which reads its memory then, most of it from the donor, and has to find it right.
fn ends_well(place: &Place, mut vm: Running) {
    place.printed(&["shutdown", "jailed"]);
    let mut said = String::new();
    vm.console.read_to_string(&mut said).expect("a pipe");
    assert!(said.starts_with('k'), "memory is wrong: {said}");
    assert_eq!(vm.code(), Some(0));
    let report = fs::read(place.path("new/out/report.json")).expect("a report");
    let report: Value = serde_json::from_slice(&report).expect("JSON");
    assert_eq!(report["outcome"], "shutdown", "{report}");
    assert!(count(&report, "/faults/remote/count") > 0);
}

#[test]
fn lost_connections_are_made_again_from_another_root() {
    if !kvm_is_there() || !is_root() {
        return;
    }
    let place = Place::new();
    let root = new_root(&place);
    let (node, address) = node(&place, &[]);
    let cutter = Cutter::new(address.parse().expect("an address"));
    let address = cutter.address.to_string();
    let vm = jailed(&place, &root, &["--transport", "tcp", "--donor", &address]);
    cutter.cut();
    ends_well(&place, vm);
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

#[test]
fn udp_works_in_another_root() {
    if !kvm_is_there() || !is_root() {
        return;
    }
    let place = Place::new();
    let root = new_root(&place);
    let (node, address) = node(&place, &[]);
    let vm = jailed(&place, &root, &["--transport", "udp", "--donor", &address]);
    ends_well(&place, vm);
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

/// Replaces the certificate in a directory, whose files belong to the user.
fn renew(at: &Path, days: u32) {
    let name = format!("days{days}");
    succeeds(at, &format!("issue ca vm/web -o {name} --days {days}"));
    fs::create_dir_all(at.join("new/web")).expect("is created");
    for file in fs::read_dir(at.join(name)).expect("it was made") {
        let file = file.expect("a file");
        let there = at.join("new/web").join(file.file_name());
        let beside = there.with_extension("tmp");
        fs::copy(file.path(), &beside).expect("is copied");
        fs::set_permissions(&beside, fs::Permissions::from_mode(0o600)).expect("is set");
        chown(&beside, Some(ID), Some(ID)).expect("is given away");
        fs::rename(&beside, &there).expect("is replaced");
    }
}

#[test]
fn certificates_below_the_new_root_are_read_again() {
    if !kvm_is_there() || !is_root() {
        return;
    }
    let place = Place::new();
    let root = new_root(&place);
    let at = place.directory.path();
    succeeds(at, "init ca --cluster prod");
    succeeds(at, "issue ca node/alpha -o alpha");
    renew(at, 40);
    let rules = place.path("rules");
    fs::write(&rules, "vm/web\n").expect("is written");
    let alpha = place.path("alpha");
    let (mut node, _) = node(
        &place,
        &["--credentials", &alpha, "--allow", &format!("@{rules}")],
    );
    let address = next_address(&mut node);
    let cutter = Cutter::new(address.parse().expect("an address"));
    let donor = format!("{},name=alpha", cutter.address);
    let web = place.path("new/web");
    let more = [
        "--transport",
        "tcp",
        "--credentials",
        &web,
        "--donor",
        &donor,
    ];
    let vm = jailed(&place, &root, &more);
    let expires = || count(&status(&place), "/vms/0/certificate_not_after");
    let before = expires();
    renew(at, 80);
    cutter.cut();
    until(|| match expires() {
        now if now > before => Ok(()),
        now => Err(format!("the certificate expires at {now}, as before")),
    });
    ends_well(&place, vm);
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

#[test]
fn certificates_outside_the_new_root_stay_in_use() {
    if !kvm_is_there() || !is_root() {
        return;
    }
    let place = Place::new();
    let root = new_root(&place);
    let at = place.directory.path();
    succeeds(at, "init ca --cluster prod");
    succeeds(at, "issue ca node/alpha -o alpha");
    succeeds(at, "issue ca vm/web -o web");
    let alpha = place.path("alpha");
    let (mut node, _) = node(&place, &["--credentials", &alpha, "--allow", "vm/web"]);
    let address = next_address(&mut node);
    let web = place.path("web");
    for transport in ["tcp", "udp"] {
        let cutter = Cutter::new(address.parse().expect("an address"));
        let to = match transport {
            "tcp" => cutter.address.to_string(),
            _ => address.clone(),
        };
        let donor = format!("{to},name=alpha");
        let more = [
            "--transport",
            transport,
            "--credentials",
            &web,
            "--donor",
            &donor,
        ];
        let vm = jailed(&place, &root, &more);
        if transport == "tcp" {
            cutter.cut();
        }
        ends_well(&place, vm);
    }
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

#[test]
fn a_command_runs_and_a_disk_of_root_is_read() {
    if !kvm_is_there() || !is_root() {
        return;
    }
    let place = Place::new();
    let root = new_root(&place);
    let root = root.to_str().expect("UTF-8");
    let kernel = place.path("kernel");
    let run = |code: &[u8], more: &[&str]| {
        fs::write(&kernel, tiny_guests::elf(code)).expect("is written");
        let flags = [
            "run", "--kernel", &kernel, "--memory", "64M", "--user", USER,
        ];
        end::output_of(&mut place.command(&[&flags, &["--chroot", root][..], more].concat()))
    };
    // Any file will do as an initial RAM disk; with one, no shell of this host is needed.
    let initrd = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let exec = ["--exec", "any", "--initrd", initrd];
    let output = run(tiny_guests::exec_result::code(), &exec);
    assert_eq!(output.stdout, b"a\0\xff");
    assert_eq!(output.status.code(), Some(42));

    let disks = ["a", "b"].map(|name| {
        let path = place.path(name);
        fs::write(&path, name.repeat(512)).expect("is written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("is set");
        path
    });
    let [first, second] = disks.map(|path| format!("path={path}"));
    let devices = [
        "--balloon",
        "off",
        "--rng",
        "off",
        "--disk",
        &first,
        "--disk",
        &second,
    ];
    let output = run(tiny_guests::read_two_disks::code(), &devices);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(output.stdout, b"ba", "{errors}");
}
