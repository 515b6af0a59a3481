//! `ssi-hv run --node B --donor C`: donors store pages beside nodes that run vCPUs.

use std::fs;
use std::io::Read as _;
use std::process::Child;
use std::time::Duration;

use serde_json::Value;
use ssi_hv::exit::ExitCode;
use tiny_guests::nodes::count_on_two_nodes;
use tiny_guests::{second_cpu, walk_for_ever};

use super::commands::{code, code_of, on_two_nodes, signal, start};
use super::secured::Secured;
use crate::running::{Place, Running, count, end, node, until};
use crate::support::kvm_is_there;

const MIB: u64 = 1 << 20;

/// Deadline of a guest that counts: it moves tens of thousands of pages, one after the other, which take
/// 2 ms each on hosts with other work.
const COUNTING_MAX: Duration = end::LIMIT.saturating_mul(5);

/// What this host lends; with 8 MiB of the node and 40 MiB of the donor that is all of the guest's
/// 64 MiB.
const LOCAL: &str = "16M";

/// Two nodes, the first with a vCPU, and their addresses.
fn two(place: &Place) -> ([Running; 2], [String; 2]) {
    let (compute, address) = node(place, &["--cpus", "1"]);
    let (donor, of_donor) = node(place, &[]);
    ([compute, donor], [address, of_donor])
}

/// The flags of a VM with this donor.
pub(super) fn flags(donor: &str) -> [&str; 4] {
    ["--local-memory", LOCAL, "--donor", donor]
}

/// Waits until no node lends anything.
pub(super) fn all_is_given_back(place: &Place, nodes: usize) {
    until(|| {
        let status = place.json(&["status", "--json"]);
        let lent = status["nodes"].as_array().expect("nodes").iter();
        let lent: Vec<_> = lent.map(|node| count(node, "/lent_bytes")).collect();
        let is_none = lent == vec![0; nodes];
        is_none
            .then_some(())
            .ok_or_else(|| format!("{lent:?} bytes are lent"))
    });
}

/// Waits until the VM's status, which is returned, is as wanted.
pub(super) fn status_when(place: &Place, is_wanted: impl Fn(&Value) -> bool) -> Value {
    until(|| {
        // A VM that starts is not known by its name yet. All of them are not asked: a donor that is
        // stopped would not answer.
        let mut command = place.command(&["status", "two", "--json"]);
        let output = command.output().expect("it starts");
        let all: Result<Value, _> = serde_json::from_slice(&output.stdout);
        let Ok(status) = all.map(|mut all| all["vms"][0].take()) else {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        };
        if is_wanted(&status) {
            return Ok(status);
        }
        Err(status.to_string())
    })
}

/// Checks the report of a guest that has counted in memory of both nodes and of the donor.
fn has_used_all(report: &Value, of_donor: &str, lent: u64) {
    let nodes = report["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), 3, "{report}");
    let roles: Vec<_> = nodes.iter().map(|node| &node["role"]).collect();
    assert_eq!(roles, ["compute", "compute", "donor"]);
    let donor = &nodes[2];
    assert_eq!(
        (&donor["id"], &donor["address"]),
        (&2.into(), &of_donor.into())
    );
    assert_eq!(count(donor, "/memory_bytes"), lent);
    assert!(count(donor, "/pages_written_back") > 2_000, "{donor}");
    assert!(count(donor, "/pages_fetched") > 2_000, "{donor}");
    for node in &nodes[..2] {
        assert!(count(node, "/transfers/evictions") > 500, "{node}");
        assert!(count(node, "/transfers/pages_received") > 10, "{node}");
    }
    // 256 copies, and 64 pages of each node on their way.
    let most = 16 * MIB + (256 + 2 * 64) * 4096;
    let resident = count(report, "/memory/resident_bytes");
    assert!(
        resident <= most,
        "{resident} bytes here, {most} are the limit"
    );
}

/// Checks the counters of a donor of a VM that has ended, as its report has them.
fn has_lent(place: &Place, of_donor: &str, leases: u64, report: &Value) {
    let status = place.json(&["status", "--json"]);
    let mut nodes = status["nodes"].as_array().expect("nodes").iter();
    let donor = nodes.find(|node| node["listen"] == of_donor);
    let donor = donor.expect("the donor");
    assert_eq!(count(donor, "/leases_granted"), leases, "{donor}");
    assert_eq!(count(donor, "/leases_expired"), 0, "{donor}");
    // All nodes are in the report, which the last pages may be missing from.
    let written = count(donor, "/pages_written");
    let reported = count(&report["nodes"][2], "/pages_written_back");
    assert!(
        reported <= written && reported > written / 10 * 9,
        "{donor}: {report}"
    );
}

/// Waits for the end of a guest whose nodes have so many leases at the donor.
fn rest_is_right(vm: Child, place: &Place, of_donor: &str, leases: u64) {
    lent_rest_is_right(vm, place, (of_donor, 40 * MIB), leases);
}

/// The same of a donor that lends so many bytes.
fn lent_rest_is_right(vm: Child, place: &Place, (of_donor, lent): (&str, u64), leases: u64) {
    let output = end::rest_of(vm, COUNTING_MAX);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "k", "{output:?}");
    let report = fs::read_to_string(place.path("report")).expect("a report");
    let report = serde_json::from_str(&report).expect("JSON");
    has_used_all(&report, of_donor, lent);
    all_is_given_back(place, 2);
    has_lent(place, of_donor, leases, &report);
}

