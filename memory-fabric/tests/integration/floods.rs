//! Members that flood the thread of resting connections: with records that hold nothing, or little,
//! or new keys.

use crate::resting::{many_rest, renew, rest};
use crate::tls::cluster::{Cluster, name};
use crate::tls::refusals::config;
use crate::tls::{ask, control_as, control_credentials, lease_as, lease_request};
use fabric_identity::{ExpectedNode, NAME};
use fabric_test_support::*;
use fabric_transport::stream::Carrier;
use fabric_wire::{Frame, FrameKind, HEADER_BYTES, encode_message};
use memory_fabric::donor::server::Donor;
use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ConnectionTrafficSecrets, StreamOwned};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

type Client = StreamOwned<ClientConnection, TcpStream>;

/// A member with a lease, whose connection rests.
fn member(cluster: &Cluster, donor: &Donor) -> Client {
    let before = donor.resting();
    let socket = TcpStream::connect(donor.address()).expect("a donor");
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    socket.set_write_timeout(Some(PATIENCE)).expect("a socket");
    let mut config = config(Some(cluster.odd(|_| {})));
    config.enable_secret_extraction = true;
    let name = ServerName::try_from(NAME).expect("a name");
    let client = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut stream = StreamOwned::new(client, socket);
    let payload = encode_message(&lease_request(4096));
    let header = Frame::new(FrameKind::Lease, 0, 0, true).encode(&payload);
    let request = [header.as_slice(), &payload].concat();
    stream.write_all(&request).expect("sent");
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).expect("an answer");
    let frame = Frame::decode(&header).expect("a frame");
    assert_eq!(frame.kind, FrameKind::Granted);
    stream
        .read_exact(&mut vec![0; frame.length])
        .expect("a grant");
    rest(donor, before + 1);
    stream
}

/// Records that a member sends by itself, without rustls.
struct Forge {
    key: LessSafeKey,
    iv: [u8; 12],
    next: u64,
}

impl Forge {
    fn of(client: Client) -> (Self, TcpStream) {
        let (connection, socket) = client.into_parts();
        let secrets = connection.dangerous_extract_secrets().expect("allowed");
        let (next, secrets) = secrets.tx;
        let (suite, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            _ => panic!("a suite of AES"),
        };
        let key = UnboundKey::new(suite, key.as_ref()).expect("a key");
        let iv = iv.as_ref().try_into().expect("12 bytes");
        let key = LessSafeKey::new(key);
        (Self { key, iv, next }, socket)
    }

    /// A record of application data with these contents (RFC 8446, section 5.2).
    fn record(&mut self, contents: &[u8]) -> Vec<u8> {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.next.to_be_bytes()) {
            *byte ^= number;
        }
        self.next += 1;
        let mut body = [contents, &[23]].concat();
        let length = u16::try_from(body.len() + 16).expect("short").to_be_bytes();
        let header = [23, 3, 3, length[0], length[1]];
        let nonce = Nonce::assume_unique_for_key(nonce);
        let sealed = self
            .key
            .seal_in_place_append_tag(nonce, Aad::from(header), &mut body);
        sealed.expect("sealed");
        [header.as_slice(), &body].concat()
    }
}

/// Has a member send what `flood` makes until it is cut off, while others renew. Checks that these
/// are served, and that the member does not rest any more.
fn survives(flood: impl FnOnce(Client, &AtomicBool) -> io::Error + Send) {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let mut others: Vec<_> = (0..8).map(|_| lease_as(&prod, &donor, "vm/web")).collect();
    rest(&donor, others.len());
    let hostile = member(&prod, &donor);
    let over = AtomicBool::new(false);
    let started = Instant::now();
    std::thread::scope(|scope| {
        let over = &over;
        let flood = scope.spawn(move || {
            let error = flood(hostile, over);
            over.store(true, Ordering::SeqCst);
            error
        });
        while !over.load(Ordering::SeqCst) {
            for (control, grant) in &mut others {
                let asked = Instant::now();
                renew(control, grant.token).expect("renewed");
                let took = asked.elapsed();
                assert!(took < Duration::from_secs(2), "{took:?}");
            }
            if started.elapsed() > PATIENCE {
                over.store(true, Ordering::SeqCst);
                panic!("the flood is not cut off");
            }
            // As VMs do, if more often.
            std::thread::sleep(Duration::from_millis(200));
        }
        let error = flood.join().expect("it does not panic");
        assert_ne!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    });
    for (control, grant) in &mut others {
        renew(control, grant.token).expect("renewed");
    }
    wait_until("the flood has no connection", || {
        (donor.resting(), donor.connections()) == (others.len(), others.len())
    });
}

