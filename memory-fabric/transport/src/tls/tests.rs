//! Both ends over a real socket: contents, back-pressure, and connections that are tampered with.

use super::*;
use fabric_identity::{ExpectedNode, Role, SharedCredentials};
use fabric_pki::{Authority, Validity};
use rustls::unbuffered::ConnectionState;
use std::net::{Shutdown, TcpListener};
use std::sync::Arc;
use std::time::Duration;

/// Timeout of every wait, far longer than any takes unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

struct Members {
    node: Arc<SharedCredentials>,
    vm: ExpectedNode,
    _files: tempfile::TempDir,
}

fn members() -> Members {
    let files = tempfile::tempdir().expect("a directory");
    let cluster = "prod".parse().expect("a name");
    let validity = Validity { days: 100 };
    let mut authority =
        Authority::create(&files.path().join("ca"), cluster, validity).expect("an authority");
    let mut member = |holder: &str, role| {
        let path = files.path().join(holder);
        let holder = holder.parse().expect("a holder");
        let issued = authority.issue(&holder, Validity { days: 10 }, &path);
        issued.expect("a certificate");
        SharedCredentials::load(&path, role).expect("credentials")
    };
    Members {
        node: member("node/alpha", Role::Node),
        vm: ExpectedNode {
            credentials: member("vm/web", Role::Vm),
            name: "alpha".parse().expect("a name"),
        },
        _files: files,
    }
}

/// Both ends of a connection, and a copy of the client's socket.
pub(crate) fn pair() -> (TlsStream, TlsStream, TcpStream) {
    let members = members();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let raw = socket.try_clone().expect("a descriptor");
    let (accepted, _) = listener.accept().expect("a client");
    let (server, client) = std::thread::scope(|scope| {
        let server = scope.spawn(|| TlsStream::accept(accepted, &members.node));
        let client = TlsStream::connect(socket, &members.vm);
        (server.join().expect("it does not panic"), client)
    });
    (server.expect("a client"), client.expect("a server"), raw)
}

fn deadline() -> Option<Instant> {
    Some(Instant::now() + PATIENCE)
}

fn byte(index: usize) -> u8 {
    u8::try_from(index * 7 % 251).expect("small")
}

/// Reads once there is something, or the connection is over.
fn read(stream: &mut TlsStream, target: &mut [u8]) -> io::Result<usize> {
    let until = Instant::now() + PATIENCE;
    loop {
        match stream.read(target) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                assert!(Instant::now() < until, "nothing came");
                stream.wait(false, Some(until))?;
            }
            other => return other,
        }
    }
}

#[test]
fn both_ends_know_each_other() {
    let (server, client, _) = pair();
    let of = |stream: &TlsStream| stream.peer().subject.to_string();
    assert_eq!(of(&server), "spiffe://prod/ssi-hv/vm/web");
    assert_eq!(of(&client), "spiffe://prod/ssi-hv/node/alpha");
}

#[test]
fn contents_arrive_whole_whatever_the_sizes_of_reads_and_writes() {
    const BYTES: usize = 3 << 20;
    let (mut server, mut client, _) = pair();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let bytes: Vec<u8> = (0..BYTES).map(byte).collect();
            let mut sent = 0;
            let mut turn = 0;
            while sent < BYTES {
                turn += 1;
                let rest = &bytes[sent..];
                // Headers and pages, long runs, and single parts.
                let (first, second) = match turn % 3 {
                    0 => (40, 4096),
                    1 => (0, 200_000),
                    _ => (1, 70_000),
                };
                let first = &rest[..rest.len().min(first)];
                let second = &rest[first.len()..rest.len().min(first.len() + second)];
                match server.write_vectored(&[IoSlice::new(first), IoSlice::new(second)]) {
                    Ok(count) => sent += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        server.wait(true, deadline()).expect("room");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            while server.is_blocked() {
                server.wait(true, deadline()).expect("room");
                server.poll_io().expect("a connection");
            }
        });
        let mut target = vec![0; 300_000];
        let mut received = 0;
        let mut turn = 0;
        loop {
            turn += 1;
            let size = [1, 40, 4096, 4136, 20_000, 300_000][turn % 6];
            let count = read(&mut client, &mut target[..size]).expect("contents");
            if count == 0 {
                break;
            }
            for (index, found) in target[..count].iter().enumerate() {
                assert_eq!(*found, byte(received + index), "byte {}", received + index);
            }
            received += count;
        }
        // The end came with a `close_notify`.
        assert_eq!(received, BYTES);
    });
}

