//! vCPUs that a node lends beside memory.

use super::connection::Connection;
use super::places::Purpose;
use super::policy::{Denied, Resource};
use super::refuse::{refuse, refuse_malformed};
use crate::control::{ControlError, ControlStream};
use crate::wire::{ComputeRequest, FrameKind, NodeClock, Refusal, WireError};
use fabric_identity::Role;
use rustix::event::{EventfdFlags, eventfd};
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Readings of the clock on one connection, and how long they may take: enough for a comparison.
const CLOCK_READINGS_MAX: u32 = 256;
const CLOCK_TIME_MAX: Duration = Duration::from_secs(10);

/// Runs vCPUs of VMs on this node.
pub trait CpuLender: Debug + Send + Sync {
    /// Serves a request until the VM has no vCPU here any more, at once when `ending` says so. Its
    /// values were checked, and what it lends is reserved meanwhile. The connection is by TCP, with
    /// or without TLS.
    ///
    /// # Errors
    ///
    /// When the connection breaks.
    fn serve(
        &self,
        control: &mut ControlStream,
        request: &ComputeRequest,
        ending: &Ending,
    ) -> Result<(), ControlError>;

    /// The time stamp counter of this host, now, and what is lent.
    fn clock(&self) -> NodeClock;
}

/// Ends the vCPUs of a member that may not have them any more, from another thread: it was evicted,
/// or its certificate is not accepted any more.
#[derive(Debug)]
pub struct Ending {
    reason: OnceLock<String>,
    bell: OwnedFd,
}

impl Ending {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            reason: OnceLock::new(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Ends them. The first reason stays.
    pub(super) fn end(&self, reason: &str) {
        let _ = self.reason.set(reason.to_owned());
        // It fails when it has been rung 2^64 times.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Returns why they end; `None` while they may stay.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.reason.get().map(String::as_str)
    }

    /// Returns what is readable once they have to end.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

fn memory_only() -> String {
    "this node lends memory only; start it with --cpus".to_owned()
}

impl Connection<'_> {
    /// Answers with this host's clock, the first time at once. The connection stays one of those
    /// that have no lease, which make room for others.
    pub(super) fn clock(&self, mut control: ControlStream) -> Result<(), ControlError> {
        let Some(lender) = &self.served.cpus else {
            return refuse(&mut control, Refusal::NoCpus, memory_only());
        };
        let until = Instant::now() + CLOCK_TIME_MAX;
        for _ in 0..CLOCK_READINGS_MAX {
            control.send(FrameKind::Clock, &lender.clock())?;
            let left = until.saturating_duration_since(Instant::now());
            let (frame, _) = match control.receive(left) {
                Ok(received) => received,
                // The comparison is done.
                Err(ControlError::Stream(..)) => return Ok(()),
                Err(error) => return refuse_malformed(&mut control, error),
            };
            if frame.kind != FrameKind::ReadClock {
                let error = ControlError::Protocol(self.peer, WireError::Unexpected(frame.kind));
                return refuse_malformed(&mut control, error);
            }
        }
        let text = format!("the clock was read {CLOCK_READINGS_MAX} times, which is the limit");
        refuse(&mut control, Refusal::Busy, text)
    }

    pub(super) fn compute(
        &self,
        mut control: ControlStream,
        mut request: ComputeRequest,
    ) -> Result<(), ControlError> {
        let Some(lender) = &self.served.cpus else {
            return refuse(&mut control, Refusal::NoCpus, memory_only());
        };
        if let Err(error) = request.check() {
            return refuse(&mut control, Refusal::Malformed, error.to_string());
        }
        if control.is_udp() {
            let text = "vCPUs are lent by TCP, and this connection is by UDP".to_owned();
            return refuse(&mut control, Refusal::Malformed, text);
        }
        if let Some(subject) = control.identity()
            && subject.holder.role != Role::Vm
        {
            let text = format!("{subject} is no VM, and runs no vCPUs on nodes");
            return refuse(&mut control, Refusal::NotAllowed, text);
        }
        let _charged = match self.charge(&control, &request) {
            Ok(charged) => charged,
            Err(denied) => return refuse(&mut control, Refusal::NotAllowed, denied.to_string()),
        };
        let reserved = match self.served.pool.reserve(request.lent_bytes) {
            Ok(reserved) => reserved,
            Err(error) => return refuse(&mut control, Refusal::NoMemory, error.to_string()),
        };
        if let Err(full) = self.place.establish(Purpose::Lasting) {
            return refuse(&mut control, Refusal::Busy, full.to_string());
        }
        let ending = Ending::new().map(Arc::new);
        let ending = ending.map_err(|error| ControlError::Stream(self.peer, error))?;
        self.place.ends_with(&ending);
        // It is logged.
        request.name.retain(|c| !c.is_control());
        let served = lender.serve(&mut control, &request, &ending);
        drop(reserved);
        served
    }

    /// Charges the member with what it asks for, until the result is dropped.
    fn charge(
        &self,
        control: &ControlStream,
        request: &ComputeRequest,
    ) -> Result<impl Sized + use<>, Denied> {
        let (pool, member) = (&self.served.pool, control.identity());
        Ok([
            pool.charge(member, Resource::Cpus, request.cpus.into())?,
            pool.charge(member, Resource::Bytes, request.lent_bytes)?,
        ])
    }
}
