//! `ssi-hv run --exec`: one command in the guest, and its result.

use std::io::{self, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::console_file::ConsoleFile;
use super::memory::bars_are_ours;
use super::run_error::RunError;
use crate::config::RunConfig;
use crate::exec::archive;
use crate::exec::channel::{Channel, CommandEnd, Progress};
use crate::exec::tail::Tail;
use crate::exit::ExitCode;
use crate::failure::Failure;
use crate::machine::{
    BlockingWriter, ConsoleConfig, Initrd, MachineError, MachineHandle, Outcome, command_line,
};
use crate::progress::{self, Progress as Bar};
use crate::report::Exec as ExecReport;
use crate::stderr::Stderr;

/// How long a guest may take to power itself off after its command has ended. Some kernels cannot;
/// the monitor then stops the machine.
const POWER_OFF_TIME_MAX: Duration = Duration::from_secs(5);
/// Lines of an unobserved console to print when there is no result.
const LINES_SHOWN: usize = 20;

/// A command to run in the guest.
#[derive(Debug)]
pub struct Exec {
    command: String,
    archive: Arc<[u8]>,
    channel: Channel,
    tail: Tail,
    /// Whether the console is also written to a file.
    console_is_kept: bool,
    /// Whether a progress bar for the boot is allowed.
    shows_boot: bool,
}

/// Opens the file for the guest's console, before anything is started.
pub fn console_file(config: &RunConfig) -> Result<Option<ConsoleFile>, Failure> {
    let opened = config.console.as_deref().map(ConsoleFile::create);
    let opened = opened.transpose().map_err(RunError::from);
    opened.map_err(Failure::usage)
}

/// Returns the console of a guest without a command, whose end is also kept in `tail`.
pub fn console(file: Option<ConsoleFile>, tail: &Tail) -> ConsoleConfig {
    let console = match file {
        Some(file) => ConsoleConfig::output_only(Box::new(file)),
        // The raw terminal does not convert Ctrl-C into a signal.
        None => ConsoleConfig::stdio().on_raw_mode(|| {
            // Writing to it never fails.
            let _ = writeln!(Stderr::default(), "ssi-hv: type Ctrl-A x to stop the guest");
        }),
    };
    console.with_output(|output| Box::new(Both(tail.clone(), output)))
}

impl Exec {
    /// Prepares the guest's initial RAM disk if there is a command to run.
    pub fn prepare(config: &RunConfig) -> Result<Option<Self>, Failure> {
        let Some(command) = &config.exec else {
            return Ok(None);
        };
        Ok(Some(Self {
            command: command.clone(),
            archive: archive::with_command(command, config.initrd.as_deref())?.into(),
            channel: Channel::default(),
            tail: Tail::default(),
            console_is_kept: config.console.is_some(),
            shows_boot: bars_are_ours(config),
        }))
    }

    /// Returns the initial RAM disk.
    pub fn initrd(&self) -> Initrd {
        Initrd::Built(Arc::clone(&self.archive))
    }

    /// Returns the kernel's command line. An unread console would slow the boot.
    pub fn command_line(&self, extra: &str) -> String {
        let quiet = if self.console_is_kept { "" } else { "quiet " };
        let init = archive::kernel_parameter();
        command_line(&format!("{quiet}{init} {extra}"))
    }

    /// Returns the hidden console, and the second serial port, which carries the command's output.
    /// Until then a progress bar is displayed.
    pub fn console(&self, file: Option<ConsoleFile>) -> Result<ConsoleConfig, Failure> {
        let console: Box<dyn Write + Send> = match file {
            Some(file) => Box::new(Both(self.tail.clone(), Box::new(file))),
            None => Box::new(self.tail.clone()),
        };
        let stdout = BlockingWriter::to(io::stdout()).map_err(RunError::host("use stdout"))?;
        let stderr = BlockingWriter::to(io::stderr()).map_err(RunError::host("use stderr"))?;
        let mut receiver = self.channel.receiver(stdout, stderr);
        if self.shows_boot {
            let bar = Bar::begin("booting", 1, "until the command begins");
            receiver = receiver.with_bar(bar);
        }
        Ok(ConsoleConfig::output_only(console).with_second_port(Box::new(receiver)))
    }

    /// Stops the machine if the guest does not power off after the command's end.
    pub fn watch(&self, machine: MachineHandle) -> Result<Watch, Failure> {
        let channel = self.channel.clone();
        let thread = std::thread::Builder::new().name("exec".into()).spawn({
            let channel = channel.clone();
            move || {
                let limit = match channel.wait_for_end().end {
                    None => return,
                    Some(CommandEnd::Status(_) | CommandEnd::NotRun(_)) => POWER_OFF_TIME_MAX,
                    Some(_) => Duration::ZERO,
                };
                if !channel.wait_until_closed(limit) {
                    machine.stop();
                }
            }
        });
        Ok(Watch {
            channel,
            thread: Some(thread.map_err(RunError::host("start a thread"))?),
        })
    }

    /// Returns the report's entry.
    pub fn report(&self) -> ExecReport {
        let progress = self.channel.progress();
        ExecReport {
            command: self.command.clone(),
            exit_status: match progress.end {
                Some(CommandEnd::Status(status)) => Some(status),
                _ => None,
            },
            stdout_bytes: progress.stdout_bytes,
            stderr_bytes: progress.stderr_bytes,
        }
    }

    /// Determines the result of the run.
    pub fn verdict(
        &self,
        outcome: Result<Outcome, MachineError>,
        init_reached: bool,
    ) -> Result<ExitCode, Failure> {
        // A guest that has not booted leaves its progress bar behind.
        progress::clear();
        let progress = self.channel.progress();
        let failed = |error| Err(Failure::new(ExitCode::HostError, error));
        match &progress.end {
            Some(CommandEnd::Status(status)) => Ok(ExitCode::Exec(*status)),
            Some(CommandEnd::NotRun(reason)) => failed(RunError::CommandNotRun(reason.clone())),
            Some(CommandEnd::OutputLost(reason)) => failed(RunError::OutputLost(reason.clone())),
            Some(CommandEnd::Garbled(what)) => failed(RunError::OutputGarbled(what.clone())),
            None => {
                self.show_console();
                let (code, end) = no_result(&outcome?, &progress, init_reached);
                let console = match self.tail.reason() {
                    Some(line) => format!("its console says: {line}"),
                    None => "its console is empty".to_owned(),
                };
                Err(Failure::new(code, RunError::NoResult { end, console }))
            }
        }
    }

    /// Prints the end of a console that was not shown elsewhere, for analysis.
    fn show_console(&self) {
        if self.console_is_kept {
            return;
        }
        for line in self.tail.lines(LINES_SHOWN) {
            tracing::error!("console: {line}");
        }
    }
}

/// Describes the end of a guest that has not sent the command's status.
fn no_result(outcome: &Outcome, progress: &Progress, init_reached: bool) -> (ExitCode, String) {
    let when = if progress.opened {
        "before the command had ended"
    } else {
        "before the command had begun"
    };
    match outcome {
        Outcome::Crash(detail) => (
            ExitCode::GuestCrash,
            format!("the guest crashed {when}: {detail}"),
        ),
        Outcome::Reboot => (
            ExitCode::GuestReboot,
            format!("the guest restarted {when}, as a kernel does that panics"),
        ),
        Outcome::Shutdown | Outcome::Stopped if init_reached && !progress.opened => (
            ExitCode::HostError,
            "the kernel has no driver for the second serial port, by which the command's output comes; it needs CONFIG_SERIAL_8250=y and two ports (8250.nr_uarts=2)".to_owned(),
        ),
        Outcome::Shutdown | Outcome::Stopped => (
            ExitCode::HostError,
            format!("the guest switched itself off {when}"),
        ),
    }
}

/// Stops its thread on drop, which waits for the end of the command.
#[derive(Debug)]
pub struct Watch {
    channel: Channel,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.channel.close();
        if let Some(thread) = self.thread.take() {
            // It has no result.
            let _ = thread.join();
        }
    }
}

