//! Leases that are kept while something else takes its time: connections to other donors, which may
//! take longer than a short lease lasts.

use super::{Leased, renewal_interval};
use crate::wire::{FrameKind, LeaseStatus};
use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError, bounded};
use std::convert::Infallible;

/// Does `work`, and renews the leases until it ends.
pub fn while_kept<T>(leases: &mut [Leased], work: impl FnOnce() -> T) -> T {
    let intervals = leases.iter().map(|leased| renewal_interval(&leased.grant));
    let Some(interval) = intervals.min() else {
        return work();
    };
    std::thread::scope(|scope| {
        let (ended, end) = bounded::<Infallible>(0);
        let renew = move || {
            while end.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                renew_all(leases, &end);
            }
        };
        // Without the thread they are renewed later, as far as they last.
        let renewing = std::thread::Builder::new().spawn_scoped(scope, renew);
        if let Err(error) = &renewing {
            tracing::warn!(%error, "leases are not renewed while donors are waited for");
        }
        let done = work();
        drop(ended);
        done
    })
}

fn renew_all(leases: &mut [Leased], end: &Receiver<Infallible>) {
    for leased in leases {
        // Each takes as long as a donor that hangs lets it.
        if end.try_recv() == Err(TryRecvError::Disconnected) {
            return;
        }
        leased.renew();
    }
}

impl Leased {
    /// Without an answer the connection is given up: what comes late belongs to no later request. The
    /// link resumes the lease on another one.
    fn renew(&mut self) {
        let Some(control) = &mut self.control else {
            return;
        };
        let renewed: Result<LeaseStatus, _> =
            control.call(FrameKind::Renew, &self.grant.token, FrameKind::Status);
        match renewed {
            // Nobody drives it until the next renewal.
            Ok(_) => control.settle(),
            Err(error) => {
                tracing::debug!(%error, "a lease is not renewed");
                self.control = None;
            }
        }
    }
}
