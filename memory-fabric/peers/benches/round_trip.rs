//! Round trips between two compute nodes over loopback: a small message, and one that is answered
//! with a page. The floor is a plain connection that carries as many bytes in the same run, and
//! waits in the same way: both ends poll without sleeping.

use std::hint::black_box;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fabric_coherence::message::{Message, Number, Want};
use fabric_coherence::{Member, Members};
use fabric_homes::NodeId;
use fabric_pages::page::{PAGE_SIZE, PageIndex};
use fabric_peers::{PeerMessage, Peers, TcpPeers, TcpPeersConfig};

/// Round trips of each kind, after as many that warm up.
const ROUNDS: usize = 10_000;

/// Bytes of the frames of a request, an acknowledgement, and a page.
const GET_BYTES: usize = 38;
const ACK_BYTES: usize = 44;
const DATA_BYTES: usize = 45 + PAGE_SIZE;

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

fn config(me: u8, listener: TcpListener, addresses: [SocketAddr; 2]) -> TcpPeersConfig {
    let me = Member::at(me).expect("a place");
    let members = Members::new(&[NodeId(0), NodeId(1)]).expect("a table");
    TcpPeersConfig::new(me, members, addresses.into(), listener, 1 << 20)
}

/// The median of round trips, after as many that are not measured.
fn p50(mut round: impl FnMut()) -> Duration {
    let mut times = Vec::with_capacity(ROUNDS);
    for place in 0..2 * ROUNDS {
        let began = Instant::now();
        round();
        if place >= ROUNDS {
            times.push(began.elapsed());
        }
    }
    times.sort_unstable();
    times[ROUNDS / 2]
}

/// Answers requests: for even pages with an acknowledgement, for odd ones with the page.
fn serve(mut peers: TcpPeers, stop: &AtomicBool) {
    let page = Box::new([7; PAGE_SIZE]);
    let mut asked = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let mut take = |from, message, _: Option<&_>| asked.push((from, message));
        peers.receive(&mut take).expect("a peer");
        for (from, message) in asked.drain(..) {
            let PeerMessage::Coherence(Message::Get { page: index, .. }) = message else {
                continue;
            };
            let number = Number::ZERO;
            if index.number() % 2 == 0 {
                let page = index;
                peers.send(
                    from,
                    PeerMessage::Coherence(Message::Ack { page, number }),
                    None,
                );
            } else {
                let data = Message::Data {
                    page: index,
                    number,
                    dirty: true,
                    written: true,
                };
                peers.send(from, PeerMessage::Coherence(data), Some(&page));
            }
        }
        peers.flush();
    }
}

fn peers() -> [Duration; 2] {
    let ((first, a), (second, b)) = (listener(), listener());
    let (one, other) = (config(0, first, [a, b]), config(1, second, [a, b]));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| serve(TcpPeers::connect(other).expect("connected"), &stop));
        let mut peers = TcpPeers::connect(one).expect("connected");
        let to = Member::at(1).expect("a place");
        let medians = [0, 1].map(|page| {
            p50(|| {
                let get = Message::Get {
                    page: PageIndex::new(page),
                    want: Want::Read,
                    early: false,
                };
                peers.send(to, PeerMessage::Coherence(get), None);
                peers.flush();
                while !peers
                    .receive(&mut |_, message, page| {
                        black_box((message, page.map(|page| page[0])));
                    })
                    .expect("a peer")
                {
                    peers.flush();
                }
            })
        });
        stop.store(true, Ordering::SeqCst);
        medians
    })
}

/// Reads so many bytes without sleeping; `false` at the end of the connection.
fn read(mut stream: &TcpStream, buffer: &mut [u8]) -> bool {
    let mut filled = 0;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return false,
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
    }
    true
}

fn write(mut stream: &TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).expect("a short frame fits");
}

fn plain(answer_bytes: usize) -> Duration {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (stream, _) = listener.accept().expect("a client");
            stream.set_nodelay(true).expect("a socket");
            stream.set_nonblocking(true).expect("a socket");
            let mut request = [0; GET_BYTES];
            let answer = vec![7; answer_bytes];
            while read(&stream, &mut request) {
                write(&stream, &answer);
            }
        });
        let stream = TcpStream::connect(address).expect("a listener");
        stream.set_nodelay(true).expect("a socket");
        stream.set_nonblocking(true).expect("a socket");
        let mut answer = vec![0; answer_bytes];
        p50(|| {
            write(&stream, &[1; GET_BYTES]);
            assert!(read(&stream, &mut answer), "the other end is there");
        })
    })
}

fn main() {
    let floors = [plain(ACK_BYTES), plain(DATA_BYTES)];
    let medians = peers();
    println!("| round trip, p50 | plain TCP | peers | ratio |");
    println!("|---|---|---|---|");
    for (name, (floor, median)) in ["small message", "page of 4 KiB"]
        .into_iter()
        .zip(floors.into_iter().zip(medians))
    {
        let ratio = median.as_secs_f64() / floor.as_secs_f64();
        println!("| {name} | {floor:.1?} | {median:.1?} | {ratio:.2} |");
    }
}
