//! Nodes that a VM does not use again, or does.

use ssi_hv_membership::MEMBER_SCHEMA;

use std::collections::BTreeSet;

use super::*;

const MIB: u64 = 1 << 20;

fn member(address: &str) -> Member {
    Member {
        schema: MEMBER_SCHEMA,
        address: address.to_owned(),
        transports: vec![Carrier::Tcp],
        memory_bytes: 64 * MIB,
        free_bytes: 64 * MIB,
        zone: None,
        cpus: 0,
        certificates: false,
        fingerprint: None,
        release: String::new(),
        wire: fabric_wire::VERSION,
    }
}

fn found(nodes: &[(&str, &str)]) -> Found {
    let named = |(name, address): &(&str, &str)| (name.parse().expect("a name"), member(address));
    Found {
        members: nodes.iter().map(named).collect(),
        ..Found::default()
    }
}

/// Returns the nodes of an etcd for a VM with two copies of 48 MiB.
fn members(found: Found) -> Members {
    let mib = |mib: u64| ByteSize::from_bytes(mib * MIB);
    let settings = RunSettings {
        memory: mib(64),
        local_memory: Some(mib(16)),
        replicas: 2,
        ..RunSettings::default()
    };
    let target: Target = "etcd://127.0.0.1:1".parse().expect("an address");
    Members {
        endpoints: target.endpoints(None, false).expect("can be asked"),
        target,
        need: checked_need(&settings).expect("possible"),
        settings,
        state: Mutex::new(State {
            found,
            left_out: HashSet::new(),
            distrusted: Distrusted::default(),
            known: Remembered::new(),
            rests: Rests::default(),
            own: BTreeMap::new(),
        }),
        watch: OnceLock::new(),
    }
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// Returns the addresses of the donors for a start.
fn chosen(members: &Members) -> Result<Vec<String>, String> {
    let donors = members.chosen().map_err(|error| error.to_string())?;
    let addresses = donors.iter().map(|donor| donor.address.to_string());
    Ok(addresses.collect())
}

fn donor(text: &str) -> DonorAddress {
    DonorAddress {
        address: address(text),
        name: None,
        fingerprint: None,
        zone: None,
        bytes: None,
    }
}

/// Returns the addresses of the nodes that may join, if the VM uses the one at port 2.
fn spares(members: &Members, found: &Found) -> Vec<String> {
    let used = [donor("127.0.0.1:2")];
    let spares = members.spares_of(found, &used, 2 * MIB).into_iter();
    spares.map(|spare| spare.address.to_string()).collect()
}

#[test]
fn a_node_that_sent_wrong_pieces_does_not_join_again_by_its_name_or_address() {
    let all = found(&[
        ("a", "127.0.0.1:1"),
        ("b", "127.0.0.1:2"),
        ("c", "127.0.0.1:3"),
    ]);
    let members = members(all.clone());
    assert_eq!(
        chosen(&members),
        Ok(vec!["127.0.0.1:1".into(), "127.0.0.1:2".into()])
    );
    members.distrust(&BTreeSet::from([address("127.0.0.1:1")]), &[]);
    assert_eq!(spares(&members, &all), ["127.0.0.1:3"]);
    // Started again elsewhere, and another name for the same address.
    let moved = found(&[
        ("a", "127.0.0.1:4"),
        ("b", "127.0.0.1:2"),
        ("d", "127.0.0.1:1"),
    ]);
    assert!(spares(&members, &moved).is_empty());
    // The list of the VM's donors is not needed for that any more.
    assert_eq!(spares(&members, &all), ["127.0.0.1:3"]);
    // Another start of the guest.
    members.ask_all_again();
    assert_eq!(
        chosen(&members),
        Ok(vec!["127.0.0.1:2".into(), "127.0.0.1:3".into()])
    );
    lock(&members.state).found = moved;
    let error = chosen(&members).expect_err("b is left");
    assert!(
        error.contains("a: it sent wrong pieces") && error.contains("d: it sent wrong pieces"),
        "{error}"
    );
}

#[test]
fn a_node_that_did_not_lend_is_asked_again_at_another_start() {
    let members = members(found(&[("a", "127.0.0.1:1"), ("b", "127.0.0.1:2")]));
    assert!(chosen(&members).is_ok());
    lock(&members.state).left_out.insert(address("127.0.0.1:1"));
    let error = chosen(&members).expect_err("one is left");
    assert!(error.contains("a: it did not lend"), "{error}");
    members.ask_all_again();
    assert_eq!(chosen(&members).map(|all| all.len()), Ok(2));
}

#[test]
fn only_the_own_donors_have_room_that_is_not_listed_at_another_start() {
    let first = [
        ("a", "127.0.0.1:1"),
        ("b", "127.0.0.1:2"),
        ("d", "127.0.0.1:4"),
    ];
    // A donor is gone, the other one's loan has just ended, and d has lent to others.
    let mut later = found(&[
        ("b", "127.0.0.1:2"),
        ("d", "127.0.0.1:4"),
        ("e", "127.0.0.1:5"),
    ]);
    for (name, free_mib) in [("b", 16), ("d", 4)] {
        let name: Name = name.parse().expect("a name");
        let member = later.members.get_mut(&name).expect("it is there");
        member.free_bytes = free_mib * MIB;
    }
    let left = [donor("127.0.0.1:2")];
    let right = ["127.0.0.1:2", "127.0.0.1:5"];

    let listed = members(found(&first));
    assert!(chosen(&listed).is_ok());
    listed.ask_all_again();
    let failed = Some(later.clone());
    lock(&listed.state).note_failed(None, &left, failed);
    assert_eq!(chosen(&listed), Ok(right.map(str::to_owned).into()));

    // etcd is away: what the VM has seen since its start counts.
    let followed = members(found(&first));
    assert!(chosen(&followed).is_ok());
    let watch = Watch::start(&followed.endpoints, later, || {}).expect("it starts");
    assert!(followed.watch.set(watch).is_ok());
    followed.ask_all_again();
    let donors = followed.without(None, &left).expect("they suffice");
    let addresses: Vec<_> = donors.iter().map(|one| one.address.to_string()).collect();
    assert_eq!(addresses, right);
}

#[test]
fn a_donor_that_was_named_by_its_address_is_distrusted_by_its_names_too() {
    let all = found(&[("b", "127.0.0.1:2"), ("c", "127.0.0.1:3")]);
    let moved = found(&[("b", "127.0.0.1:2"), ("c", "127.0.0.1:4")]);
    // Listed with its address, and named with what its certificate has.
    let mut certified = donor("127.0.0.1:9");
    certified.name = Some("c".parse().expect("a name"));
    for (hostile, named) in [
        ("127.0.0.1:3", donor("127.0.0.1:3")),
        ("127.0.0.1:9", certified.clone()),
    ] {
        let members = members(all.clone());
        assert_eq!(spares(&members, &moved), ["127.0.0.1:4"]);
        members.distrust(&BTreeSet::from([address(hostile)]), &[named]);
        assert!(spares(&members, &moved).is_empty(), "{hostile}");
        assert!(!members.trusts(&donor(hostile)) && members.trusts(&donor("127.0.0.1:2")));
        // Named again, at another address.
        let mut again = donor("127.0.0.1:8");
        assert!(members.trusts(&again));
        again.name.clone_from(&certified.name);
        assert!(!members.trusts(&again), "{hostile}");
    }
    // By UDP, at an address that etcd does not have.
    let shown = [7_u8; 32];
    let mut of_udp = all.clone();
    let name: Name = "c".parse().expect("a name");
    let member = of_udp.members.get_mut(&name).expect("it is there");
    let text: String = shown.iter().map(|byte| format!("{byte:02x}")).collect();
    member.fingerprint = Some(text);
    let fingerprint = member.fingerprint();
    assert!(fingerprint.is_some());
    let members = members(of_udp);
    let pinned = DonorAddress {
        fingerprint,
        ..donor("127.0.0.1:9")
    };
    members.distrust(&BTreeSet::from([pinned.address]), &[pinned]);
    assert!(spares(&members, &moved).is_empty());
}

#[test]
fn a_node_that_is_lost_again_is_not_asked_to_join_but_may_be_used_by_another_start() {
    let all = found(&[
        ("a", "127.0.0.1:1"),
        ("b", "127.0.0.1:2"),
        ("c", "127.0.0.1:3"),
    ]);
    let listed = members(all.clone());
    assert!(chosen(&listed).is_ok());
    assert_eq!(spares(&listed, &all), ["127.0.0.1:1", "127.0.0.1:3"]);
    listed.note_lost(address("127.0.0.1:1"));
    assert_eq!(spares(&listed, &all), ["127.0.0.1:1", "127.0.0.1:3"]);
    // It was started again elsewhere, joined, and is lost there.
    let moved = found(&[("a", "127.0.0.1:4"), ("b", "127.0.0.1:2")]);
    assert_eq!(spares(&listed, &moved), ["127.0.0.1:4"]);
    let used = ["127.0.0.1:2", "127.0.0.1:4"].map(donor);
    assert!(listed.spares_of(&moved, &used, 2 * MIB).is_empty());
    listed.note_lost(address("127.0.0.1:4"));
    assert!(spares(&listed, &moved).is_empty());
    assert_eq!(spares(&listed, &all), ["127.0.0.1:3"]);
    lock(&listed.state).found = moved;
    assert_eq!(chosen(&listed).map(|donors| donors.len()), Ok(2));
}
