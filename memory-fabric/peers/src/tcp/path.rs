//! What carries the frames to one peer: a connection, or rings that were set up over one.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;

use super::channel::Channel;
use super::paths::PeerTransport;
use crate::ring::{RingStream, offence};

/// Marks events of a connection over which rings were set up.
pub(super) const SESSION: u64 = 1 << 32;

/// What carries frames. No call waits.
#[derive(Debug)]
pub(super) enum Path {
    /// A connection.
    Socket(Channel),
    /// Rings.
    Rings(Box<RingPath>),
}

/// Rings, and the connection over which they were set up, whose end is theirs.
#[derive(Debug)]
pub(super) struct RingPath {
    stream: RingStream,
    session: Channel,
    /// The peer has ended the session.
    has_ended: bool,
    /// Where the descriptor of the rings is watched, which stays open for a while after this.
    watched_by: Option<OwnedFd>,
}

impl RingPath {
    pub(super) fn new(stream: RingStream, session: Channel) -> Self {
        Self {
            stream,
            session,
            has_ended: false,
            watched_by: None,
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.stream.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.has_ended => Ok(0),
            read => read,
        }
    }

    /// The session is readable: it has ended, as nothing travels on it.
    fn note_session(&mut self) -> io::Result<()> {
        let mut bytes = [0; 64];
        match self.session.read(&mut bytes) {
            Ok(0) => {
                self.has_ended = true;
                Ok(())
            }
            Ok(count) => Err(offence(format!("sent {count} bytes beside its ring"))),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
                _ => Err(error),
            },
        }
    }
}

impl Drop for RingPath {
    fn drop(&mut self) {
        if let Some(epoll) = &self.watched_by {
            // Fails only when it was not added.
            let _ = epoll::delete(epoll, self.stream.event_fd());
        }
    }
}

impl Path {
    /// The connection.
    #[cfg(test)]
    pub(super) fn session(&self) -> &Channel {
        match self {
            Self::Socket(channel) => channel,
            Self::Rings(rings) => &rings.session,
        }
    }

    /// The connection, if there are no rings.
    pub(super) fn into_socket(self) -> Option<Channel> {
        match self {
            Self::Socket(channel) => Some(channel),
            Self::Rings(_) => None,
        }
    }

    /// What carries the frames.
    pub(super) const fn transport(&self) -> PeerTransport {
        match self {
            Self::Socket(Channel::Plain(_)) => PeerTransport::Tcp,
            Self::Socket(Channel::Secure(_)) => PeerTransport::SecureTcp,
            Self::Rings(_) => PeerTransport::Rdma,
        }
    }

    /// Whether frames travel on the connection itself.
    pub(super) const fn is_socket(&self) -> bool {
        matches!(self, Self::Socket(_))
    }

    /// Whether this is rings that are at an end by themselves, and not with their session.
    pub(super) fn is_broken_ring(&self) -> bool {
        matches!(self, Self::Rings(rings) if !rings.has_ended)
    }

    /// Has `epoll` report under `key` when there may be something to read, and under `key` with
    /// [`SESSION`] when [`Self::note_session`] has to be called.
    pub(super) fn watch(&mut self, epoll: BorrowedFd<'_>, key: u64) -> io::Result<()> {
        let add = |socket: BorrowedFd<'_>, key| {
            let data = epoll::EventData::new_u64(key);
            epoll::add(epoll, socket, data, epoll::EventFlags::IN)
        };
        match self {
            Self::Socket(channel) => add(channel.socket().as_fd(), key)?,
            Self::Rings(rings) => {
                add(rings.session.socket().as_fd(), key | SESSION)?;
                let watched_by = epoll.try_clone_to_owned()?;
                add(rings.stream.event_fd(), key)?;
                rings.watched_by = Some(watched_by);
            }
        }
        Ok(())
    }

    /// Has `epoll` report when there is room to write, too, or no longer. Rings report it as what
    /// can be read.
    pub(super) fn watch_room(
        &self,
        epoll: BorrowedFd<'_>,
        key: u64,
        is_watched: bool,
    ) -> io::Result<()> {
        if let Self::Socket(channel) = self {
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, is_watched);
            let data = epoll::EventData::new_u64(key);
            epoll::modify(epoll, channel.socket(), data, flags)?;
        }
        Ok(())
    }

    /// Takes what the session reports.
    pub(super) fn note_session(&mut self) -> io::Result<()> {
        match self {
            Self::Socket(_) => Ok(()),
            Self::Rings(rings) => rings.note_session(),
        }
    }

    /// Reads what there is; 0 when the peer has ended the connection.
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(channel) => channel.read(bytes),
            Self::Rings(rings) => rings.read(bytes),
        }
    }

    /// Writes what is taken now.
    pub(super) fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Socket(channel) => channel.write_vectored(parts),
            Self::Rings(rings) => rings.stream.write(parts),
        }
    }

    /// Sends what was taken before. Returns whether all of it is sent.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Self::Socket(channel) => channel.flush(),
            Self::Rings(_) => Ok(true),
        }
    }

    /// Whether there is something to read of which no descriptor reports anything.
    pub(super) fn is_ready(&mut self) -> bool {
        match self {
            Self::Socket(channel) => channel.is_ready(),
            Self::Rings(rings) => rings.stream.is_readable() || rings.has_ended,
        }
    }

    /// Whether there is room to write of which no descriptor reports anything.
    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Socket(_) => false,
            Self::Rings(rings) => rings.stream.has_room(),
        }
    }

    /// Prepares for sleeping until a descriptor reports something. The caller then looks once more
    /// whether something is ready.
    pub(super) fn arm(&mut self) {
        if let Self::Rings(rings) = self {
            rings.stream.arm();
        }
    }
}
