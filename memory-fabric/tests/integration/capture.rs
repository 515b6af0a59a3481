//! What a VM and its donor send, captured between them: nothing that is sealed or under TLS can be
//! found in it, and neither can a token under TLS.

use crate::tls::cluster::{Cluster, name};
use fabric_homes::NodeId;
use fabric_identity::{ExpectedNode, Role};
use fabric_test_support::udp_proxy::{UdpProxy, Weather};
use fabric_test_support::*;
use fabric_transport::control::ControlStream;
use fabric_transport::stream::Carrier;
use fabric_wire::{Ends, FrameKind, LeaseGrant, LeaseRequest, Token, TrafficClass};
use memory_fabric::fabric::{Compression, Sealing, TransportKind};
use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex};

const GUEST: u64 = 24 * MIB;
const LOCAL: u64 = 16 * MIB;

/// All bytes that passed, in either direction.
pub type Seen = Arc<Mutex<Vec<u8>>>;

/// Forwards connections by TCP, and keeps all bytes. Its threads end with the process.
pub fn tcp_tap(donor: SocketAddr) -> (SocketAddr, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let seen = Seen::default();
    let kept = Arc::clone(&seen);
    std::thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let server = TcpStream::connect(donor).expect("a donor");
            let clone = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
            for (from, to) in [(clone(&client), clone(&server)), (server, client)] {
                let kept = Arc::clone(&kept);
                std::thread::spawn(move || keep(from, to, &kept));
            }
        }
    });
    (address, seen)
}

fn keep(mut from: TcpStream, mut to: TcpStream, kept: &Mutex<Vec<u8>>) {
    let mut bytes = [0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        kept.lock().unwrap().extend_from_slice(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// Returns whether one of these words passed, at any offset.
fn has_word(seen: &[u8], words: &HashSet<u64>) -> bool {
    // Most offsets have none of the words, whose first two bytes say so.
    let low = |word: u64| usize::try_from(word & 0xffff).expect("16 bits");
    let mut begins = vec![false; 1 << 16];
    for word in words {
        begins[low(*word)] = true;
    }
    seen.windows(8).any(|window| {
        let word = u64::from_le_bytes(window.try_into().expect("8 bytes"));
        begins[low(word)] && words.contains(&word)
    })
}

/// A way to protect a VM, and what can be found of it in a capture.
struct Case {
    transport: TransportKind,
    /// Certificates on both ends.
    tls: bool,
    seal: Sealing,
    page_shows: bool,
    token_shows: bool,
}

/// Uses a lease as a VM does, through the tap. Returns its token.
fn lease_and_attach(address: SocketAddr, carrier: &Carrier) -> Token {
    let mut control = ControlStream::connect_by(address, carrier).expect("a donor");
    let request = LeaseRequest {
        vm: "raw".into(),
        bytes: MIB,
        or_less: false,
        duration_ms: 5000,
    };
    let grant: LeaseGrant = control
        .call(FrameKind::Lease, &request, FrameKind::Granted)
        .expect("it lends");
    let ends = Ends {
        local: NodeId(0).into(),
        donor: NodeId(1),
    };
    let mut pages = ControlStream::connect_by(address, carrier).expect("a donor");
    pages
        .attach(grant.token, TrafficClass::Urgent, &ends)
        .expect("it is ours");
    grant.token
}

fn captured(case: &Case) {
    let prod = Cluster::new("prod");
    let donor = if case.tls {
        prod.donor(GUEST + MIB)
    } else {
        donor(GUEST + MIB)
    };
    let udp = (case.transport == TransportKind::Udp)
        .then(|| UdpProxy::new(donor.address(), Weather::Fair));
    let (address, seen) = match &udp {
        Some(proxy) => (proxy.address, proxy.captured()),
        None => tcp_tap(donor.address()),
    };
    let mut config = config(GUEST, LOCAL, &[address]);
    config.transport = case.transport;
    config.seal = case.seal;
    config.compression = Compression::Off;
    config.donors[0].bytes = Some(GUEST);
    let mut carrier = if udp.is_some() {
        Carrier::Udp(None)
    } else {
        Carrier::Tcp
    };
    if case.tls {
        config.credentials = Some(prod.member("vm/web", Role::Vm));
        config.donors[0].name = Some(name("alpha"));
        let node = ExpectedNode {
            credentials: prod.member("vm/web", Role::Vm),
            name: name("alpha"),
        };
        carrier = if udp.is_some() {
            Carrier::Quic(node)
        } else {
            Carrier::Tls(node)
        };
    }
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 7);
    verify(words, 7);
    let token = lease_and_attach(address, &carrier);
    running.fabric.shutdown();
    let seen = seen.lock().unwrap();
    let what = (case.transport, case.tls, case.seal);
    assert!(
        seen.len() as u64 > GUEST - LOCAL,
        "{what:?}: {} bytes passed",
        seen.len()
    );
    // A word of each page, some of which travelled.
    let marks = (0..words.pages()).map(|page| pattern(7, page, 1)).collect();
    assert_eq!(has_word(&seen, &marks), case.page_shows, "{what:?}: a page");
    let shows = seen.windows(token.0.len()).any(|part| part == token.0);
    assert_eq!(shows, case.token_shows, "{what:?}: a token");
    println!("{what:?}: {} bytes", seen.len());
}

#[test]
fn pages_and_tokens_are_found_where_nothing_protects_them() {
    captured(&Case {
        transport: TransportKind::Tcp,
        tls: false,
        seal: Sealing::Off,
        page_shows: true,
        token_shows: true,
    });
}

#[test]
fn sealing_alone_hides_pages() {
    captured(&Case {
        transport: TransportKind::Tcp,
        tls: false,
        seal: Sealing::On,
        page_shows: false,
        token_shows: true,
    });
}

#[test]
fn nothing_is_found_of_a_vm_with_certificates_sealed_or_not() {
    for transport in [TransportKind::Tcp, TransportKind::Udp] {
        for seal in [Sealing::On, Sealing::Off] {
            captured(&Case {
                transport,
                tls: true,
                seal,
                page_shows: false,
                token_shows: false,
            });
        }
    }
}

#[test]
fn nothing_is_found_of_a_vm_by_udp_without_certificates() {
    captured(&Case {
        transport: TransportKind::Udp,
        tls: false,
        seal: Sealing::On,
        page_shows: false,
        token_shows: false,
    });
}

#[test]
fn a_capture_of_udp_has_what_passes() {
    let echo = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let proxy = UdpProxy::new(echo.local_addr().expect("bound"), Weather::Fair);
    let seen = proxy.captured();
    let client = UdpSocket::bind("127.0.0.1:0").expect("a port");
    echo.set_read_timeout(Some(PATIENCE)).expect("a socket");
    client.set_read_timeout(Some(PATIENCE)).expect("a socket");
    client
        .send_to(b"to the donor", proxy.address)
        .expect("sent");
    let mut bytes = [0; 64];
    let (_, from) = echo.recv_from(&mut bytes).expect("it passes");
    echo.send_to(b"and to the VM", from).expect("sent");
    client.recv(&mut bytes).expect("it passes");
    assert_eq!(*seen.lock().unwrap(), b"to the donorand to the VM");
}
