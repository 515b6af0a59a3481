//! The protocol between the agent in a testbed host and its client.
//!
//! It runs over TCP, with one connection for each operation. The client starts with one
//! [`Request`], which determines what follows:
//!
//! | request | then the client sends | the agent answers |
//! |---|---|---|
//! | `Ping` | `Ping` frames, any number | a `Pong` for the request and for each |
//! | `Run` | `Signal` frames, any number | `Started`, `Stdout` and `Stderr`, `Exit` |
//! | `Put` | `Data` frames, `End` | `Done` |
//! | `Get` | nothing | `Data` frames, `End` |
//! | `Signal` | nothing | `Done` |
//!
//! `Error` with a text can replace any answer. When the client of a `Run` disconnects, the agent
//! kills the process with its whole group.
//!
//! A frame is one byte of kind, four bytes of length (little endian), and that many bytes.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// Largest payload of a frame; data is split to fit.
pub const FRAME_BYTES_MAX: usize = 256 << 10;

/// Largest file of `Put` and `Get`: a disk image or a log, never memory of a guest.
pub const FILE_BYTES_MAX: u64 = 1 << 30;

/// First frame of a connection.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub enum Request {
    /// Check that the host is alive.
    Ping,
    /// Run a command as the leader of a new process group, without standard input.
    Run {
        /// The program and its arguments.
        argv: Vec<String>,
        /// Environment variables to set.
        env: Vec<(String, String)>,
    },
    /// Write a file, which atomically replaces one of the same name.
    Put {
        /// Its path.
        path: String,
        /// Its mode, such as `0o755`.
        mode: u32,
    },
    /// Read a file.
    Get {
        /// Its path.
        path: String,
    },
    /// Send a signal to a process.
    Signal {
        /// The process; a negative number means a process group.
        pid: i32,
        /// The signal's number.
        signal: i32,
    },
}

/// Meaning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A [`Request`] in JSON.
    Request = 1,
    /// Bytes of a file.
    Data = 2,
    /// The end of a file.
    End = 3,
    /// A signal for the running process: four bytes.
    Signal = 4,
    /// Requests a [`Pong`](Kind::Pong).
    Ping = 5,
    /// Answers a ping.
    Pong = 16,
    /// The process was started; its id in four bytes.
    Started = 17,
    /// Standard output of the process.
    Stdout = 18,
    /// Standard error of the process.
    Stderr = 19,
    /// The process ended: exit code and signal in four bytes each, -1 for the one that does not
    /// apply.
    Exit = 20,
    /// The operation succeeded.
    Done = 21,
    /// The operation failed; the reason as text.
    Error = 22,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        use Kind::{
            Data, Done, End, Error, Exit, Ping, Pong, Request, Signal, Started, Stderr, Stdout,
        };
        let all = [
            Request, Data, End, Signal, Ping, Pong, Started, Stdout, Stderr, Exit, Done, Error,
        ];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Writes one frame.
///
/// # Errors
/// Fails when the payload exceeds [`FRAME_BYTES_MAX`] or the output fails.
pub fn write_frame(out: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    let too_long = || {
        let text = format!(
            "frame of {} bytes, {FRAME_BYTES_MAX} is the limit",
            payload.len()
        );
        io::Error::new(io::ErrorKind::InvalidInput, text)
    };
    if payload.len() > FRAME_BYTES_MAX {
        return Err(too_long());
    }
    let length = u32::try_from(payload.len()).map_err(|_| too_long())?;
    // One write, so that a small frame is one packet.
    let mut frame = Vec::with_capacity(payload.len() + 5);
    frame.push(kind as u8);
    frame.extend(length.to_le_bytes());
    frame.extend(payload);
    out.write_all(&frame)?;
    out.flush()
}

/// Reads one frame.
///
/// # Errors
/// Fails when the input ends or fails, or when the frame is of an unknown kind or exceeds
/// [`FRAME_BYTES_MAX`].
pub fn read_frame(input: &mut impl Read) -> io::Result<(Kind, Vec<u8>)> {
    let mut header = [0; 5];
    input.read_exact(&mut header)?;
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let kind = Kind::from_byte(header[0])
        .ok_or_else(|| invalid(format!("frame of unknown kind {}", header[0])))?;
    let length = u32::from_le_bytes([header[1], header[2], header[3], header[4]]);
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > FRAME_BYTES_MAX {
        return Err(invalid(format!(
            "frame of {length} bytes, {FRAME_BYTES_MAX} is the limit"
        )));
    }
    let mut payload = vec![0; length];
    input.read_exact(&mut payload)?;
    Ok((kind, payload))
}

