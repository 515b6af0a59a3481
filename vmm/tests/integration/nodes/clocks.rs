//! `ssi-hv doctor --node`.

use super::commands::code_of;
use super::secured::Secured;
use crate::running::{Place, end, node};
use crate::support::kvm_is_there;

/// Returns what the doctor finds of nodes: the status and the text of each, in their order.
fn findings(place: &Place, more: &[&str]) -> Vec<(String, String)> {
    let mut command = place.command(&[&["doctor", "--json"], more].concat());
    let output = end::output_of(&mut command);
    let findings: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let is_missing = findings.iter().any(|one| one["status"] == "missing");
    assert_eq!(code_of(&output), Some(is_missing.into()), "{output:?}");
    let of_nodes = findings.iter().filter(|one| one["check"] == "node");
    let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
    of_nodes
        .map(|one| (text(&one["status"]), text(&one["detail"])))
        .collect()
}

/// The number before `unit`, behind the last `label`.
fn number(detail: &str, label: &str, unit: &str) -> f64 {
    let (_, rest) = detail.rsplit_once(label).expect(label);
    let (number, _) = rest.split_once(unit).expect(unit);
    number.trim().parse().expect("a number")
}

#[test]
fn the_doctor_compares_the_clock_of_a_node_with_this_one() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (two, address) = node(&place, &["--cpus", "2"]);
    let (one, donor) = node(&place, &[]);
    let asked = |cpus: u8| format!("{address},cpus={cpus}");
    let (fits, many, none) = (asked(2), asked(3), format!("{donor},cpus=1"));
    let flags = ["--node", &fits, "--node", &many, "--node", &none];
    let found = findings(&place, &flags);
    let [(status, fine), (too_many, many), (without, donor)] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!(
        (status.as_str(), too_many.as_str(), without.as_str()),
        ("ok", "missing", "missing")
    );
    assert!(
        fine.starts_with(&format!("{address}: 2 of 2 vCPUs are free; ")),
        "{fine}"
    );
    // The host is the same, and so is its counter.
    let (ahead, within) = (
        number(fine, "clock is", "s "),
        number(fine, "host's, within", "us"),
    );
    assert!(ahead.abs() * 1e6 <= within + 1.0, "{fine}");
    let (drift, within) = (
        number(fine, "drifting by", "millionths"),
        number(fine, ", within", ";"),
    );
    assert!(drift.abs() <= within && within < 10_000.0, "{fine}");
    assert!(number(fine, "its counter has", "kHz") > 100_000.0, "{fine}");
    assert!(
        many.contains("2 of 2 vCPUs are free, 3 are asked for"),
        "{many}"
    );
    assert!(
        donor.contains("lends memory only; start it with --cpus"),
        "{donor}"
    );
    assert_eq!(
        (two.end(libc::SIGTERM), one.end(libc::SIGTERM)),
        (Some(0), Some(0))
    );
    let found = findings(&place, &["--node", &fits]);
    assert_eq!(found[0].0, "missing", "it is gone: {found:?}");
    assert!(found[0].1.contains(&address), "{found:?}");
}

#[test]
fn the_doctor_shows_a_certificate_where_one_is_needed() {
    let secured = Secured::new(&[]);
    let place = &secured.place;
    let plain = format!("{},cpus=1", secured.address);
    let found = findings(place, &["--node", &plain]);
    let text = "accepts only connections with certificates: give --credentials DIR";
    assert!(
        found[0].0 == "missing" && found[0].1.contains(text),
        "{found:?}"
    );
    let web = place.path("vm/web");
    let named = format!("{plain},name=alpha");
    let found = findings(place, &["--node", &named, "--credentials", &web]);
    assert!(found[0].1.contains("1 of 1 vCPUs are free"), "{found:?}");
    let other = format!("{plain},name=beta");
    let found = findings(place, &["--node", &other, "--credentials", &web]);
    assert!(found[0].1.contains("node/beta is needed here"), "{found:?}");
    let usage = ssi_hv::exit::ExitCode::Usage;
    let unnamed = ["doctor", "--node", &plain, "--credentials", &web];
    let line = place.failed(&unnamed, usage);
    assert!(line.contains("add name=NAME"), "{line}");
    let port = ["doctor", "--node", "127.0.0.1:0,cpus=1"];
    assert!(place.failed(&port, usage).contains("127.0.0.1:0"));
}
