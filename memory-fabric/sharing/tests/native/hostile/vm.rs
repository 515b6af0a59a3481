//! Two nodes that keep the protocol, and the connections of one that does not.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use fabric_coherence::message::{Left, Right, Source, Want};
use fabric_coherence::{Member, MemberSet, Members, Message, Number, Violation};
use fabric_homes::NodeId;
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::{PAGE_SIZE, PageIndex};
use fabric_peers::tcp::{Secret, TcpPeers, TcpPeersConfig};
use fabric_peers::{HomeMessage, PeerMessage, Peers as _};
use fabric_sharing::{Losses, SharedMemory};

use crate::mesh::{ALL, config, member};
use crate::programs::word;

/// Members, each of which is the home of the block with its number. The last one is hostile.
pub(super) const COUNT: u8 = 3;
pub(super) const HOSTILE: u8 = 2;
pub(super) const BLOCK: usize = 512;

/// So many first pages of the first two blocks have counters.
pub(super) const COUNTED: u32 = 3;
/// The page that the hostile member gets.
pub(super) const OWNED: u32 = 100;
/// Nobody uses the pages from here on.
pub(super) const UNUSED: u32 = 200;

/// Increments of each node before the offence.
pub(super) const WARM: u64 = 200;

/// No step takes longer on a host that works, however loaded.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// How long a member may be out of reach, and nothing may come from it.
pub(super) const GRACE: Duration = Duration::from_millis(300);
pub(super) const STALL: Duration = Duration::from_secs(20);

/// The epoch of all messages, and the one before it.
pub(super) const EPOCH: u32 = 0x5eed_0107;
pub(super) const OLD_EPOCH: u32 = EPOCH - 1;

/// A node that keeps the protocol.
pub(super) struct Node {
    pub(super) shared: SharedMemory,
    /// Why it ended, and what was lost then.
    pub(super) end: Receiver<(String, Losses)>,
    pub(super) counted: Arc<AtomicU64>,
}

/// Two nodes that increment counters in pages of both, and the connections of the hostile member.
pub(super) struct Vm {
    pub(super) nodes: Vec<Node>,
    /// `None` once it is gone.
    pub(super) hostile: Option<TcpPeers>,
    is_over: Arc<AtomicBool>,
}

/// What a page of the first two blocks is called.
pub(super) fn page(home: u8, page: u32) -> PageIndex {
    PageIndex::new(u32::from(home) * 512 + page)
}

pub(super) fn number(value: u64) -> Number {
    Number::new(value).expect("a small number")
}

pub(super) fn connect(me: u8, listener: TcpListener, addresses: Vec<SocketAddr>) -> TcpPeers {
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
    pub(super) fn start(
        me: u8,
        peers: TcpPeers,
        time_max: Duration,
        is_over: &Arc<AtomicBool>,
    ) -> Self {
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

    /// Increments a counter of a page on a thread of its own, which may wait for ever. What the counter was
    /// comes from the channel.
    pub(super) fn touch(&self, page: PageIndex) -> Receiver<u64> {
        let memory = Arc::clone(self.shared.memory());
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let counter = word(&memory, page.index() * PAGE_SIZE);
            // The test may have ended.
            let _ = sender.send(counter.fetch_add(1, Ordering::Relaxed));
        });
        receiver
    }
}

impl Vm {
    pub(super) fn start() -> Self {
        let time_max = Duration::from_secs(20);
        Self::with(time_max, |_| None)
    }

