//! The link to one donor: its lease, kept alive by renewals, and its connections, made again
//! when they break.
//!
//! One thread a donor does all that may take time: connecting, handshakes, renewals. The
//! pager's threads only ask for a connection and find it in their [`LinkPort`] later.

mod delegation;
mod keeper;
pub mod probe;
pub mod rdma;
mod stats;
mod waiting;

use crate::control::{CONTROL_TIMEOUT, ControlError, ControlStream};
use crate::homes::{LocalNode, NodeId};
use crate::stream::Carrier;
use crate::wire::{
    Ends, FrameKind, LeaseGrant, LeaseRequest, LeaseStatus, RENEWAL_INTERVAL_MAX, TrafficClass,
    lease_duration,
};
use crossbeam_channel::{Sender, bounded};
pub use delegation::{Delegated, Delegation};
pub(crate) use fabric_host::describe;
use fabric_identity::Fingerprint;
pub use fabric_transport::path;
pub use fabric_transport::port::{LinkPort, LinkRequest, Outage};
use keeper::{Keeper, Port};
use rdma::RdmaLinkConfig;
pub use stats::LinkStats;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;
pub use waiting::while_kept;

/// Round trips measured when a lease begins.
const ROUND_TRIPS_MEASURED: usize = 8;

/// Shortest time between renewals, however short the lease that a donor grants.
const RENEWAL_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Renewals in the time after which a lease ends.
const RENEWALS_PER_LEASE: u32 = 4;

/// Returns the time between renewals: enough in the lease's own time, and enough to notice in time that
/// the control connection was closed.
fn renewal_interval(grant: &LeaseGrant) -> Duration {
    let lease = Duration::from_millis(u64::from(grant.duration_ms));
    (lease / RENEWALS_PER_LEASE).clamp(RENEWAL_INTERVAL_MIN, RENEWAL_INTERVAL_MAX)
}

/// An event of a link.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum LinkEvent {
    /// The donor cannot be reached; attempts go on.
    Down {
        /// The donor.
        node: NodeId,
        /// Why.
        reason: String,
    },
    /// The donor is back with its memory.
    Up {
        /// The donor.
        node: NodeId,
    },
    /// The donor's memory is lost permanently.
    Lost {
        /// The donor.
        node: NodeId,
        /// Why.
        reason: String,
    },
}

impl LinkEvent {
    /// Returns the donor.
    #[must_use]
    pub fn node(&self) -> NodeId {
        match self {
            Self::Down { node, .. } | Self::Up { node } | Self::Lost { node, .. } => *node,
        }
    }
}

/// Takes events of a link, on the link's thread. Must return soon.
pub type LinkObserver = Arc<dyn Fn(LinkEvent) + Send + Sync>;

/// The configuration of a link.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// This node.
    pub local: LocalNode,
    /// The donor's number.
    pub node: NodeId,
    /// The donor's address.
    pub address: SocketAddr,
    /// The protocol of its connections.
    pub carrier: Carrier,
    /// The VM's name.
    pub vm: String,
    /// Bytes wanted.
    pub bytes: u64,
    /// Whether a smaller grant is accepted.
    pub or_less: bool,
    /// How long an unreachable donor may take to return.
    pub grace: Duration,
}

impl LinkConfig {
    fn ends(&self) -> Ends {
        Ends {
            local: self.local.clone(),
            donor: self.node,
        }
    }
}

/// A lease that is kept until [`Link::release`].
#[derive(Debug)]
pub struct Link {
    grant: LeaseGrant,
    address: SocketAddr,
    stats: Arc<LinkStats>,
    requests: Sender<LinkRequest>,
    /// Whether the thread was asked to end.
    stopping: bool,
    thread: Option<JoinHandle<LeaseStatus>>,
}

/// A lease without its thread yet. Released when dropped.
#[derive(Debug)]
pub struct Leased {
    config: LinkConfig,
    /// `None` when the link's thread has taken over.
    control: Option<ControlStream>,
    grant: LeaseGrant,
    round_trip: Duration,
}

impl Leased {
    /// Obtains a lease.
    ///
    /// # Errors
    ///
    /// When the donor is absent, refuses or breaks the protocol.
    pub fn obtain(config: LinkConfig) -> Result<Self, ControlError> {
        let mut control = ControlStream::connect_at_start(config.address, &config.carrier)?;
        let duration = lease_duration(config.grace);
        let request = LeaseRequest {
            vm: config.vm.clone(),
            bytes: config.bytes,
            or_less: config.or_less,
            duration_ms: u32::try_from(duration.as_millis()).unwrap_or(u32::MAX),
        };
        let grant: LeaseGrant = control.call(FrameKind::Lease, &request, FrameKind::Granted)?;
        grant
            .check(&request)
            .map_err(|error| ControlError::Grant(config.address, error))?;
        Self::measured(config, control, grant)
    }

    /// Takes over a lease that another process of the VM obtained, for which `config` is: from here on
    /// this one renews it.
    ///
    /// # Errors
    ///
    /// When the donor is absent, has no such lease or breaks the protocol.
    pub fn resume(config: LinkConfig, grant: LeaseGrant) -> Result<Self, ControlError> {
        let mut control = ControlStream::connect_at_start(config.address, &config.carrier)?;
        let _: LeaseStatus = control.call(FrameKind::Resume, &grant.token, FrameKind::Status)?;
        Self::measured(config, control, grant)
    }

