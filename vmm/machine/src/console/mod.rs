//! The console: the destination of the guest's serial output, and the source of its input.

pub(crate) mod input;
pub(crate) mod terminal;

use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use terminal::is_foreground_terminal;

/// Configuration of the guest's serial ports.
pub struct ConsoleConfig {
    pub(crate) input: Option<OwnedFd>,
    pub(crate) output: Box<dyn Write + Send>,
    /// Destination of the second serial port's output, if there is one.
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
    /// Uses the process's standard input and output. Either may be closed, a file, a pipe or a
    /// terminal. If the input is a terminal, it is in raw mode while the machine runs, and `Ctrl-A
    /// x` stops the machine. A background job does not change its terminal and has no input.
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

    /// Writes output to `writer`, on a separate thread; there is no input.
    pub fn output_only(writer: Box<dyn Write + Send>) -> Self {
        Self {
            input: None,
            output: writer,
            second: None,
            on_raw_mode: None,
        }
    }

    /// Replaces the destination of the output by what `wrap` makes of it.
    #[must_use]
    pub fn with_output(
        self,
        wrap: impl FnOnce(Box<dyn Write + Send>) -> Box<dyn Write + Send>,
    ) -> Self {
        Self {
            output: wrap(self.output),
            ..self
        }
    }

    /// Adds a second serial port whose output goes to `writer`, also on a separate thread.
    #[must_use]
    pub fn with_second_port(self, writer: Box<dyn Write + Send>) -> Self {
        Self {
            second: Some(writer),
            ..self
        }
    }

    /// Calls `notify` once when the run has put the console's terminal into raw mode. From then on
    /// only `Ctrl-A x` stops the guest from the keyboard, which the caller may want to announce.
    #[must_use]
    pub fn on_raw_mode(self, notify: impl FnOnce() + Send + 'static) -> Self {
        Self {
            on_raw_mode: Some(Box::new(notify)),
            ..self
        }
    }

    /// Reads input from `input` and writes output to `writer`.
    pub fn new(input: OwnedFd, writer: Box<dyn Write + Send>) -> Self {
        Self {
            input: Some(input),
            output: writer,
            second: None,
            on_raw_mode: None,
        }
    }
}

/// A file whose writes block, even if another process has set it to non-blocking.
#[derive(Debug)]
pub struct BlockingWriter(File);

impl BlockingWriter {
    /// Duplicates the descriptor `fd` and writes to its file.
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
