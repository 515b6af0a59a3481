//! The return of a lease when its VM ends or needs the donor no more.

use super::{BACKOFF_MAX, BACKOFF_MIN, Keeper};
use crate::control::{CONNECT_TIMEOUT, CONTROL_TIMEOUT, ControlError, ControlStream};
use crate::link::describe;
use crate::wire::{FrameKind, LeaseStatus, Refusal};
use std::io;
use std::time::{Duration, Instant};

/// Longest wait for the donor's answer on the control connection. The donor answers when the memory
/// is unmapped, which takes time.
pub(super) const ANSWER_TIME_MAX: Duration = CONTROL_TIMEOUT;

/// Longest time for attempts on other connections after that.
pub(super) const RETRY_TIME_MAX: Duration = CONTROL_TIMEOUT;

/// Whether another attempt is of use.
enum Next {
    /// The lease has ended, or its donor.
    Done,
    Retry,
    /// The donor does not accept this node any more, or breaks the protocol.
    GiveUp,
}

impl Next {
    fn after(error: &ControlError) -> Self {
        match error {
            // An earlier request ended it, and its answer was lost; or it was not renewed in time.
            ControlError::Refused {
                refusal: Refusal::UnknownLease,
                ..
            } => Self::Done,
            // Where no process listens, none has the memory.
            ControlError::Connect(_, cause) if cause.kind() == io::ErrorKind::ConnectionRefused => {
                Self::Done
            }
            // A donor whose places are taken has others soon.
            ControlError::Refused {
                refusal: Refusal::Busy,
                ..
            }
            | ControlError::Connect(..)
            | ControlError::Stream(..) => Self::Retry,
            ControlError::LeftOut(..)
            | ControlError::Identity(..)
            | ControlError::Protocol(..)
            | ControlError::Grant(..)
            | ControlError::Refused { .. } => Self::GiveUp,
        }
    }
}

impl Keeper {
    /// Returns the lease: on the control connection, whose answer may take `answer_time`. When
    /// there is none, or it fails, on new ones for up to `retry_time`. A lease that is not returned
    /// stays lent until it expires.
    pub(super) fn release(&mut self, answer_time: Duration, retry_time: Duration) {
        let mut error = match self.renew_within(answer_time, FrameKind::Release) {
            Ok(()) => return,
            Err(error) => error,
        };
        let deadline = Instant::now() + retry_time;
        let mut backoff = BACKOFF_MIN;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match Next::after(&error) {
                Next::Done => {
                    let error = describe(&error);
                    tracing::debug!(node = %self.config.node, error, "the lease has ended");
                    return;
                }
                Next::Retry if !left.is_zero() => {}
                Next::Retry | Next::GiveUp => {
                    tracing::warn!(
                        node = %self.config.node,
                        address = %self.config.address,
                        bytes = self.grant.bytes,
                        error = describe(&error),
                        "the lease was not returned; the donor keeps the memory until it expires"
                    );
                    return;
                }
            }
            match self.release_anew(left) {
                Ok(()) => return,
                Err(failed) => error = failed,
            }
            if matches!(Next::after(&error), Next::Retry) {
                let left = deadline.saturating_duration_since(Instant::now());
                std::thread::sleep(backoff.min(left));
                backoff = (backoff * 2).min(BACKOFF_MAX);
            }
        }
    }

    /// Returns the lease on a new connection, within `time`.
    fn release_anew(&mut self, time: Duration) -> Result<(), ControlError> {
        let deadline = Instant::now() + time;
        let (address, carrier, token) =
            (self.config.address, &self.config.carrier, &self.grant.token);
        let timeout = time.min(CONNECT_TIMEOUT);
        let mut control = ControlStream::connect_within(timeout, address, carrier)?;
        for kind in [FrameKind::Resume, FrameKind::Release] {
            let left = deadline.saturating_duration_since(Instant::now());
            let status: LeaseStatus = control.call_within(left, kind, token, FrameKind::Status)?;
            self.status = status;
        }
        Ok(())
    }
}
