//! A member that breaks the protocol, on real connections to nodes that work: what it did is named, it
//! is fenced, and no other node waits for ever.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use fabric_coherence::message::{Grant, Left, PageAt, Right, Source, Want};
use fabric_coherence::{
    BlockIndex, Loss, Member, MemberSet, Members, Message, Number, Violation, directory,
};
use fabric_homes::NodeId;
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::{PAGE_SIZE, PageIndex};
use fabric_peers::tcp::{Secret, TcpPeers, TcpPeersConfig};
use fabric_peers::{HomeMessage, PeerMessage, Peers as _};
use fabric_sharing::{Losses, SharedMemory};

use crate::mesh::{ALL, config, member};
use crate::programs::word;

/// Members, each of which is the home of the block with its number. The last one is hostile.
const COUNT: u8 = 3;
const HOSTILE: u8 = 2;
const BLOCK: usize = 512;

/// So many first pages of the first two blocks have counters.
const COUNTED: u32 = 3;
/// The page that the hostile member gets.
const OWNED: u32 = 100;
/// Nobody uses the pages from here on.
const UNUSED: u32 = 200;

/// Increments of each node before the offence.
const WARM: u64 = 200;

/// No step takes longer on a host that works, however loaded.
const LIMIT: Duration = Duration::from_secs(60);

/// How long a member may be out of reach, and nothing may come from it.
const GRACE: Duration = Duration::from_millis(300);
const STALL: Duration = Duration::from_secs(20);

/// The epoch of all messages, and the one before it.
const EPOCH: u32 = 0x5eed_0107;
const OLD_EPOCH: u32 = EPOCH - 1;

/// A node that keeps the protocol.
struct Node {
    shared: SharedMemory,
    /// Why it ended, and what was lost then.
    end: Receiver<(String, Losses)>,
    counted: Arc<AtomicU64>,
}

/// Two nodes that increment counters in pages of both, and the connections of the hostile member.
struct Vm {
    nodes: Vec<Node>,
    /// `None` once it is gone.
    hostile: Option<TcpPeers>,
    is_over: Arc<AtomicBool>,
}

/// What a page of the first two blocks is called.
fn page(home: u8, page: u32) -> PageIndex {
    PageIndex::new(u32::from(home) * 512 + page)
}

fn number(value: u64) -> Number {
    Number::new(value).expect("a small number")
}

fn connect(me: u8, listener: TcpListener, addresses: Vec<SocketAddr>) -> TcpPeers {
    let ids: Vec<NodeId> = (0..COUNT).map(NodeId).collect();
    let members = Members::new(&ids).expect("a few nodes");
    let pages = u32::from(COUNT) * 512;
    let mut config = TcpPeersConfig::new(member(me), members, addresses, listener, pages);
    config.secret = Secret([7; 32]);
    config.epoch = EPOCH;
    config.grace = GRACE;
    config.stall = STALL;
    config.start_timeout = LIMIT;
    TcpPeers::connect(config).expect("connected")
}

impl Node {
    /// Starts a node, and a thread that increments counters until it is over. A thread that waits for a
    /// page of a node that has ended is left alone.
    fn start(me: u8, peers: TcpPeers, time_max: Duration, is_over: &Arc<AtomicBool>) -> Self {
        let memory = GuestMemory::new(usize::from(COUNT) * BLOCK * PAGE_SIZE).expect("memory");
        let mut config = config(me, COUNT, COUNT.into(), ALL);
        config.transaction_time_max = time_max;
        let (sender, end) = mpsc::channel();
        let failed = Box::new(move |failure: fabric_sharing::Failure, losses| {
            // The test may have ended.
            let _ = sender.send((fabric_host::describe(&failure), losses));
        });
        let shared = SharedMemory::start(config, Arc::new(memory), peers, failed).expect("a node");
        let counted = Arc::<AtomicU64>::default();
        let (memory, is_over) = (Arc::clone(shared.memory()), Arc::clone(is_over));
        let done = Arc::clone(&counted);
        std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                for home in [0, 1] {
                    for counter in 0..COUNTED {
                        let offset = page(home, counter).index() * PAGE_SIZE;
                        word(&memory, offset).fetch_add(1, Ordering::Relaxed);
                    }
                }
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self {
            shared,
            end,
            counted,
        }
    }

    /// Increments a counter of a page on a thread of its own, which may wait for ever.
    fn touch(&self, page: PageIndex) {
        let memory = Arc::clone(self.shared.memory());
        std::thread::spawn(move || {
            word(&memory, page.index() * PAGE_SIZE).fetch_add(1, Ordering::Relaxed);
        });
    }
}

