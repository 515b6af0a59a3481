//! `ssi-hv node --cpus` and `ssi-hv run --node` with certificates.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::Child;

use fabric_pki::{Authority, Validity};
use ssi_hv::exit::ExitCode;
use tiny_guests::{halt_for_ever, second_cpu};

use super::commands::{children_of, code, code_of, on_two_nodes};
use crate::running::{Place, Running, end, node};
use crate::support::kvm_is_there;

/// Longer than what is warned of.
const DAYS: Validity = Validity { days: 90 };

/// A cluster with the node `alpha`, which lends a CPU, and certificates of members.
pub(super) struct Secured {
    pub(super) place: Place,
    node: Running,
    pub(super) address: String,
}

fn authority(place: &Path) -> Authority {
    let path = place.join("authority");
    match path.exists() {
        true => Authority::open(&path),
        false => Authority::create(&path, "prod".parse().expect("a name"), DAYS),
    }
    .expect("an authority")
}

/// Starts a node with its certificate, and more options. Returns its address.
fn member(place: &Place, name: &str, more: &[&str]) -> (Running, String) {
    let credentials = place.path(&format!("node/{name}"));
    let options = ["--credentials", &credentials];
    let (mut node, _) = node(place, &[&options, more].concat());
    // The first line says who the node is.
    let mut line = String::new();
    node.console.read_line(&mut line).expect("it prints");
    let address = line.trim().rsplit(' ').next().expect("one").to_owned();
    (node, address)
}

impl Secured {
    /// Starts the node with more options.
    pub(super) fn new(more: &[&str]) -> Self {
        let place = Place::new();
        let at = place.directory.path();
        let mut authority = authority(at);
        for holder in ["node/alpha", "node/beta", "vm/web", "vm/db"] {
            let output = at.join(holder);
            let holder = holder.parse().expect("a holder");
            authority
                .issue(&holder, Validity { days: 60 }, &output)
                .expect("a certificate");
        }
        drop(authority);
        let (node, address) = member(&place, "alpha", &[&["--cpus", "1"], more].concat());
        Self {
            place,
            node,
            address,
        }
    }

    /// Starts another node of the cluster, which lends memory.
    pub(super) fn donor(&self, name: &str) -> (Running, String) {
        member(&self.place, name, &[])
    }

    /// Revokes the certificate of a member, which has another one from here on, and gives the list
    /// to the directory of one other.
    pub(super) fn replace(&self, holder: &str, informed: &str) {
        let at = self.place.directory.path();
        let mut issuer = authority(at);
        let member = holder.parse().expect("a holder");
        issuer.revoke_holder(&member).expect("revoked");
        let new = at.join("replaced");
        let days = Validity { days: 60 };
        issuer.issue(&member, days, &new).expect("a certificate");
        for file in ["key.pem", "cert.pem"] {
            std::fs::copy(new.join(file), at.join(holder).join(file)).expect("copied");
        }
        let list = at.join("authority/crl.pem");
        std::fs::copy(list, at.join(informed).join("crl.pem")).expect("copied");
    }

    /// Starts a VM with this member's certificate.
    fn start(&self, holder: &str, code: &[u8]) -> Child {
        let node = format!("{},name=alpha", self.address);
        let credentials = self.place.path(holder);
        let more = ["--credentials", &credentials];
        let mut command = on_two_nodes(&self.place, &node, code, &more);
        command.spawn().expect("it starts")
    }

    /// Starts a VM, and waits until its guest runs.
    fn halted(&self, holder: &str) -> Child {
        let mut vm = self.start(holder, halt_for_ever::code());
        let console = vm.stdout.as_mut().expect("a pipe");
        assert!(end::is_readable(console, end::LIMIT), "the guest is silent");
        let mut said = [0];
        if console.read_exact(&mut said).is_err() {
            panic!("{:?}", end::rest_of(vm, end::LIMIT));
        }
        vm
    }

    /// Waits until a VM has lost its node, and returns its messages.
    fn lost(&self, vm: Child) -> String {
        let output = end::rest_of(vm, end::LIMIT);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(code_of(&output), code(ExitCode::NodeLost), "{stderr}");
        assert!(stderr.contains(&self.address), "{stderr}");
        assert_eq!(children_of(&self.node.pid()), [""; 0]);
        stderr
    }
}

#[test]
fn a_guest_starts_its_second_cpu_on_a_node_with_certificates() {
    if !kvm_is_there() {
        return;
    }
    let secured = Secured::new(&["--allow", "vm/web,cpus=1,bytes=64M"]);
    let output = end::rest_of(secured.start("vm/web", second_cpu::code()), end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "AB");
    let output = end::rest_of(secured.start("vm/db", second_cpu::code()), end::LIMIT);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        code_of(&output),
        code(ExitCode::NodeUnavailable),
        "{stderr}"
    );
    assert!(stderr.contains("add --allow vm/db"), "{stderr}");
}

