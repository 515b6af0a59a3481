//! Connections between the processes of a VM under TLS: who gets one, and what can be seen of them.

use super::cluster::Cluster;
use super::refusals::{answered, config as client, config_of, invalid};
use crate::capture::tcp_tap;
use fabric_coherence::message::{Message, Number};
use fabric_coherence::{Member, Members};
use fabric_homes::NodeId;
use fabric_identity::Fingerprint;
use fabric_identity::pinned::PinnedIdentity;
use fabric_peers::{
    PeerError, PeerMessage, PeerTransport, Peers, Secret, Security, Streams, TcpPeers,
    TcpPeersConfig,
};
use fabric_test_support::*;
use memory_fabric::compute::TlsSecurity;
use memory_fabric::page::{PAGE_SIZE, PageBytes, PageIndex};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// Pages that are more than sockets buffer.
const PAGES: u64 = 1000;

const SECRET: [u8; 32] = [0xa7; 32];

fn member(place: u8) -> Member {
    Member::at(place).expect("a place")
}

/// The processes of a VM: their certificates.
struct Vm {
    processes: Vec<PinnedIdentity>,
}

impl Vm {
    fn new(name: &str, processes: u8) -> Self {
        let identity = |me| {
            let subject = format!("spiffe://{name}/ssi-hv/node/{me}");
            PinnedIdentity::generate(&subject.parse().expect("a subject")).expect("a key")
        };
        Self {
            processes: (0..processes).map(identity).collect(),
        }
    }

    fn table(&self) -> Vec<Fingerprint> {
        let processes = self.processes.iter();
        processes.map(PinnedIdentity::fingerprint).collect()
    }

    fn security(&self, me: u8) -> Arc<dyn Security> {
        let identity = &self.processes[usize::from(me)];
        TlsSecurity::shared(identity, me, self.table()).expect("usable")
    }
}

fn config(
    me: u8,
    listener: TcpListener,
    addresses: &[SocketAddr],
    security: Option<Arc<dyn Security>>,
) -> TcpPeersConfig {
    let ids: Vec<_> = (0..).take(addresses.len()).map(NodeId).collect();
    let members = Members::new(&ids).expect("a table");
    let mut config =
        TcpPeersConfig::new(member(me), members, addresses.to_vec(), listener, 1 << 20);
    config.vm = [7; 16];
    config.secret = Secret(SECRET);
    config.start_timeout = PATIENCE;
    config.security = security;
    config
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

/// Nothing listens there: members before a node connect to it.
fn nowhere() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 1))
}

type Waiting = JoinHandle<Result<TcpPeers, PeerError>>;

/// Starts the last of `nodes` nodes, which waits for those before it.
fn waiting(nodes: u8, security: Option<Arc<dyn Security>>) -> (Waiting, SocketAddr) {
    let (listener, address) = listener();
    let mut addresses = vec![nowhere(); usize::from(nodes) - 1];
    addresses.push(address);
    let config = config(nodes - 1, listener, &addresses, security);
    (std::thread::spawn(|| TcpPeers::connect(config)), address)
}

/// Connects as the first of two nodes.
fn connect(address: SocketAddr, security: Option<Arc<dyn Security>>) -> Result<TcpPeers, String> {
    let (own, here) = listener();
    let connected = TcpPeers::connect(config(0, own, &[here, address], security));
    connected.map_err(|error| error.to_string())
}

fn refused(address: SocketAddr, security: Option<Arc<dyn Security>>) -> String {
    let refused = connect(address, security).map(drop);
    refused.expect_err("the node has another peer")
}