impl Vm {
    fn start() -> Self {
        let time_max = Duration::from_secs(20);
        Self::with(time_max, |_| None)
    }

    /// `relay` may give another address at which node 0 reaches the hostile member.
    fn with(time_max: Duration, relay: impl FnOnce(SocketAddr) -> Option<SocketAddr>) -> Self {
        let listeners = (0..COUNT).map(|_| TcpListener::bind(("127.0.0.1", 0)).expect("a port"));
        let listeners: Vec<_> = listeners.collect();
        let addresses = listeners.iter().map(TcpListener::local_addr);
        let addresses: Result<Vec<_>, _> = addresses.collect();
        let addresses = addresses.expect("bound");
        let mut of_first = addresses.clone();
        if let Some(relay) = relay(addresses[usize::from(HOSTILE)]) {
            of_first[usize::from(HOSTILE)] = relay;
        }
        let connecting = (0..).zip(listeners).map(|(me, listener)| {
            let seen = if me == 0 { &of_first } else { &addresses };
            let seen = seen.clone();
            std::thread::spawn(move || connect(me, listener, seen))
        });
        let connecting: Vec<_> = connecting.collect();
        let peers = connecting.into_iter().map(|thread| thread.join());
        let peers: Result<Vec<_>, _> = peers.collect();
        let mut peers = peers.expect("no panic");
        let hostile = peers.pop();
        let is_over = Arc::default();
        let nodes = (0..).zip(peers);
        let nodes = nodes.map(|(me, peers)| Node::start(me, peers, time_max, &is_over));
        let nodes = nodes.collect();
        let mut vm = Self {
            nodes,
            hostile,
            is_over,
        };
        vm.work_on();
        vm
    }

    /// Returns when both nodes have made [`WARM`] more rounds, for which they need pages of each other.
    fn work_on(&mut self) {
        let goals = |node: &Node| node.counted.load(Ordering::Relaxed) + WARM;
        let goals: Vec<_> = self.nodes.iter().map(goals).collect();
        let until = Instant::now() + LIMIT;
        loop {
            let counted = self.nodes.iter().map(|node| &node.counted);
            let mut reached = counted.zip(&goals);
            if reached.all(|(counted, goal)| counted.load(Ordering::Relaxed) >= *goal) {
                break;
            }
            assert!(Instant::now() < until, "the nodes do not work");
            assert_eq!(self.pump(), []);
            std::thread::yield_now();
        }
        for node in &self.nodes {
            assert_eq!(node.end.try_recv().ok(), None, "a node has ended");
        }
    }

    /// What came to the hostile member. It knows no more than that of nodes that have ended.
    fn pump(&mut self) -> Vec<(Member, PeerMessage)> {
        let mut came = Vec::new();
        if let Some(hostile) = &mut self.hostile {
            let _ = hostile.receive(&mut |from, message, _| came.push((from, message)));
            hostile.flush();
        }
        came
    }

    /// The hostile member sends a message, which has its place in a page if it needs one.
    fn send(&mut self, to: u8, message: PeerMessage) {
        let bytes = message.has_page().then_some(&[0xdb; PAGE_SIZE]);
        let hostile = self.hostile.as_mut().expect("it is there");
        hostile.send(member(to), message, bytes);
        hostile.flush();
    }

    /// The hostile member gets a page as others do, and is its owner afterwards.
    fn own(&mut self, home: u8) {
        let owned = page(home, OWNED);
        self.send(home, get(owned));
        let until = Instant::now() + LIMIT;
        let number = loop {
            assert!(Instant::now() < until, "no grant of {owned}");
            let granted = self.pump().into_iter().find_map(|(_, message)| {
                let PeerMessage::Coherence(Message::Grant(grant)) = message else {
                    return None;
                };
                assert_eq!((grant.page, grant.right), (owned, Right::Exclusive));
                assert_eq!((grant.source, grant.acks), (Source::Zero, MemberSet::EMPTY));
                Some(grant.number)
            });
            if let Some(number) = granted {
                break number;
            }
            std::thread::yield_now();
        };
        let unblock = Message::Unblock {
            page: owned,
            number,
            written: false,
        };
        self.send(home, PeerMessage::Coherence(unblock));
        self.work_on();
    }

    /// How a node ended.
    fn end_of(&mut self, node: u8) -> (String, Losses) {
        let until = Instant::now() + LIMIT;
        loop {
            self.pump();
            let place = usize::from(node);
            let wait = Duration::from_millis(1);
            if let Ok(end) = self.nodes[place].end.recv_timeout(wait) {
                return end;
            }
            assert!(Instant::now() < until, "node {node} neither works nor ends");
        }
    }

