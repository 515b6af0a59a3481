//! Receives the data of the guest's init over the second serial port.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::progress;

use super::frame::{CONTENTS_BYTES_MAX, FAILURE, HEADER_BYTES, HELLO, STATUS, STDERR, STDOUT};

/// Result of the command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandEnd {
    /// It ended with this status, as a shell reports it.
    Status(u8),
    /// The init could not run it, with the reason.
    NotRun(String),
    /// Its output could not be forwarded.
    OutputLost(String),
    /// The data did not come from our init.
    Garbled(String),
}

/// State of the command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The init has opened the channel.
    pub opened: bool,
    /// What the command has written to its standard output.
    pub stdout_bytes: u64,
    /// What the command has written to its standard error.
    pub stderr_bytes: u64,
    /// Its result, once known.
    pub end: Option<CommandEnd>,
    /// No more data will arrive.
    pub closed: bool,
}

/// The channel's end on this host. Clones share its state.
#[derive(Clone, Debug, Default)]
pub struct Channel {
    shared: Arc<(Mutex<Progress>, Condvar)>,
}

impl Channel {
    /// Returns the current state.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.lock().clone()
    }

    /// Records that no more data will arrive, and wakes the waiters.
    pub fn close(&self) {
        self.change(|progress| progress.closed = true);
    }

    /// Waits until the result of the command is known, or the channel is closed.
    #[must_use]
    pub fn wait_for_end(&self) -> Progress {
        let (_, changed) = &*self.shared;
        changed
            .wait_while(self.lock(), |p| p.end.is_none() && !p.closed)
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Waits up to `limit` until the channel is closed; returns false at the timeout.
    #[must_use]
    pub fn wait_until_closed(&self, limit: Duration) -> bool {
        let (_, changed) = &*self.shared;
        changed
            .wait_timeout_while(self.lock(), limit, |progress| !progress.closed)
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .closed
    }

    /// Returns the writer for the serial port's bytes, which forwards the command's output.
    pub fn receiver<O: Write + Send, E: Write + Send>(
        &self,
        stdout: O,
        stderr: E,
    ) -> Receiver<O, E> {
        Receiver {
            channel: self.clone(),
            stdout,
            stderr,
            booting: None,
            pending: Vec::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.lock());
        self.shared.1.notify_all();
    }

    fn end(&self, end: CommandEnd) {
        self.change(|progress| {
            progress.end.get_or_insert(end);
        });
    }
}

/// Parses frames as their bytes arrive. Never fails: errors are recorded in the [`Progress`].
#[derive(Debug)]
pub struct Receiver<O, E> {
    channel: Channel,
    stdout: O,
    stderr: E,
    /// Shows that the guest is booting.
    booting: Option<progress::Progress>,
    /// Received bytes that do not form a frame yet.
    pending: Vec<u8>,
}

