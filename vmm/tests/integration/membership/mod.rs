//! Nodes that register in a real etcd.

mod disturbed;
mod repairs;
mod vms;

use std::fs;

use serde_json::Value;
use ssi_hv::exit::ExitCode;
use ssi_hv_membership::testing::Etcd;

use crate::pki::succeeds;
use crate::running::{Place, Running, node, until};

/// What an entry may have: public facts.
const FIELDS: [&str; 11] = [
    "address",
    "certificates",
    "cpus",
    "fingerprint",
    "free_bytes",
    "memory_bytes",
    "release",
    "schema",
    "transports",
    "wire",
    "zone",
];

/// Returns the entry of a node, if it is registered.
fn entry(etcd: &Etcd, name: &str) -> Result<Value, String> {
    let key = format!("/ssi-hv/nodes/{name}");
    let all = etcd.all();
    let found = all.iter().find(|(other, _)| *other == key);
    let (_, value) = found.ok_or_else(|| format!("no {key} in {all:?}"))?;
    serde_json::from_slice(value).map_err(|error| error.to_string())
}

/// Starts a node that registers with this name, and waits until it has.
#[track_caller]
fn registered(place: &Place, etcd: &Etcd, member: &str, more: &[&str]) -> (Running, String) {
    let url = etcd.url();
    let flags = [&["--cluster", &url, "--member", member][..], more].concat();
    let (node, address) = node(place, &flags);
    let name = member
        .split(',')
        .next()
        .and_then(|part| part.strip_prefix("name="));
    until(|| entry(etcd, name.expect("a name")));
    (node, address)
}

#[test]
fn a_node_registers_public_facts_and_is_removed_at_its_end() {
    let Some(etcd) = Etcd::start() else { return };
    let place = Place::new();
    let (alpha, address) = registered(&place, &etcd, "name=alpha,zone=rack-1", &["--cpus", "1"]);
    let found = entry(&etcd, "alpha").expect("it is registered");
    assert_eq!(found["address"], address);
    assert_eq!(
        (&found["zone"], &found["cpus"]),
        (&"rack-1".into(), &1.into())
    );
    assert_eq!(found["memory_bytes"], 64 << 20);
    assert_eq!(found["free_bytes"], 64 << 20);
    assert_eq!(found["certificates"], false);
    assert_eq!(alpha.end(libc::SIGTERM), Some(0));
    // Not by its lease: that takes longer than the node's end.
    assert_eq!(etcd.all(), []);
}

#[test]
fn nothing_secret_is_registered() {
    let Some(etcd) = Etcd::start() else { return };
    let place = Place::new();
    let directory = place.directory.path();
    succeeds(directory, "init ca --cluster test");
    succeeds(directory, "issue ca node/alpha -o alpha");
    let credentials = place.path("alpha");
    let shown = ["--credentials", credentials.as_str()];
    let (_alpha, _) = registered(&place, &etcd, "name=alpha", &shown);
    let (_beta, _) = registered(&place, &etcd, "name=beta", &[]);
    let secret = fs::read_to_string(directory.join("alpha/key.pem")).expect("a key");
    let lines: Vec<_> = secret.lines().filter(|line| !line.contains("--")).collect();
    assert!(!lines.is_empty(), "{secret}");
    let all = etcd.all();
    assert_eq!(all.len(), 2, "{all:?}");
    for (key, value) in all {
        let text = String::from_utf8(value).expect("UTF-8");
        assert!(
            lines.iter().all(|line| !text.contains(line)),
            "{key}: {text}"
        );
        assert!(!text.contains("PRIVATE"), "{key}: {text}");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        for field in value.as_object().expect("an object").keys() {
            assert!(FIELDS.contains(&field.as_str()), "{key}: {field}");
        }
    }
    assert_eq!(entry(&etcd, "alpha").expect("there")["certificates"], true);
}

#[test]
fn a_node_serves_without_etcd_and_registers_when_it_is_back() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    etcd.kill();
    let place = Place::new();
    let flags = ["--cluster", &etcd.url(), "--member", "name=alpha"];
    let (alpha, _) = node(&place, &flags);
    let status = place.json(&["status", &alpha.pid(), "--json"]);
    assert_eq!(status["nodes"][0]["lent_bytes"], 0, "{status}");
    etcd.restart();
    until(|| entry(&etcd, "alpha"));
    etcd.kill();
    assert_eq!(alpha.end(libc::SIGTERM), Some(0));
}

#[test]
fn a_node_that_cannot_register_says_why_at_once() {
    let place = Place::new();
    let wrong = |more: &[&str]| {
        let listen = ["node", "--listen", "127.0.0.1:0", "--memory", "1M"];
        place.failed(&[&listen[..], more].concat(), ExitCode::Usage)
    };
    for (more, part) in [
        (&["--cluster", "cluster.toml"][..], "write etcd://HOST:PORT"),
        (&["--member", "name=a"], "add --cluster etcd://HOST:PORT"),
        (
            &["--cluster", "etcd://192.0.2.1:1"],
            "--cluster-credentials DIR",
        ),
        (&["--cluster", "etcds://127.0.0.1:1"], "needs the authority"),
        (
            &["--cluster", "etcd://h:1", "--member", "x"],
            "not an option of a member",
        ),
    ] {
        let line = wrong(more);
        assert!(line.contains(part), "{more:?}: {line}");
    }
}
