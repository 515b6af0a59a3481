//! The console: where the guest's serial output goes, and where its input comes from.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use devices::SerialPort;
use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::Outcome;
use super::terminal::is_foreground_terminal;
use super::vcpu::Shared;

/// Bytes of input read at once.
const INPUT_BATCH_BYTES: usize = 4096;

/// Where the guest's serial port leads.
pub struct ConsoleConfig {
    pub(super) input: Option<OwnedFd>,
    pub(super) output: Box<dyn Write + Send>,
}

impl fmt::Debug for ConsoleConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleConfig")
            .field("input", &self.input)
            .finish_non_exhaustive()
    }
}

impl ConsoleConfig {
    /// Input from the standard input of the process and output to its standard output. Either
    /// may be closed, a file, a pipe or a terminal. When the input is a terminal, it is in raw
    /// mode while the machine runs, and `Ctrl-A x` stops the machine. A background job leaves
    /// its terminal alone and has no input.
    pub fn stdio() -> Self {
        let input = io::stdin().as_fd().try_clone_to_owned().ok();
        let of_others = input.as_ref().is_some_and(|fd| {
            io::IsTerminal::is_terminal(fd) && !is_foreground_terminal(fd.as_raw_fd())
        });
        Self {
            input: input.filter(|_| !of_others),
            output: match io::stdout().as_fd().try_clone_to_owned() {
                Ok(fd) => Box::new(BlockingWriter(File::from(fd))),
                Err(_) => Box::new(io::sink()),
            },
        }
    }

    /// No input, and output to `writer`. The writer is called from a thread of its own.
    pub fn output_only(writer: Box<dyn Write + Send>) -> Self {
        Self {
            input: None,
            output: writer,
        }
    }

    /// Input from `input` and output to `writer`.
    pub fn new(input: OwnedFd, writer: Box<dyn Write + Send>) -> Self {
        Self {
            input: Some(input),
            output: writer,
        }
    }
}

/// A file that is waited for when another process has set it to non-blocking.
struct BlockingWriter(File);

impl Write for BlockingWriter {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_writable(self.0.as_raw_fd())?;
                }
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn wait_writable(fd: i32) -> io::Result<()> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: `poll` is one valid `pollfd`, which lives through the call.
    let ready = unsafe { libc::poll(&raw mut poll, 1, -1) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}

/// What the keyboard asks for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Keys {
    /// The last key was the escape key.
    escaped: bool,
}

/// Ctrl-A.
const ESCAPE_KEY: u8 = 0x01;
/// After [`ESCAPE_KEY`]: stops the machine.
const QUIT_KEY: u8 = b'x';

impl Keys {
    /// Takes the escape sequences out of `typed` and appends the rest to `input`. True when the
    /// machine is to stop. The escape key twice is one escape key for the guest; any other key
    /// after it is dropped.
    fn filter(&mut self, typed: &[u8], input: &mut Vec<u8>) -> bool {
        for key in typed {
            match (self.escaped, *key) {
                (false, ESCAPE_KEY) => self.escaped = true,
                (false, key) => input.push(key),
                (true, key) => {
                    self.escaped = false;
                    match key {
                        QUIT_KEY => return true,
                        ESCAPE_KEY => input.push(ESCAPE_KEY),
                        _ => {}
                    }
                }
            }
        }
        false
    }
}

/// Moves input to the serial port, as fast as the guest takes it.
pub(super) struct ConsoleInput {
    source: Option<File>,
    /// The source takes part in epoll; files do not, and are always ready.
    pollable: bool,
    /// The source is watched now.
    watched: bool,
    /// Present when the source is a terminal.
    keys: Option<Keys>,
    /// Read, and not yet taken by the port.
    pending: Vec<u8>,
    serial: Arc<SerialPort>,
    shared: Arc<Shared>,
}

impl fmt::Debug for ConsoleInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleInput").finish_non_exhaustive()
    }
}

impl ConsoleInput {
    pub fn new(source: OwnedFd, serial: Arc<SerialPort>, shared: Arc<Shared>) -> Self {
        let keys = io::IsTerminal::is_terminal(&source).then(Keys::default);
        Self {
            source: Some(File::from(source)),
            pollable: true,
            watched: false,
            keys,
            pending: Vec::new(),
            serial,
            shared,
        }
    }

