//! The clients: connections as the links of VMs make them, some threads with many each.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fabric_transport::control::{ControlError, ControlStream};
use fabric_transport::stream::Carrier;
use fabric_wire::{FrameKind, LeaseGrant, LeaseRequest, LeaseStatus, RENEWAL_INTERVAL_MAX, Token};
use memory_fabric::stats::Histogram;
use ssi_hv::progress::Progress;

use super::LEASE;

/// Threads of clients: below the connections that a node lets wait from one address.
const THREADS: usize = 8;
const _: () = assert!(THREADS < memory_fabric::donor::WAITING_OF_ADDRESS_MAX);

/// Duration of the leases.
const LEASE_TIME: Duration = Duration::from_secs(60);
/// Renewals between two set-ups, so that set-ups continue where the host is too slow.
const RENEWALS_BETWEEN: usize = 64;

#[derive(Debug)]
struct Client {
    control: ControlStream,
    token: Token,
    renew_at: Instant,
}

/// Clients that are connected.
#[derive(Debug)]
pub(super) struct Load {
    /// Of each thread, the next to renew first.
    clients: Vec<VecDeque<Client>>,
    setups: Histogram,
    setups_time: Duration,
}

/// What renewals took.
#[derive(Debug)]
pub(super) struct Renewed {
    pub(super) times: Histogram,
    pub(super) failed: u64,
    pub(super) time: Duration,
}

impl Client {
    fn connect(node: SocketAddr, carrier: &Carrier) -> Result<Self, ControlError> {
        let mut control = ControlStream::connect_by(node, carrier)?;
        let request = LeaseRequest {
            vm: "bench".into(),
            bytes: LEASE,
            or_less: false,
            duration_ms: u32::try_from(LEASE_TIME.as_millis()).unwrap_or(u32::MAX),
        };
        let grant: LeaseGrant = control.call(FrameKind::Lease, &request, FrameKind::Granted)?;
        Ok(Self {
            control,
            token: grant.token,
            renew_at: Instant::now() + RENEWAL_INTERVAL_MAX,
        })
    }

    fn ask(&mut self, kind: FrameKind) -> Result<LeaseStatus, ControlError> {
        self.control.call(kind, &self.token, FrameKind::Status)
    }
}

impl Load {
    /// Connects clients, those of each thread one after the other.
    pub(super) fn connect(node: SocketAddr, carrier: &Carrier, count: u32) -> Result<Self> {
        let count = count as usize;
        let setups = Histogram::new();
        let progress = Progress::still("clients", count as u64, "connect");
        let connected = AtomicU64::new(0);
        let started = Instant::now();
        let connect = |share: usize| {
            let mut clients = VecDeque::with_capacity(share);
            for _ in 0..share {
                renew_due(&mut clients)?;
                let began = Instant::now();
                let client = Client::connect(node, carrier);
                let client = client.with_context(|| {
                    let open = connected.load(Ordering::Relaxed);
                    format!("client {} cannot connect", open + 1)
                })?;
                setups.record(began.elapsed());
                clients.push_back(client);
                progress.reach(connected.fetch_add(1, Ordering::Relaxed) + 1);
            }
            Ok(clients)
        };
        let clients = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| (count + thread) / THREADS)
                .map(|share| scope.spawn(move || connect(share)))
                .collect();
            let joined = threads
                .into_iter()
                .map(|one| one.join().expect("it does not panic"));
            joined.collect::<Result<Vec<_>>>()
        })?;
        drop(progress);
        Ok(Self {
            clients,
            setups,
            setups_time: started.elapsed(),
        })
    }

    pub(super) const fn setups(&self) -> &Histogram {
        &self.setups
    }

    pub(super) const fn setups_time(&self) -> Duration {
        self.setups_time
    }

    /// Has all clients renew, each in its interval.
    pub(super) fn renew_for(&mut self, time: Duration) -> Renewed {
        let (times, failed) = (Histogram::new(), AtomicU64::new(0));
        let started = Instant::now();
        let until = started + time;
        self.on_threads(|clients| {
            while let Some(mut client) = clients.pop_front() {
                if client.renew_at >= until {
                    clients.push_front(client);
                    thread::sleep(until.saturating_duration_since(Instant::now()));
                    return;
                }
                thread::sleep(client.renew_at.saturating_duration_since(Instant::now()));
                let asked = Instant::now();
                if asked >= until {
                    clients.push_front(client);
                    return;
                }
                match client.ask(FrameKind::Renew) {
                    Ok(_) => {
                        times.record(asked.elapsed());
                        client.renew_at = asked + RENEWAL_INTERVAL_MAX;
                        clients.push_back(client);
                    }
                    Err(error) => {
                        tracing::debug!(%error, "a renewal failed");
                        failed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        Renewed {
            times,
            failed: failed.into_inner(),
            time: started.elapsed(),
        }
    }

    /// Releases all leases. Returns how many failed.
    pub(super) fn release(&mut self) -> u64 {
        let failed = AtomicU64::new(0);
        self.on_threads(|clients| {
            for mut client in clients.drain(..) {
                if let Err(error) = client.ask(FrameKind::Release) {
                    tracing::debug!(%error, "a lease is not released");
                    failed.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        failed.into_inner()
    }

    fn on_threads(&mut self, run: impl Fn(&mut VecDeque<Client>) + Sync) {
        thread::scope(|scope| {
            for clients in &mut self.clients {
                let run = &run;
                scope.spawn(move || run(clients));
            }
        });
    }
}

/// Renews the leases that are due.
fn renew_due(clients: &mut VecDeque<Client>) -> Result<()> {
    for _ in 0..RENEWALS_BETWEEN {
        let now = Instant::now();
        if clients.front().is_none_or(|client| client.renew_at > now) {
            return Ok(());
        }
        let Some(mut client) = clients.pop_front() else {
            return Ok(());
        };
        client
            .ask(FrameKind::Renew)
            .context("a renewal failed while others connect")?;
        client.renew_at = now + RENEWAL_INTERVAL_MAX;
        clients.push_back(client);
    }
    Ok(())
}
