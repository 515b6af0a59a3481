//! Who is not let in, and what ends a connection that was.

use std::io::{Read, Seek, Write};
use std::net::TcpStream;

use super::super::channel::Channel;
use super::super::frame::{FrameHeader, KIND_CONFIRM, KIND_RESUME, encode_resume};
use super::super::handshake::{Credentials, HandshakeError};
use super::super::hello::{HELLO_BYTES, PREFIX_BYTES, Step, prefix};
use super::super::keeper::{Keeper, News};
use super::*;

/// Connects two nodes, of which the second differs from the first by `change`. Returns how that ends
/// for the first one, and why the second one accepted no connection.
fn connect_with(change: impl Fn(&mut TcpPeersConfig) + Sync) -> [String; 2] {
    with_time(|time| {
        let ((first, a), (second, b)) = (listener(), listener());
        let [mut one, mut other] =
            [(0, first), (1, second)].map(|(me, listener)| config(me, listener, &[a, b]));
        (one.start_timeout, other.start_timeout) = (time, time);
        change(&mut other);
        let [first, refused] = std::thread::scope(|scope| {
            let ends =
                [one, other].map(|node| scope.spawn(move || TcpPeers::connect(node).map(drop)));
            ends.map(|end| {
                let end = end.join().expect("no panic");
                end.expect_err("not connected").to_string()
            })
        });
        if is_too_late(&first) || is_too_late(&refused) {
            return None;
        }
        let (start, reason) = refused.split_once(" was not accepted: ").expect("a reason");
        let text = "member 0 is lost: it did not connect in time; a connection of 127.0.0.1:";
        assert!(start.starts_with(text), "{refused}");
        Some([first, reason.to_owned()])
    })
}

#[test]
fn a_node_that_does_not_fit_is_refused_by_name() {
    let refused = |what: &str| {
        let refused = format!("the other node refused this one, which has {what}");
        let first = format!("member 1 is no peer of this node: {refused}");
        [first, format!("the other node has {what}")]
    };
    assert_eq!(
        connect_with(|config| config.vm = [8; 16]),
        refused("another VM")
    );
    assert_eq!(
        connect_with(|config| config.epoch = 1),
        refused("another epoch")
    );
    let memory = connect_with(|config| config.memory_pages = 1);
    assert_eq!(memory, refused("another size of the memory"));
    let ids = [NodeId(10), NodeId(99)];
    let table = Members::new(&ids).expect("a table");
    let table = connect_with(|config| config.members = table.clone());
    assert_eq!(table, refused("another table of compute nodes"));
}

#[test]
fn a_wrong_secret_is_refused_by_the_node_that_connects() {
    let ends = connect_with(|config| config.secret = Secret([4; 32]));
    let expected = [
        "member 1 is no peer of this node: the other node has a wrong secret",
        "the other node refused this one, which has a wrong secret",
    ];
    assert_eq!(ends, expected);
}

/// A node that waits for member 0, and its address.
fn waiting_node() -> (
    std::thread::JoinHandle<Result<TcpPeers, PeerError>>,
    SocketAddr,
) {
    // The member of these tests sends no heartbeats.
    waiting_node_with(LIMIT)
}

/// The same, which replaces a connection on which nothing arrives for `stall`.
fn waiting_node_with(
    stall: Duration,
) -> (
    std::thread::JoinHandle<Result<TcpPeers, PeerError>>,
    SocketAddr,
) {
    let (listener, address) = listener();
    let nowhere = SocketAddr::from(([127, 0, 0, 1], 1));
    let mut config = config(1, listener, &[nowhere, address]);
    config.stall = stall;
    (std::thread::spawn(|| TcpPeers::connect(config)), address)
}

/// The credentials of member 0.
pub(super) fn credentials() -> Credentials {
    let (listener, address) = listener();
    let config = config(0, listener, &[address, address]);
    Credentials {
        vm: config.vm,
        table: config.table(),
        me: config.me,
        epoch: config.epoch,
        pages: config.memory_pages,
        key: hmac::Key::new(hmac::HMAC_SHA256, &config.secret.0),
        security: None,
        upgrades: None,
    }
}

/// Does the handshake of a connection.
fn connect(
    stream: &TcpStream,
    credentials: &Credentials,
    peer: Member,
) -> Result<(), HandshakeError> {
    stream.set_nonblocking(true)?;
    let mut channel = Channel::Plain(stream.try_clone()?);
    super::super::handshake::connect(&mut channel, credentials, peer).map(drop)
}

/// Connects member 0 to a node, again after what took too long, as a member does.
fn joined(address: SocketAddr) -> TcpStream {
    let deadline = Instant::now() + LIMIT;
    loop {
        let stream = TcpStream::connect(address).expect("a listener");
        match connect(&stream, &credentials(), member(1)) {
            Ok(()) => return stream,
            Err(HandshakeError::Io(_)) if Instant::now() < deadline => {}
            Err(error) => panic!("the peer itself: {error}"),
        }
    }
}

fn read<const BYTES: usize>(mut stream: &TcpStream) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
    stream.read_exact(&mut bytes).expect("an answer");
    bytes
}