#[test]
fn a_vm_that_is_evicted_or_revoked_ends_and_says_so() {
    if !kvm_is_there() {
        return;
    }
    let secured = Secured::new(&[]);
    let (place, at) = (&secured.place, secured.place.directory.path());
    let vm = secured.halted("vm/web");
    place.printed(&["node", "evict", "vm/web"]);
    let stderr = secured.lost(vm);
    assert!(stderr.contains("vm/web was evicted"), "{stderr}");
    // It may come again, until its certificate is revoked.
    let vm = secured.halted("vm/web");
    let web = "vm/web".parse().expect("a holder");
    authority(at).revoke_holder(&web).expect("revoked");
    let list = at.join("authority/crl.pem");
    std::fs::copy(list, at.join("node/alpha/crl.pem")).expect("copied");
    place.printed(&["node", "reload"]);
    let stderr = secured.lost(vm);
    assert!(
        stderr.contains("does not accept the VM's certificate"),
        "{stderr}"
    );
    let output = end::rest_of(secured.start("vm/web", second_cpu::code()), end::LIMIT);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        code_of(&output),
        code(ExitCode::NodeUnavailable),
        "{stderr}"
    );
    assert!(
        stderr.contains("refuses this end's certificate"),
        "{stderr}"
    );
}

#[test]
fn a_node_whose_certificates_are_revoked_ends_the_vm_and_one_with_another_does_not() {
    if !kvm_is_there() {
        return;
    }
    let secured = Secured::new(&[]);
    let (place, at) = (&secured.place, secured.place.directory.path());
    let mut vm = secured.halted("vm/web");
    let alpha = "node/alpha".parse().expect("a holder");
    let tell_vm = || {
        let list = at.join("authority/crl.pem");
        std::fs::copy(list, at.join("vm/web/crl.pem")).expect("copied");
    };
    // It has another one by the time that the VM learns that the first is revoked.
    let mut issuer = authority(at);
    issuer.revoke_holder(&alpha).expect("revoked");
    let new = at.join("new");
    issuer
        .issue(&alpha, Validity { days: 60 }, &new)
        .expect("a certificate");
    drop(issuer);
    for file in ["key.pem", "cert.pem"] {
        std::fs::copy(new.join(file), at.join("node/alpha").join(file)).expect("copied");
    }
    place.printed(&["node", "reload"]);
    tell_vm();
    let mut messages = BufReader::new(vm.stderr.take().expect("a pipe"));
    let mut said = String::new();
    while !said.contains("shows another certificate now") {
        // Several lines may have come at once.
        let is_here = !messages.buffer().is_empty();
        assert!(
            is_here || end::is_readable(messages.get_ref(), end::LIMIT),
            "{said}"
        );
        assert_ne!(messages.read_line(&mut said).expect("a pipe"), 0, "{said}");
    }
    assert_eq!(vm.try_wait().expect("a child"), None, "{said}");
    authority(at).revoke_holder(&alpha).expect("revoked");
    tell_vm();
    let status = end::end_within(&mut vm, end::LIMIT).expect("it ends");
    messages.read_to_string(&mut said).expect("a pipe");
    assert_eq!(status.code(), code(ExitCode::NodeLost), "{said}");
    let part = format!(
        "node {} (number 1) is lost: its certificate",
        secured.address
    );
    assert!(said.contains(&part) && said.contains("evoked"), "{said}");
    assert_eq!(children_of(&secured.node.pid()), [""; 0]);
}

#[test]
fn one_end_without_certificates_is_told_what_to_do() {
    let place = Place::new();
    let kernel = place.path("kernel");
    std::fs::write(&kernel, tiny_guests::elf(second_cpu::code())).expect("is written");
    let fails = |place: &Place, node: &str, more: &[&str], code, text: &str| {
        let arguments = ["run", "--kernel", &kernel, "--memory", "64M", "--cpus", "2"];
        let node = ["--node", node];
        let line = place.failed(&[&arguments[..], &node, more].concat(), code);
        assert!(line.contains(text), "{line}");
    };
    let secured = Secured::new(&[]);
    let address = &secured.address;
    let web = secured.place.path("vm/web");
    let unavailable = ExitCode::NodeUnavailable;
    let plain = format!("{address},cpus=1");
    let text = "accepts only connections with certificates: give --credentials DIR";
    fails(&place, &plain, &[], unavailable, text);
    let usage = ExitCode::Usage;
    let shown = ["--credentials", web.as_str()];
    let text = "has no name to compare with its certificate; add name=NAME";
    fails(&place, &plain, &shown, usage, text);
    let named = format!("{address},cpus=1,name=alpha");
    fails(&place, &named, &[], usage, "only --credentials compares");
    let other = format!("{address},cpus=1,name=beta");
    fails(
        &place,
        &other,
        &shown,
        unavailable,
        "node/beta is needed here",
    );
    let (_open, address) = node(&place, &["--cpus", "1"]);
    let named = format!("{address},cpus=1,name=alpha");
    let text = "start `ssi-hv node` there with --credentials";
    fails(&place, &named, &shown, unavailable, text);
}