/// Decodes the integers of a [`Kind::Signal`], [`Kind::Started`] or [`Kind::Exit`] frame.
#[must_use]
pub fn integers<const N: usize>(payload: &[u8]) -> Option<[i32; N]> {
    let mut values = [0; N];
    if payload.len() != N * 4 {
        return None;
    }
    for (value, bytes) in values.iter_mut().zip(payload.chunks_exact(4)) {
        *value = i32::from_le_bytes(bytes.try_into().ok()?);
    }
    Some(values)
}

/// Sends the contents of a reader as `Data` frames and an `End`.
///
/// # Errors
/// Fails when either side fails, or after [`FILE_BYTES_MAX`] bytes.
pub fn send_data(from: &mut impl Read, out: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; FRAME_BYTES_MAX];
    let mut total = 0;
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            return write_frame(out, Kind::End, &[]);
        }
        total += n as u64;
        check_file_size(total)?;
        write_frame(out, Kind::Data, &buffer[..n])?;
    }
}

/// Receives `Data` frames until `End` into a writer.
///
/// # Errors
/// Fails when either side fails, after [`FILE_BYTES_MAX`] bytes, or on another frame; an `Error`
/// frame becomes an error with its text.
pub fn receive_data(from: &mut impl Read, out: &mut impl Write) -> io::Result<()> {
    let mut total = 0;
    loop {
        match read_frame(from)? {
            (Kind::Data, bytes) => {
                total += bytes.len() as u64;
                check_file_size(total)?;
                out.write_all(&bytes)?;
            }
            (Kind::End, _) => return out.flush(),
            (Kind::Error, text) => {
                return Err(io::Error::other(
                    String::from_utf8_lossy(&text).into_owned(),
                ));
            }
            (kind, _) => return Err(io::Error::other(format!("unexpected frame {kind:?}"))),
        }
    }
}

fn check_file_size(total: u64) -> io::Result<()> {
    if total > FILE_BYTES_MAX {
        return Err(io::Error::other(format!(
            "file too large: {FILE_BYTES_MAX} bytes is the limit"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_were_written() {
        let mut wire = Vec::new();
        write_frame(&mut wire, Kind::Stdout, b"hello").unwrap();
        write_frame(&mut wire, Kind::Exit, &[1; 8]).unwrap();
        let mut input = wire.as_slice();
        assert_eq!(
            read_frame(&mut input).unwrap(),
            (Kind::Stdout, b"hello".to_vec())
        );
        let (kind, payload) = read_frame(&mut input).unwrap();
        assert_eq!(
            (kind, integers(&payload)),
            (Kind::Exit, Some([0x0101_0101; 2]))
        );
        assert!(read_frame(&mut input).is_err());
    }

    #[test]
    fn oversized_unknown_and_cut_frames_are_refused() {
        assert!(write_frame(&mut Vec::new(), Kind::Data, &vec![0; FRAME_BYTES_MAX + 1]).is_err());
        let huge = [2, 0xff, 0xff, 0xff, 0xff];
        assert!(
            read_frame(&mut &huge[..])
                .unwrap_err()
                .to_string()
                .contains("limit")
        );
        assert!(
            read_frame(&mut &[99, 0, 0, 0, 0][..])
                .unwrap_err()
                .to_string()
                .contains("99")
        );
        assert!(read_frame(&mut &[2, 9, 0, 0, 0, 1][..]).is_err());
        assert_eq!(integers::<1>(&[1, 2, 3]), None);
    }

    #[test]
    fn a_file_larger_than_a_frame_goes_over_whole() {
        let file: Vec<u8> = (0..FRAME_BYTES_MAX * 2 + 7)
            .map(|i| u8::try_from(i % 251).unwrap())
            .collect();
        let (mut wire, mut back) = (Vec::new(), Vec::new());
        send_data(&mut file.as_slice(), &mut wire).unwrap();
        receive_data(&mut wire.as_slice(), &mut back).unwrap();
        assert!(file == back);
    }
}
