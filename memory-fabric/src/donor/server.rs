//! The donor's server: accepts connections, grants and ends leases.

mod accept;
mod mailbox;
mod open;
mod rest;

use super::CpuLender;
use super::buffers::{self, Buffers};
use super::connection::Served;
use super::policy::{Accounts, Rule};
use super::pool::Pool;
use super::rdma::{self, RdmaConnection};
use crate::transport::rdma::resources::Usage;
use crate::transport::rdma::{DeviceChoice, RdmaError, Settings};
use crate::transport::udp::Fingerprint;
use accept::{accept, listen_on_tcp, listen_on_udp};
use fabric_host::Seldom;
use fabric_identity::{Holder, ReloadError, SharedCredentials};
use fabric_transport::tls::Peer;
use mailbox::Mailbox;
pub use open::Dropped;
use open::Shared;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// Interval of checks for expired leases.
const EXPIRY_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// When the check of the leases is so late, the process or its host was paused: all leases are
/// extended by that time, since renewals may have arrived that no thread has read.
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// Connections that the kernel keeps until they are accepted; it allows up to `net.core.somaxconn`,
/// which is 4096 by default.
const BACKLOG: i32 = 4096;

/// Configuration of a donor.
#[derive(Clone, Debug)]
pub struct DonorConfig {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Memory to lend, in bytes.
    pub memory_bytes: u64,
    /// Longest interval between renewals of a lease.
    pub lease_duration_max: Duration,
    /// How long a connection polls for its next request.
    pub spin: Duration,
    /// The RDMA device for VMs.
    pub rdma: DeviceChoice,
    /// What this node shows VMs. With it, every connection is under TLS, from a member of the cluster.
    pub credentials: Option<Arc<SharedCredentials>>,
    /// Who may use it, and how much. `None` allows every member of the cluster everything.
    pub allow: Option<Vec<Rule>>,
}

/// How a donor uses RDMA.
#[derive(Clone, Debug, Default)]
pub struct RdmaUse {
    /// Limit of connections. Each needs a queue pair of the device, and a VM has one for each class
    /// of traffic over RDMA.
    pub connections_max: Option<u32>,
    /// Limit of the bytes of leases that they access, all together, which are pinned without
    /// on-demand paging. `None` is what the donor lends.
    pub bytes_max: Option<u64>,
    /// What is set of connections; the device is that of [`DonorConfig::rdma`].
    pub settings: Settings,
}

/// Why a donor cannot start.
#[derive(Debug, thiserror::Error)]
pub enum DonorError {
    /// The address cannot be used.
    #[error("cannot listen on {0}; {remedy}", remedy = remedy(.1))]
    Listen(SocketAddr, #[source] io::Error),
    /// The named RDMA device is not available.
    #[error("cannot lend by RDMA; use --rdma-device none to lend by TCP alone")]
    Rdma(#[source] RdmaError),
    /// A thread cannot be created.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// Returns the remedy for an address on which listening fails.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "another process has that port: end it, or take another port",
        io::ErrorKind::AddrNotAvailable => {
            "this host has no such address: take one that `ip address` shows"
        }
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 take rights (CAP_NET_BIND_SERVICE): take a higher one"
        }
        _ => "take another address or port",
    }
}

/// A running donor. Dropping it ends every lease.
#[derive(Debug)]
pub struct Donor {
    shared: Arc<Shared>,
    address: SocketAddr,
    listener: TcpListener,
    fingerprint: Option<Fingerprint>,
    threads: Vec<JoinHandle<()>>,
}

/// What ended since credentials and rules were read again.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reloaded {
    /// Connections.
    pub connections: usize,
    /// Leases of members that no rule names any more.
    pub leases: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// What an eviction ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Evicted {
    /// Leases.
    pub leases: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Connections.
    pub connections: usize,
}

impl Donor {
    /// Starts a donor.
    ///
    /// # Errors
    ///
    /// See [`DonorError`].
    pub fn start(config: &DonorConfig) -> Result<Self, DonorError> {
        Self::lending_cpus(config, RdmaUse::default(), None)
    }