#[test]
fn another_version_is_refused_with_both_versions() {
    let (node, address) = waiting_node();
    let mut stream = TcpStream::connect(address).expect("a listener");
    let mut hello = prefix(Step::Hello);
    hello[4] = 200;
    stream.write_all(&hello).expect("connected");
    let mut expected = prefix(Step::Refusal).to_vec();
    expected.push(1);
    assert_eq!(read::<{ PREFIX_BYTES + 1 }>(&stream).as_slice(), expected);
    // The node still waits for its peer.
    let _stream = joined(address);
    let peers = node.join().expect("no panic").expect("connected");
    let refused = peers.refused.clone().expect("a refusal");
    let text = "this node speaks version 3 of the peer protocol, the other version 200";
    assert!(refused.ends_with(text), "{refused}");
}

#[test]
fn refusals_that_any_host_can_cause_fill_no_log() {
    const REFUSED: usize = 50;
    let (node, address) = waiting_node();
    let _stream = joined(address);
    let mut peers = node.join().expect("no panic").expect("connected");
    let mut log = tempfile::tempfile().expect("a file");
    let writer = Arc::new(log.try_clone().expect("a descriptor"));
    let logger = tracing_subscriber::fmt().with_writer(writer).finish();
    let (began, deadline) = (Instant::now(), Instant::now() + LIMIT);
    tracing::subscriber::with_default(logger, || {
        for number in 0..REFUSED {
            let mut stream = TcpStream::connect(address).expect("a listener");
            let mut hello = prefix(Step::Hello);
            hello[4] = 200;
            stream.write_all(&hello).expect("connected");
            read::<{ PREFIX_BYTES + 1 }>(&stream);
            let from = stream.local_addr().expect("connected").to_string();
            while !peers.refused.as_ref().is_some_and(|it| it.contains(&from)) {
                assert!(Instant::now() < deadline, "refusal {number} is not noted");
                wait(&mut peers, deadline);
                peers.receive(&mut |_, _, _| ()).expect("a peer");
            }
        }
    });
    let most = 1 + usize::try_from(began.elapsed().as_secs() / 10).expect("short");
    log.rewind().expect("a file");
    let log = std::io::read_to_string(log).expect("UTF-8");
    let lines = log.matches("was not accepted").count();
    assert!((1..=most).contains(&lines), "{lines} lines: {log}");
}

#[test]
fn a_refusal_is_recorded_before_the_other_end_learns_it() {
    let (listener, address) = listener();
    let mut mine = credentials();
    mine.me = member(1);
    let keeper = Keeper::start(mine, &[], listener).expect("threads");
    for _ in 0..200 {
        let mut stream = TcpStream::connect(address).expect("a listener");
        let mut hello = prefix(Step::Hello);
        hello[4] = 200;
        stream.write_all(&hello).expect("connected");
        read::<{ PREFIX_BYTES + 1 }>(&stream);
        let news = keeper.news.try_recv();
        assert!(matches!(news, Ok(News::Refused(..))), "{news:?}");
    }
}

#[test]
fn a_hello_that_is_sent_again_proves_nothing() {
    let (node, address) = waiting_node();
    // What a member sends on one connection.
    let recorded = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let there = recorded.local_addr().expect("bound");
    let recorder = std::thread::spawn(move || {
        let (client, _) = recorded.accept().expect("a client");
        let server = TcpStream::connect(address).expect("a listener");
        let hello = read::<{ PREFIX_BYTES + HELLO_BYTES }>(&client);
        (&server).write_all(&hello).expect("connected");
        let answer = read::<{ PREFIX_BYTES + HELLO_BYTES + 32 }>(&server);
        (&client).write_all(&answer).expect("connected");
        let proof = read::<{ PREFIX_BYTES + 32 }>(&client);
        // The proof does not arrive: the node continues to wait.
        (hello, proof)
    });
    let stream = TcpStream::connect(there).expect("a listener");
    connect(&stream, &credentials(), member(1)).expect_err("the network fails");
    let (hello, proof) = recorder.join().expect("no panic");
    let mut stream = TcpStream::connect(address).expect("a listener");
    stream
        .write_all(&[hello.as_slice(), &proof].concat())
        .expect("connected");
    read::<{ PREFIX_BYTES + HELLO_BYTES + 32 }>(&stream);
    let mut expected = prefix(Step::Refusal).to_vec();
    expected.push(7);
    assert_eq!(read::<{ PREFIX_BYTES + 1 }>(&stream).as_slice(), expected);
    let _stream = joined(address);
    node.join().expect("no panic").expect("connected");
}

#[test]
fn a_member_that_may_not_connect_is_refused() {
    let (node, address) = waiting_node();
    let mut others = credentials();
    others.me = member(1);
    let stream = TcpStream::connect(address).expect("a listener");
    let refused = connect(&stream, &others, member(1)).expect_err("not a member before it");
    let text = "the other node refused this one, which has another member than expected";
    assert_eq!(refused.to_string(), text);
    let _stream = joined(address);
    node.join().expect("no panic").expect("connected");
}