/// Writes what `make` returns until the connection ends, or the test does.
fn pour(socket: &mut TcpStream, over: &AtomicBool, mut make: impl FnMut() -> Vec<u8>) -> io::Error {
    while !over.load(Ordering::SeqCst) {
        if let Err(error) = socket.write_all(&make()) {
            return error;
        }
    }
    io::ErrorKind::TimedOut.into()
}

#[test]
fn many_connections_under_tls_rest_and_renew() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(MIB);
    let carrier = Carrier::Tls(ExpectedNode {
        credentials: control_credentials(&prod, "vm/web"),
        name: name("alpha"),
    });
    let path = prod.directory_of("vm/web").join("cert.pem");
    let shown = fabric_identity::credentials::certificates(&path).expect("one");
    many_rest(&donor, &carrier, shown.iter().map(|one| one.len()).sum());
}

#[test]
fn empty_records_do_not_hold_the_thread() {
    survives(|client, over| {
        let (mut forge, mut socket) = Forge::of(client);
        pour(&mut socket, over, || {
            (0..1000).flat_map(|_| forge.record(&[])).collect()
        })
    });
}

#[test]
fn tiny_records_do_not_hold_the_thread() {
    survives(|client, over| {
        let (mut forge, mut socket) = Forge::of(client);
        // Parts of renewals of nothing.
        let header = Frame::new(FrameKind::Renew, 0, 0, true).encode(&[0; 16]);
        let mut bytes = header.into_iter().cycle();
        pour(&mut socket, over, || {
            let next = bytes.next().expect("endless");
            forge.record(&[next])
        })
    });
}

#[test]
fn new_keys_do_not_hold_the_thread() {
    survives(|mut client, over| {
        while !over.load(Ordering::SeqCst) {
            if let Err(error) = client.conn.refresh_traffic_keys() {
                return io::Error::other(error);
            }
            while client.conn.wants_write() {
                if let Err(error) = client.conn.write_tls(&mut client.sock) {
                    return error;
                }
            }
        }
        io::ErrorKind::TimedOut.into()
    });
}

#[test]
fn half_a_record_ends_its_connection_in_time() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (mut forge, mut socket) = Forge::of(member(&prod, &donor));
    let record = forge.record(&[0; 100]);
    let started = Instant::now();
    socket.write_all(&record[..60]).expect("sent");
    socket.read_to_end(&mut Vec::new()).expect("closed");
    let took = started.elapsed();
    assert!(took >= Duration::from_millis(4500), "{took:?}");
    assert!(took < Duration::from_secs(12), "{took:?}");
    wait_until("it has left", || donor.connections() == 0);
}

#[test]
fn a_member_that_is_evicted_loses_its_resting_connections() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (mut evicted, _) = lease_as(&prod, &donor, "vm/web");
    let (mut other, grant) = lease_as(&prod, &donor, "vm/db");
    rest(&donor, 2);
    let ended = donor.evict(&"vm/web".parse().expect("a holder"));
    assert_eq!((ended.leases, ended.connections), (1, 1));
    assert!(evicted.receive(PATIENCE).is_err());
    wait_until("it has left", || donor.connections() == 1);
    renew(&mut other, grant.token).expect("renewed");
    // It may connect again.
    ask(&mut control_as(&prod, &donor, "vm/web"), 4096).expect("granted");
}
