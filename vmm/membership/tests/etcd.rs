//! Registration, lists and changes with a real etcd.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use ssi_hv_membership::testing::Etcd;
use ssi_hv_membership::{
    Carrier, Endpoints, EtcdError, Found, LEASE_SECONDS, MEMBER_SCHEMA, Member, NODES_MAX,
    Registration, Target, Watch, find,
};

/// Deadline of each wait.
const LIMIT: Duration = Duration::from_secs(60);
/// Deadline of a list.
const FIND_TIME: Duration = Duration::from_secs(10);

fn member(address: &str, free_bytes: u64) -> Member {
    Member {
        schema: MEMBER_SCHEMA,
        address: address.to_owned(),
        transports: vec![Carrier::Tcp],
        memory_bytes: 1 << 30,
        free_bytes,
        zone: Some("rack-1".to_owned()),
        cpus: 0,
        certificates: false,
        fingerprint: None,
        release: "0.1.0".to_owned(),
        wire: 11,
    }
}

fn register(endpoints: &Endpoints, name: &str, address: &str) -> Registration {
    let described = member(address, 1 << 20);
    let name = name.parse().expect("a name");
    Registration::start(endpoints, &name, move || described.clone()).expect("it starts")
}

/// Follows the cluster, and receives each change.
fn watching(etcd: &Etcd) -> (Watch, Receiver<()>) {
    watching_at(&etcd.endpoints())
}

fn watching_at(endpoints: &Endpoints) -> (Watch, Receiver<()>) {
    let (sender, changes) = channel();
    let notify = move || {
        // The test may have ended.
        let _ = sender.send(());
    };
    let watch = Watch::start(endpoints, Found::default(), notify);
    (watch.expect("it starts"), changes)
}

/// Passes connections on to an etcd. When the flag is set, streams of changes become silent, and their
/// connections stay; later ones are not concerned.
fn proxy(etcd: &Etcd) -> (SocketAddr, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let drops = Arc::<AtomicBool>::default();
    let (port, is_dropped) = (etcd.port(), Arc::clone(&drops));
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect(("127.0.0.1", port)).expect("etcd");
            let twin = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
            let (to_server, to_client) = (twin(&server), twin(&client));
            let is_stream = Arc::<AtomicBool>::default();
            let (seen, drops) = (Arc::clone(&is_stream), Arc::clone(&is_dropped));
            let is_dropped = Arc::clone(&is_dropped);
            std::thread::spawn(move || {
                pass(client, to_server, |bytes| {
                    let is_begun = bytes.starts_with(b"POST /v3/watch ");
                    if is_begun && !drops.load(Ordering::Acquire) {
                        is_stream.store(true, Ordering::Release);
                    }
                    true
                });
            });
            std::thread::spawn(move || {
                pass(server, to_client, |_| {
                    !(seen.load(Ordering::Acquire) && is_dropped.load(Ordering::Acquire))
                });
            });
        }
    });
    (address, drops)
}

/// Passes on what `is_passed` allows until one end closes.
fn pass(mut from: TcpStream, mut to: TcpStream, is_passed: impl Fn(&[u8]) -> bool) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let bytes = &buffer[..count];
        if is_passed(bytes) && to.write_all(bytes).is_err() {
            break;
        }
    }
    // The other end may have closed.
    let _ = to.shutdown(std::net::Shutdown::Both);
}

fn names(found: &Found) -> Vec<&str> {
    found.members.keys().map(|name| name.as_str()).collect()
}

/// Waits until these nodes are known.
#[track_caller]
fn wait_for(watch: &Watch, changes: &Receiver<()>, expected: &[&str]) {
    let deadline = Instant::now() + LIMIT;
    while names(&watch.now().found) != expected {
        let left = deadline.saturating_duration_since(Instant::now());
        let changed = changes.recv_timeout(left);
        changed.unwrap_or_else(|_| panic!("{expected:?}: {:?}", watch.now()));
    }
}

