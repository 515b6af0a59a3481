//! The thread to which connections leave that do not rest any more.
//!
//! Buffers, threads and the end of a connection need locks and memory. They may wait for the memory map
//! of the process while another thread unmaps a large lease, and renewals must not wait with them.

use super::{Leave, Sleeper};
use crate::control::CONTROL_TIMEOUT;
use crate::donor::connection::{Controlled, Controlling};
use crate::donor::places::Purpose;
use crate::donor::pool::Pool;
use crate::donor::refuse::UNKNOWN_LEASE;
use crate::donor::server::accept::serve_woken;
use crate::donor::server::open::Shared;
use crate::transport::resting::{Buffers, Resting};
use crate::wire::{ErrorMessage, FrameKind, Refusal};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Takes connections until the thread of those that rest has ended.
pub(in crate::donor::server) fn serve(shared: &Arc<Shared>, leaving: &Receiver<Box<Sleeper>>) {
    let mut buffers = Buffers::default();
    for sleeper in leaving {
        sleeper.go(shared, &mut buffers);
    }
}

impl Sleeper {
    fn go(self, shared: &Arc<Shared>, buffers: &mut Buffers) {
        let peer = self.connection.peer();
        match self.leave {
            Some(Leave::Wake(purpose)) => self.wake(shared, purpose, buffers),
            Some(Leave::Over(error)) => {
                tracing::debug!(%peer, %error, "control connection ended");
                self.of.orphan(&shared.served.pool, &error);
            }
            Some(Leave::Close(why)) => tracing::debug!(%peer, why, "control connection closed"),
            None => {}
        }
    }

    /// Gives the connection a thread of its own. When it may have none, its request is served here as
    /// far as that takes no time, and the connection is closed.
    fn wake(self, shared: &Arc<Shared>, purpose: Purpose, buffers: &mut Buffers) {
        let Self {
            mut connection,
            of,
            mut place,
            ..
        } = self;
        let peer = connection.peer();
        if let Err(full) = place.wake(purpose) {
            let answered = answer(&mut connection, &of, &shared.served.pool, &full, buffers);
            let error = answered.err();
            tracing::debug!(%peer, ?error, "control connection closed: there is no thread for it");
            return;
        }
        let timeout = connection.has_part().then_some(CONTROL_TIMEOUT);
        match connection.wake() {
            Ok(control) => serve_woken(shared, place, Controlling { control, of }, timeout),
            Err(error) => {
                tracing::debug!(%peer, %error, "control connection ended");
                of.orphan(&shared.served.pool, &error);
            }
        }
    }
}

/// Answers a request that gets no thread: a release ends the lease, and any other is refused.
fn answer(
    connection: &mut Resting,
    of: &Controlled,
    pool: &Pool,
    full: &dyn std::error::Error,
    buffers: &mut Buffers,
) -> io::Result<()> {
    let (refusal, text) = if connection.has_release(&of.token) {
        match pool.end_soon(&of.token) {
            Some(status) => return connection.send(FrameKind::Status, &status, buffers),
            None => (Refusal::UnknownLease, UNKNOWN_LEASE.to_owned()),
        }
    } else {
        (Refusal::Busy, full.to_string())
    };
    connection.send(FrameKind::Error, &ErrorMessage { refusal, text }, buffers)
}
