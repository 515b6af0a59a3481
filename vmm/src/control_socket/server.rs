//! The side that answers.

use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::directory::{Directory, DirectoryError, Kind};
use super::protocol::{
    ANSWER_TIME_MAX, AnswerLine, LineError, REQUEST_BYTES_MAX, REQUEST_TIME_MAX, RefusalCode,
    RequestLine, VERSION, read_line, write_line,
};
use crate::cli::name::VmName;

/// Clients that are served at once, each by a thread that is there from the start: a client
/// makes the process take nothing new. Others wait in the kernel.
pub const THREADS: usize = 2;

/// Stack of such a thread: answers are made on the heap.
const STACK_BYTES: usize = 256 << 10;

/// Pause after the kernel refused a connection, for want of descriptors or memory.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// Something that can be asked.
#[derive(Debug)]
pub struct Request<S> {
    /// Its name in the protocol.
    pub name: &'static str,
    /// Gives the answer, or why there is none in one line. Must neither touch guest memory nor
    /// wait for anything that could.
    pub answer: fn(&S) -> Result<Value, String>,
}

/// What is asked, and what can be asked of it.
#[derive(Debug)]
pub struct Service<S: 'static> {
    /// What it is about.
    pub subject: S,
    /// The table.
    pub requests: &'static [Request<S>],
}

/// Why nobody can ask.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No directory.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// No socket.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// A socket that is answered. Dropping it removes it.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    listener: Arc<UnixListener>,
    stopping: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens in `directory` under the number of this process, and `name`.
    ///
    /// # Errors
    ///
    /// When there is no socket to be had, or no thread.
    pub fn start<S: Send + Sync>(
        directory: &Directory,
        kind: Kind,
        name: Option<&VmName>,
        service: Service<S>,
    ) -> Result<Self, ServerError> {
        // What ended processes left; one of them may have had this process's number.
        directory.sockets()?;
        let path = directory.socket_path(kind, std::process::id(), name);
        let listen = |source| ServerError::Listen {
            path: path.clone(),
            source,
        };
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(listen(error)),
            _ => {}
        }
        let listener = Arc::new(UnixListener::bind(&path).map_err(listen)?);
        let mut server = Self {
            path: path.clone(),
            listener: Arc::clone(&listener),
            stopping: Arc::default(),
            threads: Vec::new(),
        };
        let service = Arc::new(service);
        for number in 0..THREADS {
            let (listener, service) = (Arc::clone(&listener), Arc::clone(&service));
            let stopping = Arc::clone(&server.stopping);
            let thread = std::thread::Builder::new()
                .name(format!("control-{number}"))
                .stack_size(STACK_BYTES)
                .spawn(move || serve(&listener, &stopping, &service));
            server.threads.push(thread.map_err(ServerError::Thread)?);
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        // SeqCst: before the shutdown, after which the threads look at it.
        self.stopping.store(true, Ordering::SeqCst);
        // SAFETY: the descriptor is open, since `listener` is alive. Wakes who accepts.
        unsafe { libc::shutdown(self.listener.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
        // Who is just served has its deadlines; nobody waits for that here, since the end of
        // a VM must not depend on clients.
        self.threads.clear();
    }
}

fn serve<S>(listener: &UnixListener, stopping: &AtomicBool, service: &Service<S>) {
    while !stopping.load(Ordering::SeqCst) {
        match listener.accept() {
            Ok((stream, _)) => attend(stream, service),
            Err(_) if stopping.load(Ordering::SeqCst) => return,
            Err(error) => {
                tracing::debug!(%error, "control socket");
                std::thread::sleep(REFUSED_PAUSE);
            }
        }
    }
}

/// Takes one request and answers it. What a client does wrong is between it and its answer.
fn attend<S>(mut stream: UnixStream, service: &Service<S>) {
    let line = read_line(
        &mut stream,
        REQUEST_BYTES_MAX,
        Instant::now() + REQUEST_TIME_MAX,
    );
    let answer = match line {
        Ok(line) => answer(&line, service),
        Err(error @ LineError::TooLong(_)) => {
            AnswerLine::refused(RefusalCode::TooLong, error.to_string())
        }
        Err(LineError::Stream(_) | LineError::Closed) => return,
    };
    let written = write_line(&mut stream, &answer, Instant::now() + ANSWER_TIME_MAX);
    if let Err(error) = written {
        tracing::debug!(%error, "a client of the control socket did not take its answer");
    }
    let _ = stream.shutdown(Shutdown::Both);
}

fn answer<S>(line: &[u8], service: &Service<S>) -> AnswerLine {
    let request: RequestLine = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(error) => {
            let text = format!("not a request: {error}");
            return AnswerLine::refused(RefusalCode::Malformed, text);
        }
    };
    if request.version != VERSION {
        let text = format!("version {}, {VERSION} is spoken here", request.version);
        return AnswerLine::refused(RefusalCode::Version, text);
    }
    let known = service.requests.iter().find(|r| r.name == request.request);
    let Some(known) = known else {
        let names: Vec<_> = service.requests.iter().map(|r| r.name).collect();
        let text = format!("no such request; there are: {}", names.join(", "));
        return AnswerLine::refused(RefusalCode::UnknownRequest, text);
    };
    // Answering only reads, so a panic leaves nothing half done; the thread goes on.
    let attempt = std::panic::AssertUnwindSafe(|| (known.answer)(&service.subject));
    match std::panic::catch_unwind(attempt) {
        Ok(Ok(answer)) => AnswerLine {
            version: VERSION,
            answer: Some(answer),
            error: None,
        },
        Ok(Err(text)) => AnswerLine::refused(RefusalCode::Failed, text),
        Err(_) => AnswerLine::refused(RefusalCode::Failed, "answering failed"),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