/// Waits until a watch knows whether etcd answers.
#[track_caller]
fn wait_until_connected_is(watch: &Watch, expected: bool) {
    let deadline = Instant::now() + LIMIT;
    while watch.now().is_connected != expected {
        assert!(Instant::now() < deadline, "{:?}", watch.now());
        std::thread::yield_now();
    }
}

#[test]
fn a_node_is_listed_while_it_runs_and_removed_at_its_end() {
    let Some(etcd) = Etcd::start() else { return };
    let (watch, changes) = watching(&etcd);
    let alpha = register(&etcd.endpoints(), "alpha", "127.0.0.1:7000");
    wait_for(&watch, &changes, &["alpha"]);
    let beta = register(&etcd.endpoints(), "beta", "127.0.0.1:7001");
    wait_for(&watch, &changes, &["alpha", "beta"]);
    let found = find(&etcd.endpoints(), FIND_TIME).expect("a list");
    assert_eq!(found, watch.now().found);
    let begun = Instant::now();
    drop(alpha);
    wait_for(&watch, &changes, &["beta"]);
    let lease = Duration::from_secs(LEASE_SECONDS.into());
    assert!(begun.elapsed() < lease, "it expired, and was not removed");
    drop(beta);
    wait_for(&watch, &changes, &[]);
}

#[test]
fn free_memory_is_updated_and_an_entry_outlives_many_renewals() {
    let Some(etcd) = Etcd::start() else { return };
    let (watch, changes) = watching(&etcd);
    let free = Arc::new(Mutex::new(1 << 20));
    let described = Arc::clone(&free);
    let describe = move || member("127.0.0.1:7000", *described.lock().expect("a number"));
    let name = "alpha".parse().expect("a name");
    let node = Registration::start(&etcd.endpoints(), &name, describe).expect("it starts");
    wait_for(&watch, &changes, &["alpha"]);
    *free.lock().expect("a number") = 4096;
    changes.recv_timeout(LIMIT).expect("a change");
    let now = watch
        .now()
        .found
        .members
        .remove(&name)
        .expect("it is there");
    assert_eq!(now.free_bytes, 4096);
    // Longer than a lease: nothing changes.
    let renewed = Duration::from_secs(u64::from(LEASE_SECONDS) + 4);
    assert!(changes.recv_timeout(renewed).is_err(), "it changed");
    assert_eq!(names(&watch.now().found), ["alpha"]);
    drop(node);
}

#[test]
fn etcd_that_is_killed_and_started_again_loses_no_node() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let (watch, changes) = watching(&etcd);
    let alpha = register(&etcd.endpoints(), "alpha", "127.0.0.1:7000");
    wait_for(&watch, &changes, &["alpha"]);
    etcd.kill();
    wait_until_connected_is(&watch, false);
    // What was known is known still.
    assert_eq!(names(&watch.now().found), ["alpha"]);
    assert!(watch.now().error.is_some());
    // A node that begins meanwhile is registered later.
    let beta = register(&etcd.endpoints(), "beta", "127.0.0.1:7001");
    let error = find(&etcd.endpoints(), FIND_TIME).expect_err("it is dead");
    assert!(error.to_string().contains("cannot be asked"), "{error}");
    etcd.restart();
    wait_for(&watch, &changes, &["alpha", "beta"]);
    wait_until_connected_is(&watch, true);
    drop((alpha, beta));
    wait_for(&watch, &changes, &[]);
}

#[test]
fn a_store_that_has_lost_all_is_filled_again() {
    let Some(etcd) = Etcd::start() else { return };
    let (watch, changes) = watching(&etcd);
    let _alpha = register(&etcd.endpoints(), "alpha", "127.0.0.1:7000");
    wait_for(&watch, &changes, &["alpha"]);
    let all = etcd.ask("/v3/lease/leases", &json!({}));
    let id = all["leases"][0]["ID"].as_str().expect("a lease").to_owned();
    let _ = etcd.ask("/v3/lease/revoke", &json!({ "ID": id }));
    wait_for(&watch, &changes, &[]);
    wait_for(&watch, &changes, &["alpha"]);
}

