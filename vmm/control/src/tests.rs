//! The server with well-behaved and hostile clients.

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Uid;
use serde_json::Value;

use super::client::{ClientError, ask, call, try_connect};
use super::directory::{Directory, Kind};
use super::protocol::{
    BODY_BYTES_MAX, CONNECTION_TIME_MAX, CONNECTIONS_MAX, ErrorBody, HEAD_BYTES_MAX,
    REQUEST_TIME_MAX, Refusal, RefusalCode,
};
use super::route::{Method, Route, Service, Work, answer};
use super::server::Server;

/// Timeout of each step, far longer than on the most loaded host.
const LIMIT: Duration = Duration::from_secs(60);

/// The subject of requests.
struct Subject {
    count: AtomicU32,
    /// Signals that a change has started, which then waits for permission to finish.
    begun: mpsc::Sender<()>,
    leave: Mutex<mpsc::Receiver<()>>,
}

const ROUTES: &[Route<Subject>] = &[
    Route::look("/v1/count", |subject, _| {
        answer(200, &subject.count.fetch_add(1, Ordering::Relaxed))
    }),
    // More than the kernel buffers for a client that does not read.
    Route::look("/v1/large", |_, _| answer(200, &"x".repeat(2 << 20))),
    Route::look("/v1/fail", |_, _| {
        Err(Refusal::new(RefusalCode::Failed, "on purpose"))
    }),
    Route::look("/v1/panic", |_, _| panic!("on purpose")),
    Route {
        method: Method::Post,
        work: Work::Change,
        ..Route::look("/v1/change", |subject, _| {
            subject.begun.send(()).expect("the test waits");
            let leave = subject.leave.lock().expect("one at a time");
            leave.recv_timeout(LIMIT).expect("the test lets it go on");
            answer(200, &"changed")
        })
    },
    Route {
        method: Method::Put,
        work: Work::Change,
        takes_body: true,
        ..Route::look("/v1/echo", |_, body| {
            answer(200, &String::from_utf8_lossy(body))
        })
    },
    Route {
        method: Method::Post,
        work: Work::End,
        status: 202,
        ..Route::look("/v1/end", |_, _| answer(202, &"ends"))
    },
];

struct Running {
    _place: tempfile::TempDir,
    directory: Directory,
    path: PathBuf,
    server: Server,
    begun: mpsc::Receiver<()>,
    leave: mpsc::Sender<()>,
}

fn start() -> Running {
    let place = tempfile::tempdir().expect("a temporary directory");
    let directory = Directory::create(&place.path().join("s")).expect("is made");
    let (begun_sender, begun) = mpsc::channel();
    let (leave, leave_receiver) = mpsc::channel();
    let service = Service {
        subject: Subject {
            count: AtomicU32::new(0),
            begun: begun_sender,
            leave: Mutex::new(leave_receiver),
        },
        routes: ROUTES,
    };
    let name = "test".parse().expect("a name");
    let server = Server::start(&directory, Kind::Vm, Some(&name), service).expect("it listens");
    let path = directory.sockets().expect("is read")[0].path.clone();
    Running {
        _place: place,
        directory,
        path,
        server,
        begun,
        leave,
    }
}

fn connected(path: &std::path::Path) -> UnixStream {
    let stream = UnixStream::connect(path).expect("it listens");
    stream.set_read_timeout(Some(LIMIT)).expect("is set");
    stream
}