#[test]
fn vcpus_of_two_nodes_count_in_memory_of_both_and_of_a_donor() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_nodes, [address, of_donor]) = two(&place);
    let report = place.path("report");
    let donor = format!("{of_donor},memory=40M");
    let more = [&flags(&donor)[..], &["--report", &report]].concat();
    let node = format!("{address},memory=8M");
    let vm = start(&place, &node, count_on_two_nodes::code(), &more);
    // This host has one as well.
    rest_is_right(vm, &place, &of_donor, 2);
}

/// Memory that may be added is after a gap of a gigabyte, of which no donor holds a part.
#[test]
fn they_do_so_beside_memory_that_may_be_added() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_nodes, [address, of_donor]) = two(&place);
    let report = place.path("report");
    let donor = format!("{of_donor},memory=56M");
    let more = ["--hotplug-memory", "16M", "--report", &report];
    let more = [&flags(&donor)[..], &more].concat();
    let node = format!("{address},memory=8M");
    let vm = start(&place, &node, count_on_two_nodes::code(), &more);
    lent_rest_is_right(vm, &place, (&of_donor, 56 * MIB), 2);
}

#[test]
fn donors_that_hold_next_to_nothing_are_named_at_the_start() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_nodes, [address, of_donor]) = two(&place);
    for (replicas, donors) in [("1", 1), ("2", 2)] {
        let (_other, of_other) = node(&place, &[]);
        let mut more = [&flags(&of_donor)[..], &["--replicas", replicas]].concat();
        if donors == 2 {
            more.extend(["--donor", &of_other]);
        }
        // The node lends all of the guest's memory.
        let vm = start(&place, &address, second_cpu::code(), &more);
        let output = end::rest_of(vm, end::LIMIT);
        let said = String::from_utf8_lossy(&output.stderr);
        let warning = format!("the {donors} donor(s) hold next to nothing");
        assert_eq!(said.matches(&warning).count(), 1, "{said}");
    }
    let donor = format!("{of_donor},memory=40M");
    let node = format!("{address},memory=8M");
    let vm = start(&place, &node, second_cpu::code(), &flags(&donor));
    let output = end::rest_of(vm, end::LIMIT);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("next to nothing"), "{said}");
}

#[test]
fn they_do_so_with_certificates_and_sealed_pages() {
    if !kvm_is_there() {
        return;
    }
    let secured = Secured::new(&[]);
    let (_donor, of_donor) = secured.donor("beta");
    let place = &secured.place;
    let (report, web) = (place.path("report"), place.path("vm/web"));
    let donor = format!("{of_donor},memory=40M,name=beta");
    let more = [
        &flags(&donor)[..],
        &["--report", &report, "--credentials", &web, "--seal", "on"],
    ];
    let node = format!("{},memory=8M,name=alpha", secured.address);
    let code = count_on_two_nodes::code();
    let vm = on_two_nodes(place, &node, code, &more.concat()).spawn();
    // The process on the node has one as well, with its own certificate.
    rest_is_right(vm.expect("it starts"), place, &of_donor, 2);
    let report = fs::read_to_string(report).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["nodes"][2]["sealed"], true, "{report}");
    for node in [0, 1] {
        let transport = &report["nodes"][node]["peers"][0]["transport"];
        assert_eq!(transport, "tcp+tls", "{report}");
    }
    assert!(count(&report, "/memory/sealing/pages_opened") > 2_000);
}

