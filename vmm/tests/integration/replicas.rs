//! `ssi-hv run --replicas 2`: a donor is killed while a guest counts in its memory.

use std::io::Read;
use std::time::Instant;

use serde_json::Value;
use ssi_hv::exit::ExitCode;

use crate::running::{LIMIT, Place, Running, count, node, vm_with};
use crate::support;

/// Pages between 2 and 48 MiB, through which the guest walks.
pub const PAGES: usize = (46 << 20) >> 12;
/// Bytes that the guest prints of each page: its counter, and zeroes.
const PRINTED: usize = 64;

/// Reads a round of the guest, in which every page's counter must be `round`.
pub fn read_round(vm: &mut Running, round: u64) {
    let mut bytes = vec![0; PRINTED];
    for page in 0..PAGES {
        vm.console.read_exact(&mut bytes).expect("the guest walks");
        let (counter, rest) = bytes.split_first_chunk().expect("64 bytes");
        let counter = u64::from_le_bytes(*counter);
        assert_eq!(counter, round, "page {page} in round {round}");
        assert!(rest.iter().all(|&byte| byte == 0), "page {page}");
    }
}

fn status(place: &Place) -> Value {
    let mut all = place.json(&["status", "doubled", "--json"]);
    all["vms"][0].take()
}

/// Waits until a number of the status is `wanted`.
fn wait_for(place: &Place, pointer: &str, wanted: u64) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = status(place);
        if count(&status, pointer) == wanted {
            return status;
        }
        assert!(
            Instant::now() < deadline,
            "{pointer} is not {wanted}: {status}"
        );
    }
}

#[test]
fn a_guest_survives_the_loss_of_one_donor_and_ends_with_that_of_both() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (first, first_address) = node(&place, &[]);
    let (second, second_address) = node(&place, &[]);
    let flags = [
        "--name",
        "doubled",
        "--replicas",
        "2",
        "--donor",
        &first_address,
        "--donor",
        &second_address,
        "--donor-grace",
        "1",
    ];
    let mut vm = vm_with(&place, tiny_guests::talk_and_walk::code(), &flags);
    read_round(&mut vm, 1);
    let whole = wait_for(&place, "/memory/replicas/degraded_bytes", 0);
    assert!(
        count(&whole, "/memory/replicas/bytes") >= 48 << 20,
        "{whole}"
    );
    let written = |node: u32| count(&whole, &format!("/nodes/{node}/pages_written_back"));
    assert!(written(1) > 2_000 && written(2) > 2_000, "{whole}");

    assert_eq!(first.end(libc::SIGKILL), None);
    for round in 2..4 {
        read_round(&mut vm, round);
    }
    let degraded = wait_for(&place, "/memory/replicas/losses", 1);
    assert_eq!(degraded["state"], "running", "{degraded}");
    assert_eq!(
        degraded["memory"]["replicas"]["out"],
        serde_json::json!([1])
    );
    assert_eq!(count(&degraded, "/errors_total"), 1, "{degraded}");
    let error = degraded["errors"][0].as_str().expect("a line");
    assert!(error.contains("the guest continues"), "{error}");
    let text = place.printed(&["status", "doubled"]);
    assert!(text.contains("copies     degraded: "), "{text}");

    assert_eq!(second.end(libc::SIGKILL), None);
    let mut rest = Vec::new();
    vm.console.read_to_end(&mut rest).expect("a pipe");
    assert_eq!(vm.code(), Some(ExitCode::DonorLost.code().into()));
}

#[test]
fn a_guest_with_stripes_survives_the_loss_of_two_of_six_donors_at_once() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let mut flags = vec![
        "--name",
        "doubled",
        "--redundancy",
        "4+2",
        "--donor-grace",
        "1",
    ];
    let nodes: Vec<_> = (0..6).map(|_| node(&place, &[])).collect();
    for (_, address) in &nodes {
        flags.extend(["--donor", address]);
    }
    let mut vm = vm_with(&place, tiny_guests::talk_and_walk::code(), &flags);
    read_round(&mut vm, 1);
    let whole = wait_for(&place, "/memory/replicas/degraded_bytes", 0);
    assert_eq!(whole["memory"]["replicas"]["stripes"], "4+2", "{whole}");
    let text = place.printed(&["status", "doubled"]);
    assert!(text.contains("stripes    whole: "), "{text}");
    let drained = place.failed(&["drain", "doubled", "--node", "1"], ExitCode::HostError);
    assert!(drained.contains("room for 0 MiB"), "{drained}");

    let mut nodes: Vec<_> = nodes.into_iter().map(|(node, _)| Some(node)).collect();
    let (first, third) = (nodes[0].take(), nodes[2].take());
    std::thread::scope(|scope| {
        for node in [first, third] {
            let node = node.expect("six nodes");
            scope.spawn(move || assert_eq!(node.end(libc::SIGKILL), None));
        }
    });
    for round in 2..5 {
        read_round(&mut vm, round);
    }
    let degraded = wait_for(&place, "/memory/replicas/losses", 2);
    assert_eq!(degraded["state"], "running", "{degraded}");
    let out = &degraded["memory"]["replicas"]["out"];
    assert_eq!(*out, serde_json::json!([1, 3]));
    let text = place.printed(&["status", "doubled"]);
    assert!(text.contains("stripes    degraded: "), "{text}");

    let second = nodes[1].take().expect("six nodes");
    assert_eq!(second.end(libc::SIGKILL), None);
    let mut rest = Vec::new();
    vm.console.read_to_end(&mut rest).expect("a pipe");
    assert_eq!(vm.code(), Some(ExitCode::DonorLost.code().into()));
}

