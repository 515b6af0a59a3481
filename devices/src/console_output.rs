//! Buffers console bytes between vCPU threads and a slow writer.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fabric_host::{ThreadClass, begin_class};

/// Bytes that may wait for the writer before vCPUs that write to the console are blocked: enough
/// for any boot log while a terminal is slow, and a negligible amount of memory.
pub const CONSOLE_BUFFER_BYTES_MAX: usize = 256 * 1024;

#[derive(Debug, Default)]
struct State {
    bytes: VecDeque<u8>,
    /// The writer thread holds bytes that it has not written yet.
    writing: bool,
    /// vCPUs are no longer blocked: bytes without room are dropped.
    drops_excess: bool,
    /// The writer thread exits when the buffer is empty.
    closed: bool,
    /// The writer failed: all bytes are dropped.
    failed: bool,
    lost_bytes: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Bytes were added, or the output was closed.
    more: Condvar,
    /// Bytes were removed.
    less: Condvar,
}

/// A buffer of [`CONSOLE_BUFFER_BYTES_MAX`] bytes with a thread that drains it into a writer.
///
/// Nothing is lost while the writer works: when the buffer is full, [`wait_for_room`] blocks the
/// vCPU. [`close`] ends that and drains the buffer until a deadline. Clones share the buffer.
///
/// [`wait_for_room`]: Self::wait_for_room
/// [`close`]: Self::close
#[derive(Clone, Debug)]
pub struct ConsoleOutput {
    shared: Arc<Shared>,
}

impl ConsoleOutput {
    /// Starts the thread that writes to `writer`.
    ///
    /// # Errors
    ///
    /// Fails when the thread cannot be started.
    pub fn spawn(mut writer: Box<dyn Write + Send>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        thread::Builder::new()
            .name("console-out".to_owned())
            .spawn(move || {
                begin_class(ThreadClass::Device);
                of_thread.pump(writer.as_mut());
            })?;
        Ok(Self { shared })
    }

    /// Waits until the buffer has room or is closed. Must not be called with a lock that others
    /// need.
    pub fn wait_for_room(&self) {
        let state = crate::lock(&self.shared.state);
        let full = |s: &mut State| {
            s.bytes.len() >= CONSOLE_BUFFER_BYTES_MAX && !s.drops_excess && !s.failed
        };
        drop(
            self.shared
                .less
                .wait_while(state, full)
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        );
    }

    /// Adds a byte. Never blocks: callers that passed [`wait_for_room`](Self::wait_for_room)
    /// together may exceed the limit by a byte each.
    pub fn push(&self, byte: u8) {
        let mut state = crate::lock(&self.shared.state);
        let is_dropped = state.drops_excess && state.bytes.len() >= CONSOLE_BUFFER_BYTES_MAX;
        if state.failed || is_dropped {
            state.lost_bytes += 1;
            return;
        }
        state.bytes.push_back(byte);
        if state.bytes.len() == 1 {
            self.shared.more.notify_one();
        }
    }

    /// Releases vCPUs that wait for room. Buffered bytes are still written.
    pub fn stop_waiting(&self) {
        crate::lock(&self.shared.state).drops_excess = true;
        self.shared.less.notify_all();
    }

