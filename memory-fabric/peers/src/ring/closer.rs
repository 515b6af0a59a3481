//! The thread that ends connections of adapters.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use fabric_coherence::members::MEMBERS_MAX;

use super::{RingEvent, RingPort};

/// How long WRITEs that are on their way may take: the last ones may be what ends the VM in order.
const LINGER: Duration = Duration::from_millis(100);

/// A connection, and how many of its WRITEs have not completed.
type Closing = (Box<dyn RingPort>, usize);

/// Where connections are ended.
#[derive(Clone, Debug)]
pub(crate) struct Closer(SyncSender<Closing>);

impl Closer {
    /// Starts the thread, which ends with the last user of it.
    pub(crate) fn start() -> io::Result<Self> {
        // More wait only while an adapter hangs.
        let (sender, closing) = sync_channel(2 * MEMBERS_MAX);
        std::thread::Builder::new()
            .name("peers-close".to_owned())
            .spawn(move || close_all(&closing))?;
        Ok(Self(sender))
    }

    pub(super) fn close(&self, port: Box<dyn RingPort>, outstanding: usize) {
        let (TrySendError::Full(refused) | TrySendError::Disconnected(refused)) =
            match self.0.try_send((port, outstanding)) {
                Ok(()) => return,
                Err(error) => error,
            };
        drop(refused);
    }
}

fn close_all(closing: &Receiver<Closing>) {
    while let Ok((mut port, mut outstanding)) = closing.recv() {
        let deadline = Instant::now() + LINGER;
        while outstanding > 0 && Instant::now() < deadline {
            match port.poll() {
                Ok(Some(RingEvent::Sent)) => outstanding -= 1,
                Ok(Some(RingEvent::Notified(_))) => {}
                Ok(None) => std::thread::yield_now(),
                Err(_) => break,
            }
        }
    }
}
