//! Nodes on threads of a test, connected over loopback, and a network between them that fails.

mod delivery;
mod network;
mod refusals;
mod rings;
mod streams;

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use fabric_coherence::message::{Message, Number, Want};
use fabric_coherence::{Member, Members};
use fabric_homes::NodeId;
use fabric_pages::page::{PAGE_SIZE, PageBytes, PageIndex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::message::HomeMessage;

/// Pages of the guest's memory in these tests.
const PAGES: u32 = 1 << 20;

/// Time limit of whatever a test waits for.
const LIMIT: Duration = Duration::from_secs(60);

fn member(place: u8) -> Member {
    Member::at(place).expect("a place")
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

/// The configuration of a node that reaches the others at these addresses.
fn config(me: u8, listener: TcpListener, addresses: &[SocketAddr]) -> TcpPeersConfig {
    let ids: Vec<_> = (10..).take(addresses.len()).map(NodeId).collect();
    let members = Members::new(&ids).expect("a table");
    let addresses = addresses.to_vec();
    let mut config = TcpPeersConfig::new(member(me), members, addresses, listener, PAGES);
    config.vm = [7; 16];
    config.secret = Secret([3; 32]);
    config.start_timeout = LIMIT;
    config.grace = LIMIT;
    config
}

/// Waits until there is something to do, at most until `deadline`.
fn wait(peers: &mut TcpPeers, deadline: Instant) {
    let until = peers.wake_by().map_or(deadline, |wake| wake.min(deadline));
    let left = until.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).expect("a short time");
    let mut fds = [PollFd::new(&peers.epoll, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).expect("a descriptor");
}

/// A message that has its place among those of its sender, and the page beside it.
fn numbered(lane: PeerLane, number: u64) -> (PeerMessage, Option<Box<PageBytes>>) {
    let page = PageIndex::new(u32::try_from(number % u64::from(PAGES)).expect("a page"));
    let number = Number::new(number).expect("in range");
    let message = match lane {
        PeerLane::Responses => PeerMessage::Coherence(Message::Ack { page, number }),
        PeerLane::Requests => PeerMessage::Coherence(Message::Taken {
            block: fabric_coherence::BlockIndex(page.number() / 512),
            number,
        }),
        PeerLane::Data => PeerMessage::Coherence(Message::Data {
            page,
            number,
            dirty: true,
            written: false,
        }),
        PeerLane::Bulk => PeerMessage::Home(HomeMessage::Write { page, number }),
    };
    let mut bytes = Box::new([0; PAGE_SIZE]);
    for (place, word) in bytes.chunks_exact_mut(8).zip(0..) {
        place.copy_from_slice(&(number.value() << 9 | word).to_le_bytes());
    }
    let page = message.has_page().then_some(bytes);
    (message, page)
}

/// The number in a message of [`numbered`], whose page is as it was sent.
fn number_of(message: &PeerMessage, page: Option<&PageBytes>) -> u64 {
    let number = match message {
        PeerMessage::Coherence(
            Message::Ack { number, .. }
            | Message::Taken { number, .. }
            | Message::Data { number, .. },
        )
        | PeerMessage::Home(HomeMessage::Write { number, .. }) => number.value(),
        other => panic!("{other:?} was not sent"),
    };
    let (sent, bytes) = numbered(message.lane(), number);
    assert_eq!(&sent, message);
    assert_eq!(bytes.as_deref(), page, "the page of {message:?}");
    number
}

/// Repeats an attempt with more time for the nodes to start, until it ends for another reason than
/// that it had too little. What is to fail waits for all of that time.
fn with_time<T>(attempt: impl Fn(Duration) -> Option<T>) -> T {
    let times = [1, 4, 16, 64].map(Duration::from_secs);
    let ended = times.into_iter().find_map(attempt);
    ended.unwrap_or_else(|| panic!("a node did not start in {:?}", times[3]))
}

/// Whether a node gave up before it learned anything from the other one.
fn is_too_late(ended: &str) -> bool {
    ended.ends_with("it did not connect in time") || ended.contains("the connection failed")
}

/// Two connected nodes.
fn pair() -> (TcpPeers, TcpPeers) {
    let ((first, a), (second, b)) = (listener(), listener());
    let addresses = [a, b];
    let other = config(1, second, &addresses);
    let other = std::thread::spawn(move || TcpPeers::connect(other));
    let one = TcpPeers::connect(config(0, first, &addresses)).expect("connected");
    (one, other.join().expect("no panic").expect("connected"))
}

fn get(page: u32) -> PeerMessage {
    PeerMessage::Coherence(Message::Get {
        page: PageIndex::new(page),
        want: Want::Read,
        early: false,
    })
}

/// Receives until so many messages are here.
fn receive(peers: &mut TcpPeers, count: usize) -> Vec<(Member, PeerMessage)> {
    let deadline = Instant::now() + LIMIT;
    let mut found = Vec::new();
    while found.len() < count {
        assert!(Instant::now() < deadline, "only {} of {count}", found.len());
        peers
            .receive(&mut |from, message, _| found.push((from, message)))
            .expect("a correct peer");
        peers.flush();
        if found.len() < count {
            wait(peers, deadline);
        }
    }
    found
}

#[test]
fn two_nodes_exchange_messages() {
    let (mut one, mut other) = pair();
    one.send(member(1), get(5), None);
    one.flush();
    assert_eq!(
        receive_after_resume(&mut one, &mut other),
        [(member(0), get(5))]
    );
    assert_eq!(receive(&mut one, 0), []);
}

#[test]
fn polls_that_read_the_connection_alone_are_few_and_miss_nothing() {
    let (mut one, mut other) = pair();
    one.send(member(1), get(5), None);
    one.flush();
    receive_after_resume(&mut one, &mut other);
    let now = Instant::now();
    other.quick = 0;
    for _ in 0..2 {
        assert!(!other.is_quick(now), "everything is asked for first");
        assert!((0..QUICK_POLLS).all(|_| other.is_quick(now)));
    }
    assert!(!other.is_quick(now));
    assert!(!other.is_quick(now + QUICK_TIME), "the time is over");
    assert!(other.is_quick(now));
    other.wake_by();
    assert!(!other.is_quick(now), "something ended a sleep");
    one.send(member(1), get(6), None);
    one.flush();
    let deadline = Instant::now() + LIMIT;
    let mut found = Vec::new();
    while found.is_empty() {
        assert!(Instant::now() < deadline, "nothing arrives");
        let collect = &mut |from, message, _: Option<&PageBytes>| found.push((from, message));
        other.poll_quick(collect, Instant::now()).expect("a peer");
    }
    assert_eq!(found, [(member(0), get(6))]);
    // The end of the connection too.
    drop(one);
    while other.missing().is_none() {
        assert!(Instant::now() < deadline, "no end is seen");
        let nothing = &mut |_, message, _: Option<&PageBytes>| panic!("{message:?}");
        other.poll_quick(nothing, Instant::now()).expect("a fault");
    }
}

/// What `other` receives first; both have to be running until the connection is resumed.
fn receive_after_resume(one: &mut TcpPeers, other: &mut TcpPeers) -> Vec<(Member, PeerMessage)> {
    let deadline = Instant::now() + LIMIT;
    let mut found = Vec::new();
    while found.is_empty() {
        assert!(Instant::now() < deadline, "nothing arrives");
        one.receive(&mut |_, message, _| panic!("{message:?}"))
            .expect("a peer");
        one.flush();
        let collect = &mut |from, message, _: Option<&PageBytes>| found.push((from, message));
        other.receive(collect).expect("a peer");
    }
    found
}
