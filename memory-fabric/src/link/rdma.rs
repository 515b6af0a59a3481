//! The RDMA connections to one donor: made beside its link, watched, and made again.
//!
//! One thread a donor does what may take time, verbs above all: SoftRoCE is known to hang in
//! them. So neither the lease nor the pager waits for it; while there is no lane, pages travel
//! by TCP.

use crate::control::{CONTROL_TIMEOUT, ControlError, ControlStream};
use crate::layout::NodeId;
use crate::page::PageBytes;
use crate::stats::Counter;
use crate::stream::Carrier;
use crate::transport::rdma::{
    ConnectAnswer, ConnectRequest, Device, DeviceChoice, Lane, LaneConfig, PageLane, RdmaError,
    RdmaTransport,
};
use crate::transport::tcp::TcpTransport;
use crate::transport::{IN_FLIGHT_MAX, PageTransport};
use crate::wire::{FrameKind, RUN_PAGES_MAX, Token, TrafficClass, WireError};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// First pause before a lane that failed is made again; doubled each time that this fails, or
/// that the new one does soon.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest such pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A lane that lasted for so long was no failure from the start.
const LASTING: Duration = Duration::from_secs(10);
/// How often it is looked whether a lane is over, while it is in use.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);
/// READs that a new lane is tried out with: as many as round trips are measured of a lease.
const TRIALS: usize = 8;
/// How long they may take together: more than the adapter takes to give up one.
const TRIAL_TIME_MAX: Duration = Duration::from_secs(3);
/// The least speed, bytes a second, at which a donor is expected to make and pin its memory.
const REGISTERING_SPEED_MIN: u64 = 128 << 20;
/// How long the end of the thread is waited for: one that hangs in a verb is left behind.
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
                source: RdmaError::NoLibrary | RdmaError::NoDevice,
                ..
            }
        )
    }
}

/// Numbers of the RDMA connections to one donor.
#[derive(Debug, Default)]
pub struct RdmaStats {
    /// Pages that came by READ.
    pub pages_read: Counter,
    /// Pages that went home by WRITE.
    pub pages_written: Counter,
    /// Connections made.
    pub connections: Counter,
    /// Of these, failed.
    pub failures: Counter,
    /// Of these, given back in order.
    returned: Counter,
}

impl RdmaStats {
    /// Whether there is a connection now.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.connections.get() > self.failures.get() + self.returned.get()
    }
}

/// Where RDMA is to lead.
#[derive(Clone, Debug)]
pub struct RdmaLinkConfig {
    /// The donor's number.
    pub node: NodeId,
    /// The donor's address.
    pub address: SocketAddr,
    /// The lease.
    pub token: Token,
    /// Its size.
    pub bytes: u64,
    /// What the donor's other connections are made of. RDMA is set up over TCP alone.
    pub carrier: Carrier,
}

/// Where lanes are handed over.
pub(crate) type LaneSender = Sender<Box<dyn PageLane>>;

/// The end of the link in the hands of a transport.
#[derive(Debug)]
pub(crate) struct LanePort {
    class: TrafficClass,
    lanes: Receiver<Box<dyn PageLane>>,
    ask: Sender<Ask>,
    stats: Arc<RdmaStats>,
}

impl LanePort {
    /// A port whose other ends are the caller's: where lanes come from, and where they go.
    #[cfg(test)]
    pub(crate) fn alone(class: TrafficClass) -> (Self, LaneSender, Receiver<Ask>) {
        let (give, lanes) = bounded(1);
        let (ask, asked) = bounded(4);
        let port = Self {
            class,
            lanes,
            ask,
            stats: Arc::default(),
        };
        (port, give, asked)
    }

    /// The numbers that it counts into.
    #[cfg(test)]
    pub(crate) fn stats(&self) -> Arc<RdmaStats> {
        Arc::clone(&self.stats)
    }

    pub(crate) fn class(&self) -> TrafficClass {
        self.class
    }

    /// The newest lane, if there is a new one.
    pub(crate) fn take_lane(&self) -> Option<Box<dyn PageLane>> {
        self.lanes.try_recv().ok()
    }

