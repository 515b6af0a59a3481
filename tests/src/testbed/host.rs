//! One host of a testbed.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use testbed_agent::{Kind, Request};

use super::client::{Endpoint, Heartbeat, Silence};
use super::process::{RemoteProcess, Tap};
use super::{HostImage, TestbedConfig, TestbedError, qemu};
use crate::cleanup::Process;
use crate::processor;

/// Deadline of one attempt to reach a booting agent.
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between attempts: no event on this side shows that the agent runs.
const PING_PAUSE: Duration = Duration::from_millis(200);
/// Lines of a console log that an error quotes.
const LOG_LINES_QUOTED: usize = 40;

/// Exit status of a command; the field that does not apply is -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitStatus {
    /// The exit code.
    pub code: i32,
    /// The signal that killed it.
    pub signal: i32,
}

impl std::fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.signal >= 0 {
            write!(f, "signal {}", self.signal)
        } else {
            write!(f, "exit code {}", self.code)
        }
    }
}

/// Result of a command.
#[derive(Clone, Debug)]
pub struct Output {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// A running host.
#[derive(Debug)]
pub struct Host {
    endpoint: Endpoint,
    // Dropped before `emulator`: it ends with its connection, or on its stop message.
    heartbeat: Option<Heartbeat>,
    emulator: Option<Process>,
}

impl Host {
    /// Starts the emulator without waiting for the host.
    pub(super) fn launch(
        number: usize,
        config: &TestbedConfig,
        image: &HostImage,
        run_dir: &Path,
    ) -> Result<Self, TestbedError> {
        let logs = config.logs.join(format!("host{number}"));
        std::fs::create_dir_all(&logs)
            .map_err(|e| TestbedError::io(format!("log directory {}", logs.display()), e))?;
        let port = qemu::free_port().map_err(|e| TestbedError::io("free port", e))?;
        let endpoint = Endpoint::new(number, port, logs.join("console.log"));
        let errors = logs.join("qemu.log");
        let file =
            File::create(&errors).map_err(|e| TestbedError::io(errors.display().to_string(), e))?;
        let mut command = qemu::command(number, config, image, run_dir, port, &endpoint.log);
        command.stderr(file);
        let emulator = Process::spawn(&mut command).map_err(|e| {
            let hint = "qemu-system-x86_64 (apt-get install qemu-system-x86)";
            TestbedError::io(hint, e)
        })?;
        Ok(Self {
            endpoint,
            heartbeat: None,
            emulator: Some(emulator),
        })
    }

    /// Attaches to a host that another process runs.
    ///
    /// # Errors
    /// Fails when its agent does not answer.
    pub fn attach(number: usize, port: u16, log: &Path) -> Result<Self, TestbedError> {
        let endpoint = Endpoint::new(number, port, log.to_path_buf());
        let mut host = Self {
            endpoint,
            heartbeat: None,
            emulator: None,
        };
        host.wait_ready(Instant::now() + PING_TIMEOUT)?;
        Ok(host)
    }

    /// Returns the processor time of its emulator, which is zero for a host of another process.
    pub(super) fn processor_time(&self) -> Duration {
        let emulator = self.emulator.as_ref();
        let time = emulator.map(|emulator| processor::of_process(emulator.pid()));
        time.and_then(Result::ok).unwrap_or_default()
    }

    pub(super) fn wait_ready(&mut self, deadline: Instant) -> Result<(), TestbedError> {
        loop {
            // The connection is refused or reset until the agent listens: QEMU's side of the port
            // always accepts.
            match self.endpoint.ping(PING_TIMEOUT) {
                Ok(stream) => {
                    let heartbeat = Heartbeat::start(self.endpoint.clone(), stream);
                    self.heartbeat = Some(heartbeat.map_err(|e| TestbedError::io("heartbeat", e))?);
                    return Ok(());
                }
                Err(error) if Instant::now() > deadline => {
                    return Err(self.boot_error(format!("no answer from its agent: {error}")));
                }
                Err(_) => {}
            }
            let pause = Instant::now() + PING_PAUSE;
            match &self.emulator {
                Some(emulator) => {
                    let ended = emulator
                        .wait_until(pause)
                        .map_err(|e| TestbedError::io("waiting for QEMU", e))?;
                    if let Some(status) = ended {
                        return Err(self.boot_error(format!("QEMU ended with {status}")));
                    }
                }
                None => std::thread::sleep(PING_PAUSE),
            }
        }
    }

