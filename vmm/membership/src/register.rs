//! A node registers, and stays registered while it runs.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric_host::Seldom;
use fabric_identity::Name;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::client::{ATTEMPT_TIME_MAX, Client};
use crate::either::{Either, either};
use crate::error::EtcdError;
use crate::etcd::{Condition, Entry};
use crate::list::runtime;
use crate::member::Member;
use crate::target::Endpoints;

/// Time for which a node that has vanished is still listed.
pub const LEASE_SECONDS: u32 = 10;
/// Interval of renewals: two may fail.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);
/// Shortest interval of updates, and pause while nothing is to be done.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest pause between attempts while etcd is away.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(8);
/// Interval of warnings while etcd is away.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Keeps a node registered until it is dropped. Failures are logged, and tried again.
#[derive(Debug)]
pub struct Registration {
    stop: Option<watch::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Registration {
    /// Starts the thread that registers `name`. What `describe` returns is compared with what is
    /// registered once a second.
    ///
    /// # Errors
    ///
    /// Fails when the host has no thread or descriptor left.
    pub fn start(
        endpoints: &Endpoints,
        name: &Name,
        describe: impl Fn() -> Member + Send + 'static,
    ) -> Result<Self, EtcdError> {
        let runtime = runtime()?;
        let (stop, stopped) = watch::channel(());
        let mut node = Node {
            client: Client::new(endpoints),
            key: format!("{}{name}", endpoints.target.nodes()),
            name: name.clone(),
            lease: None,
            written: None,
            warnings: Seldom::new(WARNING_INTERVAL),
            is_away: false,
        };
        let keep = move || runtime.block_on(node.keep(&describe, stopped));
        let thread = std::thread::Builder::new().name("etcd".into()).spawn(keep);
        let thread = thread.map_err(|error| EtcdError::System(error.to_string()))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Registration {
    /// Removes the entry, if etcd answers; otherwise its lease ends.
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It has no result, and each of its waits a deadline.
            let _ = thread.join();
        }
    }
}

/// A lease of etcd, and when it was renewed last.
#[derive(Clone, Copy, Debug)]
struct Lease {
    id: i64,
    renewed: Instant,
}

struct Node {
    client: Client,
    key: String,
    name: Name,
    lease: Option<Lease>,
    /// What is registered under the lease.
    written: Option<Member>,
    warnings: Seldom,
    is_away: bool,
}

impl Node {
    async fn keep(&mut self, describe: &impl Fn() -> Member, mut stopped: watch::Receiver<()>) {
        let mut pause = UPDATE_INTERVAL;
        loop {
            let step = match either(stopped.changed(), self.step(describe)).await {
                Either::First(_) => break,
                Either::Second(step) => step,
            };
            match step {
                Ok(()) => {
                    pause = UPDATE_INTERVAL;
                    if std::mem::take(&mut self.is_away) {
                        tracing::info!("etcd at {} answers again", self.client.endpoint());
                    }
                }
                Err(error) => {
                    self.is_away = true;
                    self.warn(&error);
                    pause = (pause * 2).min(RETRY_PAUSE_MAX);
                }
            }
            // The end of the channel is a change as well.
            if timeout(pause, stopped.changed()).await.is_ok() {
                break;
            }
        }
        if let Some(lease) = self.lease {
            // Without an answer the lease ends by itself.
            let revoked = timeout(ATTEMPT_TIME_MAX, self.client.revoke(lease.id)).await;
            if !matches!(revoked, Ok(Ok(()))) {
                tracing::info!(
                    "etcd was not told of the end; the entry of {} expires",
                    self.name
                );
            }
        }
    }

    fn warn(&self, error: &EtcdError) {
        if self.warnings.pass(Instant::now()).is_some() {
            tracing::warn!(
                "this node is not registered as {}, and new VMs do not find it: {error}; it serves \
                 its VMs as before, and tries again",
                self.name
            );
        }
    }

    /// Does what is due: obtains or renews the lease, and writes the entry.
    async fn step(&mut self, describe: &impl Fn() -> Member) -> Result<(), EtcdError> {
        if let Some(lease) = self.lease
            && lease.renewed.elapsed() >= RENEW_INTERVAL
        {
            let asked = Instant::now();
            if self.client.keep_alive(lease.id).await? {
                self.lease = Some(Lease {
                    renewed: asked,
                    ..lease
                });
            } else {
                self.lose_lease();
            }
        }
        let lease = match self.lease {
            Some(lease) => lease.id,
            None => {
                let renewed = Instant::now();
                let id = self.client.grant(LEASE_SECONDS).await?;
                self.lease = Some(Lease { id, renewed });
                id
            }
        };
        let member = describe();
        match &self.written {
            Some(written) if *written == member => Ok(()),
            Some(_) => self.update(lease, member).await,
            None => self.register(lease, member).await,
        }
    }

    fn lose_lease(&mut self) {
        self.lease = None;
        self.written = None;
    }

    async fn update(&mut self, lease: i64, member: Member) -> Result<(), EtcdError> {
        let condition = Condition::OfLease(lease);
        let json = member.to_json();
        let kept = self
            .client
            .put_if(condition, &self.key, &json, lease)
            .await?;
        match kept {
            None => self.written = Some(member),
            // It has expired, or was removed: registered anew.
            Some(_) => self.lose_lease(),
        }
        Ok(())
    }

    async fn register(&mut self, lease: i64, member: Member) -> Result<(), EtcdError> {
        let json = member.to_json();
        let mut condition = Condition::Absent;
        // A second attempt replaces what was found by the first.
        for _ in 0..2 {
            let kept = self.client.put_if(condition, &self.key, &json, lease).await;
            let found = match kept {
                Ok(None) => {
                    tracing::info!("registered as {} in {}", self.name, self.client.endpoints());
                    self.written = Some(member);
                    return Ok(());
                }
                // The lease may be what is refused.
                Err(error @ EtcdError::Refused { .. }) => {
                    self.lose_lease();
                    return Err(error);
                }
                Err(error) => return Err(error),
                Ok(Some(found)) => found,
            };
            condition = match found {
                None => Condition::Absent,
                Some(entry) if self.may_replace(&entry, lease, &member) => {
                    Condition::ChangedAt(entry.changed_at)
                }
                Some(entry) => return Err(self.taken(&entry)),
            };
        }
        // Others write the key as well; the next attempt looks again.
        Ok(())
    }

    /// Whether an entry is this node's: its answer was lost, or it is that of its earlier process.
    fn may_replace(&self, entry: &Entry, lease: i64, member: &Member) -> bool {
        let other = Member::read(self.name.as_str().as_bytes(), &entry.value);
        entry.lease == lease || other.is_ok_and(|(_, other)| other.address == member.address)
    }

    fn taken(&self, entry: &Entry) -> EtcdError {
        let other = Member::read(self.name.as_str().as_bytes(), &entry.value);
        EtcdError::NameTaken {
            name: self.name.to_string(),
            other: other.map_or_else(
                |problem| format!("an address that is not known: {problem}"),
                |(_, other)| other.address,
            ),
        }
    }
}
