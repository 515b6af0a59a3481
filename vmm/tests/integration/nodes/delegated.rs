//! Leases at donors that a VM with certificates has delegated to its processes on nodes.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::Child;

use ssi_hv::exit::ExitCode;
use tiny_guests::walk_for_ever;

use super::commands::{code, code_of, on_two_nodes, signal};
use super::donors::{all_is_given_back, flags, has_pages_at_its_donor, status_when};
use super::secured::Secured;
use crate::running::{Running, count, end};
use crate::support::kvm_is_there;

/// A guest that walks through its memory on two nodes, with pages at a donor with certificates.
struct Walking {
    secured: Secured,
    donor: Running,
    of_donor: String,
    vm: Child,
}

impl Walking {
    fn new() -> Self {
        let secured = Secured::new(&[]);
        let (donor, of_donor) = secured.donor("beta");
        let place = &secured.place;
        let web = place.path("vm/web");
        let named = format!("{of_donor},memory=40M,name=beta");
        let more = [&flags(&named)[..], &["--credentials", &web]].concat();
        let node = format!("{},memory=8M,name=alpha", secured.address);
        let vm = on_two_nodes(place, &node, walk_for_ever::code(), &more).spawn();
        let mut vm = vm.expect("it starts");
        let console = vm.stdout.as_mut().expect("a pipe");
        let mut said = [0];
        if !end::is_readable(console, end::LIMIT) || console.read_exact(&mut said).is_err() {
            panic!("{:?}", end::rest_of(vm, end::LIMIT));
        }
        has_pages_at_its_donor(place);
        Self {
            secured,
            donor,
            of_donor,
            vm,
        }
    }

    /// Returns how many leases the donor has, and how many it has granted.
    fn leases(&self) -> (u64, u64) {
        let status = self.secured.place.json(&["status", "--json"]);
        let mut nodes = status["nodes"].as_array().expect("nodes").iter();
        let donor = nodes.find(|node| node["listen"] == self.of_donor.as_str());
        let donor = donor.expect("the donor");
        (count(donor, "/leases"), count(donor, "/leases_granted"))
    }
}

#[test]
fn a_vm_with_another_certificate_delegates_its_leases_again() {
    if !kvm_is_there() {
        return;
    }
    let mut walking = Walking::new();
    assert_eq!(walking.leases(), (2, 2), "one of each node");
    walking.secured.replace("vm/web", "node/beta");
    // It closes the connections of this host and of the node.
    walking.donor.signal(libc::SIGHUP);
    let mut messages = BufReader::new(walking.vm.stderr.take().expect("a pipe"));
    let mut said = String::new();
    while !said.contains("was delegated again") {
        // Several lines may have come at once.
        let is_here = !messages.buffer().is_empty();
        assert!(
            is_here || end::is_readable(messages.get_ref(), end::LIMIT),
            "{said}"
        );
        assert_ne!(messages.read_line(&mut said).expect("a pipe"), 0, "{said}");
    }
    let place = &walking.secured.place;
    let fetched = |status: &_| count(status, "/nodes/2/pages_fetched");
    let before = fetched(&status_when(place, |_| true));
    status_when(place, |status| fetched(status) >= before + 300);
    assert_eq!(walking.leases(), (2, 2), "the same ones");
    signal(&walking.vm.id().to_string(), libc::SIGINT);
    let status = end::end_within(&mut walking.vm, end::LIMIT).expect("it ends");
    messages.read_to_string(&mut said).expect("a pipe");
    assert_eq!(status.code(), code(ExitCode::Interrupted), "{said}");
    all_is_given_back(place, 2);
}

#[test]
fn a_vm_that_its_donor_evicts_ends_and_no_node_keeps_a_lease() {
    if !kvm_is_there() {
        return;
    }
    let walking = Walking::new();
    let Walking {
        secured, donor, vm, ..
    } = walking;
    let place = &secured.place;
    let evicted = place.printed(&["node", "evict", "vm/web", "--node", &donor.pid()]);
    assert!(evicted.contains("2 lease(s)"), "{evicted}");
    let output = end::rest_of(vm, end::LIMIT);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(code_of(&output), code(ExitCode::DonorLost), "{stderr}");
    all_is_given_back(place, 2);
}