#[test]
fn a_connection_that_is_cut_is_not_taken_for_one_that_was_closed() {
    let (mut server, client, raw) = pair();
    raw.shutdown(Shutdown::Write).expect("a socket");
    let error = read(&mut server, &mut [0; 10]).expect_err("cut");
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    drop(client);

    let (mut server, client, _raw) = pair();
    drop(client);
    assert_eq!(read(&mut server, &mut [0; 10]).expect("closed"), 0);
}

#[test]
fn what_a_third_party_inserts_ends_the_connection() {
    let (mut server, mut client, mut raw) = pair();
    client
        .write_vectored(&[IoSlice::new(b"before")])
        .expect("room");
    let mut target = [0; 10];
    assert_eq!(read(&mut server, &mut target).expect("contents"), 6);
    // A record of application data (RFC 8446, section 5.1) with arbitrary contents.
    let mut record = vec![23, 3, 3, 0, 40];
    record.extend([9; 40]);
    raw.write_all(&record).expect("sent");
    let error = read(&mut server, &mut target).expect_err("forged");
    assert!(error.to_string().contains("TLS failed"), "{error}");
    // The other end is told so.
    let error = read(&mut client, &mut target).expect_err("an alert");
    assert!(error.to_string().contains("BadRecordMac"), "{error}");
}

#[test]
fn a_peer_that_sends_what_nobody_asked_for_does_not_keep_a_thread_awake() {
    let (mut server, mut client, _) = pair();
    server
        .write_vectored(&[IoSlice::new(&[1; 100])])
        .expect("room");
    assert_eq!(read(&mut client, &mut [0; 60]).expect("contents"), 60);
    assert!(client.is_ready());
    let error = client.poll_io().expect_err("40 bytes are left");
    assert!(error.to_string().contains("more than was asked"), "{error}");
    assert!(!client.is_ready());
}

/// Sends so many new keys, and bytes after them.
fn send_keys(server: &mut TlsStream, keys: usize, bytes: &[u8]) {
    for _ in 0..keys {
        let Session::Server(connection) = &mut server.session else {
            panic!("a client");
        };
        match connection.process_tls_records(&mut []).state {
            Ok(ConnectionState::WriteTraffic(traffic)) => {
                traffic.refresh_traffic_keys().expect("a new key");
            }
            other => panic!("{other:?}"),
        }
        server.encrypt(Then::Nothing).expect("room");
    }
    server.flush().expect("a connection");
    let sent = server.write_vectored(&[IoSlice::new(bytes)]);
    assert_eq!(sent.expect("room"), bytes.len());
}

#[test]
fn a_peer_that_sends_records_without_contents_does_not_hold_a_thread() {
    let (mut server, mut client, _) = pair();
    // Now and then one does.
    for _ in 0..40 {
        send_keys(&mut server, 1, b"bytes");
        assert_eq!(read(&mut client, &mut [0; 10]).expect("contents"), 5);
    }
    // All in one packet.
    send_keys(&mut server, 30, b"");
    let error = read(&mut client, &mut [0; 10]).expect_err("it sends keys");
    assert!(error.to_string().contains("without contents"), "{error}");
    let error = client.read(&mut [0; 10]).expect_err("it is over");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
}

#[test]
fn both_ends_prefer_aes_with_128_bits() {
    let (server, client, _) = pair();
    for end in [&server, &client] {
        let suite = end.session.common().negotiated_cipher_suite();
        let suite = suite.expect("the handshake is over").suite();
        assert_eq!(suite, rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    }
    // A server takes what its client prefers.
    let first = fabric_identity::provider().cipher_suites[0].suite();
    assert_eq!(first, rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
}

#[test]
fn a_read_of_the_socket_that_is_left_waits() {
    let (server, _client, _) = pair();
    let mut socket = server.into_socket().expect("a descriptor");
    let time = Duration::from_millis(100);
    socket.set_read_timeout(Some(time)).expect("a socket");
    let started = Instant::now();
    let error = socket.read(&mut [0]).expect_err("nothing comes");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    assert!(started.elapsed() >= time, "{:?}", started.elapsed());
}