    /// Hands back a lane that failed, or is not needed any more.
    pub(crate) fn give_back(&self, lane: Box<dyn PageLane>, why: Option<RdmaError>) {
        // There is room: no class has more than two lanes. Closed: then it ends here.
        let _ = self.ask.try_send(Ask::Back(self.class, lane, why));
    }

    /// Pages have come.
    pub(crate) fn note_read(&self, pages: u32) {
        self.stats.pages_read.add(pages.into());
    }

    /// A page has gone home.
    pub(crate) fn note_written(&self) {
        self.stats.pages_written.increment();
    }
}

#[derive(Debug)]
pub(crate) enum Ask {
    /// A lane comes back.
    Back(TrafficClass, Box<dyn PageLane>, Option<RdmaError>),
    Stop,
}

/// The RDMA connections to one donor. Dropping it ends them.
#[derive(Debug)]
pub struct RdmaLink {
    ask: Sender<Ask>,
    ended: Receiver<()>,
    stats: Arc<RdmaStats>,
    round_trip: Duration,
}

impl RdmaLink {
    /// Connects, for each class, and gives the ends; its bell is rung when there is a new lane,
    /// or one has to be given back.
    ///
    /// # Errors
    ///
    /// See [`RdmaLinkError`].
    pub(crate) fn start(
        config: RdmaLinkConfig,
        classes: Vec<(TrafficClass, EventFd)>,
    ) -> Result<(Self, Vec<LanePort>), RdmaLinkError> {
        let stats = Arc::new(RdmaStats::default());
        // Each class has a lane in use and one that waits, at the most; and one stop.
        let (ask, asked) = bounded(2 * classes.len() + 1);
        let (ended_by, ended) = bounded(1);
        let (first, came) = bounded(1);
        let mut ports = Vec::new();
        let mut ends = Vec::new();
        for (class, wake) in classes {
            let (lanes, receiver) = bounded(1);
            ports.push(LanePort {
                class,
                lanes: receiver,
                ask: ask.clone(),
                stats: Arc::clone(&stats),
            });
            ends.push(End {
                class,
                wake,
                lanes,
                watch: None,
                retry_at: None,
                pause: PAUSE_MIN,
                made_at: Instant::now(),
            });
        }
        let address = config.address;
        let most = registering_time(config.bytes) + TRIAL_TIME_MAX * 2 + CONTROL_TIMEOUT;
        let after = most * u32::try_from(ends.len()).unwrap_or(1).max(1);
        let keeper = LaneKeeper {
            config,
            ends,
            stats: Arc::clone(&stats),
        };
        let name = format!("rdma-{}", keeper.config.node.0);
        std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                keeper.run(&first, &asked);
                // That nobody waits any more is no error.
                let _ = ended_by.send(());
            })
            .map_err(RdmaLinkError::Thread)?;
        let round_trip = came
            .recv_timeout(after)
            .unwrap_or(Err(RdmaLinkError::Late { address, after }))?;
        let link = Self {
            ask,
            ended,
            stats,
            round_trip,
        };
        Ok((link, ports))
    }

    /// Connects for one class and gives the transport, with `tcp` beside it, as the pager has it.
    /// For measuring and for tests: nobody rings when there is a new lane, so it has to be polled.
    ///
    /// # Errors
    ///
    /// See [`RdmaLinkError`].
    pub fn transport(
        config: RdmaLinkConfig,
        class: TrafficClass,
        tcp: TcpTransport,
    ) -> Result<(Self, Box<dyn PageTransport>), RdmaLinkError> {
        let bell = EventFd::new(EFD_NONBLOCK).map_err(RdmaLinkError::Thread)?;
        let (link, mut ports) = Self::start(config, vec![(class, bell)])?;
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
        let told = self.ask.send_timeout(Ask::Stop, END_TIME_MAX);
        if told.is_ok() && self.ended.recv_timeout(END_TIME_MAX) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("an RDMA connection does not end; its thread is left behind");
        }
    }
}

/// How long a donor may take for registering a lease.
pub(crate) fn registering_time(bytes: u64) -> Duration {
    CONTROL_TIMEOUT + Duration::from_secs(bytes / REGISTERING_SPEED_MIN)
}

