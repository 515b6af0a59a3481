//! Standard error: the lines of messages, and the progress bar below them.
//!
//! A thread that prints a message may be the one that renews a lease, or ends the process.
//! Therefore no thread waits long here for a blocked reader, and a closed stderr is not an error.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use indicatif::ProgressBar;

/// Limit of queued bytes for a slow reader; further messages are dropped, and their number is
/// reported.
const KEPT_BYTES_MAX: usize = 256 << 10;

/// How long the author of a message waits until it is written, which keeps its other output in
/// order. When a reader has been blocked for that long, no thread waits for it until it reads
/// again.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long the end of the process waits for queued messages.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(1);

static MESSAGES: Messages = Messages::new();

/// The bar on the terminal.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Whether messages are JSON objects. It publishes no other data.
static AS_JSON: AtomicBool = AtomicBool::new(false);

/// Returns the slot of the bar. No message is written while it is locked.
pub(crate) fn bar() -> MutexGuard<'static, Option<ProgressBar>> {
    BAR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets whether messages are JSON objects.
pub(crate) fn set_json(as_json: bool) {
    AS_JSON.store(as_json, Ordering::Relaxed);
}

/// Returns whether messages are JSON objects.
pub(crate) fn is_json() -> bool {
    AS_JSON.load(Ordering::Relaxed)
}

/// Whether messages are dropped. It publishes no other data.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// Drops all messages from now on: the process is about to be ended in order.
pub fn silence() {
    IS_SILENT.store(true, Ordering::Relaxed);
}

/// Whether messages are only queued. It publishes no other data.
static IS_DELAYED: AtomicBool = AtomicBool::new(false);

/// Messages are queued while it exists, and written after that: their thread must not exist before the
/// process is restricted.
#[must_use]
#[derive(Debug)]
pub struct Delayed {
    _private: (),
}

impl Delayed {
    /// Begins it.
    pub fn begin() -> Self {
        IS_DELAYED.store(true, Ordering::Relaxed);
        Self { _private: () }
    }
}

impl Drop for Delayed {
    fn drop(&mut self) {
        IS_DELAYED.store(false, Ordering::Relaxed);
        if MESSAGES.has_queued() {
            start();
            MESSAGES.flush(PATIENCE);
        }
    }
}

/// Starts the thread that writes messages, if there is none.
fn start() {
    if !MESSAGES.starts() {
        return;
    }
    let pump = || MESSAGES.pump(out);
    let thread = thread::Builder::new().name("stderr".into());
    if thread.spawn(pump).is_err() {
        // Messages are written directly, since no thread can be started.
        MESSAGES.stop();
        for text in MESSAGES.take() {
            out(&text);
        }
    }
}

/// Returns the line that replaces dropped messages.
fn lost_line(count: u64) -> String {
    let text = format!("{count} messages are omitted here: stderr was not read");
    if is_json() {
        format!("{{\"level\":\"WARN\",\"message\":\"{text}\"}}\n")
    } else {
        format!("ssi-hv: {text}\n")
    }
}

/// Waits until all messages are written, up to a limit, and returns whether they are. Call it before
/// the process ends.
pub fn flush() -> bool {
    MESSAGES.flush(FLUSH_TIME_MAX)
}