/// Without zones, the first and the third of four donors that lend the same hold both copies of
/// blocks.
#[test]
fn a_guest_survives_the_loss_of_a_zone_with_two_donors_at_once() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let mut flags = vec!["--name", "doubled", "--replicas", "2", "--donor-grace", "1"];
    let nodes: Vec<_> = ["east", "west", "east", "west"]
        .into_iter()
        .map(|zone| {
            let (node, address) = node(&place, &[]);
            (node, format!("{address},zone={zone}"))
        })
        .collect();
    for (_, donor) in &nodes {
        flags.extend(["--donor", donor]);
    }
    let mut vm = vm_with(&place, tiny_guests::talk_and_walk::code(), &flags);
    read_round(&mut vm, 1);
    let whole = wait_for(&place, "/memory/replicas/degraded_bytes", 0);
    assert_eq!(count(&whole, "/memory/replicas/in_one_zone_bytes"), 0);

    let mut east = Vec::new();
    let mut west = Vec::new();
    for (index, (node, _)) in nodes.into_iter().enumerate() {
        match index % 2 {
            0 => east.push(node),
            _ => west.push(node),
        }
    }
    for node in &east {
        node.signal(libc::SIGKILL);
    }
    for round in 2..5 {
        read_round(&mut vm, round);
    }
    // Both copies are in the zone that is left, which is counted.
    let lost = wait_for(&place, "/memory/replicas/losses", 2);
    assert_eq!(lost["state"], "running", "{lost}");
    let bytes = count(&lost, "/memory/replicas/bytes");
    wait_for(&place, "/memory/replicas/in_one_zone_bytes", bytes);
    let text = place.printed(&["status", "doubled"]);
    assert!(text.contains(" have both copies in one zone\n"), "{text}");
    read_round(&mut vm, 5);
    drop(west);
}

#[test]
fn replicas_that_cannot_be_kept_are_refused_before_anything_starts() {
    let place = Place::new();
    let kernel = place.directory.path().join("kernel");
    std::fs::write(
        &kernel,
        tiny_guests::elf(tiny_guests::walk_for_ever::code()),
    )
    .expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let two = ["--donor", "127.0.0.1:1", "--donor", "127.0.0.1:2"];
    let refused = |more: &[&str]| {
        let run = ["run", "--kernel", kernel, "--memory", "64M"];
        let flags = [&run[..], &["--local-memory", "16M"], more].concat();
        place.failed(&flags, ExitCode::Usage)
    };
    for (more, parts) in [
        (&["--replicas", "3"][..], &["--replicas 3", "2"][..]),
        (
            &["--replicas", "2", "--donor", "127.0.0.1:1"],
            &["needs 2 donors", "the number given is 1"],
        ),
        (
            &["--replicas", "2"],
            &["needs 2 donors", "the number given is 0"],
        ),
    ] {
        let line = refused(more);
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
    for (more, part) in [
        (&["--hotplug-memory", "64M"][..], "remove --hotplug-memory"),
        (&["--numa", "expose"], "remove --numa expose"),
    ] {
        let line = refused(&[&["--replicas", "2"], &two[..], more].concat());
        assert!(line.contains(part), "{line}");
    }
    let line = refused(&[
        "--replicas",
        "2",
        "--donor",
        "127.0.0.1:1,memory=64M",
        "--donor",
        "127.0.0.1:2,memory=32M",
    ]);
    assert!(
        line.contains("the 32 MiB of which the donors can hold"),
        "{line}"
    );
}
