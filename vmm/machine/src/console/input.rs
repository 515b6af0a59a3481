//! Reads the console's input and passes it on as fast as the guest takes it.

use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use devices::SerialPort;
use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use crate::lifecycle::shared::Shared;
use crate::outcome::Outcome;

/// Bytes of input that are read at once.
const INPUT_BATCH_BYTES: usize = 4096;

/// Recognizes escape sequences of the keyboard.
#[derive(Debug, Default, PartialEq, Eq)]
struct Keys {
    /// The last key was [`ESCAPE_KEY`].
    escaped: bool,
}

/// Ctrl-A.
const ESCAPE_KEY: u8 = 0x01;
/// After [`ESCAPE_KEY`]: stop the machine.
const QUIT_KEY: u8 = b'x';

impl Keys {
    /// Removes escape sequences from `typed` and appends the rest to `input`. Returns true when the
    /// machine is to stop. Two escape keys are one for the guest; any other key after an escape key
    /// is dropped.
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

/// Moves input to the serial port as fast as the guest takes it.
pub(crate) struct ConsoleInput {
    /// Stays open after its end: epoll only drops a closed descriptor when no other descriptor
    /// refers to the same open file.
    source: File,
    /// The source has ended.
    ended: bool,
    /// epoll supports the source. It does not support files and /dev/null, which are always ready.
    pollable: bool,
    /// The source is registered with epoll.
    watched: bool,
    /// Present when the source is a terminal.
    keys: Option<Keys>,
    /// Input that was read, and that the port has not taken yet.
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
        let keys = source.is_terminal().then(Keys::default);
        Self {
            source: File::from(source),
            ended: false,
            pollable: true,
            watched: false,
            keys,
            pending: Vec::new(),
            serial,
            shared,
        }
    }

    /// Passes pending input to the port, as much as it takes. A source without epoll is read when
    /// the port has room.
    fn give(&mut self) {
        loop {
            let taken = self.serial.receive(&self.pending);
            self.pending.drain(..taken.min(self.pending.len()));
            if self.pollable || self.ended || !self.pending.is_empty() {
                break;
            }
            self.read();
        }
        if self.keys.is_some() {
            // Drops the rest, as a real serial line does.
            self.pending.truncate(INPUT_BATCH_BYTES);
        }
    }

    /// Reads up to one batch from the source, or notes its end.
    fn read(&mut self) {
        let mut typed = [0; INPUT_BATCH_BYTES];
        match self.source.read(&mut typed) {
            Ok(0) => self.ended = true,
            Ok(len) => match &mut self.keys {
                Some(keys) => {
                    if keys.filter(&typed[..len], &mut self.pending) {
                        self.shared.control.end(Ok(Outcome::Stopped));
                    }
                }
                None => self.pending.extend_from_slice(&typed[..len]),
            },
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Another process has read the input first.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.pollable => {}
            Err(error) => {
                tracing::warn!(%error, "the console's input cannot be read; it ends here");
                self.ended = true;
            }
        }
    }

    /// Registers the source with epoll exactly while there is room for its input. A terminal stays
    /// registered, for the escape sequence.
    fn watch(&mut self, ops: &mut EventOps) {
        let room = self.keys.is_some() || self.pending.is_empty();
        let wanted = self.pollable && !self.ended && room;
        if wanted == self.watched {
            return;
        }
        let events = Events::new(&self.source, EventSet::IN);
        let changed = if wanted {
            ops.add(events)
        } else {
            ops.remove(events)
        };
        match changed {
            Ok(()) => self.watched = wanted,
            // EPERM: epoll does not support this file.
            Err(_) if wanted => {
                self.pollable = false;
                self.give();
            }
            Err(error) => tracing::warn!(%error, "the console's input stays watched"),
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
        if events.fd() == self.source.as_raw_fd() {
            self.read();
        } else {
            // The value has no meaning; readability is the signal.
            let _ = self.serial.room_event_fd().read();
        }
        self.give();
        self.watch(ops);
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