impl<O: Write + Send, E: Write + Send> Write for Receiver<O, E> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend_from_slice(bytes);
        let mut taken = 0;
        while let Some(len) = self.take(taken) {
            taken += len;
        }
        self.pending.drain(..taken.min(self.pending.len()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<O: Write + Send, E: Write + Send> Receiver<O, E> {
    /// Adds a progress bar that is removed before the command's first output.
    #[must_use]
    pub fn with_bar(self, bar: progress::Progress) -> Self {
        Self {
            booting: Some(bar),
            ..self
        }
    }

    /// Processes the frame at `from`; returns its length, or `None` when it is incomplete.
    fn take(&mut self, from: usize) -> Option<usize> {
        let Progress { opened, end, .. } = self.channel.progress();
        let bytes = self.pending.get(from..).filter(|bytes| !bytes.is_empty())?;
        if end.is_some() {
            return Some(bytes.len());
        }
        if !opened {
            return self.find_hello(from);
        }
        let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let [kind, low, high] = *header;
        let len = usize::from(u16::from_le_bytes([low, high]));
        if len > CONTENTS_BYTES_MAX || ![STDOUT, STDERR, STATUS, FAILURE].contains(&kind) {
            let text = format!("a frame of kind {kind:#04x} with {len} bytes");
            self.channel.end(CommandEnd::Garbled(text));
            return Some(bytes.len());
        }
        let contents = rest.get(..len)?;
        match (kind, contents) {
            (STDOUT, _) => {
                let written = self
                    .stdout
                    .write_all(contents)
                    .and_then(|()| self.stdout.flush());
                self.written("standard output", written, len);
            }
            (STDERR, _) => {
                let written = self
                    .stderr
                    .write_all(contents)
                    .and_then(|()| self.stderr.flush());
                self.written("standard error", written, len);
            }
            (STATUS, [status]) => self.channel.end(CommandEnd::Status(*status)),
            (FAILURE, _) => {
                // It is shown on a terminal, and any program in the guest could have sent it.
                let text = String::from_utf8_lossy(contents);
                let text = text.chars().filter(|c| !c.is_control()).collect();
                self.channel.end(CommandEnd::NotRun(text));
            }
            _ => {
                let text = format!("a status of {len} bytes");
                self.channel.end(CommandEnd::Garbled(text));
            }
        }
        Some(HEADER_BYTES + len)
    }

    /// Searches for the greeting from `from` on; drops bytes that cannot be part of it.
    fn find_hello(&mut self, from: usize) -> Option<usize> {
        let bytes = self.pending.get(from..)?;
        if let Some(at) = bytes
            .windows(HELLO.len())
            .position(|window| window == HELLO)
        {
            self.booting = None;
            self.channel.change(|progress| progress.opened = true);
            return Some(at + HELLO.len());
        }
        match bytes.len().saturating_sub(HELLO.len() - 1) {
            0 => None,
            stray => Some(stray),
        }
    }

    fn written(&mut self, what: &str, written: io::Result<()>, len: usize) {
        if let Err(error) = written {
            let text = format!("{what}: {error}");
            return self.channel.end(CommandEnd::OutputLost(text));
        }
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        self.channel.change(|progress| {
            let bytes = if what == "standard output" {
                &mut progress.stdout_bytes
            } else {
                &mut progress.stderr_bytes
            };
            *bytes += len;
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::frame::header;
    use super::*;

    fn frame(kind: u8, contents: &[u8]) -> Vec<u8> {
        [&header(kind, contents.len())[..], contents].concat()
    }

    /// Returns the result of receiving bytes in these pieces: output, errors, state.
    fn received<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<u8>, Vec<u8>, Progress) {
        let channel = Channel::default();
        let mut receiver = channel.receiver(Vec::new(), Vec::new());
        for piece in pieces {
            receiver.write_all(piece).expect("never fails");
        }
        assert!(receiver.pending.len() <= HEADER_BYTES + CONTENTS_BYTES_MAX);
        (receiver.stdout, receiver.stderr, channel.progress())
    }

    #[test]
    fn output_errors_and_status_are_told_apart_however_they_are_cut() {
        let every: Vec<u8> = (0..=255).collect();
        let stream = [
            b"stray\0SSI".to_vec(),
            HELLO.to_vec(),
            frame(STDOUT, &every),
            frame(STDERR, b"oh\n"),
            frame(STDOUT, &HELLO),
            frame(STATUS, &[42]),
            b"after the end".to_vec(),
        ]
        .concat();
        for size in [1, 2, 7, 1000] {
            let (out, err, progress) = received(stream.chunks(size));
            assert_eq!(out, [&every[..], &HELLO].concat());
            assert_eq!(err, b"oh\n");
            assert_eq!(progress.end, Some(CommandEnd::Status(42)));
            assert_eq!((progress.stdout_bytes, progress.stderr_bytes), (272, 3));
        }
    }

    #[test]
    fn what_is_not_of_our_init_is_said() {
        for (frames, expected) in [
            (frame(b'?', b""), "kind 0x3f"),
            (frame(STATUS, b""), "a status of 0 bytes"),
            (
                frame(STDOUT, &[0; CONTENTS_BYTES_MAX + 1]),
                "with 4097 bytes",
            ),
        ] {
            let (_, _, progress) = received([&HELLO[..], &frames]);
            let Some(CommandEnd::Garbled(text)) = progress.end else {
                panic!("{progress:?}");
            };
            assert!(text.contains(expected), "{text}");
        }
        let (_, _, progress) = received([&HELLO[..], &frame(FAILURE, b"no\x1b shell\n")]);
        assert_eq!(progress.end, Some(CommandEnd::NotRun("no shell".into())));
    }

    #[test]
    fn output_that_nobody_takes_ends_it() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let channel = Channel::default();
        let mut receiver = channel.receiver(Broken, Vec::new());
        let stream = [&HELLO[..], &frame(STDOUT, b"x"), &frame(STATUS, &[0])].concat();
        receiver.write_all(&stream).expect("never fails");
        let expected = CommandEnd::OutputLost("standard output: broken pipe".into());
        assert_eq!(channel.progress().end, Some(expected));
    }

    #[test]
    fn who_waits_is_woken_by_the_end_and_by_the_close() {
        let channel = Channel::default();
        assert!(!channel.wait_until_closed(Duration::ZERO));
        let waiting = std::thread::spawn({
            let channel = channel.clone();
            move || {
                (
                    channel.wait_for_end(),
                    channel.wait_until_closed(Duration::MAX),
                )
            }
        });
        channel.end(CommandEnd::Status(1));
        channel.close();
        let (progress, closed) = waiting.join().expect("ends");
        assert_eq!(progress.end, Some(CommandEnd::Status(1)));
        assert!(closed);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..64), 0..32),
            hello: bool,
        ) {
            let first = if hello { &HELLO[..] } else { &[] };
            received(std::iter::once(first).chain(pieces.iter().map(Vec::as_slice)));
        }
    }
}