    fn measured(
        config: LinkConfig,
        control: ControlStream,
        grant: LeaseGrant,
    ) -> Result<Self, ControlError> {
        let mut leased = Self {
            config,
            control: Some(control),
            grant,
            round_trip: Duration::MAX,
        };
        leased.measure()?;
        Ok(leased)
    }

    /// Lets the process with this certificate use the lease, which [`Delegation::refresh`] does.
    #[must_use]
    pub fn delegation(&self, to: Fingerprint) -> Delegation {
        Delegation::new(&self.config, self.grant.token, to)
    }

    /// Leaves the lease to a process that has [resumed](Self::resume) it, without ending it.
    pub fn hand_over(mut self) {
        drop(self.control.take());
    }

    /// Finds the shortest of some round trips: what the network takes when nothing is in its way.
    fn measure(&mut self) -> Result<(), ControlError> {
        for _ in 0..ROUND_TRIPS_MEASURED {
            let control = self.control.as_mut().expect("there until the link starts");
            let started = Instant::now();
            let _: LeaseStatus =
                control.call(FrameKind::Renew, &self.grant.token, FrameKind::Status)?;
            self.round_trip = self.round_trip.min(started.elapsed());
        }
        Ok(())
    }

    /// The shortest round trip of a small request that was seen.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// What was granted.
    #[must_use]
    pub fn grant(&self) -> &LeaseGrant {
        &self.grant
    }

    /// The donor's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.config.address
    }

    /// The donor's number.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.config.node
    }

    /// What its connections are made of.
    #[must_use]
    pub fn carrier(&self) -> &Carrier {
        &self.config.carrier
    }

    /// Where RDMA to it would lead.
    #[must_use]
    pub fn rdma_config(&self) -> RdmaLinkConfig {
        RdmaLinkConfig {
            ends: self.config.ends(),
            address: self.config.address,
            token: self.grant.token,
            bytes: self.grant.bytes,
            carrier: self.config.carrier.clone(),
            settings: Arc::default(),
        }
    }

    /// Starts the link's thread. For each class there is one port; its notifier is signalled when
    /// there is a new connection.
    ///
    /// # Errors
    ///
    /// When the first connections cannot be made, or a thread not started.
    pub fn start(
        mut self,
        classes: Vec<(TrafficClass, EventFd)>,
        observer: LinkObserver,
    ) -> Result<(Link, Vec<LinkPort>), ControlError> {
        let address = self.config.address;
        let system = |error| ControlError::Stream(address, error);
        // Each class may ask while the thread is busy, and once for stopping.
        let (requests, requested) = bounded(classes.len() + 2);
        let mut ports = Vec::new();
        let mut ends = Vec::new();
        for (class, wake) in classes {
            let (connections, receiver) = bounded(1);
            let completed = Arc::new(AtomicU64::new(0));
            ports.push(Port::new(class, connections, wake, Arc::clone(&completed)));
            let (between, requests) = (self.config.ends(), requests.clone());
            ends.push(LinkPort::new(class, between, requests, receiver, completed));
        }
        let grant = self.grant.clone();
        let control = self.control.take();
        let stats = Arc::new(LinkStats::new(self.round_trip));
        let keeper = Keeper::connect(
            self.config.clone(),
            grant.clone(),
            control,
            ports,
            observer,
            Arc::clone(&stats),
        )?;
        let thread = keeper.spawn(requested).map_err(system)?;
        Ok((
            Link {
                grant,
                address,
                stats,
                requests,
                stopping: false,
                thread: Some(thread),
            },
            ends,
        ))
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        if let Some(control) = &mut self.control {
            let status: Result<LeaseStatus, _> =
                control.call(FrameKind::Release, &self.grant.token, FrameKind::Status);
            if let Err(error) = status {
                tracing::debug!(node = %self.config.node, %error, "lease was not released");
            }
        }
    }
}

impl Link {
    /// Bytes lent.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.grant.bytes
    }

    /// The donor's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How the link is doing, also while it runs.
    #[must_use]
    pub fn stats(&self) -> &Arc<LinkStats> {
        &self.stats
    }

    /// Ends the lease. Returns the donor's own counters of it, as last reported. A donor that does
    /// not answer is tried again, for [`CONTROL_TIMEOUT`] on the connection and as long on others.
    pub fn release(mut self) -> LeaseStatus {
        self.stop()
    }

    /// Starts the end of the lease without waiting for the donor. [`release`](Self::release) waits.
    pub fn begin_release(&mut self) {
        if !self.stopping {
            self.stopping = true;
            let _ = self
                .requests
                .send_timeout(LinkRequest::Stop, CONTROL_TIMEOUT);
        }
    }

    fn stop(&mut self) -> LeaseStatus {
        self.begin_release();
        let thread = self.thread.take();
        thread
            .and_then(|thread| thread.join().ok())
            .unwrap_or_default()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop();
        }
    }
}
