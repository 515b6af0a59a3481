//! Both ends over a real socket, with and without TLS.

use super::*;
use crate::tls::tests::pair;
use fabric_wire::LeaseStatus;
#[cfg(feature = "udp")]
use socket2::SockRef;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Timeout of every wait, far longer than any takes unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);
const TOKEN: Token = Token([7; 16]);

fn streams(is_tls: bool) -> [Stream; 2] {
    if is_tls {
        let (server, client, _raw) = pair();
        return [server, client].map(|stream| Stream::Tls(Box::new(stream)));
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (server, _) = listener.accept().expect("a client");
    [server, client].map(|socket| Stream::Tcp(socket.into()))
}

/// A node's end that rests, and the VM's.
fn resting(is_tls: bool) -> (Resting, ControlStream) {
    let peer = ([127, 0, 0, 1], 1).into();
    let [server, client] = streams(is_tls);
    let server = ControlStream::accepted(server, peer);
    assert!(server.is_quiet());
    let server = Resting::of(server).expect("quiet");
    (server, ControlStream::accepted(client, peer))
}

/// Receives until there is something.
fn hear(server: &mut Resting, buffers: &mut Buffers) -> Heard {
    let until = Instant::now() + PATIENCE;
    loop {
        match server.receive(&TOKEN, buffers).expect("a connection") {
            Received {
                heard: Heard::Nothing,
                ..
            } => assert!(Instant::now() < until, "nothing came"),
            Received { heard, .. } => return heard,
        }
        std::thread::yield_now();
    }
}

#[test]
fn renewals_are_answered_without_buffers_of_the_connection() {
    for is_tls in [false, true] {
        let (mut server, mut client) = resting(is_tls);
        let mut buffers = Buffers::default();
        let status = LeaseStatus {
            pages_read: 1,
            pages_written: 2,
            pages_dropped: u64::MAX,
        };
        for _ in 0..3 {
            client.send(FrameKind::Renew, &TOKEN).expect("sent");
            assert_eq!(hear(&mut server, &mut buffers), Heard::Renewal);
            assert!(!server.has_part());
            let sent = server.send(FrameKind::Status, &status, &mut buffers);
            sent.expect("accepted");
            let (frame, payload) = client.receive(PATIENCE).expect("an answer");
            assert_eq!(
                client
                    .decode::<LeaseStatus>(frame.kind, &payload)
                    .expect("one"),
                status
            );
        }
        if let Stream::Tls(stream) = &server.stream {
            assert_eq!(stream.kept_bytes(), 0);
        }
        drop(client);
        assert_eq!(hear(&mut server, &mut buffers), Heard::End);
    }
}

#[test]
fn a_request_in_parts_is_awaited_and_any_other_is_left_to_a_thread() {
    let other = Token([8; 16]);
    for is_tls in [false, true] {
        for (kind, token) in [
            (FrameKind::Release, TOKEN),
            (FrameKind::Lease, TOKEN),
            (FrameKind::Renew, other),
        ] {
            let (mut server, client) = resting(is_tls);
            let mut buffers = Buffers::default();
            let mut stream = client.into_stream();
            let payload = encode_message(&token);
            let header = Frame::new(kind, 0, 0, true).encode(&payload);
            let frame = [header.as_slice(), &payload].concat();
            let deadline = Instant::now() + PATIENCE;
            for part in frame.chunks(50) {
                stream.write_all_by(part, deadline).expect("sent");
            }
            while hear(&mut server, &mut buffers) == Heard::Part {
                assert!(server.has_part());
            }
            let mut woken = server.wake().expect("a connection");
            assert!(!woken.is_quiet(), "its request is not read yet");
            let (frame, payload) = woken.receive(PATIENCE).expect("the request");
            assert_eq!(frame.kind, kind);
            assert_eq!(payload, encode_message(&token));
            assert!(woken.is_quiet());
        }
    }
}

#[test]
fn two_renewals_at_once_and_bytes_of_no_frame_are_left_to_a_thread() {
    for is_tls in [false, true] {
        let (mut server, client) = resting(is_tls);
        let payload = encode_message(&TOKEN);
        let header = Frame::new(FrameKind::Renew, 0, 0, true).encode(&payload);
        let frame = [header.as_slice(), &payload].concat();
        let mut stream = client.into_stream();
        let deadline = Instant::now() + PATIENCE;
        let both = [frame.clone(), frame].concat();
        stream.write_all_by(&both, deadline).expect("sent");
        assert_eq!(hear(&mut server, &mut Buffers::default()), Heard::Other);
        let mut woken = server.wake().expect("a connection");
        for _ in 0..2 {
            let (frame, _) = woken.receive(PATIENCE).expect("a renewal");
            assert_eq!(frame.kind, FrameKind::Renew);
        }

        let (mut server, client) = resting(is_tls);
        let mut stream = client.into_stream();
        stream.write_all_by(&[9; 100], deadline).expect("sent");
        assert_eq!(hear(&mut server, &mut Buffers::default()), Heard::Other);
        let error = server.wake().expect("a connection").receive(PATIENCE);
        let error = error.expect_err("no frame");
        assert!(matches!(error, ControlError::Protocol(..)), "{error}");
    }
}

#[test]
fn a_record_that_is_too_long_is_left_to_a_thread() {
    let (mut server, client) = resting(true);
    let mut stream = client.into_stream();
    let deadline = Instant::now() + PATIENCE;
    stream.write_all_by(&[9; 9000], deadline).expect("sent");
    let mut buffers = Buffers::default();
    while hear(&mut server, &mut buffers) == Heard::Part {
        assert!(server.has_part());
    }
    let error = server.wake().expect("a connection").receive(PATIENCE);
    assert!(
        matches!(error, Err(ControlError::Protocol(..))),
        "{error:?}"
    );
}

#[test]
fn one_call_takes_a_limited_part_of_a_flood() {
    for is_tls in [false, true] {
        let (mut server, client) = resting(is_tls);
        let mut stream = client.into_stream();
        let deadline = Instant::now() + PATIENCE;
        for _ in 0..500 {
            stream.write_all_by(&[9], deadline).expect("sent");
        }
        let Received { bytes, .. } = server
            .receive(&TOKEN, &mut Buffers::default())
            .expect("a connection");
        assert!(bytes <= REST_INPUT_BYTES, "{bytes}");
    }
}

// The crate that sets the size of a buffer comes with this feature.
#[cfg(feature = "udp")]
#[test]
fn answers_that_are_not_read_end_the_connection_at_once() {
    /// The smallest buffers of Linux are far below.
    const ANSWERS_MAX: usize = 100_000;
    for is_tls in [false, true] {
        let (mut server, client) = resting(is_tls);
        let socket = server.socket().expect("TCP");
        SockRef::from(&socket)
            .set_send_buffer_size(1)
            .expect("a socket");
        let mut buffers = Buffers::default();
        let status = LeaseStatus::default();
        let started = Instant::now();
        let error = (0..ANSWERS_MAX)
            .find_map(|_| server.send(FrameKind::Status, &status, &mut buffers).err());
        let error = error.expect("no socket takes so many");
        assert!(
            matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::WriteZero
            ),
            "{error}"
        );
        assert!(started.elapsed() < PATIENCE);
        drop((server, client));
    }
}

#[test]
fn an_end_that_is_meant_shows_as_such() {
    let (server, mut client) = resting(true);
    drop(server);
    let error = client.receive(PATIENCE).expect_err("the end").to_string();
    let source = client.receive(PATIENCE);
    assert!(source.is_err(), "{error}");
    let mut stream = client.into_stream();
    // A `close_notify`, rather than a connection that was cut.
    assert_eq!(stream.read(&mut [0; 8]).expect("closed"), 0);
}