/// Sends these bytes and returns the complete answer.
fn said_to(running: &Running, bytes: &[u8]) -> String {
    let mut stream = connected(&running.path);
    stream.write_all(bytes).expect("is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

/// Returns the status code, and the code in the body if there is one.
fn refused(said: &str) -> (u16, String) {
    let status = said.split(' ').nth(1).and_then(|code| code.parse().ok());
    let body = said.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let code = serde_json::from_str::<Value>(body)
        .map(|body| body["error"]["code"].as_str().unwrap_or("none").to_owned());
    (
        status.unwrap_or_else(|| panic!("no status in {said:?}")),
        code.unwrap_or_default(),
    )
}

fn count(running: &Running) -> u32 {
    ask(&running.path, "/v1/count").expect("an answer")
}

#[test]
fn a_request_gets_its_answer_and_an_error_its_reason() {
    let running = start();
    assert_eq!((count(&running), count(&running)), (0, 1));
    for (path, code, said) in [
        ("/v1/fail", RefusalCode::Failed, "on purpose"),
        ("/v1/panic", RefusalCode::Failed, "answering failed"),
        (
            "/v1/other",
            RefusalCode::UnknownPath,
            "there are: GET /v1/count",
        ),
        ("/v1/change", RefusalCode::UnknownMethod, "takes POST"),
    ] {
        match ask::<u32>(&running.path, path) {
            Err(ClientError::Refused(refusal)) => {
                assert_eq!(refusal.code, code);
                assert!(refusal.text.contains(said), "{}", refusal.text);
            }
            other => panic!("{path}: {other:?}"),
        }
    }
    // Every thread has met a panic by now, or another one serves.
    for _ in 0..8 {
        let _ = ask::<u32>(&running.path, "/v1/panic");
    }
    assert_eq!(count(&running), 2);
    let large: String = ask(&running.path, "/v1/large").expect("an answer");
    assert_eq!(large.len(), 2 << 20);
    let echo: String = call(&running.path, Method::Put, "/v1/echo", Some(&7)).expect("an answer");
    assert_eq!(echo, "7");
    let mode = fs::metadata(&running.path).expect("is there").permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
}

#[test]
fn what_is_no_request_is_refused_by_its_code() {
    let running = start();
    let head = |line: &str, more: &str| format!("{line} HTTP/1.1\r\nhost: x\r\n{more}\r\n");
    let long = "x".repeat(2 * HEAD_BYTES_MAX);
    let body = "y".repeat(BODY_BYTES_MAX + 1);
    let many: String = (0..200).map(|n| format!("h{n}: v\r\n")).collect();
    for (bytes, status, code) in [
        ("hello\r\n\r\n".to_owned(), 400, ""),
        ("\0\u{1}\u{2}\r\n\r\n".to_owned(), 400, ""),
        (
            "{\"version\":1,\"request\":\"status\"}\n\r\n".to_owned(),
            400,
            "",
        ),
        (head("GET /v1/count", &format!("h: {long}\r\n")), 431, ""),
        (head("GET /v1/count", &many), 431, ""),
        (head(&format!("GET /{long}"), ""), 431, ""),
        (head("GET /", ""), 404, "unknown-path"),
        (head("GET /v2/count", ""), 404, "unknown-path"),
        (head("GET /v1/count/", ""), 404, "unknown-path"),
        (head("DELETE /v1/count", ""), 405, "unknown-method"),
        (head("BREW /v1/echo", ""), 405, "unknown-method"),
        (head("GET /v1/count?pretty", ""), 400, "malformed"),
        (
            head("GET /v1/count", "content-length: 2\r\n") + "{}",
            400,
            "malformed",
        ),
        (head("PUT /v1/echo", "content-length: -1\r\n"), 400, ""),
        (
            head("PUT /v1/echo", "content-length: 5000\r\n"),
            413,
            "too-large",
        ),
        (
            head("PUT /v1/echo", "content-length: 4097\r\n") + &body,
            413,
            "too-large",
        ),
        (
            head("PUT /v1/echo", "content-length: 999999999999999\r\n"),
            413,
            "too-large",
        ),
        (
            head("PUT /v1/echo", "transfer-encoding: chunked\r\n")
                + "1001\r\n"
                + &body
                + "\r\n0\r\n\r\n",
            413,
            "too-large",
        ),
        (
            head("PUT /v1/echo", "transfer-encoding: chunked\r\n") + "zz\r\n",
            400,
            "malformed",
        ),
        // Incomplete requests.
        ("GET /v1/count HTTP/1.1\r\nhost".to_owned(), 408, "slow"),
        (
            head("PUT /v1/echo", "content-length: 9\r\n") + "half",
            408,
            "slow",
        ),
    ] {
        let said = said_to(&running, bytes.as_bytes());
        assert_eq!(
            refused(&said),
            (status, code.to_owned()),
            "{bytes:.60} {said}"
        );
    }
    // Another version of HTTP cannot be answered in this one.
    assert_eq!(said_to(&running, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "");
    assert_eq!(count(&running), 0, "none of them was carried out");
    let said = said_to(&running, head("BREW /v1/echo", "").as_bytes());
    assert!(said.to_lowercase().contains("\r\nallow: put\r\n"), "{said}");
    let said = said_to(&running, head("HEAD /v1/count", "").as_bytes());
    assert!(
        said.starts_with("HTTP/1.1 200 ") && said.ends_with("\r\n\r\n"),
        "{said}"
    );
    let expecting = head(
        "PUT /v1/echo",
        "content-length: 1\r\nexpect: 100-continue\r\n",
    ) + "1";
    let said = said_to(&running, expecting.as_bytes());
    assert!(said.contains("HTTP/1.1 200 OK"), "{said}");
}

#[test]
fn a_client_that_has_said_all_may_close_its_half() {
    let running = start();
    let mut stream = connected(&running.path);
    stream
        .write_all(b"GET /v1/count HTTP/1.1\r\nhost: x\r\n\r\n")
        .expect("is taken");
    stream.shutdown(Shutdown::Write).expect("is shut");
    let mut said = String::new();
    stream.read_to_string(&mut said).expect("UTF-8");
    assert!(
        said.starts_with("HTTP/1.1 200 ") && said.ends_with("\r\n\r\n0"),
        "{said}"
    );
}

#[test]
fn fifty_clients_at_once_all_get_their_answers() {
    let running = start();
    let clients: Vec<_> = (0..50)
        .map(|_| {
            let path = running.path.clone();
            thread::spawn(move || {
                let mut seen = Vec::new();
                for _ in 0..20 {
                    seen.push(ask::<u32>(&path, "/v1/count").expect("an answer"));
                }
                seen
            })
        })
        .collect();
    let mut seen: Vec<u32> = clients
        .into_iter()
        .flat_map(|client| client.join().expect("no panic"))
        .collect();
    seen.sort_unstable();
    assert_eq!(
        seen,
        (0..1000).collect::<Vec<_>>(),
        "each is carried out once"
    );
}

#[test]
fn a_client_of_another_user_is_refused_although_permissions_let_it_in() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: becoming another user takes root");
        return;
    }
    let running = start();
    for path in running.path.ancestors().take(3) {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("is set");
    }
    let (path, nobody) = (running.path.clone(), Uid::from_raw(65_534));
    let client = thread::spawn(move || {
        // Of this thread alone.
        rustix::thread::set_thread_res_uid(Uid::ROOT, nobody, Uid::ROOT).expect("is root");
        let mut stream = connected(&path);
        let request = b"GET /v1/count HTTP/1.1\r\nhost: x\r\n\r\n";
        stream.write_all(request).expect("is taken");
        let mut said = String::new();
        stream.read_to_string(&mut said).expect("UTF-8");
        said
    });
    let said = client.join().expect("it is answered");
    assert_eq!(refused(&said), (403, "forbidden".to_owned()));
    assert!(
        said.contains("is for the user 0 and for root, and the client runs as 65534"),
        "{said}"
    );
    // It was not carried out.
    assert_eq!(count(&running), 0);
}

#[test]
fn silent_slow_and_vanishing_clients_hold_nobody_up_for_long() {
    let running = start();
    // More clients than connections: some send nothing, some half a request, some do not read.
    let mut clients = Vec::new();
    for number in 0..CONNECTIONS_MAX + 6 {
        let mut stream = connected(&running.path);
        let bytes: &[u8] = match number % 3 {
            0 => b"",
            1 => b"GET /v1/cou",
            _ => b"GET /v1/large HTTP/1.1\r\nhost: x\r\n\r\n",
        };
        stream.write_all(bytes).expect("is taken");
        clients.push(stream);
    }
    for _ in 0..20 {
        drop(connected(&running.path));
    }
    let asked_at = Instant::now();
    assert_eq!(count(&running), 0);
    assert!(
        asked_at.elapsed() < CONNECTION_TIME_MAX,
        "{:?}",
        asked_at.elapsed()
    );
    // Clients that do not read are disconnected as well.
    for mut client in clients {
        let mut nothing = [0; 4096];
        while client.read(&mut nothing).expect("it is closed in time") > 0 {}
    }
}

#[test]
fn one_change_at_a_time_and_others_are_told() {
    let running = start();
    let change = || {
        let path = running.path.clone();
        thread::spawn(move || call::<String>(&path, Method::Post, "/v1/change", None::<&()>))
    };
    let first = change();
    running.begun.recv_timeout(LIMIT).expect("it begins");
    for _ in 0..3 {
        let refused = call::<String>(&running.path, Method::Put, "/v1/echo", Some(&1));
        assert!(
            matches!(&refused, Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::Busy),
            "{refused:?}"
        );
    }
    // Read-only requests are not blocked, nor is ending the process.
    assert_eq!(count(&running), 0);
    let ends: String =
        call(&running.path, Method::Post, "/v1/end", None::<&()>).expect("an answer");
    assert_eq!(ends, "ends");
    running.leave.send(()).expect("it waits");
    assert_eq!(
        first.join().expect("no panic").expect("an answer"),
        "changed"
    );
    let echo: String = call(&running.path, Method::Put, "/v1/echo", Some(&1)).expect("its turn");
    assert_eq!(echo, "1");
}

#[test]
fn a_change_goes_on_without_its_client_and_then_another_may() {
    let running = start();
    let mut client = connected(&running.path);
    client
        .write_all(b"POST /v1/change HTTP/1.1\r\nhost: x\r\n\r\n")
        .expect("is taken");
    running.begun.recv_timeout(LIMIT).expect("it begins");
    drop(client);
    running.leave.send(()).expect("it waits");
    let deadline = Instant::now() + LIMIT;
    loop {
        match call::<String>(&running.path, Method::Put, "/v1/echo", Some(&1)) {
            Ok(_) => break,
            Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::Busy => {
                assert!(Instant::now() < deadline, "its turn does not end");
            }
            Err(error) => panic!("{error:?}"),
        }
    }
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
    assert_eq!(count(&running), 0);
}

#[test]
fn a_server_that_ends_takes_its_socket_along_and_waits_for_nobody() {
    let running = start();
    let silent = connected(&running.path);
    let mut unread = connected(&running.path);
    unread
        .write_all(b"GET /v1/large HTTP/1.1\r\nhost: x\r\n\r\n")
        .expect("is taken");
    let ended_at = Instant::now();
    drop(running.server);
    assert!(ended_at.elapsed() < REQUEST_TIME_MAX);
    assert!(!running.path.exists());
    assert!(running.directory.sockets().expect("is read").is_empty());
    drop((silent, unread));
}

#[test]
fn every_code_has_a_status_of_http_and_travels_as_json() {
    for code in RefusalCode::ALL {
        assert!((400..600).contains(&code.status()));
        let body = ErrorBody {
            error: Refusal::new(code, "why"),
        };
        let text = serde_json::to_string(&body).expect("is JSON");
        assert_eq!(
            serde_json::from_str::<ErrorBody>(&text).expect("is one"),
            body
        );
    }
}
