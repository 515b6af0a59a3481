//! The RDMA connections to one donor: made beside its link, watched, and made again.
//!
//! One thread a donor does what may take time, verbs above all: SoftRoCE is known to hang in
//! them. So neither the lease nor the pager waits for it; while there is no lane, pages travel
//! by TCP.

mod connect;
mod keeper;

use crate::control::{CONTROL_TIMEOUT, ControlError};
use crate::stream::Carrier;
use crate::transport::PageTransport;
pub use crate::transport::rdma::port::{LanePort, RdmaStats};
use crate::transport::rdma::port::{LaneRequest, LaneSender};
use crate::transport::rdma::{RdmaError, RdmaTransport, Settings};
use crate::transport::tcp::TcpTransport;
use crate::wire::{Ends, Token, TrafficClass};
pub use connect::Reader;
pub(super) use connect::connect;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use fabric_host::{ThreadClass, begin_class};
use keeper::{End, LaneKeeper};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// How long they may take together: more than the adapter takes to give up one.
const TRIAL_TIME_MAX: Duration = Duration::from_secs(3);
/// The least speed, bytes a second, at which a donor is expected to make and pin its memory.
const REGISTERING_SPEED_MIN: u64 = 128 << 20;
/// Longest wait for the end of the thread: one that hangs in a verb is detached.
const END_TIME_MAX: Duration = Duration::from_secs(2);

/// Why there is no RDMA connection to a donor.
#[derive(Debug, thiserror::Error)]
pub enum RdmaLinkError {
    /// This host's part failed.
    #[error("no RDMA to donor {address}; use --transport tcp, or auto")]
    Here {
        /// The donor.
        address: SocketAddr,
        /// Why.
        #[source]
        source: RdmaError,
    },
    /// The donor's part failed, or the way to it.
    #[error("no RDMA with donor {address}; use --transport tcp, or auto")]
    Donor {
        /// The donor.
        address: SocketAddr,
        /// Why.
        #[source]
        source: ControlError,
    },
    /// A connection was made, and READs on it failed or took too long.
    #[error("no RDMA to donor {address}; use --transport tcp, or auto: {why}")]
    Tried {
        /// The donor.
        address: SocketAddr,
        /// What came of it.
        why: String,
    },
    /// Nothing came of it in time.
    #[error(
        "no RDMA to donor {address} within {} s: a verb or the donor hangs; use --transport tcp",
        .after.as_secs()
    )]
    Late {
        /// The donor.
        address: SocketAddr,
        /// For how long it was tried.
        after: Duration,
    },
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

impl RdmaLinkError {
    /// Whether this host has nothing to do with RDMA.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        matches!(
            self,
            Self::Here {
                source: RdmaError::LeftOut | RdmaError::NoLibrary | RdmaError::NoDevice,
                ..
            }
        )
    }
}

/// Where RDMA is to lead.
#[derive(Clone, Debug)]
pub struct RdmaLinkConfig {
    /// This node and the donor.
    pub ends: Ends,
    /// The donor's address.
    pub address: SocketAddr,
    /// The lease.
    pub token: Token,
    /// Its size.
    pub bytes: u64,
    /// What the donor's other connections are made of. RDMA is set up over TCP alone.
    pub carrier: Carrier,
    /// What is set of the connections.
    pub settings: Arc<Settings>,
}

/// The RDMA connections to one donor. Dropping it ends them.
#[derive(Debug)]
pub struct RdmaLink {
    requests: Sender<LaneRequest>,
    ended: Receiver<()>,
    stats: Arc<RdmaStats>,
    round_trip: Duration,
}

