//! Writing a report to its file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use fabric_host::root::path_now;
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::Serialize;

/// How long the reader of a pipe may block a report.
pub const REPORT_TIME_MAX: Duration = Duration::from_secs(5);

/// Pause between attempts to open a named pipe without a reader: no event reports its reader.
const OPEN_PAUSE: Duration = Duration::from_millis(20);

/// Why a report cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The file or its directory cannot be written.
    #[error("cannot write --report {}; name a file in a directory that exists, has room and that you may write to", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// The contents cannot be serialized.
    #[error("cannot express the report as JSON")]
    Json(#[source] serde_json::Error),
}

/// The destination of a report, whose writability was checked before the run.
///
/// A regular file is replaced atomically: readers see the old one or the new one. Anything else (a
/// pipe, a device) is written to.
#[derive(Clone, Debug)]
pub struct ReportFile {
    /// Its path as given, for messages.
    named: PathBuf,
    target: Target,
}

#[derive(Clone, Debug)]
enum Target {
    /// A file to replace, and the temporary one next to it.
    Replace { file: PathBuf, temporary: PathBuf },
    /// Not a regular file.
    Direct(PathBuf),
}

impl ReportFile {
    /// Checks whether a report can be written to `path`, without leaving a file behind.
    ///
    /// # Errors
    ///
    /// Fails if it cannot.
    pub fn prepare(path: &Path) -> Result<Self, ReportError> {
        let failed = |source| ReportError::Write {
            path: path.into(),
            source,
        };
        let target = target_of(path).map_err(failed)?;
        match &target {
            Target::Replace { temporary, .. } => {
                create_new(temporary).map_err(failed)?;
                fs::remove_file(temporary).map_err(failed)?;
            }
            // A pipe is not opened early, since its reader would see an end.
            Target::Direct(_) => {}
        }
        Ok(Self {
            named: path.into(),
            target,
        })
    }

    /// Returns the file that is written, or replaced: what a symbolic link is to, also that of a
    /// redirected standard stream.
    #[must_use]
    pub fn place(path: &Path) -> PathBuf {
        match target_of(path) {
            Ok(Target::Replace { file, .. }) => file,
            Ok(Target::Direct(_)) | Err(_) => path.into(),
        }
    }

    /// Writes a report, or any other serializable data.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written; an older file then remains intact. Fails if a pipe has
    /// no reader for [`REPORT_TIME_MAX`].
    pub fn write(&self, report: &impl Serialize) -> Result<(), ReportError> {
        let mut text = serde_json::to_vec_pretty(report).map_err(ReportError::Json)?;
        text.push(b'\n');
        let written = match &self.target {
            Target::Replace { file, temporary } => {
                replace(&path_now(file), &path_now(temporary), &text)
            }
            Target::Direct(path) => write_direct(&path_now(path), &text),
        };
        written.map_err(|source| ReportError::Write {
            path: self.named.clone(),
            source,
        })
    }
}

/// Writes to something that is not a regular file, such as a pipe.
fn write_direct(path: &Path, mut text: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + REPORT_TIME_MAX;
    let mut options = OpenOptions::new();
    options
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let mut file = loop {
        match options.open(path) {
            // It has no reader yet.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
                if Instant::now() >= deadline {
                    return Err(not_read());
                }
                thread::sleep(OPEN_PAUSE);
            }
            opened => break opened?,
        }
    };
    while !text.is_empty() {
        match file.write(text) {
            Ok(written) => text = text.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_for_reader(&file, deadline)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until there may be room.
fn wait_for_reader(file: &File, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(not_read());
    }
    let left = Timespec::try_from(left).map_err(io::Error::other)?;
    // The next write reports any error.
    let _ = rustix::event::poll(&mut [PollFd::new(file, PollFlags::OUT)], Some(&left));
    Ok(())
}

fn not_read() -> io::Error {
    let text = format!("nobody has read it for {} s", REPORT_TIME_MAX.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, text)
}

fn target_of(path: &Path) -> io::Result<Target> {
    let file = match fs::metadata(path) {
        Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(found) if !found.is_file() => return Ok(Target::Direct(path.into())),
        // Follows a symbolic link, so that its target is replaced.
        Ok(_) => fs::canonicalize(path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.into(),
        Err(error) => return Err(error),
    };
    let name = file
        .file_name()
        .ok_or(io::ErrorKind::InvalidFilename)?
        .to_os_string();
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.tmp", std::process::id()));
    let temporary = file.with_file_name(hidden);
    Ok(Target::Replace { file, temporary })
}

/// Creates a file, replacing the remains of a killed process with the same id, which is common in
/// containers.
fn create_new(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => OpenOptions::new().write(true).create_new(true).open(path),
    }
}

fn replace(file: &Path, temporary: &Path, text: &[u8]) -> io::Result<()> {
    let written = create_new(temporary).and_then(|mut opened| {
        opened.write_all(text)?;
        opened.sync_all()?;
        fs::rename(temporary, file)
    });
    if written.is_err() {
        // The first error is the one to report; the temporary file may not exist.
        let _ = fs::remove_file(temporary);
    }
    written
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
