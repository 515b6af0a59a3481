//! Every message arrives once, and each lane keeps its order, whatever the network does.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

use super::network::{Faults, Network};
use super::*;

/// Messages that a node sends and has not seen answered by as many from the peer: less than a lane
/// may have outstanding.
const AHEAD: u64 = 200;

/// Nodes with a faulty network in front of each, and what each of them sends to each other one.
pub(super) struct Plan {
    pub(super) nodes: u8,
    /// Messages on each lane from each node to each other one.
    pub(super) messages: u64,
    pub(super) faults: Faults,
    pub(super) stall: Duration,
    pub(super) rdma: Option<RdmaPeers>,
}

impl Plan {
    /// Runs the nodes; returns how many connections were cut.
    pub(super) fn run(&self) -> u32 {
        let listeners: Vec<_> = (0..self.nodes).map(|_| listener()).collect();
        let networks: Vec<_> = listeners
            .iter()
            .zip(1..)
            .map(|((_, address), seed)| Network::new(*address, self.faults, seed * 7919))
            .collect();
        let addresses: Vec<_> = networks.iter().map(|network| network.address).collect();
        let done = AtomicU32::new(0);
        let start = Barrier::new(usize::from(self.nodes));
        std::thread::scope(|scope| {
            for ((listener, _), me) in listeners.into_iter().zip(0..) {
                let mut config = config(me, listener, &addresses);
                config.stall = self.stall;
                config.rdma.clone_from(&self.rdma);
                let (done, start) = (&done, &start);
                scope.spawn(move || self.node(config, done, start));
            }
        });
        networks.iter().map(Network::cuts).sum()
    }

    /// Sends all messages to every other node, and receives theirs.
    fn node(&self, config: TcpPeersConfig, done: &AtomicU32, start: &Barrier) {
        let me = config.me;
        let mut peers = TcpPeers::connect(config).expect("connected");
        start.wait();
        let places = usize::from(self.nodes) * PeerLane::COUNT;
        let (mut sent, mut received) = (vec![0; places], vec![0; places]);
        let own = me.index() * PeerLane::COUNT..(me.index() + 1) * PeerLane::COUNT;
        let mut is_done = false;
        let deadline = Instant::now() + LIMIT * 4;
        while done.load(Ordering::SeqCst) < u32::from(self.nodes) {
            assert!(Instant::now() < deadline, "{me}: {received:?} of {sent:?}");
            for place in (0..places).filter(|place| !own.contains(place)) {
                let lane = PeerLane::ALL[place % PeerLane::COUNT];
                let to = member(u8::try_from(place / PeerLane::COUNT).expect("a place"));
                let most = self.messages.min(received[place] + AHEAD);
                while sent[place] < most {
                    let (message, page) = numbered(lane, sent[place]);
                    peers.send(to, message, page.as_deref());
                    sent[place] += 1;
                }
            }
            peers.flush();
            let mut take = |from: Member, message: PeerMessage, page: Option<&PageBytes>| {
                let place = from.index() * PeerLane::COUNT + usize::from(message.lane());
                assert_eq!(number_of(&message, page), received[place], "{from} to {me}");
                received[place] += 1;
            };
            let has_arrived = peers.receive(&mut take).expect("a correct peer");
            let mut others = (0..places).filter(|place| !own.contains(place));
            if !is_done && others.all(|place| received[place] == self.messages) {
                is_done = true;
                done.fetch_add(1, Ordering::SeqCst);
            }
            if !has_arrived {
                wait(&mut peers, Instant::now() + Duration::from_millis(20));
            }
        }
    }
}

#[test]
fn every_message_arrives_once_in_the_order_of_its_lane() {
    let plan = Plan {
        nodes: 3,
        messages: 20_000,
        faults: Faults::default(),
        stall: STALL_DEFAULT,
        rdma: None,
    };
    plan.run();
}