#[test]
fn connections_that_say_nothing_do_not_keep_a_member_out() {
    let (node, address) = waiting_node();
    let silent: Vec<_> = (0..100)
        .map(|_| TcpStream::connect(address).expect("a listener"))
        .collect();
    let _stream = joined(address);
    node.join().expect("no panic").expect("connected");
    drop(silent);
}

fn header(kind: u8, length: u16) -> FrameHeader {
    FrameHeader {
        kind,
        lane: 0,
        length,
        epoch: 0,
        sequence: 0,
        confirmed: [0; 4],
    }
}

/// How a connection ends on which a member sends these bytes after it was resumed.
fn sends(bytes: &[u8]) -> String {
    let (node, address) = waiting_node();
    let stream = joined(address);
    let mut peers = node.join().expect("no panic").expect("connected");
    let resume = [
        &header(KIND_RESUME, 32).encode()[..],
        &encode_resume([0; 4]),
    ]
    .concat();
    (&stream)
        .write_all(&[&resume, bytes].concat())
        .expect("connected");
    let deadline = Instant::now() + LIMIT;
    loop {
        assert!(Instant::now() < deadline, "the node takes it");
        if let Err(error) = peers.receive(&mut |_, _, _| ()) {
            return error.to_string();
        }
        wait(&mut peers, deadline);
    }
}

#[test]
fn what_no_correct_peer_sends_is_named() {
    let broken = |text: &str| format!("member 0 broke the protocol: {text}");
    let kind = sends(&header(99, 0).encode());
    assert_eq!(kind, broken("there is no message of kind 99"));
    let long = sends(&header(1, u16::MAX).encode());
    assert_eq!(long, broken("Get with 65535 bytes, 6 are expected"));
    let lane = sends(&header(1, 6).encode());
    assert_eq!(lane, broken("sent Message(Get) on lane 0"));
    let mut epoch = header(KIND_CONFIRM, 0);
    epoch.epoch = 3;
    assert_eq!(
        sends(&epoch.encode()),
        broken("uses epoch 3, this is epoch 0")
    );
    let mut confirms = header(KIND_CONFIRM, 0);
    confirms.confirmed[1] = 1;
    let text = "confirms messages that were not sent: [0, 1, 0, 0]";
    assert_eq!(sends(&confirms.encode()), broken(text));
    let again = sends(&[&header(KIND_RESUME, 32).encode()[..], &[0; 32]].concat());
    assert_eq!(again, broken("sent Resume while the connection is Up"));
    let mut skipped = header(1, 6);
    (skipped.lane, skipped.sequence) = (1, 5);
    let skipped = sends(&[&skipped.encode()[..], &[0; 6]].concat());
    assert_eq!(skipped, broken("skipped from message 0 to 5 of a lane"));
    let mut page = header(1, 6);
    page.lane = 1;
    let page = sends(&[&page.encode()[..], &[0xff; 6]].concat());
    let text = "page 0xffffffff of a memory with 1048576 pages";
    assert_eq!(page, broken(text));
}

#[test]
fn a_connection_that_is_half_open_is_torn_down() {
    let (node, address) = waiting_node_with(Duration::from_millis(500));
    let stream = joined(address);
    let mut peers = node.join().expect("no panic").expect("connected");
    let deadline = Instant::now() + LIMIT;
    while peers.missing().is_none() {
        assert!(Instant::now() < deadline, "the connection stays");
        wait(&mut peers, deadline);
        peers
            .receive(&mut |_, _, _| ())
            .expect("the grace time is long");
    }
    let outage = peers.links[0]
        .as_ref()
        .and_then(|link| link.outage.as_ref());
    assert_eq!(
        outage.expect("an outage").reason,
        "nothing arrived for 500ms"
    );
    drop(stream);
}

#[test]
fn a_member_that_starts_again_cannot_continue() {
    let (mut one, mut other) = pair();
    one.send(member(1), get(1), None);
    receive_after_resume(&mut one, &mut other);
    let deadline = Instant::now() + LIMIT;
    while !one.links[1].as_ref().expect("a link").is_idle() {
        assert!(Instant::now() < deadline, "nothing is confirmed");
        one.receive(&mut |_, _, _| ()).expect("a peer");
        other.receive(&mut |_, _, _| ()).expect("a peer");
    }
    // A program that has the secret and none of the state.
    let address = one.links[1].as_ref().map(Link::remote).expect("connected");
    let stream = TcpStream::connect(address).expect("a listener");
    connect(&stream, &credentials(), member(1)).expect("it has the secret");
    let resume = [
        &header(KIND_RESUME, 32).encode()[..],
        &encode_resume([0; 4]),
    ]
    .concat();
    (&stream).write_all(&resume).expect("connected");
    let mut get = header(1, 6);
    (get.lane, get.sequence) = (1, 7);
    (&stream)
        .write_all(&[&get.encode()[..], &[0; 6]].concat())
        .expect("connected");
    let error = loop {
        assert!(Instant::now() < deadline, "it continues");
        if let Err(error) = other.receive(&mut |_, _, _| ()) {
            break error.to_string();
        }
    };
    assert_eq!(
        error,
        "member 0 broke the protocol: skipped from message 1 to 7 of a lane"
    );
}
