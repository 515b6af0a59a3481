//! The link to one donor: its lease, kept alive by renewals, and its connections, made again
//! when they break.
//!
//! One thread a donor does all that may take time: connecting, handshakes, renewals. The
//! pager's threads only ask for a connection and find it in their [`LinkPort`] later.

use crate::control::{ControlError, ControlStream};
use crate::layout::NodeId;
use crate::transport::tcp::STALL_TIMEOUT;
use crate::wire::{
    AttachRequest, ErrorMessage, FrameKind, LeaseGrant, LeaseRequest, LeaseStatus,
    RENEWAL_INTERVAL_MAX, Refusal, Token, TrafficClass, WireError,
};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// First pause between attempts to connect; doubled after each, up to [`BACKOFF_MAX`].
const BACKOFF_MIN: Duration = Duration::from_millis(20);
/// Longest pause between attempts to connect.
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// An outage is over when nothing was wrong for so long: a connection on which requests are
/// outstanding and not answered is found out sooner.
const QUIET_TIME: Duration = STALL_TIMEOUT.saturating_mul(2);
/// Shortest time between renewals, however short the lease that a donor grants.
const RENEWAL_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Round trips measured when a lease begins.
const ROUND_TRIPS_MEASURED: usize = 8;
/// Renewals in the time after which a lease ends.
const RENEWALS_PER_LEASE: u32 = 4;

/// Why a page connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum Outage {
    /// There was none yet.
    #[error("not connected yet")]
    Initial,
    /// It broke.
    #[error("connection broke: {0}")]
    Stream(#[source] io::Error),
    /// Nothing was answered for the time that is allowed.
    #[error("no answer for {} s", STALL_TIMEOUT.as_secs())]
    Stalled,
    /// The donor broke the protocol.
    #[error("donor does not keep to the protocol: {0}")]
    Protocol(#[source] WireError),
    /// The donor refused a request.
    #[error("donor refuses: {}", .0.text)]
    Refused(ErrorMessage),
}

/// What a link tells its VM.
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
    /// The donor's memory is lost for good.
    Lost {
        /// The donor.
        node: NodeId,
        /// Why.
        reason: String,
    },
}

/// Takes events of a link, on the link's thread. Must return soon.
pub type LinkObserver = Arc<dyn Fn(LinkEvent) + Send + Sync>;

/// What a link is to be.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// The donor's number.
    pub node: NodeId,
    /// The donor's address.
    pub address: SocketAddr,
    /// The VM's name.
    pub vm: String,
    /// Bytes wanted.
    pub bytes: u64,
    /// Whether less will do.
    pub or_less: bool,
    /// How long an unreachable donor is waited for.
    pub grace: Duration,
}

/// The end of a link in the hands of a transport.
#[derive(Debug)]
pub struct LinkPort {
    class: TrafficClass,
    ask: Sender<Ask>,
    connections: Receiver<TcpStream>,
    /// Requests completed on all connections of this port.
    completed: Arc<AtomicU64>,
}

impl LinkPort {
    /// A request was completed: the connection is of use.
    pub(crate) fn note_progress(&self) {
        // Relaxed: a count that the link compares with an earlier one.
        self.completed.fetch_add(1, Ordering::Relaxed);
    }
    /// The newest connection, if there is a new one.
    pub(crate) fn take_connection(&self) -> Option<TcpStream> {
        self.connections.try_iter().last()
    }

    /// Asks for a new connection, since the one there was failed.
    pub(crate) fn ask_for_connection(&self, why: Outage) {
        // Full or closed: the link knows already, or ends.
        let _ = self.ask.try_send(Ask::Connection(self.class, why));
    }
}

#[derive(Debug)]
enum Ask {
    Connection(TrafficClass, Outage),
    Stop,
}

/// Where the connections of one class go.
#[derive(Debug)]
struct Port {
    class: TrafficClass,
    connections: Sender<TcpStream>,
    /// Rung when there is a new connection.
    wake: EventFd,
    wanted: bool,
    /// Requests completed, written by the transport.
    completed: Arc<AtomicU64>,
}

/// An outage.
#[derive(Clone, Copy, Debug)]
struct Trouble {
    /// When the donor is given up.
    deadline: Instant,
    /// The next pause between attempts.
    backoff: Duration,
    /// When the last attempt succeeded, and how many requests had been completed then.
    recovered_at: Instant,
    completed: u64,
}

/// A lease that is kept until [`Link::release`].
#[derive(Debug)]
pub struct Link {
    grant: LeaseGrant,
    address: SocketAddr,
    ask: Sender<Ask>,
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
        let mut control = ControlStream::connect(config.address)?;
        // Long enough that a donor which is only cut off still has the memory when the VM
        // has waited the whole grace time.
        let duration = config.grace * 2 + Duration::from_secs(10);
        let request = LeaseRequest {
            vm: config.vm.clone(),
            bytes: config.bytes,
            or_less: config.or_less,
            duration_ms: u32::try_from(duration.as_millis()).unwrap_or(u32::MAX),
        };
        let grant: LeaseGrant = control.call(FrameKind::Lease, &request, FrameKind::Granted)?;
        let mut leased = Self {
            config,
            control: Some(control),
            grant,
            round_trip: Duration::MAX,
        };
        leased.measure()?;
        Ok(leased)
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