    /// `relay` may give another address at which node 0 reaches the hostile member.
    pub(super) fn with(
        time_max: Duration,
        relay: impl FnOnce(SocketAddr) -> Option<SocketAddr>,
    ) -> Self {
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
    pub(super) fn work_on(&mut self) {
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
    pub(super) fn pump(&mut self) -> Vec<(Member, PeerMessage)> {
        let mut came = Vec::new();
        if let Some(hostile) = &mut self.hostile {
            let _ = hostile.receive(&mut |from, message, _| came.push((from, message)));
            hostile.flush();
        }
        came
    }

    /// The hostile member sends a message, which has its place in a page if it needs one.
    pub(super) fn send(&mut self, to: u8, message: PeerMessage) {
        self.send_with(to, message, 0xdb);
    }

    /// The same with a page of such bytes.
    pub(super) fn send_with(&mut self, to: u8, message: PeerMessage, byte: u8) {
        let bytes = [byte; PAGE_SIZE];
        let bytes = message.has_page().then_some(&bytes);
        let hostile = self.hostile.as_mut().expect("it is there");
        hostile.send(member(to), message, bytes);
        hostile.flush();
    }

    /// Waits for a message to the hostile member in which `find` finds something.
    pub(super) fn await_message<T>(
        &mut self,
        what: &str,
        find: impl Fn(PeerMessage) -> Option<T>,
    ) -> T {
        let until = Instant::now() + LIMIT;
        loop {
            assert!(Instant::now() < until, "{what} did not come");
            let mut came = self.pump().into_iter();
            if let Some(found) = came.find_map(|(_, message)| find(message)) {
                return found;
            }
            std::thread::yield_now();
        }
    }

    /// The hostile member gets a page as others do, and is its owner afterwards, with this number.
    pub(super) fn own(&mut self, home: u8) -> Number {
        let owned = page(home, OWNED);
        self.send(home, get(owned));
        let number = self.await_message("a grant", |message| {
            let PeerMessage::Coherence(Message::Grant(grant)) = message else {
                return None;
            };
            assert_eq!((grant.page, grant.right), (owned, Right::Exclusive));
            assert_eq!((grant.source, grant.acks), (Source::Zero, MemberSet::EMPTY));
            Some(grant.number)
        });
        let unblock = Message::Unblock {
            page: owned,
            number,
            written: false,
        };
        self.send(home, PeerMessage::Coherence(unblock));
        self.work_on();
        number
    }

    /// The hostile member writes the page that it owned or owns to its home, which answers that it took it.
    pub(super) fn write_back(&mut self, home: u8, number: Number, byte: u8) {
        let page = page(home, OWNED);
        let write = PeerMessage::Home(HomeMessage::Write { page, number });
        self.send_with(home, write, byte);
        let written = HomeMessage::Written {
            page,
            number,
            refused: false,
        };
        let is_written = |message| (message == PeerMessage::Home(written)).then_some(());
        self.await_message("the answer to a write-back", is_written);
    }

    /// The hostile member gives back the page that it owns, and has written to its home.
    pub(super) fn give_back(&mut self, home: u8, number: Number) {
        let page = page(home, OWNED);
        let left = Left::Home;
        self.send(
            home,
            PeerMessage::Coherence(Message::Put { page, number, left }),
        );
        let done = PeerMessage::Coherence(Message::PutDone { page, number });
        self.await_message("the end of a put", |message| {
            (message == done).then_some(())
        });
    }

    /// How a node ended.
    pub(super) fn end_of(&mut self, node: u8) -> (String, Losses) {
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
    pub(super) fn ends(mut self, victim: u8, expected: &str) {
        let (text, losses) = self.end_of(victim);
        assert_eq!(text, expected, "of node {victim}");
        assert!(
            has_owned(&losses, victim),
            "page {OWNED} is not in {losses:?}"
        );
        let (text, _) = self.end_of(1 - victim);
        let expected = format!("{} is lost: ", member(victim));
        assert!(text.starts_with(&expected), "{text} of the other node");
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // Threads may wait for pages of nodes that have ended.
        self.nodes.drain(..).for_each(std::mem::forget);
    }
}

pub(super) fn get(page: PageIndex) -> PeerMessage {
    PeerMessage::Coherence(Message::Get {
        page,
        want: Want::Write,
        early: false,
    })
}

/// Whether the page that the hostile member got from a home is among those that were lost with it.
pub(super) fn has_owned(losses: &Losses, home: u8) -> bool {
    let owned = page(home, OWNED).number();
    losses.only_copy.iter().any(|pages| pages.contains(&owned))
}

pub(super) fn fenced(violation: Violation) -> String {
    let offence = violation.of(member(HOSTILE));
    format!("{offence}; it is fenced, and the VM ends")
}
