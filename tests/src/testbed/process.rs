//! A process on a testbed host.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use testbed_agent::{Kind, Request};

use super::TestbedError;
use super::client::Endpoint;
use super::host::{ExitStatus, Output};

/// Limit of a command's output, beyond which it is cut off; a guest's console has some hundred
/// kilobytes.
const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// Interval at which a wait checks the host's health.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);
/// Lines of output that an error quotes.
const LINES_QUOTED_MAX: usize = 30;

/// Receives pieces of output as they arrive.
pub type Tap = Box<dyn FnMut(&[u8]) + Send>;

/// A process on a host; dropping it kills its process group.
pub struct RemoteProcess {
    endpoint: Endpoint,
    what: String,
    pid: i32,
    stream: TcpStream,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for RemoteProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteProcess")
            .field("host", &self.endpoint.host)
            .field("pid", &self.pid)
            .field("what", &self.what)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    ended: Option<Result<ExitStatus, String>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RemoteProcess {
    pub(super) fn start(
        endpoint: &Endpoint,
        argv: &[&str],
        env: &[(&str, &str)],
        mut tap: Option<Tap>,
    ) -> Result<Self, TestbedError> {
        let request = Request::Run {
            argv: argv.iter().map(|a| (*a).to_owned()).collect(),
            env: env
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
        };
        let mut stream = endpoint.request(&request)?;
        let pid = match testbed_agent::read_frame(&mut stream) {
            Ok((Kind::Started, payload)) => match testbed_agent::integers(&payload) {
                Some([pid]) => pid,
                None => return Err(endpoint.refused("malformed answer")),
            },
            Ok((Kind::Error, text)) => {
                return Err(endpoint.refused(&String::from_utf8_lossy(&text)));
            }
            Ok((kind, _)) => return Err(endpoint.refused(&format!("unexpected answer {kind:?}"))),
            Err(error) => return Err(endpoint.broken(&error)),
        };
        let io = |e| TestbedError::io("connection to the agent", e);
        // Silence is normal from here on; the heartbeat detects a hung host.
        stream.set_read_timeout(None).map_err(io)?;
        let mut input = stream.try_clone().map_err(io)?;
        let shared = Arc::new(Shared::default());
        let writer = Arc::clone(&shared);
        let reader = std::thread::Builder::new()
            .name("remote output".into())
            .spawn(move || {
                while let Some(ended) = read_one(&mut input, &writer, &mut tap) {
                    if ended {
                        return;
                    }
                }
            })
            .map_err(io)?;
        let what = argv.join(" ");
        Ok(Self {
            endpoint: endpoint.clone(),
            what,
            pid,
            stream,
            shared,
            reader: Some(reader),
        })
    }

    /// Returns its process id on its host.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Sends a signal to the process.
    ///
    /// # Errors
    /// Fails when the connection is broken.
    pub fn kill(&self, signal: i32) -> Result<(), TestbedError> {
        let mut stream = &self.stream;
        testbed_agent::write_frame(&mut stream, Kind::Signal, &signal.to_le_bytes())
            .map_err(|e| self.endpoint.broken(&e))
    }

    /// Waits for a line of standard output or error that contains `pattern`, and returns it.
    ///
    /// # Errors
    /// Fails, quoting the last lines, when the process ends without such a line or at the deadline.
    pub fn wait_for_line(&self, pattern: &str, within: Duration) -> Result<String, TestbedError> {
        self.wait_for_nth_line(pattern, 0, within)
    }

    /// Waits for a line of standard output or error that contains `pattern` and follows `before`
    /// other such lines, and returns it.
    ///
    /// # Errors
    /// As [`wait_for_line`](Self::wait_for_line).
    pub fn wait_for_nth_line(
        &self,
        pattern: &str,
        before: usize,
        within: Duration,
    ) -> Result<String, TestbedError> {
        let what = format!("\"{pattern}\" from \"{}\"", self.what);
        let found = self.wait_until(&what, within, |state| {
            let line = find_line(&state.stdout, pattern, before)
                .or_else(|| find_line(&state.stderr, pattern, before));
            line.map(Some)
                .or_else(|| state.ended.as_ref().map(|_| None))
        })?;
        found.ok_or_else(|| self.ended_before(what, within))
    }

    fn ended_before(&self, what: String, within: Duration) -> TestbedError {
        let detail = format!("; the process has ended{}", self.quote());
        TestbedError::Deadline {
            host: self.endpoint.host,
            what,
            within,
            detail,
        }
    }

    /// Waits until standard output contains `pattern` this many times, even within an incomplete
    /// line.
    ///
    /// # Errors
    /// As [`wait_for_line`](Self::wait_for_line).
    pub fn wait_for_text(
        &self,
        pattern: &str,
        times: usize,
        within: Duration,
    ) -> Result<(), TestbedError> {
        let what = format!("\"{pattern}\" {times} times from \"{}\"", self.what);
        let found = self.wait_until(&what, within, |state| {
            let is_there = text(&state.stdout).matches(pattern).count() >= times;
            (is_there || state.ended.is_some()).then_some(is_there)
        })?;
        if found {
            return Ok(());
        }
        Err(self.ended_before(what, within))
    }

    /// Waits for the process to end.
    ///
    /// # Errors
    /// Fails at the deadline, quoting the last lines. The process then continues to run.
    pub fn wait(&self, within: Duration) -> Result<Output, TestbedError> {
        let what = format!("end of \"{}\"", self.what);
        let ended = self.wait_until(&what, within, |state| state.ended.clone())?;
        let status = ended.map_err(|reason| match self.endpoint.check() {
            Err(hung) => hung,
            Ok(()) => self.endpoint.refused(&reason),
        })?;
        let state = self.shared.lock();
        Ok(Output {
            status,
            stdout: text(&state.stdout),
            stderr: text(&state.stderr),
        })
    }

    /// Returns its standard output so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        text(&self.shared.lock().stdout)
    }

