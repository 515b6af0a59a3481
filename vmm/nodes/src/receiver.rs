//! The receiving side of the connection between two nodes.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::codec::{FRAME_BYTES_MAX, Malformed, decode};
use crate::link::{Link, QUEUED_BYTES_MAX};
use crate::message::{Message, NodeNumber};

/// Why a link has ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer has ended the connection.
    #[error("node {0} has closed its connection")]
    Closed(NodeNumber),
    /// The connection has failed.
    #[error("the connection to node {peer} failed")]
    Failed {
        /// The peer.
        peer: NodeNumber,
        /// How.
        #[source]
        source: io::Error,
    },
    /// Nothing comes from the peer.
    #[error("node {peer} has been silent for {} s", time.as_secs())]
    Silent {
        /// The peer.
        peer: NodeNumber,
        /// For how long.
        time: Duration,
    },
    /// The peer sent what no correct peer sends.
    #[error("node {peer} broke the protocol: {reason}")]
    Broken {
        /// The peer.
        peer: NodeNumber,
        /// How.
        reason: String,
    },
}

impl LinkError {
    /// The peer.
    #[must_use]
    pub fn peer(&self) -> NodeNumber {
        match self {
            Self::Closed(peer)
            | Self::Failed { peer, .. }
            | Self::Silent { peer, .. }
            | Self::Broken { peer, .. } => *peer,
        }
    }
}

/// Takes the messages of one peer, on one thread.
#[derive(Debug)]
pub struct Receiver {
    link: Arc<Link>,
    buffer: Vec<u8>,
    /// The bytes of `buffer` that hold messages not yet taken.
    filled: std::ops::Range<usize>,
    /// When something came last. `None` while a peer may take its time: before its greeting, and after
    /// that until something comes or [has to](Self::expects_life).
    heard: Option<Instant>,
}

impl Receiver {
    pub(crate) fn new(link: Arc<Link>) -> Self {
        Self {
            link,
            buffer: vec![0; 2 * FRAME_BYTES_MAX],
            filled: 0..0,
            heard: None,
        }
    }

    /// The link.
    #[must_use]
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// What is wrong with a peer that sent what it must not.
    pub fn broken(&self, reason: impl Into<String>) -> LinkError {
        LinkError::Broken {
            peer: self.link.peer(),
            reason: reason.into(),
        }
    }

    fn closed(&self) -> LinkError {
        match self.link.is_flooded() {
            true => self.broken(format!(
                "it does not read: more than {} MiB wait for it",
                QUEUED_BYTES_MAX >> 20
            )),
            false => LinkError::Closed(self.link.peer()),
        }
    }

    fn failed(&self, source: io::Error) -> LinkError {
        let peer = self.link.peer();
        match source.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => LinkError::Closed(peer),
            _ => LinkError::Failed { peer, source },
        }
    }

    /// Waits for the peer's greeting, and checks that it is the expected peer.
    ///
    /// # Errors
    /// When it is another one, or does not greet in time.
    pub fn greet(&mut self, until: Instant) -> Result<(), LinkError> {
        let begun = Instant::now();
        let config = self.link.config;
        match self.next(Some(until))? {
            Some(Message::Hello { version, vm, node }) => {
                if version != crate::VERSION {
                    let mine = crate::VERSION;
                    let reason = format!("it has version {version}, this node {mine}");
                    return Err(self.broken(reason));
                }
                if vm != config.vm || node != config.peer {
                    return Err(self.broken(format!("it is node {node}, or of another VM")));
                }
                // It may have to load the guest before it takes messages and shows that it lives.
                self.heard = None;
                Ok(())
            }
            Some(_) => Err(self.broken("it does not greet")),
            None => Err(LinkError::Silent {
                peer: config.peer,
                time: begun.elapsed(),
            }),
        }
    }

    /// From now on the peer is lost when nothing comes from it for too long.
    pub fn expects_life(&mut self) {
        self.heard.get_or_insert_with(Instant::now);
    }

    /// The next message; `None` at the time `until`. Meanwhile sends what is queued, and signs of
    /// life.
    ///
    /// # Errors
    /// When the link has ended.
    pub fn next(&mut self, until: Option<Instant>) -> Result<Option<Message>, LinkError> {
        loop {
            if let Some(message) = self.take()? {
                if message == Message::Alive {
                    continue;
                }
                return Ok(Some(message));
            }
            if self.read()? {
                continue;
            }
            if self.link.is_closed() {
                return Err(self.closed());
            }
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) {
                return Ok(None);
            }
            self.wait(until, now)?;
        }
    }

    /// The first message in the buffer.
    fn take(&mut self) -> Result<Option<Message>, LinkError> {
        match decode(&self.buffer[self.filled.clone()]) {
            Ok(Some((message, len))) => {
                self.filled.start += len;
                Ok(Some(message))
            }
            Ok(None) => Ok(None),
            Err(error @ Malformed { .. }) => Err(self.broken(error.to_string())),
        }
    }

    /// Reads what is there; whether something was.
    fn read(&mut self) -> Result<bool, LinkError> {
        if self.buffer.len() - self.filled.end < FRAME_BYTES_MAX {
            self.buffer.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
        match self.link.stream.read(&mut self.buffer[self.filled.end..]) {
            Ok(0) => Err(self.closed()),
            Ok(count) => {
                self.filled.end += count;
                self.heard = Some(Instant::now());
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Waits for something to do, at most until `until`.
    fn wait(&mut self, until: Option<Instant>, now: Instant) -> Result<(), LinkError> {
        let silence_max = self.link.config.silence_max;
        let lost_at = self.heard.map(|at| at + silence_max);
        if lost_at.is_some_and(|at| at <= now) {
            return Err(LinkError::Silent {
                peer: self.link.peer(),
                time: silence_max,
            });
        }
        // Enough that one sign of life may be late.
        let interval = silence_max / 4;
        let mut alive_at = self.link.lock().sent_at + interval;
        let is_full = self.link.flush();
        if alive_at <= now && !is_full {
            self.link.send(&Message::Alive);
            alive_at = now + interval;
        }
        let wake_at = [lost_at, until].into_iter().flatten();
        let wake_at = wake_at.fold(
            if is_full { now + interval } else { alive_at },
            Instant::min,
        );
        let time = Timespec::try_from(wake_at.saturating_duration_since(now));
        let flags = if is_full {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        };
        let mut fds = [
            PollFd::from_borrowed_fd(self.link.stream.fd(), flags),
            PollFd::from_borrowed_fd(self.link.wake_fd().as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, time.ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(self.failed(error.into())),
        }
        if fds[1].revents().contains(PollFlags::IN) {
            // Readable, as poll said, and nobody else reads it.
            let _ = rustix::io::read(self.link.wake_fd(), &mut [0; 8]);
        }
        Ok(())
    }
}
