//! The lines that client and server exchange.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the protocol.
pub const VERSION: u32 = 1;

/// The longest request, with its newline: a name and a few arguments.
pub const REQUEST_BYTES_MAX: usize = 4096;

/// The longest answer, with its newline. A heat map has about 160 KiB.
pub const ANSWER_BYTES_MAX: usize = 4 << 20;

/// How long a client may take to send its request.
pub const REQUEST_TIME_MAX: Duration = Duration::from_secs(2);

/// How long a client may take to take the answer.
pub const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestLine {
    /// [`VERSION`].
    pub version: u32,
    /// A name from the server's table.
    pub request: String,
}

/// What the server says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AnswerLine {
    /// [`VERSION`].
    pub version: u32,
    /// The answer, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<Value>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Refusal>,
}

/// Why a request is not answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// For programs.
    pub code: RefusalCode,
    /// For people, one line.
    pub text: String,
}

/// Kinds of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalCode {
    /// The line is not a request.
    Malformed,
    /// It is longer than [`REQUEST_BYTES_MAX`].
    TooLong,
    /// It has another version.
    Version,
    /// There is no such request.
    UnknownRequest,
    /// It could not be done.
    Failed,
}

impl AnswerLine {
    /// A refusal.
    #[must_use]
    pub fn refused(code: RefusalCode, text: impl Into<String>) -> Self {
        Self {
            version: VERSION,
            answer: None,
            error: Some(Refusal {
                code,
                text: text.into(),
            }),
        }
    }
}

/// Why there is no line.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The stream broke, or the time was over.
    #[error("the stream broke")]
    Stream(#[source] io::Error),
    /// The other side closed it before the end of the line.
    #[error("closed before the end of a line")]
    Closed,
    /// It does not end.
    #[error("a line of more than {0} bytes")]
    TooLong(usize),
}

/// Reads one line, without its newline, of at most `bytes_max` bytes with it, until `deadline`.
///
/// # Errors
///
/// When no such line comes in time.
pub fn read_line(
    stream: &mut UnixStream,
    bytes_max: usize,
    deadline: Instant,
) -> Result<Vec<u8>, LineError> {
    let mut line = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let room = piece.len().min(bytes_max - line.len());
        if room == 0 {
            return Err(LineError::TooLong(bytes_max));
        }
        let left = time_left(deadline).map_err(LineError::Stream)?;
        stream
            .set_read_timeout(Some(left))
            .map_err(LineError::Stream)?;
        match stream.read(&mut piece[..room]) {
            Ok(0) => return Err(LineError::Closed),
            Ok(count) => {
                let end = piece[..count].iter().position(|&byte| byte == b'\n');
                line.extend_from_slice(&piece[..end.unwrap_or(count)]);
                if end.is_some() {
                    return Ok(line);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(LineError::Stream(error)),
        }
    }
}

/// Writes a message as one line, until `deadline`.
///
/// # Errors
///
/// When the other side does not take it in time.
pub fn write_line(
    stream: &mut UnixStream,
    message: &impl Serialize,
    deadline: Instant,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let mut rest = &line[..];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(time_left(deadline)?))?;
        match stream.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Never zero, which would mean for ever.
fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(io::ErrorKind::TimedOut.into())
    } else {
        Ok(left)
    }
}