    /// Releases waiting vCPUs, waits up to `limit` until all bytes are written, and returns how
    /// many were not.
    pub fn close(&self, limit: Duration) -> u64 {
        let deadline = Instant::now() + limit;
        self.stop_waiting();
        let mut state = crate::lock(&self.shared.state);
        state.closed = true;
        self.shared.more.notify_all();
        while state.writing || !state.bytes.is_empty() {
            let now = Instant::now();
            if now >= deadline {
                break;
            }
            state = match self.shared.less.wait_timeout(state, deadline - now) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        let waiting = u64::try_from(state.bytes.len()).unwrap_or(u64::MAX);
        state.lost_bytes.saturating_add(waiting)
    }
}

impl Shared {
    /// Drains the buffer until it is closed and empty.
    fn pump(&self, writer: &mut dyn Write) {
        let mut batch = Vec::new();
        loop {
            {
                let state = crate::lock(&self.state);
                let mut state = self
                    .more
                    .wait_while(state, |s| s.bytes.is_empty() && !s.closed)
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                if state.bytes.is_empty() {
                    return;
                }
                batch.clear();
                batch.extend(state.bytes.drain(..));
                state.writing = true;
                self.less.notify_all();
            }
            let result = writer.write_all(&batch).and_then(|()| writer.flush());
            let mut state = crate::lock(&self.state);
            state.writing = false;
            if result.is_err() {
                let lost = batch.len().saturating_add(state.bytes.len());
                let lost = u64::try_from(lost).unwrap_or(u64::MAX);
                state.lost_bytes = state.lost_bytes.saturating_add(lost);
                state.failed = true;
                state.bytes.clear();
            }
            self.less.notify_all();
            drop(state);
            if let Err(error) = result {
                tracing::warn!(%error, "writing to the console failed; its output is dropped");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A writer into a channel that announces each write, and takes a permit from another channel
    /// before it.
    struct Gated {
        begun: mpsc::Sender<()>,
        permits: mpsc::Receiver<()>,
        written: mpsc::Sender<Vec<u8>>,
    }

    impl Write for Gated {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            // A test that does not wait for it has dropped the receiver.
            let _ = self.begun.send(());
            self.permits.recv().map_err(|_| io::ErrorKind::BrokenPipe)?;
            self.written
                .send(buf.to_vec())
                .map_err(|_| io::ErrorKind::BrokenPipe)?;
            Ok(buf.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Gate {
        begins: mpsc::Receiver<()>,
        permit: mpsc::Sender<()>,
        output: mpsc::Receiver<Vec<u8>>,
    }

    fn gated() -> (ConsoleOutput, Gate) {
        let (begun, begins) = mpsc::channel();
        let (permit, permits) = mpsc::channel();
        let (written, output) = mpsc::channel();
        let writer = Gated {
            begun,
            permits,
            written,
        };
        let gate = Gate {
            begins,
            permit,
            output,
        };
        (ConsoleOutput::spawn(Box::new(writer)).unwrap(), gate)
    }

    #[test]
    fn a_slow_writer_loses_nothing() {
        let (console, Gate { permit, output, .. }) = gated();
        let total = CONSOLE_BUFFER_BYTES_MAX * 3;
        let producer = {
            let console = console.clone();
            thread::spawn(move || {
                for i in 0..total {
                    console.wait_for_room();
                    console.push(u8::try_from(i % 251).unwrap());
                }
            })
        };
        let mut got = Vec::new();
        while got.len() < total {
            permit.send(()).unwrap();
            got.extend(output.recv().unwrap());
        }
        producer.join().unwrap();
        assert_eq!(console.close(Duration::from_secs(10)), 0);
        assert!(
            got.iter()
                .enumerate()
                .all(|(i, b)| usize::from(*b) == i % 251)
        );
    }

    #[test]
    fn a_blocked_writer_does_not_hold_up_close_for_ever() {
        let (console, _gate) = gated();
        let blocked = {
            let console = console.clone();
            thread::spawn(move || {
                for _ in 0..CONSOLE_BUFFER_BYTES_MAX * 3 {
                    console.wait_for_room();
                    console.push(b'x');
                }
            })
        };
        let lost = console.close(Duration::from_millis(10));
        blocked.join().unwrap();
        assert!(lost <= u64::try_from(CONSOLE_BUFFER_BYTES_MAX * 3).unwrap());
    }

    #[test]
    fn a_vcpu_that_is_to_stop_waiting_does_and_what_found_room_is_written() {
        let (console, gate) = gated();
        let Gate { permit, output, .. } = &gate;
        console.push(b'x');
        // The thread has taken that byte and takes no more before it has a permit, so the buffer
        // is full of the others, whenever the thread runs.
        gate.begins.recv().unwrap();
        for _ in 1..CONSOLE_BUFFER_BYTES_MAX * 2 {
            console.push(b'x');
        }
        console.stop_waiting();
        console.wait_for_room();
        console.push(b'y');
        for _ in 0..2 {
            permit.send(()).unwrap();
        }
        assert_eq!(console.close(Duration::from_secs(10)), 1);
        let written: Vec<u8> = output.try_iter().flatten().collect();
        assert_eq!(written.len(), CONSOLE_BUFFER_BYTES_MAX * 2);
    }

    #[test]
    fn a_failed_writer_lets_the_guest_go_on() {
        let (console, gate) = gated();
        drop(gate);
        for _ in 0..CONSOLE_BUFFER_BYTES_MAX * 2 {
            console.wait_for_room();
            console.push(b'x');
        }
        assert!(console.close(Duration::from_secs(10)) > 0);
    }
}
