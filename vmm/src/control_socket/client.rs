//! The side that asks.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use socket2::{Domain, SockAddr, Socket, Type};

use super::protocol::{
    ANSWER_BYTES_MAX, AnswerLine, LineError, RequestLine, VERSION, read_line, write_line,
};

/// How long an answer is waited for. Longer than other clients can hold it up.
pub const CLIENT_TIME_MAX: Duration = Duration::from_secs(20);

/// Pause between attempts to be let in.
const FULL_PAUSE: Duration = Duration::from_millis(20);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody there, or they do not read.
    #[error("cannot be asked")]
    Stream(#[source] io::Error),
    /// No line came back.
    #[error("does not answer")]
    Line(#[source] LineError),
    /// Something else came back.
    #[error("answers something that is not understood")]
    Malformed(#[source] serde_json::Error),
    /// It refused.
    #[error("refuses: {0}")]
    Refused(String),
}

/// Asks the process that listens on `socket`.
///
/// # Errors
///
/// When there is no answer in time, or none that is understood.
pub fn ask<T: DeserializeOwned>(socket: &Path, request: &str) -> Result<T, ClientError> {
    let deadline = Instant::now() + CLIENT_TIME_MAX;
    let mut stream = connect(socket, deadline).map_err(ClientError::Stream)?;
    let line = RequestLine {
        version: VERSION,
        request: request.to_owned(),
    };
    write_line(&mut stream, &line, deadline).map_err(ClientError::Stream)?;
    let line = read_line(&mut stream, ANSWER_BYTES_MAX, deadline).map_err(ClientError::Line)?;
    let line: AnswerLine = serde_json::from_slice(&line).map_err(ClientError::Malformed)?;
    match (line.answer, line.error) {
        (Some(answer), _) => serde_json::from_value(answer).map_err(ClientError::Malformed),
        (None, error) => Err(ClientError::Refused(
            error.map_or_else(|| "without saying why".into(), |refusal| refusal.text),
        )),
    }
}

/// Connects before `deadline`. An ordinary connect to a socket whose queue is full waits for ever.
fn connect(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    loop {
        match try_connect(path) {
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
            {
                std::thread::sleep(FULL_PAUSE);
            }
            Ok(stream) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Connects at once, or fails with `WouldBlock` where the queue is full. The stream does not
/// block.
pub(super) fn try_connect(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(OwnedFd::from(socket).into())
}