/// Standard error for messages, each of which is one call of `write`. Never fails.
#[derive(Debug, Default)]
pub struct Stderr {
    _private: (),
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if IS_SILENT.load(Ordering::Relaxed) {
            return Ok(bytes.len());
        }
        if IS_DELAYED.load(Ordering::Relaxed) {
            MESSAGES.queue(bytes);
            return Ok(bytes.len());
        }
        start();
        if !MESSAGES.write(bytes) {
            out(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes to standard error. The bar is hidden meanwhile, and no other is displayed.
fn out(bytes: &[u8]) {
    // Best effort: stderr may be closed.
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
    /// Number of queued messages, and of written ones.
    taken: u64,
    written: u64,
    /// Number of dropped messages.
    lost: u64,
    /// Whether the reader is blocked.
    stalled: bool,
    /// Whether the writing thread exists.
    started: bool,
}

impl State {
    /// Queues a message; false if it is dropped.
    fn push(&mut self, bytes: &[u8]) -> bool {
        if self.bytes + bytes.len() > KEPT_BYTES_MAX {
            self.lost += 1;
            return false;
        }
        self.bytes += bytes.len();
        self.taken += 1;
        self.texts.push_back(bytes.to_vec());
        true
    }
}

/// Messages in transit to the thread that writes them.
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

    /// Returns whether the caller is the first, which must start the thread.
    fn starts(&self) -> bool {
        !std::mem::replace(&mut self.lock().started, true)
    }

    fn stop(&self) {
        self.lock().started = false;
    }

    fn has_queued(&self) -> bool {
        !self.lock().texts.is_empty()
    }

    /// Takes what is queued.
    fn take(&self) -> VecDeque<Vec<u8>> {
        let mut state = self.lock();
        state.bytes = 0;
        state.written = state.taken;
        std::mem::take(&mut state.texts)
    }

    /// Queues a message for the thread.
    fn queue(&self, bytes: &[u8]) {
        self.lock().push(bytes);
    }

    /// Queues a message, and waits up to a limit until it is written; returns false without a
    /// writing thread.
    fn write(&self, bytes: &[u8]) -> bool {
        let mut state = self.lock();
        if !state.started {
            return false;
        }
        if !state.push(bytes) {
            return true;
        }
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

    /// Writes queued messages forever.
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

    fn flush(&self, limit: Duration) -> bool {
        let is_under_way = |state: &mut State| state.started && state.written < state.taken;
        let (_state, waited) = self
            .changed
            .wait_timeout_while(self.lock(), limit, is_under_way)
            .unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;

    /// Timeout of each step, far longer than on the most loaded host.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A reader that accepts one text for each permit.
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
        // The first message waits up to the limit, the others not at all.
        assert!(begun.elapsed() < PATIENCE * 50, "{:?}", begun.elapsed());
        assert!(!MESSAGES.flush(Duration::ZERO), "nobody reads");
        let kept = KEPT_BYTES_MAX / text.len();
        permit.send(()).expect("it reads");
        assert_eq!(read.recv_timeout(LIMIT).expect("the first"), text);
        permit.send(()).expect("it reads");
        let notice = read.recv_timeout(LIMIT).expect("what was lost");
        let notice = String::from_utf8(notice).expect("UTF-8");
        let lost = format!("{} messages are omitted here", count - kept);
        assert!(notice.contains(&lost), "{notice}");
        // The reader continues: all queued messages arrive in order, then new ones.
        drop(permit);
        assert!(MESSAGES.write(b"last"));
        for _ in 1..kept {
            assert_eq!(read.recv_timeout(LIMIT).expect("one that was kept"), text);
        }
        assert_eq!(read.recv_timeout(LIMIT).expect("the last"), b"last");
        assert!(MESSAGES.flush(LIMIT));
    }

    #[test]
    fn a_message_is_out_when_its_author_goes_on() {
        static MESSAGES: Messages = Messages::new();
        let (permit, read) = gated(&MESSAGES);
        drop(permit);
        // Flushes too, since a busy machine may need longer than `PATIENCE`.
        for _ in 0..100 {
            assert!(MESSAGES.write(b"one"));
            assert!(MESSAGES.flush(LIMIT));
            assert_eq!(read.try_recv().expect("it is out"), b"one");
        }
    }

    #[test]
    fn what_is_queued_before_the_thread_exists_comes_first() {
        static MESSAGES: Messages = Messages::new();
        MESSAGES.queue(b"early");
        assert!(MESSAGES.has_queued());
        let (permit, read) = gated(&MESSAGES);
        drop(permit);
        assert!(MESSAGES.write(b"late"));
        assert!(MESSAGES.flush(LIMIT) && !MESSAGES.has_queued());
        let read: Vec<_> = read.try_iter().collect();
        assert_eq!(read, [&b"early"[..], b"late"]);
    }

    #[test]
    fn without_a_thread_its_author_writes() {
        static MESSAGES: Messages = Messages::new();
        assert!(!MESSAGES.write(b"one"));
        assert!(MESSAGES.flush(LIMIT), "there is nothing to wait for");
    }
}