    /// Starts the link's thread. `wakes` are rung when there is a new connection of the
    /// urgent and of the bulk class; the ports that come back are for these two.
    ///
    /// # Errors
    ///
    /// When the first connections cannot be made, or a thread not started.
    pub fn start(
        mut self,
        wakes: [EventFd; 2],
        observer: LinkObserver,
    ) -> Result<(Link, [LinkPort; 2]), ControlError> {
        let address = self.config.address;
        let system = |error| ControlError::Stream(address, error);
        // Both classes may ask while the thread is busy, and once for stopping.
        let (ask, asked) = bounded(4);
        let [urgent_wake, bulk_wake] = wakes;
        let mut ports = Vec::new();
        let mut ends = Vec::new();
        for (class, wake) in [
            (TrafficClass::Urgent, urgent_wake),
            (TrafficClass::Bulk, bulk_wake),
        ] {
            let (connections, receiver) = bounded(1);
            let completed = Arc::new(AtomicU64::new(0));
            ports.push(Port {
                class,
                connections,
                wake,
                wanted: true,
                completed: Arc::clone(&completed),
            });
            ends.push(LinkPort {
                class,
                ask: ask.clone(),
                connections: receiver,
                completed,
            });
        }
        let grant = self.grant.clone();
        let mut keeper = Keeper {
            config: self.config.clone(),
            grant: grant.clone(),
            control: self.control.take(),
            ports,
            observer,
            status: LeaseStatus::default(),
            trouble: None,
        };
        if let Err(error) = keeper.connect_ports() {
            let _ = keeper.renew(FrameKind::Release);
            return Err(error);
        }
        let name = format!("link-{}", keeper.config.node.0);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                let (node, observer) = (keeper.config.node, Arc::clone(&keeper.observer));
                // The keeper's data is not used again.
                let run = std::panic::AssertUnwindSafe(move || keeper.run(&asked));
                std::panic::catch_unwind(run).unwrap_or_else(|_| {
                    let reason = "the thread of its link panicked".to_owned();
                    observer(LinkEvent::Lost { node, reason });
                    LeaseStatus::default()
                })
            })
            .map_err(system)?;
        let ends: [LinkPort; 2] = ends.try_into().expect("made two");
        Ok((
            Link {
                grant,
                address,
                ask,
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

    /// Ends the lease. What comes back are the donor's own counts for it, as it last told.
    pub fn release(mut self) -> LeaseStatus {
        self.stop()
    }

    fn stop(&mut self) -> LeaseStatus {
        let _ = self
            .ask
            .send_timeout(Ask::Stop, crate::control::CONTROL_TIMEOUT);
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

/// The link's thread.
struct Keeper {
    config: LinkConfig,
    grant: LeaseGrant,
    /// `None` while the control connection is broken.
    control: Option<ControlStream>,
    ports: Vec<Port>,
    observer: LinkObserver,
    status: LeaseStatus,
    /// The last outage. It is over when a request was completed since, or after
    /// [`QUIET_TIME`].
    trouble: Option<Trouble>,
}

/// Why an attempt to be connected again failed.
enum Setback {
    /// It may work later.
    Passing(ControlError),
    /// The memory is gone.
    Final(String),
}

impl Keeper {
    /// Time between renewals: enough in the lease's own time, and enough to notice in time that
    /// the control connection was closed.
    fn renewal_interval(&self) -> Duration {
        let lease = Duration::from_millis(u64::from(self.grant.duration_ms));
        (lease / RENEWALS_PER_LEASE).clamp(RENEWAL_INTERVAL_MIN, RENEWAL_INTERVAL_MAX)
    }

    fn run(mut self, asked: &Receiver<Ask>) -> LeaseStatus {
        let interval = self.renewal_interval();
        let mut renew_at = Instant::now() + interval;
        let mut lost = false;
        loop {
            let why = match asked.recv_deadline(renew_at) {
                Ok(Ask::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(Ask::Connection(class, why)) => {
                    self.want(class);
                    why.to_string()
                }
                Err(RecvTimeoutError::Timeout) if lost => {
                    renew_at = Instant::now() + interval;
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => match self.renew(FrameKind::Renew) {
                    Ok(()) => {
                        renew_at = Instant::now() + interval;
                        continue;
                    }
                    Err(error) => describe(&error),
                },
            };
            if lost {
                continue;
            }
            match self.recover(why, asked) {
                Recovery::Recovered => {}
                Recovery::Stopped => break,
                Recovery::Lost => lost = true,
            }
            renew_at = Instant::now() + interval;
        }
        if !lost
            && self.control.is_some()
            && let Err(error) = self.renew(FrameKind::Release)
        {
            tracing::debug!(node = %self.config.node, %error, "lease was not released");
        }
        self.status
    }

    fn want(&mut self, class: TrafficClass) {
        for port in self.ports.iter_mut().filter(|port| port.class == class) {
            port.wanted = true;
        }
    }

    /// Requests completed on all connections so far.
    fn completed(&self) -> u64 {
        self.ports
            .iter()
            .map(|port| port.completed.load(Ordering::Relaxed))
            .sum()
    }

    /// Connects again, for as long as the grace time lasts. A donor that takes connections and
    /// completes nothing on them is no better than one that takes none: then it is the same
    /// outage that goes on.
    fn recover(&mut self, why: String, asked: &Receiver<Ask>) -> Recovery {
        let node = self.config.node;
        let known = self.trouble.take().filter(|trouble| {
            trouble.completed == self.completed() && trouble.recovered_at.elapsed() < QUIET_TIME
        });
        let mut trouble = known.unwrap_or(Trouble {
            deadline: Instant::now() + self.config.grace,
            backoff: BACKOFF_MIN,
            recovered_at: Instant::now(),
            completed: 0,
        });
        let mut attempt = known.is_none();
        let mut told = false;
        let mut reason = why.clone();
        tracing::debug!(%node, why, "link to donor broke; connecting again");
        loop {
            if attempt {
                match self.reconnect() {
                    Ok(()) => {
                        trouble.recovered_at = Instant::now();
                        trouble.completed = self.completed();
                        self.trouble = Some(trouble);
                        if told {
                            (self.observer)(LinkEvent::Up { node });
                        }
                        return Recovery::Recovered;
                    }
                    Err(Setback::Final(reason)) => {
                        (self.observer)(LinkEvent::Lost { node, reason });
                        return Recovery::Lost;
                    }
                    Err(Setback::Passing(error)) => reason = describe(&error),
                }
            }
            attempt = true;
            if !told {
                told = true;
                (self.observer)(LinkEvent::Down {
                    node,
                    reason: why.clone(),
                });
            }
            let now = Instant::now();
            if now >= trouble.deadline {
                let grace = self.config.grace.as_secs_f64();
                let reason = format!("not back within {grace} s: {reason}");
                (self.observer)(LinkEvent::Lost { node, reason });
                return Recovery::Lost;
            }
            match asked.recv_deadline((now + trouble.backoff).min(trouble.deadline)) {
                Ok(Ask::Stop) | Err(RecvTimeoutError::Disconnected) => return Recovery::Stopped,
                Ok(Ask::Connection(class, _)) => self.want(class),
                Err(RecvTimeoutError::Timeout) => {}
            }
            trouble.backoff = (trouble.backoff * 2).min(BACKOFF_MAX);
        }
    }

    fn reconnect(&mut self) -> Result<(), Setback> {
        let attempt = self.renew(FrameKind::Renew).or_else(|error| match error {
            ControlError::Refused { .. } => Err(error),
            _ => self.resume(),
        });
        match attempt.and_then(|()| self.connect_ports()) {
            Ok(()) => Ok(()),
            Err(ControlError::Refused {
                refusal: Refusal::UnknownLease,
                text,
                ..
            }) => Err(Setback::Final(format!(
                "donor {} no longer has this VM's memory: {text}",
                self.config.address
            ))),
            Err(error) => Err(Setback::Passing(error)),
        }
    }

    fn resume(&mut self) -> Result<(), ControlError> {
        let mut control = ControlStream::connect(self.config.address)?;
        self.status = control.call(FrameKind::Resume, &self.grant.token, FrameKind::Status)?;
        self.control = Some(control);
        Ok(())
    }

    /// Renews or releases the lease.
    fn renew(&mut self, kind: FrameKind) -> Result<(), ControlError> {
        let broken =
            || ControlError::Stream(self.config.address, io::ErrorKind::NotConnected.into());
        let control = self.control.as_mut().ok_or_else(broken)?;
        let token: Token = self.grant.token;
        match control.call(kind, &token, FrameKind::Status) {
            Ok(status) => {
                self.status = status;
                Ok(())
            }
            Err(error) => {
                self.control = None;
                Err(error)
            }
        }
    }

    /// Makes every connection that is wanted.
    fn connect_ports(&mut self) -> Result<(), ControlError> {
        for port in self.ports.iter_mut().filter(|port| port.wanted) {
            let mut stream = ControlStream::connect(self.config.address)?;
            let request = AttachRequest {
                token: self.grant.token,
                class: port.class,
            };
            stream.send(FrameKind::Attach, &request)?;
            let (frame, _) = stream.receive(crate::control::CONTROL_TIMEOUT)?;
            if frame.kind != FrameKind::Attached {
                let wrong = WireError::Unexpected(frame.kind);
                return Err(ControlError::Protocol(self.config.address, wrong));
            }
            port.wanted = false;

            // Full: the transport has not taken the one before, and asks again when that
            // turns out to be closed.
            let _ = port.connections.try_send(stream.into_stream());
            let _ = port.wake.write(1);
        }
        Ok(())
    }
}

enum Recovery {
    Recovered,
    Stopped,
    Lost,
}

/// An error and its causes, on one line.
pub(crate) fn describe(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