    /// Like [`start`](Self::start), and lends vCPUs as well, if there are some.
    ///
    /// # Errors
    ///
    /// See [`DonorError`].
    pub fn lending_cpus(
        config: &DonorConfig,
        rdma: RdmaUse,
        cpus: Option<Arc<dyn CpuLender>>,
    ) -> Result<Self, DonorError> {
        Self::with_buffers(config, rdma, cpus, buffers::PAGES_BYTES_MAX)
    }

    /// The same with another limit of the buffers of connections for pages, all together.
    ///
    /// # Errors
    ///
    /// See [`DonorError`].
    pub fn with_buffers(
        config: &DonorConfig,
        rdma: RdmaUse,
        cpus: Option<Arc<dyn CpuLender>>,
        pages_bytes_max: u64,
    ) -> Result<Self, DonorError> {
        config.rdma.check().map_err(DonorError::Rdma)?;
        let listen = |error| DonorError::Listen(config.listen, error);
        let listener = listen_on_tcp(config.listen).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        // Again, with a longer queue than that of the standard library: a burst of connections must
        // not make the kernel drop those of VMs.
        socket2::SockRef::from(&listener)
            .listen(BACKLOG)
            .map_err(listen)?;
        let accepted_from = listener.try_clone().map_err(listen)?;
        let served = Served {
            pool: Arc::new(Pool::under_policy(
                config.memory_bytes,
                config.lease_duration_max,
                config.allow.clone().map(Accounts::new),
            )),
            spin: config.spin,
            rdma: Settings {
                device: config.rdma.clone(),
                ..rdma.settings
            },
            rdma_connections: rdma::Connections::new(rdma.connections_max, rdma.bytes_max),
            buffers: Buffers::new(pages_bytes_max),
            credentials: config.credentials.clone(),
            cpus,
        };
        let credentials = config.credentials.clone();
        let ended = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(listen)?;
        let rest = Mailbox::new().map_err(listen)?;
        let longest = config.lease_duration_max;
        let shared = Shared::new(served, credentials, longest, ended, rest);
        let shared = Arc::new(shared);
        let mut threads = Vec::new();
        let accepting = Arc::clone(&shared);
        threads.push(thread("donor-accept", move || {
            accept(&accepting, &accepted_from)
        })?);
        let fingerprint = listen_on_udp(&shared, address, &mut threads)?;
        let resting = Arc::clone(&shared);
        let (sender, leaving) = rest::leaving();
        threads.push(thread("donor-rest", move || rest::serve(&resting, sender))?);
        let waking = Arc::clone(&shared);
        threads.push(thread("donor-wake", move || {
            rest::serve_leaving(&waking, &leaving);
        })?);
        let expiring = Arc::clone(&shared);
        threads.push(thread("donor-leases", move || expire(&expiring))?);
        Ok(Self {
            shared,
            address,
            listener,
            fingerprint,
            threads,
        })
    }

