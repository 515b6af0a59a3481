//! The thread that makes a donor's RDMA connections, watches them, and makes them again.

use super::connect::{LOOK_INTERVAL, connect};
use super::{LaneRequest, LaneSender, RdmaLinkConfig, RdmaLinkError, RdmaStats, TRIAL_TIME_MAX};
use crate::link::describe;
use crate::transport::rdma::{Device, PageLane, RdmaError};
use crate::wire::TrafficClass;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use fabric_host::lock;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// First pause before a lane that failed is made again; doubled each time that this fails, or
/// that the new one does soon.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest such pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A lane that lasted for so long was no failure from the start.
const LASTING: Duration = Duration::from_secs(10);
/// READs that a new lane is tried out with: as many as round trips are measured of a lease.
const TRIALS: usize = 8;

/// One class, as the thread sees it.
#[derive(Debug)]
pub(super) struct End {
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

impl End {
    /// Before its first lane.
    pub(super) fn new(class: TrafficClass, wake: EventFd, lanes: LaneSender) -> Self {
        Self {
            class,
            wake,
            lanes,
            watch: None,
            retry_at: None,
            pause: PAUSE_MIN,
            made_at: Instant::now(),
        }
    }
}

/// Observes whether a lane has to be released, and revokes it.
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

/// The state of the thread.
pub(super) struct LaneKeeper {
    config: RdmaLinkConfig,
    ends: Vec<End>,
    stats: Arc<RdmaStats>,
    /// Whether a stop was requested.
    stopping: bool,
}

impl LaneKeeper {
    pub(super) fn new(config: RdmaLinkConfig, ends: Vec<End>, stats: Arc<RdmaStats>) -> Self {
        Self {
            config,
            ends,
            stats,
            stopping: false,
        }
    }

    /// Makes a lane of each class, reports their round trip, and maintains them until a stop
    /// request.
    pub(super) fn run(
        mut self,
        first: &Sender<Result<Duration, RdmaLinkError>>,
        asked: &Receiver<LaneRequest>,
    ) {
        let mut longest = Duration::ZERO;
        for index in 0..self.ends.len() {
            match self.make(index, asked) {
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
        while self.serve(asked, LOOK_INTERVAL) {
            self.retry(asked);
        }
        // What was never taken, and what was given back meanwhile.
        self.ends.clear();
        while asked.try_recv().is_ok() {}
    }

    /// Waits for requests for so long, does what they want, and looks after the lanes. Returns whether
    /// to go on.
    fn serve(&mut self, asked: &Receiver<LaneRequest>, wait: Duration) -> bool {
        let mut request = asked.recv_timeout(wait);
        loop {
            match request {
                Ok(LaneRequest::Stop) | Err(RecvTimeoutError::Disconnected) => self.stopping = true,
                Ok(LaneRequest::TakeBack(class, lane, why)) => self.take_back(class, lane, why),
                Err(RecvTimeoutError::Timeout) => break,
            }
            if self.stopping {
                break;
            }
            request = asked.recv_timeout(Duration::ZERO);
        }
        self.watch();
        !self.stopping
    }

    fn take_back(&mut self, class: TrafficClass, lane: Box<dyn PageLane>, why: Option<RdmaError>) {
        drop(lane);
        let node = self.config.ends.donor;
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
                let error = describe(&error);
                tracing::warn!(%node, ?class, error, "RDMA failed; pages go on over TCP");
            }
        }
    }

    /// Calls back the lanes that are over, or whose device is being removed.
    fn watch(&self) {
        for end in &self.ends {
            if let Some(watch) = end.watch.as_ref().filter(|watch| watch.is_over()) {
                // Relaxed: it says nothing about other memory; the notifier wakes the thread.
                watch.revoked.store(true, Ordering::Relaxed);
                let _ = end.wake.write(1);
            }
        }
    }

    /// Makes again what is due.
    fn retry(&mut self, asked: &Receiver<LaneRequest>) {
        for index in 0..self.ends.len() {
            let end = &mut self.ends[index];
            if self.stopping || end.retry_at.is_none_or(|at| at > Instant::now()) {
                continue;
            }
            end.retry_at = None;
            let (node, class) = (self.config.ends.donor, end.class);
            match self.make(index, asked) {
                Ok(_) => tracing::info!(%node, ?class, "back on RDMA"),
                Err(error) => {
                    let end = &mut self.ends[index];
                    end.retry_at = Some(Instant::now() + end.pause);
                    end.pause = (end.pause * 2).min(PAUSE_MAX);
                    let error = describe(&error);
                    tracing::debug!(%node, ?class, error, "still no RDMA");
                }
            }
        }
    }

    /// Makes a lane, tries it out and hands it over; gives its shortest round trip. While the donor
    /// registers memory the others are looked after.
    fn make(
        &mut self,
        index: usize,
        asked: &Receiver<LaneRequest>,
    ) -> Result<Duration, RdmaLinkError> {
        let (config, class) = (self.config.clone(), self.ends[index].class);
        let mut meanwhile = || self.serve(asked, Duration::ZERO);
        let (mut lane, device, session) = connect(&config, class, &mut meanwhile)?;
        let address = config.address;
        let mut shortest = Duration::MAX;
        for _ in 0..TRIALS {
            let trip = lane.read_now(0, TRIAL_TIME_MAX, &mut |_| {});
            shortest =
                shortest.min(trip.map_err(|source| RdmaLinkError::Here { address, source })?);
        }
        if self.ends[index].class == TrafficClass::Urgent {
            *lock(&self.stats.ends) = lane.ends();
        }
        self.stats.connections.increment();
        let end = &mut self.ends[index];
        end.made_at = Instant::now();
        end.watch = Some(Watch {
            device: Arc::downgrade(&device),
            session,
            revoked: lane.revocation(),
        });
        // There is room: the previous lane was returned.
        let _ = end.lanes.try_send(Box::new(lane));
        let _ = end.wake.write(1);
        Ok(shortest)
    }
}
