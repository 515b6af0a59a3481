//! The rules of a stream over two rings.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use fabric_host::metrics::Histogram;

use super::closer::Closer;
use super::credit::Note;
use super::{
    CREDIT_BYTES, CREDIT_NOTES, NOTES_MAX, REQUESTS, RING_BYTES, RingEvent, RingPort, RingWrite,
};

/// What the other end did that no correct one does.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct RingOffence(String);

pub(crate) fn offence(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, RingOffence(text))
}

/// Returns whether an error is the other end's offence, and not a connection that broke.
pub(crate) fn is_offence(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|inner| inner.is::<RingOffence>())
}

/// One end of a stream. No call waits.
#[derive(Debug)]
pub(crate) struct RingStream {
    /// `None` only while this is dropped.
    port: Option<Box<dyn RingPort>>,
    closer: Closer,
    /// Bytes that were written into the other's ring, all together.
    written: u64,
    /// Of these, what the other end has read.
    returned: u64,
    /// Of these, what has left the place where it was staged.
    sent: u64,
    /// WRITEs with bytes that the other end has not returned.
    notes_out: usize,
    /// Bytes of each WRITE that has not completed, oldest first, and when it was posted; no bytes
    /// of a credit.
    posted: VecDeque<(usize, Instant)>,
    /// How long WRITEs take.
    write_times: Arc<Histogram>,
    /// Bytes that arrived in this end's ring, all together.
    arrived: u64,
    /// Of these, what was read.
    read: u64,
    /// Bytes that were read, and WRITEs that were taken, since the last credit.
    owed_bytes: usize,
    owed_notes: usize,
    /// Why the stream broke, until it is reported.
    failure: Option<io::Error>,
}

/// The place in a ring of the byte with this number.
fn place(number: u64) -> usize {
    usize::try_from(number % RING_BYTES as u64).expect("a place in the ring")
}

impl RingStream {
    pub(crate) fn new(
        port: Box<dyn RingPort>,
        closer: Closer,
        write_times: Arc<Histogram>,
    ) -> Self {
        Self {
            port: Some(port),
            closer,
            written: 0,
            returned: 0,
            sent: 0,
            notes_out: 0,
            posted: VecDeque::with_capacity(REQUESTS),
            write_times,
            arrived: 0,
            read: 0,
            owed_bytes: 0,
            owed_notes: 0,
            failure: None,
        }
    }

    fn port(&mut self) -> &mut dyn RingPort {
        self.port.as_deref_mut().expect("not dropped")
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        let port = self.port.as_deref().expect("not dropped");
        port.event_fd()
    }

    /// Room for bytes in the other's ring and in the place where they are staged.
    fn room(&self) -> usize {
        if self.notes_out >= NOTES_MAX || self.posted.len() >= NOTES_MAX {
            return 0;
        }
        let used = self.written - self.returned.min(self.sent);
        RING_BYTES - usize::try_from(used).expect("no more than the ring")
    }

    /// Whether [`Self::write`] would take something.
    pub(crate) fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// Whether [`Self::read`] would return something else than `WouldBlock`.
    pub(crate) fn is_readable(&mut self) -> bool {
        self.take_events();
        self.arrived > self.read || self.failure.is_some()
    }

    /// Prepares for sleeping until the descriptor is readable. The caller then looks
    /// once more whether there is something to read, or room.
    pub(crate) fn arm(&mut self) {
        if let Err(error) = self.port().arm() {
            self.failure.get_or_insert(error);
        }
    }

    /// Takes what the adapter reports, and returns credit that is due.
    fn take_events(&mut self) {
        if self.failure.is_some() {
            return;
        }
        if let Err(error) = self.try_take_events() {
            self.failure = Some(error);
        }
    }

    fn try_take_events(&mut self) -> io::Result<()> {
        let mut now = None;
        while let Some(event) = self.port().poll()? {
            match event {
                RingEvent::Sent => {
                    let oldest = self.posted.pop_front();
                    let twice = || io::Error::other("a WRITE completed twice");
                    let (bytes, posted_at) = oldest.ok_or_else(twice)?;
                    self.sent += bytes as u64;
                    let now = *now.get_or_insert_with(Instant::now);
                    self.write_times.record(now.duration_since(posted_at));
                }
                RingEvent::Notified(value) => self.take_note(Note::decode(value))?,
            }
        }
        self.return_credit()
    }