    /// Returns the address on which it listens, with the actual port for port 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns its fingerprint for VMs over UDP; `None` when it does not listen there, or shows
    /// credentials instead.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint
    }

    /// Returns its pool of memory and leases.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.shared.served.pool
    }

    /// Returns its RDMA connections, and their limit.
    #[must_use]
    pub fn rdma_connections(&self) -> (Usage, Vec<RdmaConnection>) {
        let connections = &self.shared.served.rdma_connections;
        (connections.usage(), connections.active())
    }

    /// Returns the bytes that the buffers of connections are charged with, and their limit.
    #[must_use]
    pub fn buffers(&self) -> Usage {
        self.shared.served.buffers.usage()
    }

    /// Returns the number of open connections. An ended one counts until its resources are
    /// released.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.connections()
    }

    /// Returns the number of connections that have shown no lease yet, and of those of leases.
    #[must_use]
    pub fn waiting_and_established(&self) -> (usize, usize) {
        self.shared.counts()
    }

    /// Returns the number of those of leases that have no thread of their own.
    #[must_use]
    pub fn resting(&self) -> usize {
        self.shared.resting()
    }

    /// Returns how many connections were dropped.
    #[must_use]
    pub fn dropped(&self) -> &Dropped {
        &self.shared.dropped
    }

    /// Returns the number of open connections of peers that have shown who they are.
    #[must_use]
    pub fn members(&self) -> usize {
        self.shared.members()
    }

    /// Breaks every connection, like a network failure. Leases continue, and VMs reconnect.
    pub fn break_connections(&self) {
        self.shared.break_all();
    }

    /// Reads the credentials again, for new connections, and replaces the rules of a donor that has
    /// some, if there are new ones. Connections of peers whose certificates are not confirmed any
    /// more are closed: they expired, or were revoked. Members that no rule names any more are
    /// evicted. Others keep what they have, also beyond a new limit, and get no more until they are
    /// below it. Returns `None` when there are no credentials.
    ///
    /// # Errors
    ///
    /// Fails when the new credentials cannot be used; the former ones, and the rules, stay.
    pub fn reload(&self, rules: Option<Vec<Rule>>) -> Result<Option<Reloaded>, ReloadError> {
        let Some(credentials) = &self.shared.credentials else {
            return Ok(None);
        };
        let credentials = credentials.reload()?;
        let connections = self.shared.end(|peer| {
            let why = credentials.confirm(&peer.chain).err()?;
            tracing::warn!(
                why,
                "a connection is closed: its certificate is not accepted any more"
            );
            Some(format!(
                "the node does not accept the VM's certificate any more, and ended its vCPUs: {why}"
            ))
        });
        let mut reloaded = Reloaded {
            connections,
            ..Reloaded::default()
        };
        if let (Some(rules), Some(accounts)) = (rules, self.pool().accounts()) {
            accounts.replace(rules);
            // After the rules: a lease that was granted under the former ones is in the table by
            // now.
            let unnamed = |holder: &Holder| !accounts.names(holder);
            (reloaded.leases, reloaded.bytes) = self.pool().end_of_members(unnamed);
            reloaded.connections += self.shared.end(|peer| {
                let member = &peer.subject.holder;
                unnamed(member).then(|| {
                    tracing::warn!(%member, "a connection is closed: no rule names its member any more");
                    format!("no rule of the node names {member} any more, so it ended its vCPUs")
                })
            });
        }
        Ok(Some(reloaded))
    }

    /// Ends the leases of a member, and closes its connections. The member may connect again, unless
    /// the policy or a list of revoked certificates keeps it out.
    pub fn evict(&self, holder: &Holder) -> Evicted {
        let (leases, bytes) = self.pool().end_of(holder);
        let connections = self.shared.end(|peer: &Peer| {
            let why = || format!("{holder} was evicted from the node, which ended its vCPUs");
            (peer.subject.holder == *holder).then(why)
        });
        tracing::warn!(%holder, leases, bytes, connections, "a member was evicted");
        Evicted {
            leases,
            bytes,
            connections,
        }
    }

    /// Returns the credentials.
    #[must_use]
    pub fn credentials(&self) -> Option<&Arc<SharedCredentials>> {
        self.shared.credentials.as_ref()
    }
}

impl Drop for Donor {
    fn drop(&mut self) {
        // SeqCst: before closing the listener wakes the accepting thread.
        self.shared.stopping.store(true, Ordering::SeqCst);
        if let Err(error) = socket2::SockRef::from(&self.listener).shutdown(Shutdown::Both) {
            tracing::warn!(%error, "the listener does not end");
        }
        self.shared.rest.ring();
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
        self.break_connections();
        self.shared.served.pool.end_all();
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, DonorError> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(run)
        .map_err(DonorError::Thread)
}

fn expire(shared: &Shared) {
    // A client can obtain short leases in a loop, and renew none.
    let notices = Seldom::notices();
    let mut looked = Instant::now();
    while !shared.stopping.load(Ordering::SeqCst) {
        let now = Instant::now();
        let late = now.saturating_duration_since(looked + EXPIRY_CHECK_INTERVAL);
        if late >= PAUSE_MIN {
            tracing::warn!(
                ?late,
                "the check of the leases is late: was this process or its host paused? All leases end later by that time"
            );
            shared.served.pool.postpone_ends(late);
        }
        for vm in shared.served.pool.end_expired(now) {
            match notices.pass(Instant::now()) {
                Some(unreported) => {
                    tracing::warn!(vm, unreported, "lease ended: it was not renewed in time");
                }
                None => tracing::debug!(vm, "lease ended: it was not renewed in time"),
            }
        }
        shared.served.pool.release_removed_devices();
        shared.close_expired();
        // What was done here is no pause, however much memory was unmapped.
        looked = Instant::now();
        std::thread::park_timeout(EXPIRY_CHECK_INTERVAL);
    }
}