/// One class, as the thread sees it.
#[derive(Debug)]
struct End {
    class: TrafficClass,
    wake: EventFd,
    lanes: LaneSender,
    /// What to watch for the lane that was made last.
    watch: Option<Watch>,
    /// When the next attempt is due.
    retry_at: Option<Instant>,
    pause: Duration,
    made_at: Instant,
}

/// What tells that a lane has to be let go of, and how to call it back.
#[derive(Debug)]
struct Watch {
    device: Weak<Device>,
    /// The connection by which the donor's end was made, and with which that ends.
    session: TcpStream,
    revoked: Arc<AtomicBool>,
}

impl Watch {
    fn is_over(&self) -> bool {
        if self.device.upgrade().is_some_and(|device| device.is_gone()) {
            return true;
        }
        // The donor sends nothing: there is something to read when it has ended.
        match self.session.peek(&mut [0]) {
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            Ok(_) => true,
        }
    }
}

struct LaneKeeper {
    config: RdmaLinkConfig,
    ends: Vec<End>,
    stats: Arc<RdmaStats>,
}

impl LaneKeeper {
    fn run(mut self, first: &Sender<Result<Duration, RdmaLinkError>>, asked: &Receiver<Ask>) {
        let mut longest = Duration::ZERO;
        for index in 0..self.ends.len() {
            match self.make(index) {
                Ok(round_trip) => longest = longest.max(round_trip),
                Err(error) => {
                    let _ = first.send(Err(error));
                    return;
                }
            }
        }
        if first.send(Ok(longest)).is_err() {
            return;
        }
        loop {
            let wake_at = Instant::now() + WATCH_INTERVAL;
            match asked.recv_deadline(wake_at) {
                Ok(Ask::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(Ask::Back(class, lane, why)) => self.take_back(class, lane, why),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.watch();
            self.retry();
        }
        // What was never taken, and what was given back meanwhile.
        self.ends.clear();
        while asked.try_recv().is_ok() {}
    }

    fn take_back(&mut self, class: TrafficClass, lane: Box<dyn PageLane>, why: Option<RdmaError>) {
        drop(lane);
        let node = self.config.node;
        let Some(end) = self.ends.iter_mut().find(|end| end.class == class) else {
            return;
        };
        end.watch = None;
        match why {
            None => self.stats.returned.increment(),
            Some(error) => {
                self.stats.failures.increment();
                if end.made_at.elapsed() >= LASTING {
                    end.pause = PAUSE_MIN;
                }
                end.retry_at = Some(Instant::now() + end.pause);
                end.pause = (end.pause * 2).min(PAUSE_MAX);
                let error = super::describe(&error);
                tracing::warn!(%node, ?class, error, "RDMA failed; pages go on over TCP");
            }
        }
    }

    /// Calls back the lanes that are over, or whose device is being removed.
    fn watch(&self) {
        for end in &self.ends {
            if let Some(watch) = end.watch.as_ref().filter(|watch| watch.is_over()) {
                // Relaxed: it says nothing about other memory; the bell makes the thread look.
                watch.revoked.store(true, Ordering::Relaxed);
                let _ = end.wake.write(1);
            }
        }
    }

    /// Makes again what is due.
    fn retry(&mut self) {
        for index in 0..self.ends.len() {
            let end = &mut self.ends[index];
            if end.retry_at.is_none_or(|at| at > Instant::now()) {
                continue;
            }
            end.retry_at = None;
            let (node, class) = (self.config.node, end.class);
            match self.make(index) {
                Ok(_) => tracing::info!(%node, ?class, "back on RDMA"),
                Err(error) => {
                    let end = &mut self.ends[index];
                    end.retry_at = Some(Instant::now() + end.pause);
                    end.pause = (end.pause * 2).min(PAUSE_MAX);
                    let error = super::describe(&error);
                    tracing::debug!(%node, ?class, error, "still no RDMA");
                }
            }
        }
    }

    /// Makes a lane, tries it out and hands it over; gives its shortest round trip.
    fn make(&mut self, index: usize) -> Result<Duration, RdmaLinkError> {
        let (mut lane, device, session) = connect(&self.config, self.ends[index].class)?;
        let address = self.config.address;
        let mut shortest = Duration::MAX;
        for _ in 0..TRIALS {
            let trip = lane.read_now(0, TRIAL_TIME_MAX, &mut |_| {});
            shortest =
                shortest.min(trip.map_err(|source| RdmaLinkError::Here { address, source })?);
        }
        self.stats.connections.increment();
        let end = &mut self.ends[index];
        end.made_at = Instant::now();
        end.watch = Some(Watch {
            device: Arc::downgrade(&device),
            session,
            revoked: lane.revocation(),
        });
        // There is room: the one before came back.
        let _ = end.lanes.try_send(Box::new(lane));
        let _ = end.wake.write(1);
        Ok(shortest)
    }
}

/// Connects to the lease by RDMA.
pub(super) fn connect(
    config: &RdmaLinkConfig,
    class: TrafficClass,
) -> Result<(Lane, Arc<Device>, TcpStream), RdmaLinkError> {
    let address = config.address;
    let here = |source| RdmaLinkError::Here { address, source };
    let donor = |source| RdmaLinkError::Donor { address, source };
    let mut control = ControlStream::connect(address).map_err(donor)?;
    let local = control.local().map_err(donor)?;
    let (device, route) = Device::for_peer(&DeviceChoice::Automatic, local.ip()).map_err(here)?;
    let lane = Lane::prepare(&LaneConfig {
        device: Arc::clone(&device),
        route,
        pages: staging_pages(class),
        writes: class == TrafficClass::Bulk,
        peer: address.to_string(),
    });
    let lane = lane.map_err(here)?;
    let request = ConnectRequest {
        token: config.token,
        class,
        endpoint: lane.endpoint(),
    };
    control.send(FrameKind::Connect, &request).map_err(donor)?;
    let (frame, payload) = control
        .receive(registering_time(config.bytes))
        .map_err(donor)?;
    if frame.kind != FrameKind::Connected {
        let wrong = WireError::Unexpected(frame.kind);
        return Err(donor(ControlError::Protocol(address, wrong)));
    }
    let answer: ConnectAnswer = control.decode(frame.kind, &payload).map_err(donor)?;
    answer.memory.check(config.bytes).map_err(here)?;
    let session = control.into_tcp().map_err(donor)?;
    let watched = session.set_nonblocking(true).and(session.try_clone());
    let watched = watched.map_err(|error| donor(ControlError::Stream(address, error)))?;
    let lane = lane.connect(&answer, session).map_err(here)?;
    Ok((lane, device, watched))
}

/// Reads a lease page by page, without a pager: for measuring and for tests.
#[derive(Debug)]
pub struct Reader(Lane);

impl Reader {
    /// Connects to a lease by RDMA, in place of another connection for faults.
    ///
    /// # Errors
    ///
    /// See [`RdmaLinkError`].
    pub fn connect(config: &RdmaLinkConfig) -> Result<Self, RdmaLinkError> {
        Self::connect_for(config, TrafficClass::Urgent)
    }

    /// The same in place of another connection for `class`.
    ///
    /// # Errors
    ///
    /// See [`RdmaLinkError`].
    pub fn connect_for(
        config: &RdmaLinkConfig,
        class: TrafficClass,
    ) -> Result<Self, RdmaLinkError> {
        let (lane, ..) = connect(config, class)?;
        Ok(Self(lane))
    }

    /// Reads the page at `offset` (bytes) of the lease; gives the time from posting the request
    /// to its completion.
    ///
    /// # Errors
    ///
    /// When the request fails, or has not completed `within` that time. The reader is of no more
    /// use then.
    pub fn read(
        &mut self,
        offset: u64,
        within: Duration,
        page: &mut PageBytes,
    ) -> Result<Duration, RdmaError> {
        let mut take = |bytes: &[u8]| page.copy_from_slice(bytes);
        self.0.read_now(offset, within, &mut take)
    }
}

/// Pages that may be on their way at once. Runs of pages need neighbouring room.
fn staging_pages(class: TrafficClass) -> usize {
    match class {
        TrafficClass::Urgent | TrafficClass::Bulk => IN_FLIGHT_MAX,
        // 2 MiB: twice what the prefetcher has on its way.
        TrafficClass::Prefetch | TrafficClass::Probe => 8 * RUN_PAGES_MAX as usize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            node: NodeId(1),
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