    /// Node `victim` ends for this reason, and knows that what the hostile member owns is lost with it. The
    /// other node ends as well, because it lost the victim.
    fn ends(mut self, victim: u8, expected: &str) {
        let (text, losses) = self.end_of(victim);
        assert_eq!(text, expected, "of node {victim}");
        let lost = Loss::Page(page(victim, OWNED));
        assert!(losses.contains(&lost), "{lost:?} is not in {losses:?}");
        let (text, _) = self.end_of(1 - victim);
        let expected = format!("{} is lost: ", member(victim));
        assert!(text.starts_with(&expected), "{text} of the other node");
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn get(page: PageIndex) -> PeerMessage {
    PeerMessage::Coherence(Message::Get {
        page,
        want: Want::Write,
        early: false,
    })
}

fn fenced(violation: Violation) -> String {
    let offence = violation.of(member(HOSTILE));
    format!("{offence}; it is fenced, and the VM ends")
}

/// What the hostile member sends to the home of a block, and what that is.
type Offence = fn(u8) -> (Message, Violation);

const OFFENCES: [Offence; 13] = [
    // Pages and blocks that it does not own.
    |home| {
        let (page, number) = (page(home, 0), Number::MAX);
        let left = Left::Home;
        let violation = Violation::NumberNotGranted(page, number);
        (Message::Put { page, number, left }, violation)
    },
    |home| {
        let (block, number) = (BlockIndex(home.into()), Number::MAX);
        let violation = Violation::BlockNotAsked(block);
        (Message::Taken { block, number }, violation)
    },
    |home| {
        let (block, number) = (BlockIndex(home.into()), number(1));
        let pages = vec![PageAt::Owner; BLOCK].into();
        let violation = Violation::BlockNotAsked(block);
        let state = Message::SplitState {
            block,
            number,
            pages,
        };
        (state, violation)
    },
    |home| {
        let (page, number) = (page(home, UNUSED), number(1));
        let data = Message::Data {
            page,
            number,
            dirty: true,
            written: true,
        };
        (data, Violation::DataNotAsked(page))
    },
    // What it owns.
    |home| {
        let page = page(home, OWNED);
        (Message::PutShared { page }, Violation::DroppedOwned(page))
    },
    |home| {
        let (page, want) = (page(home, OWNED), Want::Write);
        let early = false;
        let get = Message::Get { page, want, early };
        (get, Violation::AlreadyHeld(page))
    },
    // Answers that were not asked.
    |home| {
        let (page, number) = (page(home, UNUSED), number(1));
        let violation = Violation::AckNotAsked(page);
        (Message::Ack { page, number }, violation)
    },
    |home| {
        let (page, number) = (page(home, 1), Number::MAX);
        let unblock = Message::Unblock {
            page,
            number,
            written: true,
        };
        (unblock, Violation::UnblockNotAsked(page))
    },
    |_| {
        let number = number(1);
        (Message::TokenBack { number }, Violation::Token)
    },
    // As the directory, which it is not.
    |home| {
        let (page, number) = (page(home, 2), Number::MAX);
        let grant = Grant {
            page,
            number,
            right: Right::Exclusive,
            source: Source::Zero,
            acks: MemberSet::EMPTY,
            hold: 0,
        };
        (Message::Grant(grant), Violation::ElsewhereDirectory(page))
    },
    |home| {
        let (page, number) = (page(home, 0), Number::MAX);
        let fetch = Message::Fetch {
            page,
            number,
            requester: member(HOSTILE),
            right: Right::Exclusive,
        };
        (fetch, Violation::ElsewhereDirectory(page))
    },
    |home| {
        let (page, number) = (page(home, 1), Number::MAX);
        let invalidate = Message::Invalidate {
            page,
            number,
            requester: member(1 - home),
        };
        (invalidate, Violation::ElsewhereDirectory(page))
    },
    |home| {
        let (block, number) = (BlockIndex(home.into()), Number::MAX);
        let violation = Violation::BlockNotHeld(block);
        (Message::Split { block, number }, violation)
    },
];

#[test]
fn a_member_that_breaks_the_protocol_is_named_and_fenced() {
    for (offence, victim) in OFFENCES.iter().zip([0, 1].into_iter().cycle()) {
        let mut vm = Vm::start();
        vm.own(victim);
        let (message, violation) = offence(victim);
        vm.send(victim, PeerMessage::Coherence(message));
        vm.ends(victim, &fenced(violation));
    }
}

#[test]
fn a_member_that_answers_as_a_home_that_was_not_asked_is_named() {
    let mut vm = Vm::start();
    vm.own(1);
    let page = page(1, UNUSED);
    let written = HomeMessage::Written {
        page,
        number: number(1),
        refused: false,
    };
    vm.send(1, PeerMessage::Home(written));
    let reason = format!("it answers as the home of {page}, which was not asked");
    let hostile = member(HOSTILE);
    vm.ends(1, &format!("{hostile} broke the protocol: {reason}"));
}

#[test]
fn a_member_that_floods_requests_is_named_and_fenced() {
    let mut vm = Vm::start();
    vm.own(0);
    let most = directory::OPEN_MAX;
    for number in 0..=u32::from(most) {
        vm.send(0, get(page(0, UNUSED + number)));
    }
    vm.ends(0, &fenced(Violation::Flooding(most)));
}

/// Of what the nodes have to wait for at most.
const TIME_MAX: Duration = Duration::from_secs(5);

#[test]
fn a_member_that_never_unblocks_is_named_and_fenced() {
    let mut vm = Vm::with(TIME_MAX, |_| None);
    vm.own(0);
    let page = page(0, UNUSED);
    vm.send(0, get(page));
    // It waits for the unblock as well.
    vm.nodes[1].touch(page);
    vm.ends(0, &fenced(Violation::Silent(page)));
}

#[test]
fn an_owner_that_never_sends_its_page_is_named() {
    let mut vm = Vm::with(TIME_MAX, |_| None);
    vm.own(0);
    let page = page(0, OWNED);
    vm.nodes[1].touch(page);
    // It knows who has to answer, and the directory does not.
    let (text, _) = vm.end_of(1);
    assert_eq!(text, fenced(Violation::Silent(page)));
    let (text, _) = vm.end_of(0);
    let expected = format!("{} is lost: ", member(1));
    assert!(text.starts_with(&expected), "{text}");
}

/// Starts a relay to the hostile member. Whatever that sends is of the old epoch from the time on when the
/// relay is told so.
fn relay(to: SocketAddr, is_old: &Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("bound");
    let is_old = Arc::clone(is_old);
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(to) else {
                continue;
            };
            let (Ok(from), Ok(to)) = (near.try_clone(), far.try_clone()) else {
                continue;
            };
            let never = Arc::default();
            let is_old = Arc::clone(&is_old);
            std::thread::spawn(move || pass(from, to, &never));
            std::thread::spawn(move || pass(far, near, &is_old));
        }
    });
    address
}

