//! Writing to a connection.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::time::Instant;

use super::{Connection, Fault, Link, State};
use crate::tcp::channel::Channel;
use crate::tcp::frame::{
    FrameHeader, HEADER_BYTES, KIND_CONFIRM, KIND_RESUME, RESUME_BYTES, encode_resume, low_halves,
};
use crate::tcp::outbox::{HEAD_BYTES, Head};
use crate::tcp::path::Path;

/// Frames passed to the kernel in one call.
const BATCH: usize = 16;

/// Parts of a frame: head, long payload, page.
const PARTS: usize = 3;

impl Link {
    /// Whether there are messages to write, and a connection that takes them.
    pub(in crate::tcp) fn can_send(&self) -> bool {
        let connection = self.connection.as_ref();
        let is_open = |state| state == State::Up;
        connection.is_some_and(|one| is_open(one.state) && !one.waits_for_room)
            && self.outbox.has_unsent()
    }

    /// Writes what the connection takes: the frame that is written in part, then messages in the
    /// order of their lanes. If there are none, a frame without a message, when one is due.
    pub(in crate::tcp) fn send(&mut self, epoll: impl AsFd, now: Instant) -> Result<(), Fault> {
        loop {
            let heads = self.gather(now);
            let Some(connection) = &mut self.connection else {
                return Ok(());
            };
            let skip = connection
                .partial
                .as_ref()
                .map_or(0, |(_, written)| *written);
            let mut parts = [IoSlice::new(&[]); BATCH * PARTS];
            let mut used = 0;
            let mut left = skip;
            for head in heads.iter().flatten() {
                let [large, page] = self.outbox.rest(head.place);
                for part in [&head.bytes[..head.length], large, page] {
                    let from = left.min(part.len());
                    left -= from;
                    if from < part.len() {
                        parts[used] = IoSlice::new(&part[from..]);
                        used += 1;
                    }
                }
            }
            let is_blocked = if used == 0 {
                !connection.stream.flush()?
            } else {
                match connection.stream.write_vectored(&parts[..used]) {
                    Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                    Ok(count) => {
                        connection.last_sent = now;
                        self.note_written(&heads, skip + count, now);
                        if self.has_written_all() {
                            return Ok(());
                        }
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
                    Err(error) => return Err(error.into()),
                }
            };
            if is_blocked != connection.waits_for_room {
                let key = self.peer.place().into();
                let path = &connection.stream;
                path.watch_room(epoll.as_fd(), key, is_blocked)?;
                connection.waits_for_room = is_blocked;
            }
            return Ok(());
        }
    }

    /// Whether the kernel has all there is to write, and nothing is known to the contrary.
    fn has_written_all(&self) -> bool {
        let is_over = |one: &Connection| {
            let is_plain = matches!(one.stream, Path::Socket(Channel::Plain(_)));
            is_plain && one.partial.is_none() && !one.must_resume && !one.waits_for_room
        };
        self.connection.as_ref().is_some_and(is_over) && !self.outbox.has_unsent()
    }

    /// The next frames to write.
    fn gather(&mut self, now: Instant) -> [Option<Head>; BATCH] {
        let mut heads = [None; BATCH];
        let Some(connection) = &self.connection else {
            return heads;
        };
        let expected = self.expected();
        let confirmed = low_halves(expected);
        let mut free = heads.iter_mut();
        let partial = connection.partial.map(|(head, _)| head);
        let mut only = None;
        if let Some(head) = partial {
            free.next()
                .into_iter()
                .for_each(|place| *place = Some(head));
        }
        if connection.must_resume {
            let is_it = partial.is_some_and(|head| head.bytes[0] == KIND_RESUME);
            only = (!is_it).then(|| self.plain(KIND_RESUME, &encode_resume(expected)));
        } else if connection.state == State::Up {
            let unsent = self.outbox.unsent();
            let unsent =
                unsent.filter(|place| partial.is_none_or(|head| head.place != Some(*place)));
            for (place, unsent) in free.by_ref().zip(unsent) {
                *place = Some(self.outbox.head(unsent, confirmed));
            }
            let is_idle = partial.is_none() && !self.outbox.has_unsent();
            only = (is_idle && self.must_send(now)).then(|| self.plain(KIND_CONFIRM, &[]));
        }
        if let (Some(head), Some(place)) = (only, free.next()) {
            *place = Some(head);
        }
        heads
    }

    /// A frame that is no message.
    fn plain(&self, kind: u8, payload: &[u8]) -> Head {
        let header = FrameHeader {
            kind,
            lane: 0,
            length: u16::try_from(payload.len()).expect("a short payload"),
            epoch: self.epoch,
            sequence: 0,
            confirmed: low_halves(self.expected()),
        };
        let mut bytes = [0; HEAD_BYTES];
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        bytes[HEADER_BYTES..][..payload.len()].copy_from_slice(payload);
        Head {
            bytes,
            length: HEADER_BYTES + payload.len(),
            place: None,
        }
    }

    /// So many bytes of these frames are written.
    fn note_written(&mut self, heads: &[Option<Head>; BATCH], bytes: usize, now: Instant) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        let mut left = bytes;
        let mut is_new = connection.partial.take().is_none();
        for head in heads.iter().flatten() {
            let rest = self.outbox.rest(head.place);
            let frame = head.length + rest.iter().map(|part| part.len()).sum::<usize>();
            if left > 0 && is_new {
                // A frame that was begun before confirms only what had arrived then.
                connection.unconfirmed_since = None;
                connection.unconfirmed = 0;
            }
            is_new = true;
            if left < frame {
                if left > 0 {
                    connection.partial = Some((*head, left));
                }
                break;
            }
            left -= frame;
            match head.place {
                Some((lane, _)) => {
                    self.outbox.wrote(lane);
                    connection.waiting_since.get_or_insert(now);
                }
                None if head.bytes[0] == KIND_RESUME => connection.must_resume = false,
                None => {}
            }
        }
    }
}

const _: () = assert!(HEADER_BYTES + RESUME_BYTES <= HEAD_BYTES);