    /// Gives the port what it takes, and reads more when all was taken.
    fn pump(&mut self, ops: &mut EventOps, source_is_ready: bool) {
        if source_is_ready {
            self.read();
        }
        loop {
            let taken = self.serial.receive(&self.pending);
            self.pending.drain(..taken.min(self.pending.len()));
            // A file is read on when the guest has read what came of it before.
            if !self.pending.is_empty() || self.pollable || self.source.is_none() {
                break;
            }
            self.read();
        }
        self.watch(ops);
    }

    fn read(&mut self) {
        let Some(source) = &mut self.source else {
            return;
        };
        let mut typed = [0; INPUT_BATCH_BYTES];
        match source.read(&mut typed) {
            Ok(0) => self.source = None,
            Ok(len) => match &mut self.keys {
                Some(keys) => {
                    if keys.filter(&typed[..len], &mut self.pending) {
                        self.shared.control.end(Ok(Outcome::Stopped));
                    }
                }
                None => self.pending.extend_from_slice(&typed[..len]),
            },
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) => {}
            Err(error) => {
                tracing::warn!(%error, "the console's input cannot be read; it ends here");
                self.source = None;
            }
        }
    }

    /// Watches the source exactly while there is room for what it would give. A terminal is
    /// watched always, for the escape sequence; what the guest does not take of it piles up,
    /// at typing speed, to one batch.
    fn watch(&mut self, ops: &mut EventOps) {
        let room = match self.keys {
            Some(_) => self.pending.len() < INPUT_BATCH_BYTES,
            None => self.pending.is_empty(),
        };
        if self.keys.is_some() && !room {
            self.pending.truncate(INPUT_BATCH_BYTES);
        }
        let wanted = self.pollable && self.source.is_some() && (room || self.keys.is_some());
        if wanted == self.watched {
            return;
        }
        let Some(fd) = self.source.as_ref().map(AsRawFd::as_raw_fd) else {
            // Closed, by which it left epoll.
            self.watched = false;
            return;
        };
        let events = Events::new_raw(fd, EventSet::IN);
        let changed = if wanted {
            ops.add(events)
        } else {
            ops.remove(events)
        };
        match changed {
            Ok(()) => self.watched = wanted,
            // Files and /dev/null do not take part in epoll (EPERM).
            Err(_) if wanted => {
                self.pollable = false;
                self.pump(ops, false);
            }
            Err(error) => tracing::warn!(%error, "the console's input cannot be unwatched"),
        }
    }
}

impl MutEventSubscriber for ConsoleInput {
    fn init(&mut self, ops: &mut EventOps) {
        let room = Events::new(self.serial.room_event_fd(), EventSet::IN);
        if let Err(error) = ops.add(room) {
            tracing::warn!(%error, "the console has no input");
            return;
        }
        self.watch(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if events.fd() == self.serial.room_event_fd().as_raw_fd() {
            let _ = self.serial.room_event_fd().read();
            self.pump(ops, false);
        } else {
            if self.source.is_none() {
                let _ = ops.remove(events);
                return;
            }
            let unwatch = Events::new_raw(events.fd(), EventSet::IN);
            self.pump(ops, true);
            if self.source.is_none() && self.watched {
                let _ = ops.remove(unwatch);
                self.watched = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(typed: &[&[u8]]) -> (Vec<u8>, bool) {
        let mut keys = Keys::default();
        let mut input = Vec::new();
        let quit = typed.iter().any(|typed| keys.filter(typed, &mut input));
        (input, quit)
    }

    #[test]
    fn keys_pass_and_the_escape_sequence_quits() {
        assert_eq!(filter(&[b"ls\r\x03"]), (b"ls\r\x03".to_vec(), false));
        assert_eq!(filter(&[b"a\x01x"]), (b"a".to_vec(), true));
        assert_eq!(filter(&[b"a\x01", b"x"]), (b"a".to_vec(), true));
        assert_eq!(filter(&[b"\x01\x01x"]), (b"\x01x".to_vec(), false));
        assert_eq!(filter(&[b"\x01qx"]), (b"x".to_vec(), false));
    }
}