    /// Returns its standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        text(&self.shared.lock().stderr)
    }

    fn wait_until<T>(
        &self,
        what: &str,
        within: Duration,
        ready: impl Fn(&State) -> Option<T>,
    ) -> Result<T, TestbedError> {
        let deadline = Instant::now() + within;
        let mut state = self.shared.lock();
        loop {
            if let Some(value) = ready(&state) {
                return Ok(value);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                let (host, what, detail) = (self.endpoint.host, what.to_owned(), self.quote());
                return Err(TestbedError::Deadline {
                    host,
                    what,
                    within,
                    detail,
                });
            }
            self.endpoint.check()?;
            let wait = left.min(HEALTH_INTERVAL);
            state = self
                .shared
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Returns the last lines of output, for an error.
    fn quote(&self) -> String {
        let state = self.shared.lock();
        let mut lines = VecDeque::new();
        for line in text(&state.stdout)
            .lines()
            .chain(text(&state.stderr).lines())
        {
            lines.push_back(format!("\n    | {line}"));
            if lines.len() > LINES_QUOTED_MAX {
                lines.pop_front();
            }
        }
        lines.into_iter().collect()
    }
}

impl Drop for RemoteProcess {
    fn drop(&mut self) {
        // The agent kills the process when its client disconnects.
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Handles one frame and returns whether it was the last; `None` if no frame can be read.
fn read_one(input: &mut TcpStream, shared: &Shared, tap: &mut Option<Tap>) -> Option<bool> {
    let frame = testbed_agent::read_frame(input);
    if let (Ok((Kind::Stdout | Kind::Stderr, bytes)), Some(tap)) = (&frame, tap) {
        tap(bytes);
    }
    let mut state = shared.lock();
    let keep = |buffer: &mut Vec<u8>, bytes: &[u8]| {
        let room = OUTPUT_BYTES_MAX.saturating_sub(buffer.len());
        buffer.extend(&bytes[..bytes.len().min(room)]);
    };
    match frame {
        Ok((Kind::Stdout, bytes)) => keep(&mut state.stdout, &bytes),
        Ok((Kind::Stderr, bytes)) => keep(&mut state.stderr, &bytes),
        Ok((Kind::Exit, payload)) => {
            state.ended = Some(match testbed_agent::integers(&payload) {
                Some([code, signal]) => Ok(ExitStatus { code, signal }),
                None => Err("malformed exit status".into()),
            });
        }
        Ok((Kind::Error, reason)) => state.ended = Some(Err(text(&reason))),
        Ok((kind, _)) => state.ended = Some(Err(format!("unexpected frame {kind:?}"))),
        Err(error) => state.ended = Some(Err(format!("connection lost: {error}"))),
    }
    let ended = state.ended.is_some();
    drop(state);
    shared.changed.notify_all();
    Some(ended)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the complete line that contains the pattern and follows `before` other such lines.
fn find_line(bytes: &[u8], pattern: &str, before: usize) -> Option<String> {
    let end = bytes.iter().rposition(|b| *b == b'\n')?;
    let all = String::from_utf8_lossy(&bytes[..end]);
    all.lines()
        .filter(|l| l.contains(pattern))
        .nth(before)
        .map(|l| l.trim_end_matches('\r').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_are_found() {
        assert_eq!(find_line(b"one\r\ntwo", "two", 0), None);
        assert_eq!(find_line(b"one\r\ntwo\n", "one", 0).as_deref(), Some("one"));
        assert_eq!(find_line(b"one\r\ntwo\n", "tw", 0).as_deref(), Some("two"));
        assert_eq!(find_line(b"a 1\nb\na 2\n", "a", 1).as_deref(), Some("a 2"));
        assert_eq!(find_line(b"a 1\nb\n", "a", 1), None);
    }
}
