//! Standard error: the lines of messages, and the bar below them.
//!
//! Whoever has something to say may be what keeps a lease alive, or what ends the process. So nobody waits
//! long here for a reader that stands still, and nobody fails because of one that is gone.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use indicatif::ProgressBar;

/// What is kept for a reader that does not keep up; what comes on top is left out, and that is told.
const KEPT_BYTES_MAX: usize = 256 << 10;

/// How long a message's author waits until it is out, so that what he writes elsewhere comes after it. When a
/// reader has stood still for so long, nobody waits for it until it goes on.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long the end of the process waits for what is kept.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(1);

static MESSAGES: Messages = Messages::new();

/// The bar that is on the terminal.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Whether messages are objects of JSON. Nothing else is published by it.
static AS_JSON: AtomicBool = AtomicBool::new(false);

/// The place of the bar. No message is written while it is locked.
pub(crate) fn bar() -> MutexGuard<'static, Option<ProgressBar>> {
    BAR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets whether messages are objects of JSON.
pub(crate) fn set_json(as_json: bool) {
    AS_JSON.store(as_json, Ordering::Relaxed);
}

/// Whether messages are objects of JSON.
pub(crate) fn is_json() -> bool {
    AS_JSON.load(Ordering::Relaxed)
}

/// What stands for messages that nobody could be shown.
fn lost_line(count: u64) -> String {
    let text = format!("{count} messages are left out here: stderr was not read");
    if is_json() {
        format!("{{\"level\":\"WARN\",\"message\":\"{text}\"}}\n")
    } else {
        format!("ssi-hv: {text}\n")
    }
}

/// Waits until all messages are out, but not for ever. To be called before the process ends.
pub fn flush() {
    MESSAGES.flush(FLUSH_TIME_MAX);
}

/// Standard error for messages, each of which is one call of `write`. Never fails.
#[derive(Debug, Default)]
pub struct Stderr {
    _private: (),
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if MESSAGES.starts() {
            let pump = || MESSAGES.pump(out);
            if thread::Builder::new()
                .name("stderr".into())
                .spawn(pump)
                .is_err()
            {
                // Better late than never.
                MESSAGES.stop();
            }
        }
        if !MESSAGES.write(bytes) {
            out(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes to standard error. A bar stays away until the text is out, and no other begins.
fn out(bytes: &[u8]) {
    // Nobody to tell when it is closed.
    let write = || drop(io::stderr().write_all(bytes));
    match &*bar() {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

#[derive(Debug)]
struct State {
    texts: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Messages that were taken, and that are out.
    taken: u64,
    written: u64,
    /// Messages for which there was no room.
    lost: u64,
    /// The reader stands still.
    stalled: bool,
    /// There is a thread that writes.
    started: bool,
}

/// Texts on their way to a thread that writes them.
#[derive(Debug)]
struct Messages {
    state: Mutex<State>,
    changed: Condvar,
}

impl Messages {
    const fn new() -> Self {
        Self {
            state: Mutex::new(State {
                texts: VecDeque::new(),
                bytes: 0,
                taken: 0,
                written: 0,
                lost: 0,
                stalled: false,
                started: false,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the caller is the first, who has to start the thread.
    fn starts(&self) -> bool {
        !std::mem::replace(&mut self.lock().started, true)
    }

    fn stop(&self) {
        self.lock().started = false;
    }

    /// Takes a message, and waits for a while until it is out; false when no thread writes.
    fn write(&self, bytes: &[u8]) -> bool {
        let mut state = self.lock();
        if !state.started {
            return false;
        }
        if state.bytes + bytes.len() > KEPT_BYTES_MAX {
            state.lost += 1;
            return true;
        }
        state.bytes += bytes.len();
        state.taken += 1;
        state.texts.push_back(bytes.to_vec());
        self.changed.notify_all();
        let number = state.taken;
        if !state.stalled {
            let is_under_way = |state: &mut State| state.written < number;
            let (mut state, waited) = self
                .changed
                .wait_timeout_while(state, PATIENCE, is_under_way)
                .unwrap_or_else(PoisonError::into_inner);
            state.stalled |= waited.timed_out();
        }
        true
    }

    /// Writes what comes, for ever.
    fn pump(&self, mut out: impl FnMut(&[u8])) {
        loop {
            let mut state = self
                .changed
                .wait_while(self.lock(), |state| state.texts.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            let Some(text) = state.texts.pop_front() else {
                continue;
            };
            drop(state);
            out(&text);
            let mut state = self.lock();
            state.bytes -= text.len();
            state.written += 1;
            state.stalled = false;
            let lost = std::mem::take(&mut state.lost);
            self.changed.notify_all();
            drop(state);
            if lost > 0 {
                out(lost_line(lost).as_bytes());
            }
        }
    }

    fn flush(&self, limit: Duration) {
        let is_under_way = |state: &mut State| state.started && state.written < state.taken;
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), limit, is_under_way);
        drop(waited);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;

    /// No step of a test takes longer on a host that works, however loaded.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A reader that takes one text for each permit.
    fn gated(messages: &'static Messages) -> (mpsc::Sender<()>, mpsc::Receiver<Vec<u8>>) {
        let (permit, permits) = mpsc::channel();
        let (seen, read) = mpsc::channel();
        assert!(messages.starts() && !messages.starts());
        thread::spawn(move || {
            messages.pump(|text| {
                // The test is over, or has failed.
                let _ = permits.recv();
                let _ = seen.send(text.to_vec());
            });
        });
        (permit, read)
    }

    #[test]
    fn nobody_waits_for_a_reader_that_stands_still_and_what_is_left_out_is_told() {
        static MESSAGES: Messages = Messages::new();
        let (permit, read) = gated(&MESSAGES);
        let text = [b'x'; 1000];
        let begun = Instant::now();
        let count = 10_000;
        for _ in 0..count {
            assert!(MESSAGES.write(&text));
        }
        // The first waits for a while, the others not at all.
        assert!(begun.elapsed() < PATIENCE * 50, "{:?}", begun.elapsed());
        MESSAGES.flush(Duration::ZERO);
        let kept = KEPT_BYTES_MAX / text.len();
        permit.send(()).expect("it reads");
        assert_eq!(read.recv_timeout(LIMIT).expect("the first"), text);
        permit.send(()).expect("it reads");
        let told = read.recv_timeout(LIMIT).expect("what was lost");
        let told = String::from_utf8(told).expect("UTF-8");
        let lost = format!("{} messages are left out here", count - kept);
        assert!(told.contains(&lost), "{told}");
        // It goes on: all that was kept comes, in order, and new ones after it.
        drop(permit);
        assert!(MESSAGES.write(b"last"));
        for _ in 1..kept {
            assert_eq!(read.recv_timeout(LIMIT).expect("one that was kept"), text);
        }
        assert_eq!(read.recv_timeout(LIMIT).expect("the last"), b"last");
        MESSAGES.flush(LIMIT);
    }

    #[test]
    fn a_message_is_out_when_its_author_goes_on() {
        static MESSAGES: Messages = Messages::new();
        let (permit, read) = gated(&MESSAGES);
        drop(permit);
        // Not in the time of patience alone: the machine may be busy.
        for _ in 0..100 {
            assert!(MESSAGES.write(b"one"));
            MESSAGES.flush(LIMIT);
            assert_eq!(read.try_recv().expect("it is out"), b"one");
        }
    }

    #[test]
    fn without_a_thread_its_author_writes() {
        static MESSAGES: Messages = Messages::new();
        assert!(!MESSAGES.write(b"one"));
        MESSAGES.flush(LIMIT);
    }
}