/// Passes on one direction of a connection.
fn pass(mut from: TcpStream, mut to: TcpStream, is_old: &Arc<AtomicBool>) {
    let _ = to.set_nodelay(true);
    let epoch = EPOCH.to_le_bytes();
    let mut part = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut part) {
        let part = &mut part[..count];
        if is_old.load(Ordering::Relaxed)
            && let Some(at) = part.windows(4).position(|bytes| bytes == epoch)
        {
            part[at..at + 4].copy_from_slice(&OLD_EPOCH.to_le_bytes());
        }
        if to.write_all(part).is_err() {
            break;
        }
    }
    for end in [&from, &to] {
        let _ = end.shutdown(std::net::Shutdown::Both);
    }
}

#[test]
fn a_member_that_sends_an_old_epoch_is_named_and_fenced() {
    let is_old = Arc::default();
    let mut vm = Vm::with(LIMIT, |to| Some(relay(to, &is_old)));
    vm.own(0);
    is_old.store(true, Ordering::Relaxed);
    // Of this epoch it is correct.
    let page = page(0, UNUSED);
    vm.send(0, PeerMessage::Coherence(Message::PutShared { page }));
    let hostile = member(HOSTILE);
    let reason = format!("uses epoch {OLD_EPOCH}, this is epoch {EPOCH}");
    vm.ends(0, &format!("{hostile} broke the protocol: {reason}"));
}

#[test]
fn a_member_that_is_gone_is_named_by_all() {
    let mut vm = Vm::start();
    vm.own(0);
    // Its connections end, and nothing listens at its address any longer.
    vm.hostile = None;
    let lost = Loss::Page(page(0, OWNED));
    for node in [0, 1] {
        let (text, losses) = vm.end_of(node);
        let expected = format!("{} is lost: ", member(HOSTILE));
        assert!(text.starts_with(&expected), "{text} of node {node}");
        assert_eq!(losses.contains(&lost), node == 0, "{losses:?}");
    }
}