    fn take_note(&mut self, note: Note) -> io::Result<()> {
        match note {
            Note::Bytes(bytes) => {
                let unread = usize::try_from(self.arrived - self.read).unwrap_or(usize::MAX);
                // What was read and is not returned is no room for it either.
                let room = RING_BYTES - unread - self.owed_bytes;
                if bytes == 0 || bytes > room {
                    let text = format!("wrote {bytes} bytes, and there is room for {room}");
                    return Err(offence(text));
                }
                self.arrived += bytes as u64;
                self.owed_notes += 1;
                if self.owed_notes > NOTES_MAX {
                    let text = format!("wrote {NOTES_MAX} times without room for more");
                    return Err(offence(text));
                }
            }
            Note::Credit { bytes, notes } => {
                let unread = usize::try_from(self.written - self.returned).unwrap_or(usize::MAX);
                let is_empty = bytes == 0 && notes == 0;
                if is_empty || bytes > unread || notes > self.notes_out {
                    let out = self.notes_out;
                    let text = format!(
                        "returned {bytes} bytes of {notes} WRITEs, and has {unread} of {out}"
                    );
                    return Err(offence(text));
                }
                self.returned += bytes as u64;
                self.notes_out -= notes;
            }
        }
        Ok(())
    }

    /// Returns what was read, if that is enough and there is a request for it.
    fn return_credit(&mut self) -> io::Result<()> {
        let (bytes, notes) = (self.owed_bytes, self.owed_notes);
        let is_due = bytes >= CREDIT_BYTES || notes >= CREDIT_NOTES;
        if !is_due || self.posted.len() >= REQUESTS {
            return Ok(());
        }
        let write = RingWrite {
            offset: 0,
            bytes: 0,
            value: Note::Credit { bytes, notes }.encode(),
        };
        self.posted.push_back((0, Instant::now()));
        self.port().post(&[write])?;
        (self.owed_bytes, self.owed_notes) = (0, 0);
        Ok(())
    }

    /// Reads what there is; `WouldBlock` when there is nothing now.
    pub(crate) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.take_events();
        let unread = usize::try_from(self.arrived - self.read).unwrap_or(usize::MAX);
        // What arrived before a failure is whole.
        if unread == 0 {
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = unread.min(bytes.len());
        let at = place(self.read);
        let (first, second) = bytes[..count].split_at_mut(count.min(RING_BYTES - at));
        let port = self.port.as_deref().expect("not dropped");
        port.copy(at, first);
        port.copy(0, second);
        self.read += count as u64;
        self.owed_bytes += count;
        if self.failure.is_none()
            && let Err(error) = self.return_credit()
        {
            self.failure = Some(error);
        }
        Ok(count)
    }

    /// Takes bytes and posts them.
    pub(crate) fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.take_events();
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let mut left = self.room();
        let start = self.written;
        for part in parts {
            let mut rest = &part[..part.len().min(left)];
            left -= rest.len();
            while !rest.is_empty() {
                let at = place(self.written);
                let (now, later) = rest.split_at(rest.len().min(RING_BYTES - at));
                self.port().stage(at, now);
                self.written += now.len() as u64;
                rest = later;
            }
        }
        let mut count = usize::try_from(self.written - start).expect("no more than the ring");
        if count == 0 {
            return match parts.iter().all(|part| part.is_empty()) {
                true => Ok(0),
                false => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let offset = place(start);
        let before_end = count.min(RING_BYTES - offset);
        let write = |offset, bytes| RingWrite {
            offset,
            bytes,
            value: Note::Bytes(bytes).encode(),
        };
        let writes = [write(offset, before_end), write(0, count - before_end)];
        let mut used = 1 + usize::from(before_end < count);
        if used == 2 && (self.notes_out + 2 > NOTES_MAX || self.posted.len() + 2 > NOTES_MAX) {
            // What is behind the ring's end is staged again later.
            (used, count) = (1, before_end);
            self.written = start + count as u64;
        }
        let now = Instant::now();
        for write in &writes[..used] {
            self.posted.push_back((write.bytes, now));
        }
        self.notes_out += used;
        let posted = self.port().post(&writes[..used]);
        posted.map(|()| count)
    }
}

impl Drop for RingStream {
    /// Ending a connection of an adapter may take time, which the thread that uses the stream does
    /// not have.
    fn drop(&mut self) {
        if let Some(port) = self.port.take() {
            self.closer.close(port, self.posted.len());
        }
    }
}