#[test]
fn a_silent_etcd_is_noticed_and_a_list_has_a_deadline() {
    let Some(etcd) = Etcd::start() else { return };
    let (watch, changes) = watching(&etcd);
    let alpha = register(&etcd.endpoints(), "alpha", "127.0.0.1:7000");
    wait_for(&watch, &changes, &["alpha"]);
    etcd.set_stopped(true);
    let begun = Instant::now();
    let limit = Duration::from_secs(1);
    let error = find(&etcd.endpoints(), limit).expect_err("it is silent");
    assert!(
        matches!(error, EtcdError::Late { seconds: 1, .. }),
        "{error}"
    );
    assert!(begun.elapsed() < 5 * limit, "{:?}", begun.elapsed());
    wait_until_connected_is(&watch, false);
    etcd.set_stopped(false);
    wait_until_connected_is(&watch, true);
    wait_for(&watch, &changes, &["alpha"]);
    // Neither end waits for a silent one.
    etcd.set_stopped(true);
    let begun = Instant::now();
    drop((alpha, watch));
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    etcd.set_stopped(false);
}

#[test]
fn changes_are_known_although_their_stream_is_silent() {
    let Some(etcd) = Etcd::start() else { return };
    let (address, drops) = proxy(&etcd);
    let target: Target = format!("etcd://{address}").parse().expect("an address");
    let endpoints = target.endpoints(None, false).expect("can be asked");
    let (watch, changes) = watching_at(&endpoints);
    let _alpha = register(&etcd.endpoints(), "alpha", "127.0.0.1:7000");
    wait_for(&watch, &changes, &["alpha"]);
    drops.store(true, Ordering::Release);
    let _beta = register(&etcd.endpoints(), "beta", "127.0.0.1:7001");
    wait_for(&watch, &changes, &["alpha", "beta"]);
    let _gamma = register(&etcd.endpoints(), "gamma", "127.0.0.1:7002");
    wait_for(&watch, &changes, &["alpha", "beta", "gamma"]);
    // A list may have failed in between, and is repeated.
    wait_until_connected_is(&watch, true);
}

#[test]
fn a_name_is_that_of_one_address_and_a_new_process_takes_it_over() {
    let Some(etcd) = Etcd::start() else { return };
    let (watch, changes) = watching(&etcd);
    let first = register(&etcd.endpoints(), "alpha", "127.0.0.1:7000");
    wait_for(&watch, &changes, &["alpha"]);
    let other = register(&etcd.endpoints(), "alpha", "127.0.0.1:7001");
    let address = |watch: &Watch| {
        let found = watch.now().found;
        found.members.into_values().next().map(|one| one.address)
    };
    let early = changes.recv_timeout(Duration::from_secs(3));
    assert!(early.is_err(), "{:?}", watch.now());
    assert_eq!(address(&watch).as_deref(), Some("127.0.0.1:7000"));
    drop(first);
    let deadline = Instant::now() + LIMIT;
    while address(&watch).as_deref() != Some("127.0.0.1:7001") {
        let left = deadline.saturating_duration_since(Instant::now());
        changes.recv_timeout(left).expect("the name is free");
    }
    // The entry of a process that was killed is there until its lease ends.
    let begun = Instant::now();
    let again = register(&etcd.endpoints(), "alpha", "127.0.0.1:7001");
    drop(other);
    drop(again);
    wait_for(&watch, &changes, &[]);
    assert!(begun.elapsed() < LIMIT);
}

