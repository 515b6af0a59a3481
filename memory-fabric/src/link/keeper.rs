//! The link's thread: keeps the lease and makes connections.

mod release;

use super::{
    LinkConfig, LinkEvent, LinkObserver, LinkRequest, LinkStats, describe, renewal_interval,
};
use crate::control::{
    CONNECT_TIMEOUT, CONTROL_TIMEOUT, ControlError, ControlStream, start_timeout,
};
use crate::stream::{Carrier, Stream};
use crate::wire::{FrameKind, LeaseGrant, LeaseStatus, Refusal, Token, TrafficClass};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use fabric_host::{ThreadClass, begin_class};
use fabric_transport::port::STALL_TIMEOUT;
use release::{ANSWER_TIME_MAX, RETRY_TIME_MAX};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// First pause between attempts to connect; doubled after each, up to [`BACKOFF_MAX`].
const BACKOFF_MIN: Duration = Duration::from_millis(20);
/// Longest pause between attempts to connect.
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// A connection that lasted for so long was idle and not at fault: one on which requests stay
/// unanswered fails sooner.
const QUIET_TIME: Duration = STALL_TIMEOUT.saturating_mul(2);

/// Where the connections of one class go.
#[derive(Debug)]
pub(super) struct Port {
    class: TrafficClass,
    connections: Sender<Stream>,
    /// Rung when there is a new connection.
    wake: EventFd,
    wanted: bool,
    /// When the newest connection was made, and how many requests had been completed then.
    made_at: Instant,
    completed_before: u64,
    /// Requests completed, written by the transport.
    completed: Arc<AtomicU64>,
    outage: Option<PortOutage>,
}

impl Port {
    pub(super) fn new(
        class: TrafficClass,
        connections: Sender<Stream>,
        wake: EventFd,
        completed: Arc<AtomicU64>,
    ) -> Self {
        Self {
            class,
            connections,
            wake,
            wanted: true,
            made_at: Instant::now(),
            completed_before: 0,
            completed,
            outage: None,
        }
    }

    /// Notes that a new connection is wanted. A connection that completed no request continues the
    /// outage in which it was made: a donor that takes connections and completes nothing on them is
    /// no better than one that takes none.
    fn want(&mut self) {
        // Relaxed: a count that is compared with an earlier one.
        let completed = self.completed.load(Ordering::Relaxed);
        if completed != self.completed_before || self.made_at.elapsed() >= QUIET_TIME {
            self.outage = None;
        }
        self.outage.get_or_insert(PortOutage {
            began: Instant::now(),
            connections: 0,
            is_overdue: false,
        });
        self.wanted = true;
    }

    fn note_connected(&mut self, now: Instant, grace: Duration) {
        self.wanted = false;
        self.made_at = now;
        self.completed_before = self.completed.load(Ordering::Relaxed);
        if let Some(outage) = &mut self.outage {
            // The first one cannot be at fault for what was before it.
            outage.is_overdue = outage.connections > 0 && now >= outage.began + grace;
            outage.connections += 1;
        }
    }
}

/// A time in which the connections of a port complete no request.
#[derive(Clone, Copy, Debug)]
struct PortOutage {
    began: Instant,
    /// Connections made in it.
    connections: u32,
    /// Whether the last one, and not the first, was made after the grace time. If that one
    /// completes nothing either, the donor is lost.
    is_overdue: bool,
}

/// The link's thread.
pub(super) struct Keeper {
    config: LinkConfig,
    grant: LeaseGrant,
    /// `None` while the control connection is broken.
    control: Option<ControlStream>,
    ports: Vec<Port>,
    observer: LinkObserver,
    stats: Arc<LinkStats>,
    status: LeaseStatus,
    /// How many requests had been completed when connections broke last, and when that was.
    last_break: Option<(u64, Instant)>,
}

/// Why a reconnection failed.
enum ReconnectError {
    /// A later attempt may succeed.
    Temporary(ControlError),
    /// The donor no longer has the memory.
    Final(String),
}

impl Keeper {
    /// A keeper of a new lease, with every connection made.
    pub(super) fn connect(
        config: LinkConfig,
        grant: LeaseGrant,
        control: Option<ControlStream>,
        ports: Vec<Port>,
        observer: LinkObserver,
        stats: Arc<LinkStats>,
    ) -> Result<Self, ControlError> {
        let status = LeaseStatus::default();
        let mut keeper = Self {
            config,
            grant,
            control,
            ports,
            observer,
            stats,
            status,
            last_break: None,
        };
        let timeout = start_timeout(&keeper.config.carrier);
        if let Err(error) = keeper.connect_ports(timeout) {
            let _ = keeper.renew(FrameKind::Release);
            return Err(error);
        }
        Ok(keeper)
    }