/// Waits until the link to the donor is `reachable`.
fn wait_for_link(place: &Place, reachable: bool) {
    status_when(place, |status| {
        status["nodes"][2]["link"]["reachable"] == reachable
    });
}

#[test]
fn a_guest_goes_on_when_its_donor_is_back() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let ([_compute, donor], [address, of_donor]) = two(&place);
    let vm = walking(&place, &address, &of_donor, &[]);
    donor.signal(libc::SIGSTOP);
    wait_for_link(&place, false);
    donor.signal(libc::SIGCONT);
    wait_for_link(&place, true);
    let fetched = |status: &Value| count(status, "/nodes/2/pages_fetched");
    let before = fetched(&status_when(&place, |_| true));
    status_when(&place, |status| fetched(status) >= before + 100);
    signal(&vm.id().to_string(), libc::SIGINT);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), code(ExitCode::Interrupted), "{output:?}");
    all_is_given_back(&place, 2);
}

/// Starts a guest that walks through its memory, and waits until its donor has pages of it.
fn walking(place: &Place, address: &str, of_donor: &str, more: &[&str]) -> Child {
    let more = [&flags(of_donor)[..], more].concat();
    let node = format!("{address},memory=8M");
    let mut vm = start(place, &node, walk_for_ever::code(), &more);
    let console = vm.stdout.as_mut().expect("a pipe");
    let mut said = [0];
    if !end::is_readable(console, end::LIMIT) || console.read_exact(&mut said).is_err() {
        panic!("{:?}", end::rest_of(vm, end::LIMIT));
    }
    has_pages_at_its_donor(place);
    vm
}

/// Waits until a VM has read pages at its donor.
pub(super) fn has_pages_at_its_donor(place: &Place) {
    let has_read = |status: &Value| count(status, "/nodes/2/pages_fetched") > 100;
    let status = status_when(place, has_read);
    assert_eq!(status["nodes"][2]["link"]["reachable"], true, "{status}");
}

#[test]
fn a_vm_whose_donor_is_killed_ends_and_names_it() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let ([_compute, donor], [address, of_donor]) = two(&place);
    let vm = walking(&place, &address, &of_donor, &["--donor-grace", "1"]);
    let text = place.printed(&["status", "two"]);
    let row = text.lines().find(|line| line.ends_with(&of_donor));
    assert!(
        row.is_some_and(|row| row.starts_with("2    donor    up")),
        "{text}"
    );
    donor.end(libc::SIGKILL);
    let output = end::rest_of(vm, end::LIMIT);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(code_of(&output), code(ExitCode::DonorLost), "{stderr}");
    assert!(
        stderr.contains("guest memory on node 2 is lost"),
        "{stderr}"
    );
    assert!(stderr.contains(&of_donor), "{stderr}");
    all_is_given_back(&place, 1);
}

#[test]
fn a_donor_gets_its_memory_back_when_a_node_is_killed() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let ([compute, _donor], [address, of_donor]) = two(&place);
    let vm = walking(&place, &address, &of_donor, &[]);
    compute.end(libc::SIGKILL);
    let output = end::rest_of(vm, end::LIMIT);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(code_of(&output), code(ExitCode::NodeLost), "{stderr}");
    assert!(stderr.contains(&format!("node {address}")), "{stderr}");
    all_is_given_back(&place, 1);
}

#[test]
fn a_vm_that_is_interrupted_gives_all_memory_back() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_nodes, [address, of_donor]) = two(&place);
    let vm = walking(&place, &address, &of_donor, &[]);
    signal(&vm.id().to_string(), libc::SIGINT);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), code(ExitCode::Interrupted), "{output:?}");
    all_is_given_back(&place, 2);
}

/// A node with a vCPU, and so many donors; the addresses of all.
fn with_donors(place: &Place, donors: usize) -> (Vec<Running>, Vec<String>) {
    let compute = node(place, &["--cpus", "1"]);
    let donors = (0..donors).map(|_| node(place, &[]));
    std::iter::once(compute).chain(donors).unzip()
}

/// The flags of a VM that keeps two copies of each page at these donors.
fn twice(donors: &[String]) -> Vec<&str> {
    let donors = donors.iter().flat_map(|donor| ["--donor", donor]);
    let flags = ["--replicas", "2", "--donor-grace", "1"];
    let flags = flags.into_iter().chain(["--local-memory", LOCAL]);
    flags.chain(donors).collect()
}