#[test]
fn wrong_entries_are_left_out_with_a_line_each() {
    let Some(etcd) = Etcd::start() else { return };
    let _alpha = register(&etcd.endpoints(), "alpha", "127.0.0.1:7000");
    let (watch, changes) = watching(&etcd);
    wait_for(&watch, &changes, &["alpha"]);
    etcd.put("/ssi-hv/nodes/large", &vec![b'x'; 1 << 20]);
    for at in 0..20 {
        etcd.put(
            &format!("/ssi-hv/nodes/huge-{at:02}"),
            &vec![b'x'; 1_400_000],
        );
    }
    etcd.put("/ssi-hv/nodes/text", b"\xff\x1b[2J");
    etcd.put("/ssi-hv/nodes/Upper", b"{}");
    etcd.put("/ssi-hv/nodes/later", br#"{"schema":2}"#);
    etcd.put("/ssi-hv/nodez/next", b"not asked for");
    let found = find(&etcd.endpoints(), LIMIT).expect("a list");
    assert_eq!(names(&found), ["alpha"]);
    assert_eq!(found.problems.len(), 24, "{:?}", found.problems);
    for (name, part) in [
        ("large", "1048576 bytes, and 4096 is the limit"),
        ("text", "is not understood"),
        ("Upper", "no name"),
        ("later", "schema 2, and this program knows 1"),
    ] {
        let key = format!("/ssi-hv/nodes/{name}: ");
        let mut lines = found.problems.iter();
        let line = lines.find(|line| line.starts_with(&key)).expect(name);
        assert!(
            line.contains(part) && !line.contains(char::is_control),
            "{line:?}"
        );
    }
    // The one that follows them knows no other ones either.
    assert_eq!(names(&watch.now().found), ["alpha"]);
}

#[test]
fn as_many_entries_as_are_possible_are_read_and_no_more() {
    let Some(etcd) = Etcd::start() else { return };
    let value = serde_json::to_vec(&member("h:1", 0)).expect("JSON");
    for at in 0..NODES_MAX + 5 {
        etcd.put(&format!("/ssi-hv/nodes/n{at}"), &value);
    }
    let found = find(&etcd.endpoints(), LIMIT).expect("a list");
    assert_eq!(found.members.len(), NODES_MAX);
    assert_eq!(found.problems.len(), 1, "{:?}", found.problems);
    assert!(
        found.problems[0].contains("first 1024"),
        "{:?}",
        found.problems
    );
}

#[test]
fn tls_needs_the_right_authority_at_both_ends() {
    let Some(etcd) = Etcd::with_tls() else { return };
    let (watch, changes) = watching(&etcd);
    let alpha = register(&etcd.endpoints(), "alpha", "127.0.0.1:7000");
    wait_for(&watch, &changes, &["alpha"]);
    let asked = |url: &str, credentials: Option<&Path>| {
        let target: Target = url.parse().expect("an address");
        let endpoints = target.endpoints(credentials, false).expect("can be asked");
        find(&endpoints, FIND_TIME)
    };
    // Without a certificate of its authority, etcd refuses.
    let (right, wrong) = (etcd.credentials(), etcd.wrong_credentials());
    let error = asked(&etcd.url(), Some(&wrong)).expect_err("another's");
    assert!(error.to_string().contains("BadCertificate"), "{error}");
    // Without TLS.
    let plain = etcd.url().replace("etcds", "etcd");
    asked(&plain, None).expect_err("it speaks TLS");
    // An etcd of another authority, or with another name, is not believed.
    let other = Etcd::with_tls().expect("another one");
    let error = asked(&other.url(), Some(&right)).expect_err("another's");
    assert!(
        error.to_string().contains("invalid peer certificate"),
        "{error}"
    );
    let named = etcd.url().replace("127.0.0.1", "localhost");
    let error = asked(&named, Some(&right)).expect_err("its name");
    assert!(error.to_string().contains("not valid for name"), "{error}");
    drop(alpha);
    wait_for(&watch, &changes, &[]);
}

#[test]
fn the_next_endpoint_is_asked_when_one_is_away() {
    let Some(etcd) = Etcd::start() else { return };
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("an address")
    };
    let both = format!("etcd://{closed},127.0.0.1:{}", etcd.port());
    let target: Target = both.parse().expect("an address");
    let endpoints = target.endpoints(None, false).expect("can be asked");
    assert_eq!(find(&endpoints, FIND_TIME), Ok(Found::default()));
    let (watch, changes) = watching(&etcd);
    let _alpha = register(&endpoints, "alpha", "127.0.0.1:7000");
    wait_for(&watch, &changes, &["alpha"]);
}
