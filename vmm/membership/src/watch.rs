//! A VM follows the changes of the cluster while it runs.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric_host::{Seldom, lock};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::client::Client;
use crate::either::{Either, either};
use crate::error::EtcdError;
use crate::etcd::Change;
use crate::list::{Found, list, runtime};
use crate::target::Endpoints;

/// Interval in which etcd is asked whether it is there, beside the stream of changes: a cut network
/// ends no stream.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// Shortest interval of lists because of a revision that the stream has not shown: others than nodes
/// may write to the store.
const LIST_INTERVAL: Duration = Duration::from_secs(30);
/// First and longest pause between attempts while etcd is away.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(500);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(8);
/// Interval of warnings.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// What is known of the cluster.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The nodes, as etcd had them last.
    pub found: Found,
    /// Whether etcd answers.
    pub is_connected: bool,
    /// Why it did not answer last.
    pub error: Option<String>,
    /// Since when that is so.
    pub since: Instant,
}

/// Follows the changes of a cluster until it is dropped.
#[derive(Debug)]
pub struct Watch {
    state: Arc<Mutex<Watched>>,
    stop: Option<watch::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts the thread. `notify` is called by it after each change of nodes.
    ///
    /// # Errors
    ///
    /// Fails when the host has no thread or descriptor left.
    pub fn start(
        endpoints: &Endpoints,
        found: Found,
        notify: impl Fn() + Send + 'static,
    ) -> Result<Self, EtcdError> {
        let runtime = runtime()?;
        let state = Arc::new(Mutex::new(Watched {
            found,
            is_connected: true,
            error: None,
            since: Instant::now(),
        }));
        let (stop, stopped) = watch::channel(());
        let mut follower = Follower {
            client: Client::new(endpoints),
            prefix: endpoints.target.nodes(),
            state: Arc::clone(&state),
            notify,
            away: Seldom::new(WARNING_INTERVAL),
            again: Seldom::new(WARNING_INTERVAL),
            lists: Seldom::new(LIST_INTERVAL),
            wrong: Seldom::new(WARNING_INTERVAL),
        };
        let follow = move || runtime.block_on(follower.run(stopped));
        let thread = std::thread::Builder::new().name("etcd".into());
        let thread = thread.spawn(follow);
        let thread = thread.map_err(|error| EtcdError::System(error.to_string()))?;
        Ok(Self {
            state,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Returns what is known now.
    #[must_use]
    pub fn now(&self) -> Watched {
        lock(&self.state).clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It has no result, and all that it does ends with the channel.
            let _ = thread.join();
        }
    }
}

struct Follower<N> {
    client: Client,
    prefix: String,
    state: Arc<Mutex<Watched>>,
    notify: N,
    /// Limits warnings that etcd is away, and lines that it answers again.
    away: Seldom,
    again: Seldom,
    /// Limits lists because of changes that the stream has not shown.
    lists: Seldom,
    wrong: Seldom,
}

impl<N: Fn()> Follower<N> {
    async fn run(&mut self, mut stopped: watch::Receiver<()>) {
        let mut pause = RETRY_PAUSE_MIN;
        loop {
            let error = match either(stopped.changed(), self.follow(&mut pause)).await {
                Either::First(_) => return,
                Either::Second(error) => error,
            };
            if let Some(error) = error {
                self.note_away(&error);
            }
            if timeout(pause, stopped.changed()).await.is_ok() {
                return;
            }
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    /// Lists the nodes, and follows their changes until that fails.
    async fn follow(&mut self, pause: &mut Duration) -> Option<EtcdError> {
        let listed = match list(&mut self.client).await {
            Ok(listed) => listed,
            Err(error) => return Some(error),
        };
        for problem in &listed.found.problems {
            self.note_problem(problem);
        }
        self.note_listed(listed.found);
        let watched = self.client.watch(&self.prefix, listed.revision + 1).await;
        let mut lines = match watched {
            Ok(lines) => lines,
            Err(error) => return Some(error),
        };
        *pause = RETRY_PAUSE_MIN;
        let mut seen = listed.revision;
        loop {
            match timeout(PROBE_INTERVAL, lines.changes()).await {
                Ok(Ok(Some(changes))) => {
                    let revisions = changes.iter().map(|(_, revision)| *revision);
                    seen = revisions.fold(seen, i64::max);
                    self.note_changes(&changes);
                }
                Ok(Ok(None)) => return None,
                Ok(Err(error)) => return Some(error),
                Err(_) => {
                    let start = self.prefix.clone();
                    let asked = self
                        .client
                        .range(&self.prefix, start.as_bytes(), 1, 0)
                        .await;
                    let newest = match asked {
                        Ok(page) => page.revision,
                        Err(error) => return Some(error),
                    };
                    // The server of the stream may be cut off from the others, or the network
                    // between may have dropped the stream: neither ends it.
                    let is_elsewhere = lines.endpoint() != self.client.endpoint();
                    if is_elsewhere || newest != seen && self.lists.pass(Instant::now()).is_some() {
                        return None;
                    }
                }
            }
        }
    }

    fn note_listed(&self, found: Found) {
        let mut state = lock(&self.state);
        if !state.is_connected {
            let now = Instant::now();
            state.since = now;
            if self.again.pass(now).is_some() {
                tracing::info!("etcd at {} answers again", self.client.endpoint());
            }
        }
        state.is_connected = true;
        state.error = None;
        let is_changed = state.found.members != found.members;
        state.found = found;
        drop(state);
        if is_changed {
            (self.notify)();
        }
    }

    fn note_changes(&self, changes: &[(Change, i64)]) {
        let mut state = lock(&self.state);
        let before = state.found.members.clone();
        let mut problems = Vec::new();
        for (change, _) in changes {
            match change {
                Change::Put(entry) => {
                    problems.extend(state.found.note(&self.prefix, &entry.key, &entry.value));
                }
                Change::Deleted(key) => state.found.remove(&self.prefix, key),
            }
        }
        let is_changed = state.found.members != before;
        drop(state);
        for problem in &problems {
            self.note_problem(problem);
        }
        if is_changed {
            (self.notify)();
        }
    }

    fn note_problem(&self, problem: &str) {
        if self.wrong.pass(Instant::now()).is_some() {
            tracing::warn!("an entry of etcd is left out: {problem}");
        }
    }

    fn note_away(&self, error: &EtcdError) {
        let mut state = lock(&self.state);
        if state.is_connected {
            state.since = Instant::now();
        }
        state.is_connected = false;
        state.error = Some(error.to_string());
        drop(state);
        if self.away.pass(Instant::now()).is_some() {
            tracing::warn!(
                "changes of the cluster are not known: {error}; the VM runs as before, and this is \
                 tried again"
            );
        }
    }
}