    fn boot_error(&self, reason: String) -> TestbedError {
        let errors = self.endpoint.log.with_file_name("qemu.log");
        let mut tail = String::new();
        for path in [&errors, &self.endpoint.log] {
            let text = std::fs::read(path).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            tail.push_str(&lines[lines.len().saturating_sub(LOG_LINES_QUOTED)..].join("\n"));
        }
        let log = self.endpoint.log.display().to_string();
        TestbedError::Boot {
            host: self.endpoint.host,
            reason,
            log,
            tail,
        }
    }

    /// Returns the host's number.
    #[must_use]
    pub fn number(&self) -> usize {
        self.endpoint.host
    }

    /// Returns the port on 127.0.0.1 that leads to its agent.
    #[must_use]
    pub fn agent_port(&self) -> u16 {
        self.endpoint.port
    }

    /// Returns the path of its console log.
    #[must_use]
    pub fn console_log(&self) -> &Path {
        &self.endpoint.log
    }

    /// Returns its address on the links.
    #[must_use]
    pub fn address(&self) -> String {
        format!("10.77.0.{}", self.endpoint.host)
    }

    /// Fails when the host has stopped answering.
    ///
    /// # Errors
    /// [`TestbedError::HostHung`].
    pub fn check_health(&self) -> Result<(), TestbedError> {
        self.endpoint.check()
    }

    /// Returns for how long its agent has not answered.
    #[must_use]
    pub fn silence(&self) -> Silence {
        self.endpoint.silence()
    }

    /// Begins to measure the longest silence anew.
    pub(crate) fn forget_silence(&self) {
        self.endpoint.forget_silence();
    }

    /// Runs a command to its end, or kills it at the deadline.
    ///
    /// # Errors
    /// Fails when it cannot be started or exceeds the deadline; a non-zero exit code is not an
    /// error.
    pub fn run(&self, argv: &[&str], within: Duration) -> Result<Output, TestbedError> {
        self.spawn(argv)?.wait(within)
    }

    /// Runs a command that must succeed, and returns its standard output.
    ///
    /// # Errors
    /// As [`run`](Self::run), and when its exit code is not 0.
    pub fn check(&self, argv: &[&str], within: Duration) -> Result<String, TestbedError> {
        let output = self.run(argv, within)?;
        if output.status.code == 0 {
            return Ok(output.stdout);
        }
        Err(TestbedError::Command {
            host: self.endpoint.host,
            command: argv.join(" "),
            status: output.status.to_string(),
            stderr: output.stderr.trim().to_owned(),
        })
    }

    /// Starts a command without waiting for it.
    ///
    /// # Errors
    /// Fails when it cannot be started.
    pub fn spawn(&self, argv: &[&str]) -> Result<RemoteProcess, TestbedError> {
        RemoteProcess::start(&self.endpoint, argv, &[], None)
    }

    /// Starts a command whose standard output and error are also passed to `tap` as they arrive.
    ///
    /// # Errors
    /// Fails when it cannot be started.
    pub fn spawn_with(
        &self,
        argv: &[&str],
        env: &[(&str, &str)],
        tap: Tap,
    ) -> Result<RemoteProcess, TestbedError> {
        RemoteProcess::start(&self.endpoint, argv, env, Some(tap))
    }

    /// Sends a signal to a process on the host.
    ///
    /// # Errors
    /// Fails when there is no such process.
    pub fn signal(&self, pid: i32, signal: i32) -> Result<(), TestbedError> {
        self.endpoint.exchange(&Request::Signal { pid, signal })
    }

    /// Copies a file of this machine into the host.
    ///
    /// # Errors
    /// Fails when it cannot be read here or written there.
    pub fn put(&self, from: &Path, to: &str, mode: u32) -> Result<(), TestbedError> {
        let mut file =
            File::open(from).map_err(|e| TestbedError::io(from.display().to_string(), e))?;
        let mut stream = self.endpoint.request(&Request::Put {
            path: to.to_owned(),
            mode,
        })?;
        let sent = testbed_agent::send_data(&mut file, &mut stream);
        match self.endpoint.expect(&mut stream, Kind::Done) {
            Ok(()) => sent.map_err(|e| self.endpoint.broken(&e)),
            Err(error) => Err(error),
        }
    }

    /// Copies a file from the host to this machine.
    ///
    /// # Errors
    /// Fails when it cannot be read there or written here.
    pub fn get(&self, from: &str, to: &Path) -> Result<(), TestbedError> {
        let mut file =
            File::create(to).map_err(|e| TestbedError::io(to.display().to_string(), e))?;
        let mut stream = self.endpoint.request(&Request::Get {
            path: from.to_owned(),
        })?;
        testbed_agent::receive_data(&mut stream, &mut file).map_err(|e| self.endpoint.broken(&e))
    }
}