impl RdmaLink {
    /// Connects, for each class, and gives the ends; its notifier is signalled when there is a new
    /// lane, or one has to be given back.
    ///
    /// # Errors
    ///
    /// See [`RdmaLinkError`].
    pub(crate) fn start(
        config: RdmaLinkConfig,
        classes: Vec<(TrafficClass, EventFd)>,
    ) -> Result<(Self, Vec<LanePort>), RdmaLinkError> {
        let stats = Arc::new(RdmaStats::default());
        // At most one lane in use and one waiting for each class, and one stop request.
        let (requests, requested) = bounded(2 * classes.len() + 1);
        let (ended_by, ended) = bounded(1);
        let (first, came) = bounded(1);
        let mut ports = Vec::new();
        let mut ends = Vec::new();
        for (class, wake) in classes {
            let (lanes, receiver) = bounded(1);
            let stats = Arc::clone(&stats);
            ports.push(LanePort::new(class, receiver, requests.clone(), stats));
            ends.push(End::new(class, wake, lanes));
        }
        let address = config.address;
        let most = registering_time(config.bytes) + TRIAL_TIME_MAX * 2 + CONTROL_TIMEOUT;
        let after = most * u32::try_from(ends.len()).unwrap_or(1).max(1);
        let name = format!("rdma-{}", config.ends.donor.0);
        let keeper = LaneKeeper::new(config, ends, Arc::clone(&stats));
        std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                begin_class(ThreadClass::Link);
                keeper.run(&first, &requested);
                // The waiter may have timed out.
                let _ = ended_by.send(());
            })
            .map_err(RdmaLinkError::Thread)?;
        let round_trip = came
            .recv_timeout(after)
            .unwrap_or(Err(RdmaLinkError::Late { address, after }))?;
        let link = Self {
            requests,
            ended,
            stats,
            round_trip,
        };
        Ok((link, ports))
    }

    /// Connects for one class and gives the transport, with `tcp` beside it, as the pager has it.
    /// For measuring and for tests: no notifier is signalled for a new lane, so poll for it.
    ///
    /// # Errors
    ///
    /// See [`RdmaLinkError`].
    pub fn transport(
        config: RdmaLinkConfig,
        class: TrafficClass,
        tcp: TcpTransport,
    ) -> Result<(Self, Box<dyn PageTransport>), RdmaLinkError> {
        let notifier = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(RdmaLinkError::Thread)?;
        let (link, mut ports) = Self::start(config, vec![(class, notifier)])?;
        let port = ports.pop().expect("one for the class");
        Ok((link, Box::new(RdmaTransport::new(port, tcp))))
    }

    /// Its numbers, also while it runs.
    pub fn stats(&self) -> &Arc<RdmaStats> {
        &self.stats
    }

    /// The shortest of some READs of a page, at the start.
    pub(crate) fn round_trip(&self) -> Duration {
        self.round_trip
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        let sent = self.requests.send_timeout(LaneRequest::Stop, END_TIME_MAX);
        if sent.is_ok() && self.ended.recv_timeout(END_TIME_MAX) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("an RDMA connection does not end; its thread is left behind");
        }
    }
}

/// How long a donor may take for registering a lease.
pub(crate) fn registering_time(bytes: u64) -> Duration {
    CONTROL_TIMEOUT + Duration::from_secs(bytes / REGISTERING_SPEED_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::homes::NodeId;

    #[test]
    fn a_large_lease_may_take_longer_to_register() {
        assert_eq!(registering_time(0), CONTROL_TIMEOUT);
        let hour = registering_time(512 << 30);
        assert!(hour > Duration::from_secs(3600) && hour < Duration::from_secs(5000));
    }

    #[test]
    fn a_donor_that_is_not_there_is_an_error_in_time() {
        // A port that was free a moment ago.
        let address = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a free port");
        let config = RdmaLinkConfig {
            carrier: Carrier::Tcp,
            settings: Arc::default(),
            ends: Ends {
                local: NodeId(0).into(),
                donor: NodeId(1),
            },
            address,
            token: Token([0; 16]),
            bytes: 4096,
        };
        let wake = EventFd::new(0).expect("an eventfd");
        let error = RdmaLink::start(config, vec![(TrafficClass::Urgent, wake)])
            .map(|_| ())
            .expect_err("nobody listens");
        assert!(matches!(error, RdmaLinkError::Donor { .. }), "{error}");
    }
}

#[cfg(test)]
mod transport_tests;
