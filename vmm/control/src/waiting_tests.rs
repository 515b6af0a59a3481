//! Requests that wait for a change, in parallel with others.

use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::changes::{Changes, Seen};
use super::client::{ClientError, ask, call};
use super::directory::{Directory, Kind};
use super::protocol::{CHANGE_WAIT_TIME_MAX, RefusalCode, WAITS_MAX};
use super::route::{Method, Route, Service, Work, answer};
use super::server::Server;

/// Timeout of each step, far longer than on the most loaded host.
const LIMIT: Duration = Duration::from_secs(60);

struct Subject {
    changes: Changes,
    /// Notified by each request that is about to wait.
    asked: mpsc::SyncSender<()>,
}

const ROUTES: &[Route<Subject>] = &[
    Route {
        until: Some(|subject, query| {
            let next = subject.changes.after(Seen::parse(query)?);
            subject.asked.send(()).expect("the test waits");
            Ok(next)
        }),
        ..Route::look("/v1/state", |subject, _| {
            answer(200, &subject.changes.count())
        })
    },
    Route::look("/v1/other", |_, _| answer(200, &"other")),
    Route {
        method: Method::Post,
        work: Work::Change,
        ..Route::look("/v1/change", |subject, _| {
            subject.changes.notify();
            answer(200, &subject.changes.count())
        })
    },
];

struct Running {
    _place: tempfile::TempDir,
    path: PathBuf,
    server: Server,
    asked: mpsc::Receiver<()>,
}

type Waiting = JoinHandle<Result<u64, ClientError>>;

impl Running {
    fn start() -> Self {
        let place = tempfile::tempdir().expect("a temporary directory");
        let directory = Directory::create(&place.path().join("s")).expect("is made");
        let (sender, asked) = mpsc::sync_channel(2 * WAITS_MAX);
        let service = Service {
            subject: Subject {
                changes: Changes::default(),
                asked: sender,
            },
            routes: ROUTES,
        };
        let server = Server::start(&directory, Kind::Vm, None, service).expect("it listens");
        Self {
            path: directory.sockets().expect("is read")[0].path.clone(),
            _place: place,
            server,
            asked,
        }
    }

    /// Starts a request that waits, and returns when it is about to.
    fn wait(&self, query: &str) -> Waiting {
        let (path, query) = (self.path.clone(), format!("/v1/state?{query}"));
        let waiting = thread::spawn(move || ask(&path, &query));
        self.asked.recv_timeout(LIMIT).expect("it is asked");
        waiting
    }

    fn change(&self) -> u64 {
        call(&self.path, Method::Post, "/v1/change", None::<&()>).expect("an answer")
    }
}

fn answered(waiting: Waiting) -> u64 {
    waiting.join().expect("no panic").expect("an answer")
}

#[test]
fn waiting_requests_are_answered_by_a_change_and_hold_nobody_up() {
    let running = Running::start();
    let began = Instant::now();
    let waiting: Vec<_> = (0..WAITS_MAX).map(|_| running.wait("seen=0")).collect();
    for _ in 0..8 {
        let other: String = ask(&running.path, "/v1/other").expect("an answer");
        assert_eq!(other, "other");
        let now: u64 = ask(&running.path, "/v1/state").expect("an answer");
        assert_eq!(now, 0);
    }
    let early = waiting.iter().any(|request| request.is_finished());
    assert!(!early || began.elapsed() > CHANGE_WAIT_TIME_MAX);
    assert_eq!(running.change(), 1);
    let answers: Vec<_> = waiting.into_iter().map(answered).collect();
    assert_eq!(answers, [1; WAITS_MAX]);
    assert!(began.elapsed() < CHANGE_WAIT_TIME_MAX, "by the change");
    // A client that has seen this change waits for the next one.
    let waiting = running.wait("seen=1");
    assert_eq!(running.change(), 2);
    assert_eq!(answered(waiting), 2);
}

#[test]
fn who_has_seen_something_else_is_answered_at_once_and_others_when_their_time_is_over() {
    let running = Running::start();
    running.change();
    let began = Instant::now();
    assert_eq!(answered(running.wait("seen=0")), 1);
    assert_eq!(answered(running.wait("seen=7&wait_ms=8000")), 1);
    assert!(began.elapsed() < CHANGE_WAIT_TIME_MAX);
    let began = Instant::now();
    assert_eq!(answered(running.wait("seen=1&wait_ms=100")), 1);
    assert!(began.elapsed() >= Duration::from_millis(100));
}

#[test]
fn more_requests_than_may_wait_are_told_so() {
    let running = Running::start();
    let waiting: Vec<_> = (0..WAITS_MAX).map(|_| running.wait("seen=0")).collect();
    let refused = running.wait("seen=0").join().expect("no panic");
    assert!(
        matches!(&refused, Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::Busy),
        "{refused:?}"
    );
    running.change();
    waiting.into_iter().for_each(|request| {
        answered(request);
    });
    let waiting = running.wait("seen=1");
    running.change();
    assert_eq!(answered(waiting), 2);
}

#[test]
fn parameters_that_make_no_sense_or_belong_nowhere_are_refused() {
    let running = Running::start();
    for path in ["/v1/state?", "/v1/state?seen=x", "/v1/other?seen=0"] {
        let refused = ask::<u64>(&running.path, path);
        assert!(
            matches!(&refused, Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::Malformed),
            "{path}: {refused:?}"
        );
    }
}

#[test]
fn a_server_that_ends_answers_who_waits() {
    let running = Running::start();
    let waiting = running.wait("seen=0");
    let began = Instant::now();
    drop(running.server);
    assert_eq!(answered(waiting), 0, "as it is");
    assert!(began.elapsed() < CHANGE_WAIT_TIME_MAX);
}