#[test]
fn frames_that_arrive_byte_by_byte_are_the_same() {
    let plan = Plan {
        nodes: 2,
        messages: 300,
        faults: Faults {
            split: 40,
            delayed: 500,
            ..Faults::default()
        },
        stall: STALL_DEFAULT,
        rdma: None,
    };
    plan.run();
}

#[test]
fn connections_that_are_cut_lose_and_repeat_nothing() {
    let plan = Plan {
        nodes: 3,
        messages: 10_000,
        faults: Faults {
            cut_after: 2_000_000,
            split: 9_000,
            delayed: 300,
        },
        stall: STALL_DEFAULT,
        rdma: None,
    };
    let cuts = plan.run();
    assert!(cuts > 20, "only {cuts} connections were cut");
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn millions_of_messages_over_connections_that_are_cut() {
    let plan = Plan {
        nodes: 3,
        messages: 200_000,
        faults: Faults {
            cut_after: 10_000_000,
            split: 60_000,
            delayed: 2_000,
        },
        stall: STALL_DEFAULT,
        rdma: None,
    };
    let cuts = plan.run();
    println!("4.8 million messages, {cuts} connections cut");
    assert!(cuts > 100, "only {cuts} connections were cut");
}

#[test]
fn a_silent_connection_is_replaced() {
    let ((first, a), (second, b)) = (listener(), listener());
    let network = Network::new(b, Faults::default(), 1);
    let stall = Duration::from_millis(200);
    let other = std::thread::spawn(move || {
        let mut config = config(1, second, &[a, b]);
        config.stall = stall;
        let mut peers = TcpPeers::connect(config).expect("connected");
        receive(&mut peers, 2)
    });
    let mut config = config(0, first, &[a, network.address]);
    config.stall = stall;
    let mut peers = TcpPeers::connect(config).expect("connected");
    peers.send(member(1), get(1), None);
    let deadline = Instant::now() + LIMIT;
    let mut ended = 0;
    while !other.is_finished() {
        assert!(Instant::now() < deadline, "the connection is not replaced");
        let was_connected = peers.missing().is_none();
        let _ = peers.receive(&mut |_, _, _| ()).expect("a peer");
        peers.flush();
        let link = peers.links[1].as_ref().expect("a link");
        if ended == 0 && link.is_idle() && link.is_connected() {
            // The first message is confirmed; the second goes nowhere for a while.
            network.silence(true);
            peers.send(member(1), get(2), None);
            peers.flush();
            ended = 1;
        }
        if ended == 1 && was_connected && peers.missing().is_some() {
            network.silence(false);
            ended = 2;
        }
        wait(&mut peers, Instant::now() + Duration::from_millis(20));
    }
    assert_eq!(ended, 2, "the silent connection was torn down");
    let found = other.join().expect("no panic");
    assert_eq!(found, [(member(0), get(1)), (member(0), get(2))]);
}

#[test]
fn a_peer_that_is_out_of_reach_for_the_grace_time_is_lost() {
    let ((first, a), (second, b)) = (listener(), listener());
    let network = Network::new(b, Faults::default(), 1);
    let other = config(1, second, &[a, b]);
    let other = std::thread::spawn(move || TcpPeers::connect(other).expect("connected"));
    let mut config = config(0, first, &[a, network.address]);
    config.grace = Duration::from_millis(300);
    let mut peers = TcpPeers::connect(config).expect("connected");
    let _other = other.join().expect("no panic");
    network.close(true);
    let deadline = Instant::now() + LIMIT;
    let lost = loop {
        assert!(Instant::now() < deadline, "the loss is not noticed");
        match peers.receive(&mut |_, _, _| ()) {
            Ok(_) => wait(&mut peers, deadline),
            Err(error) => break error.to_string(),
        }
    };
    let text = "member 1 is lost: it was out of reach for 300ms: ";
    assert!(lost.starts_with(text), "{lost}");
}