    /// Starts the thread. It gives what the donor counted for the lease, as it last reported.
    pub(super) fn spawn(self, asked: Receiver<LinkRequest>) -> io::Result<JoinHandle<LeaseStatus>> {
        let (node, observer) = (self.config.node, Arc::clone(&self.observer));
        std::thread::Builder::new()
            .name(format!("link-{}", node.0))
            .spawn(move || {
                begin_class(ThreadClass::Link);
                // The keeper's data is not used again.
                let run = std::panic::AssertUnwindSafe(move || self.run(&asked));
                std::panic::catch_unwind(run).unwrap_or_else(|_| {
                    let reason = "the thread of its link panicked".to_owned();
                    observer(LinkEvent::Lost { node, reason });
                    LeaseStatus::default()
                })
            })
    }

    fn run(mut self, asked: &Receiver<LinkRequest>) -> LeaseStatus {
        let interval = renewal_interval(&self.grant);
        let mut renew_at = Instant::now() + interval;
        let mut lost = false;
        loop {
            // Nobody drives it until the next renewal.
            if let Some(control) = &mut self.control {
                control.settle();
            }
            let why = match asked.recv_deadline(renew_at) {
                Ok(LinkRequest::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(LinkRequest::Connection(class, why)) => {
                    self.want(class);
                    why.to_string()
                }
                Err(RecvTimeoutError::Timeout) if lost => {
                    renew_at = Instant::now() + interval;
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => match self.renew_with_donor() {
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
        if !lost {
            self.release(ANSWER_TIME_MAX, RETRY_TIME_MAX);
        }
        self.status
    }

    /// Renews the lease, if the donor is still who it was: a certificate that expired or was revoked
    /// breaks the connection, and the next one needs another.
    fn renew_with_donor(&mut self) -> Result<(), ControlError> {
        if let Some(why) = self.not_confirmed() {
            self.control = None;
            let why = format!("its certificate is not accepted any more: {why}");
            let error = io::Error::new(io::ErrorKind::PermissionDenied, why);
            return Err(ControlError::Identity(self.config.address, error));
        }
        self.renew(FrameKind::Renew)
    }

    /// Returns why the certificate of the donor's end of the control connection is not valid now.
    /// Reads the lists of revoked certificates again when they have changed.
    fn not_confirmed(&self) -> Option<String> {
        let (Carrier::Tls(expected) | Carrier::Quic(expected)) = &self.config.carrier else {
            return None;
        };
        expected.credentials.refresh();
        let chain = self.control.as_ref()?.chain()?;
        expected.credentials.current().confirm(chain).err()
    }

    fn want(&mut self, class: TrafficClass) {
        for port in self.ports.iter_mut().filter(|port| port.class == class) {
            port.want();
        }
    }

    /// Counts an outage once: not the connections that are made in it and fail, nor those of other
    /// ports, on which nothing has been completed since either.
    fn note_break(&mut self, outages: &[PortOutage], now: Instant) {
        // Relaxed: a count that is compared with an earlier one.
        let completed = self.ports.iter();
        let completed = completed.map(|port| port.completed.load(Ordering::Relaxed));
        let completed = completed.sum();
        let last = self.last_break.replace((completed, now));
        let continues = last.is_some_and(|(before, at)| {
            completed == before && now.saturating_duration_since(at) < QUIET_TIME
        });
        // The control connection alone breaks anew: the lease was resumed on it.
        let is_new = !continues && outages.iter().any(|outage| outage.connections == 0);
        if outages.is_empty() || is_new {
            self.stats.breaks.increment();
        }
    }

    /// Connects again, for as long as the grace time lasts, and at least once. The loss of the
    /// control connection alone is over when the lease is resumed.
    fn recover(&mut self, why: String, asked: &Receiver<LinkRequest>) -> Recovery {
        let node = self.config.node;
        let now = Instant::now();
        let wanted = self.ports.iter().filter(|port| port.wanted);
        let outages: Vec<PortOutage> = wanted.filter_map(|port| port.outage).collect();
        self.note_break(&outages, now);
        let began = outages.iter().map(|outage| outage.began).min();
        let began = began.unwrap_or(now);
        let deadline = began + self.config.grace;
        let mut tried = outages.iter().any(|outage| outage.is_overdue);
        // Where a connection that was made in this outage has failed, there is a pause before the
        // next, which doubles as the outage lasts.
        let mut attempt = outages.iter().all(|outage| outage.connections == 0);
        let mut backoff = now.saturating_duration_since(began);
        let mut reported = false;
        let mut reason = why.clone();
        tracing::debug!(%node, why, "link to donor broke; connecting again");
        loop {
            if attempt {
                match self.reconnect() {
                    Ok(()) => {
                        if reported {
                            self.stats.note_reachable();
                            (self.observer)(LinkEvent::Up { node });
                        }
                        return Recovery::Recovered;
                    }
                    Err(ReconnectError::Final(reason)) => {
                        (self.observer)(LinkEvent::Lost { node, reason });
                        return Recovery::Lost;
                    }
                    Err(ReconnectError::Temporary(error)) => reason = describe(&error),
                }
                tried = true;
            }
            attempt = true;
            if !reported {
                reported = true;
                self.stats.note_unreachable();
                (self.observer)(LinkEvent::Down {
                    node,
                    reason: why.clone(),
                });
            }
            let now = Instant::now();
            if now >= deadline && tried {
                let grace = self.config.grace.as_secs_f64();
                let reason = format!("not back within {grace} s: {reason}");
                (self.observer)(LinkEvent::Lost { node, reason });
                return Recovery::Lost;
            }
            backoff = backoff.clamp(BACKOFF_MIN, BACKOFF_MAX);
            match asked.recv_deadline((now + backoff).min(deadline)) {
                Ok(LinkRequest::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    return Recovery::Stopped;
                }
                Ok(LinkRequest::Connection(class, _)) => self.want(class),
                Err(RecvTimeoutError::Timeout) => {}
            }
            backoff *= 2;
        }
    }

    fn reconnect(&mut self) -> Result<(), ReconnectError> {
        let attempt = self.renew(FrameKind::Renew).or_else(|error| match error {
            ControlError::Refused { .. } => Err(error),
            _ => self.resume(),
        });
        match attempt.and_then(|()| self.connect_ports(CONNECT_TIMEOUT)) {
            Ok(()) => Ok(()),
            Err(ControlError::Refused {
                refusal: Refusal::UnknownLease,
                text,
                ..
            }) => Err(ReconnectError::Final(format!(
                "donor {} no longer has this VM's memory: {text}",
                self.config.address
            ))),
            Err(error) => Err(ReconnectError::Temporary(error)),
        }
    }

    fn resume(&mut self) -> Result<(), ControlError> {
        let mut control = ControlStream::connect_by(self.config.address, &self.config.carrier)?;
        self.status = control.call(FrameKind::Resume, &self.grant.token, FrameKind::Status)?;
        self.control = Some(control);
        Ok(())
    }

    fn renew(&mut self, kind: FrameKind) -> Result<(), ControlError> {
        self.renew_within(CONTROL_TIMEOUT, kind)
    }

    /// Renews or releases the lease, with this timeout of the answer.
    fn renew_within(&mut self, timeout: Duration, kind: FrameKind) -> Result<(), ControlError> {
        let broken =
            || ControlError::Stream(self.config.address, io::ErrorKind::NotConnected.into());
        let control = self.control.as_mut().ok_or_else(broken)?;
        let token: Token = self.grant.token;
        let asked_at = Instant::now();
        match control.call_within(timeout, kind, &token, FrameKind::Status) {
            Ok(status) => {
                self.stats.record_round_trip(asked_at.elapsed());
                self.status = status;
                Ok(())
            }
            Err(error) => {
                self.control = None;
                Err(error)
            }
        }
    }

    /// Makes every connection that is wanted, just after a renewal. Each may take as long as a short
    /// lease lasts, which is renewed in between.
    fn connect_ports(&mut self, timeout: Duration) -> Result<(), ControlError> {
        let mut renewed_at = Instant::now();
        for index in 0..self.ports.len() {
            if !self.ports[index].wanted {
                continue;
            }
            if renewed_at.elapsed() >= renewal_interval(&self.grant) {
                self.renew(FrameKind::Renew)?;
                renewed_at = Instant::now();
            }
            let port = &mut self.ports[index];
            let (address, carrier) = (self.config.address, &self.config.carrier);
            let mut stream = ControlStream::connect_within(timeout, address, carrier)?;
            // The epoch is read after a transport asked for the connection, so it is none from
            // before a request that the transport has sent.
            stream.attach(self.grant.token, port.class, &self.config.ends())?;
            port.note_connected(Instant::now(), self.config.grace);
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

#[cfg(test)]
mod tests;
