//! Tests of the server against clients of every kind.

use std::io::{Read, Write};
use std::sync::atomic::AtomicU32;

use super::*;
use crate::control_socket::client::{ClientError, ask, try_connect};

const REQUESTS: &[Request<AtomicU32>] = &[
    Request {
        name: "count",
        answer: |count| Ok(count.fetch_add(1, Ordering::Relaxed).into()),
    },
    Request {
        name: "large",
        // More than the kernel keeps for a client that does not read.
        answer: |_| Ok("x".repeat(2 << 20).into()),
    },
    Request {
        name: "fail",
        answer: |_| Err("on purpose".into()),
    },
    Request {
        name: "panic",
        answer: |_| panic!("on purpose"),
    },
];

struct Running {
    _place: tempfile::TempDir,
    directory: Directory,
    path: PathBuf,
    server: Server,
}

fn start() -> Running {
    let place = tempfile::tempdir().expect("a temporary directory");
    let directory = Directory::create(&place.path().join("s")).expect("is made");
    let service = Service {
        subject: AtomicU32::new(0),
        requests: REQUESTS,
    };
    let name = "test".parse().expect("a name");
    let server = Server::start(&directory, Kind::Vm, Some(&name), service).expect("it listens");
    let path = directory.sockets().expect("is read")[0].path.clone();
    Running {
        _place: place,
        directory,
        path,
        server,
    }
}

/// The whole answer to these bytes.
fn said_to(running: &Running, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(&running.path).expect("it listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .expect("is set");
    stream.write_all(bytes).expect("is taken");
    let mut answer = Vec::new();
    // It may be reset instead of closed when more was sent than was read.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).expect("UTF-8")
}

#[test]
fn a_request_gets_its_answer_and_an_error_its_reason() {
    let running = start();
    assert_eq!(ask::<u32>(&running.path, "count").expect("an answer"), 0);
    assert_eq!(ask::<u32>(&running.path, "count").expect("an answer"), 1);
    for (request, said) in [
        ("fail", "on purpose"),
        ("panic", "answering failed"),
        ("other", "there are: count, large, fail, panic"),
    ] {
        match ask::<u32>(&running.path, request) {
            Err(ClientError::Refused(text)) => assert!(text.contains(said), "{text}"),
            other => panic!("{request}: {other:?}"),
        }
    }
    // Every thread has met a panic by now, or another one serves.
    for _ in 0..THREADS * 2 {
        let _ = ask::<u32>(&running.path, "panic");
    }
    assert_eq!(ask::<u32>(&running.path, "count").expect("an answer"), 2);
}

#[test]
fn what_is_no_request_is_refused_by_its_code() {
    let running = start();
    for (bytes, code) in [
        (&b"hello\n"[..], "malformed"),
        (b"\n", "malformed"),
        (b"\xff\xfe\x00\n", "malformed"),
        (b"{\"version\":1}\n", "malformed"),
        (
            b"{\"version\":1,\"request\":\"count\",\"more\":1}\n",
            "malformed",
        ),
        (b"{\"version\":2,\"request\":\"count\"}\n", "version"),
        (b"{\"version\":1,\"request\":\"x\"}\n", "unknown-request"),
        (&[b'['; REQUEST_BYTES_MAX], "too-long"),
    ] {
        let said = said_to(&running, bytes);
        let line: AnswerLine = serde_json::from_str(&said).expect("an answer");
        let found = serde_json::to_value(line.error.expect("an error").code).expect("JSON");
        assert_eq!(found, code, "{said}");
    }
    // Deeply nested input must not take the stack of its thread.
    let nested = format!("{{\"version\":1,\"request\":{}\n", "[".repeat(4000));
    assert!(said_to(&running, nested.as_bytes()).contains("malformed"));
    assert_eq!(ask::<u32>(&running.path, "count").expect("an answer"), 0);
}

#[test]
fn silent_slow_and_vanishing_clients_hold_nobody_up_for_long() {
    let running = start();
    // More than there are threads: some say nothing, some half a line, some do not read.
    let mut clients = Vec::new();
    for number in 0..6 {
        let mut stream = UnixStream::connect(&running.path).expect("it listens");
        match number % 3 {
            0 => {}
            1 => stream.write_all(b"{\"version\":").expect("is taken"),
            _ => stream
                .write_all(b"{\"version\":1,\"request\":\"large\"}\n")
                .expect("is taken"),
        }
        clients.push(stream);
    }
    for _ in 0..20 {
        drop(UnixStream::connect(&running.path).expect("it listens"));
    }
    let asked_at = Instant::now();
    assert_eq!(ask::<u32>(&running.path, "count").expect("an answer"), 0);
    let most = (REQUEST_TIME_MAX + ANSWER_TIME_MAX) * 3;
    assert!(asked_at.elapsed() < most, "{:?}", asked_at.elapsed());
    drop(clients);
}

#[test]
fn a_full_queue_keeps_nobody_from_looking_around() {
    let running = start();
    let mut clients = Vec::new();
    let full = loop {
        match try_connect(&running.path) {
            Ok(stream) => clients.push(stream),
            Err(error) => break error,
        }
        assert!(clients.len() < 100_000, "the queue has no end");
    };
    assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    let looked_at = Instant::now();
    assert_eq!(running.directory.sockets().expect("is read").len(), 1);
    assert!(looked_at.elapsed() < REQUEST_TIME_MAX);
    drop(clients);
    assert_eq!(ask::<u32>(&running.path, "count").expect("an answer"), 0);
}

#[test]
fn a_server_that_ends_takes_its_socket_along_and_waits_for_nobody() {
    let running = start();
    let silent = UnixStream::connect(&running.path).expect("it listens");
    let ended_at = Instant::now();
    drop(running.server);
    assert!(ended_at.elapsed() < REQUEST_TIME_MAX);
    assert!(!running.path.exists());
    assert!(running.directory.sockets().expect("is read").is_empty());
    drop(silent);
}