#[test]
fn both_vcpus_count_on_while_a_donor_with_copies_is_killed() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (mut nodes, addresses) = with_donors(&place, 2);
    let report = place.path("report");
    let more = [&twice(&addresses[1..])[..], &["--report", &report]].concat();
    let node = format!("{},memory=8M", addresses[0]);
    let vm = start(&place, &node, count_on_two_nodes::code(), &more);
    // It has written copies to both and reads some. Which of them it reads first depends on how fast
    // each CPU is.
    let of_both = |status: &Value, what: &str| {
        [2, 3].map(|donor| count(status, &format!("/nodes/{donor}/{what}")))
    };
    let status = status_when(&place, |status| {
        let [one, other] = of_both(status, "pages_written_back");
        let fetched: u64 = of_both(status, "pages_fetched").iter().sum();
        one.min(other) > 1_000 && fetched > 100
    });
    assert_eq!(count(&status, "/memory/replicas/degraded_bytes"), 0);
    nodes.remove(1).end(libc::SIGKILL);
    let output = end::rest_of(vm, COUNTING_MAX);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "k", "{output:?}");
    let report = fs::read_to_string(report).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let replicas = &report["memory"]["replicas"];
    assert_eq!(replicas["out"], serde_json::json!([2]), "{report}");
    assert_eq!(count(replicas, "/losses"), 1);
    // Half of what is read first was at each.
    let at = |node: usize| count(&report, &format!("/nodes/{node}/memory_bytes"));
    assert_eq!(at(2) + at(3), count(replicas, "/bytes"), "{report}");
    assert!(at(2) > 0 && at(3) > 0, "{report}");
    let written = |node: usize| count(&report, &format!("/nodes/{node}/pages_written_back"));
    assert!(written(2) > 1_000 && written(3) > written(2), "{report}");
    let error = report["errors"][0].as_str().expect("a line");
    assert!(error.contains("the guest continues"), "{error}");
    all_is_given_back(&place, 2);
}

#[test]
fn copies_of_a_killed_donor_are_made_again_beside_nodes() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (mut nodes, addresses) = with_donors(&place, 3);
    let node = format!("{},memory=8M", addresses[0]);
    let vm = start(
        &place,
        &node,
        walk_for_ever::code(),
        &twice(&addresses[1..]),
    );
    let fetched = |status: &Value| {
        (2..5)
            .map(|at| count(&status["nodes"][at], "/pages_fetched"))
            .sum::<u64>()
    };
    status_when(&place, |status| fetched(status) > 300);
    let whole = |losses: u64| {
        let is_whole = |status: &Value| {
            let replicas = &status["memory"]["replicas"];
            count(replicas, "/losses") == losses && count(replicas, "/degraded_bytes") == 0
        };
        status_when(&place, is_whole)
    };
    whole(0);
    nodes.remove(1).end(libc::SIGKILL);
    let repaired = whole(1);
    assert!(
        count(&repaired, "/memory/replicas/repaired_bytes") >= 20 * MIB,
        "{repaired}"
    );
    // What it had is now at the two others, of which one is enough.
    nodes.remove(1).end(libc::SIGKILL);
    let alone = status_when(&place, |status| {
        count(status, "/memory/replicas/losses") == 2
    });
    let before = fetched(&alone);
    status_when(&place, |status| fetched(status) >= before + 300);
    // The last one has the only copies.
    nodes.remove(1).end(libc::SIGKILL);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), code(ExitCode::DonorLost), "{output:?}");
    all_is_given_back(&place, 1);
}

#[test]
fn donors_that_lend_too_little_are_refused_with_what_is_missing() {
    let place = Place::new();
    let kernel = place.path("kernel");
    fs::write(&kernel, tiny_guests::elf(walk_for_ever::code())).expect("is written");
    let (_nodes, [address, of_donor]) = two(&place);
    let node = format!("{address},cpus=1,memory=8M");
    let fails = |memory: &str, code, text: &str| {
        let arguments = [
            "run", "--kernel", &kernel, "--memory", memory, "--cpus", "2",
        ];
        let more = [&["--node", &node][..], &flags(&of_donor)].concat();
        let line = place.failed(&[&arguments[..], &more].concat(), code);
        assert!(line.contains(text), "{line}");
    };
    // The donor has 64 MiB.
    let text = "16 MiB, the 8 MiB of --node and the 64 MiB that --donor lends;";
    fails("90M", ExitCode::DonorUnavailable, text);
}