/// A page that can be found in a capture, and its number.
fn page(number: u64) -> Box<PageBytes> {
    let mut bytes = Box::new([0; PAGE_SIZE]);
    for chunk in bytes.chunks_exact_mut(16) {
        chunk[..8].copy_from_slice(b"a marker");
        chunk[8..].copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

fn has(seen: &[u8], wanted: &[u8]) -> bool {
    seen.windows(wanted.len()).any(|window| window == wanted)
}

/// A network between two nodes that can be cut.
#[derive(Default)]
struct Network {
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Network {
    /// Forwards connections to a node. Its threads end with the process.
    fn to(node: SocketAddr) -> (Self, SocketAddr) {
        let (listener, address) = listener();
        let network = Self::default();
        let open = Arc::clone(&network.open);
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let server = TcpStream::connect(node).expect("a node");
                let clone = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
                let ends = [clone(&client), clone(&server)];
                open.lock().expect("no panic").extend(ends);
                for (mut from, mut to) in [(clone(&client), clone(&server)), (server, client)] {
                    std::thread::spawn(move || {
                        // The end of one direction is the end of the connection.
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        (network, address)
    }

    fn cut(&self) {
        for stream in self.open.lock().expect("no panic").drain(..) {
            // Its other end may be gone.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Sends so many pages from `one` to `other` and as many back. Calls `midway` once when some have
/// come.
fn exchange(one: &mut TcpPeers, other: &mut TcpPeers, pages: u64, midway: impl FnOnce()) {
    let mut midway = Some(midway);
    for number in 0..pages {
        let index = PageIndex::new(u32::try_from(number).expect("a page"));
        let message = PeerMessage::Coherence(Message::Data {
            page: index,
            number: Number::new(number).expect("in range"),
            dirty: true,
            written: false,
        });
        one.send(member(1), message.clone(), Some(&page(number)));
        other.send(member(0), message, Some(&page(number)));
    }
    let deadline = Instant::now() + PATIENCE;
    let mut received = [0_u64; 2];
    while received != [pages; 2] {
        for (peers, received) in [&mut *one, &mut *other].into_iter().zip(&mut received) {
            let mut check = |_, message: PeerMessage, bytes: Option<&PageBytes>| {
                let PeerMessage::Coherence(Message::Data { number, .. }) = message else {
                    panic!("{message:?} was not sent");
                };
                assert_eq!(number.value(), *received, "pages come in their order");
                assert!(bytes == Some(&*page(*received)), "page {received}");
                *received += 1;
            };
            peers.receive(&mut check).expect("a correct peer");
            peers.flush();
        }
        if received[1] > pages / 4
            && let Some(midway) = midway.take()
        {
            midway();
        }
        assert!(Instant::now() < deadline, "{received:?} pages came");
    }
}

#[test]
fn pages_travel_whole_and_nobody_between_the_nodes_sees_them() {
    for secured in [false, true] {
        let vm = Vm::new("vm-a", 2);
        let security = |me| secured.then(|| vm.security(me));
        let (node, address) = waiting(2, security(1));
        let (through, seen) = tcp_tap(address);
        let mut one = connect(through, security(0)).expect("connected");
        let mut other = node.join().expect("no panic").expect("connected");
        exchange(&mut one, &mut other, PAGES, || ());
        let transport = match secured {
            true => PeerTransport::SecureTcp,
            false => PeerTransport::Tcp,
        };
        for peers in [&one, &other] {
            let paths: Vec<_> = peers.paths().now().collect();
            let now = paths.iter().map(|path| (path.transport, path.connections));
            assert_eq!(now.collect::<Vec<_>>(), [(transport, 1)], "{paths:?}");
        }
        let seen = seen.lock().expect("no panic");
        assert!(seen.len() > 2000 * PAGE_SIZE, "only {} bytes", seen.len());
        assert_eq!(has(&seen, b"a marker"), !secured, "secured: {secured}");
        assert!(!has(&seen, &SECRET), "the secret");
    }
}

#[test]
fn a_cut_connection_is_made_again_under_tls_and_no_page_is_lost() {
    let vm = Vm::new("vm-a", 2);
    let (node, address) = waiting(2, Some(vm.security(1)));
    let (network, through) = Network::to(address);
    let mut one = connect(through, Some(vm.security(0))).expect("connected");
    let mut other = node.join().expect("no panic").expect("connected");
    for _ in 0..4 {
        // Together they are fewer than may be unconfirmed.
        exchange(&mut one, &mut other, 250, || network.cut());
    }
}

#[test]
fn who_is_no_process_of_the_vm_gets_no_connection() {
    let (prod, other) = (Cluster::new("prod"), Cluster::new("prod"));
    let (vm, another) = (Vm::new("vm-a", 2), Vm::new("vm-b", 2));
    let (node, address) = waiting(2, Some(vm.security(1)));
    let hello = b"SVPC\x02\x00\x01\x00";
    let there = vm.processes[1].fingerprint();
    let clients = invalid(&prod, &other).into_iter();
    let clients = clients.map(|(what, shown)| (what, client(shown)));
    let of_cluster = [
        ("one of a VM of the cluster", config_of(&prod, "vm/web")),
        (
            "one of a node of the cluster",
            config_of(&prod, "node/alpha"),
        ),
        (
            "one of another VM's process",
            another.processes[0].client(there).expect("usable"),
        ),
        (
            "the node's own",
            vm.processes[1].client(there).expect("usable"),
        ),
    ];
    for (what, client) in clients.chain(of_cluster) {
        let answer = answered(address, client, hello);
        println!("{what}: {}", answer.expect_err("the node answers"));
    }
    // One that begins as TLS does and is cut.
    let mut socket = TcpStream::connect(address).expect("a listener");
    socket.write_all(&[22, 3, 1, 2, 0, 1, 0]).expect("sent");
    socket.shutdown(Shutdown::Write).expect("a socket");
    let mut rest = Vec::new();
    // An alert at most.
    let _ = socket.read_to_end(&mut rest);
    assert!(rest.len() <= 7, "{rest:?}");
    let text = refused(address, Some(another.security(0)));
    assert!(text.contains("not that of a process of this VM"), "{text}");
    // The node has waited for its peer.
    assert!(!node.is_finished());
    let mut one = connect(address, Some(vm.security(0))).expect("connected");
    let mut other = node.join().expect("no panic").expect("connected");
    exchange(&mut one, &mut other, PAGES, || ());
}

/// Both ends know the secret; one of them shows no certificate.
#[test]
fn one_end_without_certificates_is_told_what_to_do() {
    let vm = Vm::new("vm-a", 2);
    let (node, address) = waiting(2, Some(vm.security(1)));
    let text = refused(address, None);
    assert!(text.contains("another use of certificates"), "{text}");
    assert!(text.contains("on all hosts with --credentials"), "{text}");
    connect(address, Some(vm.security(0))).expect("connected");
    node.join().expect("no panic").expect("connected");

    let (node, address) = waiting(2, None);
    let text = refused(address, Some(vm.security(0)));
    assert!(
        text.contains("`ssi-hv node` there with --credentials"),
        "{text}"
    );
    connect(address, None).expect("connected");
    node.join().expect("no panic").expect("connected");
}

#[test]
fn a_process_is_no_other_one_of_the_same_vm() {
    let vm = Vm::new("vm-a", 3);
    let (_node, address) = waiting(3, Some(vm.security(2)));
    let (own, here) = listener();
    // The second process says that it is the first one.
    let mut liar = config(0, own, &[here, nowhere(), address], None);
    liar.security = Some(vm.security(1));
    let streams = Streams::begin(liar, "a test").expect("threads");
    let error = streams.finish().expect_err("refused").to_string();
    assert!(error.contains("another member than expected"), "{error}");
    // One that is behind the node may not connect to it at all.
    let (node, address) = waiting(2, Some(vm.security(1)));
    let text = answered(
        address,
        vm.processes[2]
            .client(vm.processes[1].fingerprint())
            .expect("usable"),
        b"SVPC\x02\x00\x01\x00",
    );
    println!("{}", text.expect_err("the node answers"));
    assert!(!node.is_finished());
}
