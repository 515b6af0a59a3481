//! The console: where the guest's serial output goes, and where its input comes from.

pub(crate) mod input;
pub(crate) mod terminal;

use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use terminal::is_foreground_terminal;

/// Where the guest's serial port leads.
pub struct ConsoleConfig {
    pub(crate) input: Option<OwnedFd>,
    pub(crate) output: Box<dyn Write + Send>,
    /// Where a second serial port leads, if there is one.
    pub(crate) second: Option<Box<dyn Write + Send>>,
    pub(crate) on_raw_mode: Option<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for ConsoleConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleConfig")
            .field("input", &self.input)
            .finish_non_exhaustive()
    }
}

impl ConsoleConfig {
    /// Input from the standard input of the process and output to its standard output. Either
    /// may be closed, a file, a pipe or a terminal. When the input is a terminal, it is in raw
    /// mode while the machine runs, and `Ctrl-A x` stops the machine. A background job leaves
    /// its terminal alone and has no input.
    pub fn stdio() -> Self {
        let input = io::stdin().as_fd().try_clone_to_owned().ok();
        let of_others = input
            .as_ref()
            .is_some_and(|fd| fd.is_terminal() && !is_foreground_terminal(fd));
        Self {
            input: input.filter(|_| !of_others),
            output: match BlockingWriter::to(io::stdout()) {
                Ok(stdout) => Box::new(stdout),
                Err(_) => Box::new(io::sink()),
            },
            second: None,
            on_raw_mode: None,
        }
    }

    /// No input, and output to `writer`. The writer is called from a thread of its own.
    pub fn output_only(writer: Box<dyn Write + Send>) -> Self {
        Self {
            input: None,
            output: writer,
            second: None,
            on_raw_mode: None,
        }
    }

    /// The same, and a second serial port of which the output goes to `writer`, also from a
    /// thread of its own.
    #[must_use]
    pub fn with_second_port(self, writer: Box<dyn Write + Send>) -> Self {
        Self {
            second: Some(writer),
            ..self
        }
    }

    /// The same, and `notify` is called once when the run has put the console's terminal into raw
    /// mode. From then on only `Ctrl-A x` stops the guest from the keyboard, which the caller may
    /// want to announce.
    #[must_use]
    pub fn on_raw_mode(self, notify: impl FnOnce() + Send + 'static) -> Self {
        Self {
            on_raw_mode: Some(Box::new(notify)),
            ..self
        }
    }

    /// Input from `input` and output to `writer`.
    pub fn new(input: OwnedFd, writer: Box<dyn Write + Send>) -> Self {
        Self {
            input: Some(input),
            output: writer,
            second: None,
            on_raw_mode: None,
        }
    }
}

/// Writes block, even when another process has set the file to non-blocking.
#[derive(Debug)]
pub struct BlockingWriter(File);

impl BlockingWriter {
    /// Writes to the file of `fd`, by a descriptor of its own.
    ///
    /// # Errors
    ///
    /// Fails when `fd` is closed, or the process is out of descriptors.
    pub fn to(fd: impl AsFd) -> io::Result<Self> {
        Ok(Self(File::from(fd.as_fd().try_clone_to_owned()?)))
    }
}

impl Write for BlockingWriter {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_writable(&self.0)?;
                }
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn wait_writable(file: &File) -> io::Result<()> {
    match poll(&mut [PollFd::new(file, PollFlags::OUT)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