/// Writes to two destinations; the first never fails.
struct Both(Tail, Box<dyn Write + Send>);

impl Write for Both {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.1.write(bytes)?;
        self.0.write_all(bytes.get(..written).unwrap_or_default())?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.1.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(opened: bool) -> Progress {
        Progress {
            opened,
            ..Progress::default()
        }
    }

    #[test]
    fn each_way_to_end_without_a_result_is_told_apart() {
        for (outcome, opened, init_reached, code, part) in [
            (
                Outcome::Reboot,
                false,
                false,
                ExitCode::GuestReboot,
                "before the command had begun, as a kernel does that panics",
            ),
            (
                Outcome::Crash("boom".into()),
                true,
                true,
                ExitCode::GuestCrash,
                "crashed before the command had ended: boom",
            ),
            (
                Outcome::Shutdown,
                true,
                true,
                ExitCode::HostError,
                "switched itself off before the command had ended",
            ),
            (
                Outcome::Shutdown,
                false,
                true,
                ExitCode::HostError,
                "CONFIG_SERIAL_8250=y",
            ),
            (
                Outcome::Shutdown,
                false,
                false,
                ExitCode::HostError,
                "switched itself off before the command had begun",
            ),
        ] {
            let (found, text) = no_result(&outcome, &progress(opened), init_reached);
            assert_eq!(found, code, "{text}");
            assert!(text.contains(part), "{text}");
        }
    }
}
