//! The process of a VM on a node, as the node holds it.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use memory_fabric::compute::{ComputeEnd, ComputePorts, ComputeRequest};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::protocol::{Connect, LINE_BYTES_MAX, ProcessMessage, RdmaOfNode, Setup, send_line};

/// How long the process may take to start.
const START_TIME_MAX: Duration = Duration::from_secs(10);

/// Why a process for a VM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It cannot be started, or not be reached.
    #[error("cannot {0} the process of the VM")]
    System(&'static str, #[source] io::Error),
    /// It did not answer in time.
    #[error("the process of the VM did not start within {} s", START_TIME_MAX.as_secs())]
    Late,
    /// It ended at once.
    #[error("the process of the VM {0}")]
    Ended(String),
    /// It broke its protocol.
    #[error("the process of the VM broke its protocol")]
    Protocol,
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> ProcessError {
    move |error| ProcessError::System(what, error)
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The process has sent something, or has ended.
    Process,
    /// One of the other descriptors is readable.
    Other,
    /// Time is up.
    Late,
}

/// The process of a VM on this node. Dropping it ends it at once.
#[derive(Debug)]
pub struct VmProcess {
    child: Child,
    pidfd: OwnedFd,
    input: Option<ChildStdin>,
    output: ChildStdout,
    /// The beginning of a line that it has sent.
    line: Vec<u8>,
    ports: ComputePorts,
}

impl VmProcess {
    /// Starts `ssi-hv`, which is `program`, as the process of a VM that listens at `address`, for
    /// connections under TLS if they are `secured`. `rdma` is what the node allows. The calling
    /// thread has to live as long as the process.
    ///
    /// # Errors
    ///
    /// When it does not start.
    pub fn start(
        program: &Path,
        request: &ComputeRequest,
        address: IpAddr,
        secured: bool,
        rdma: &RdmaOfNode,
    ) -> Result<Self, ProcessError> {
        let mut child = Command::new(program)
            .arg("node-vm")
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals for the node's group, such as SIGHUP of its terminal, are for the node alone.
            .process_group(0)
            .spawn()
            .map_err(system("start"))?;
        let input = child.stdin.take();
        let output = child.stdout.take();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let (Ok(pidfd), Some(output)) = (pidfd, output) else {
            // Nothing is known of it that would allow to wait for it.
            let _ = child.kill();
            let _ = child.wait();
            return Err(system("watch")(io::ErrorKind::Unsupported.into()));
        };
        let mut process = Self {
            child,
            pidfd,
            input,
            output,
            line: Vec::new(),
            ports: ComputePorts {
                memory: 0,
                vcpus: 0,
                certificate: None,
            },
        };
        let setup = Setup {
            request: request.clone(),
            address,
            secured,
            rdma: rdma.clone(),
        };
        process.send(&setup)?;
        let deadline = Instant::now() + START_TIME_MAX;
        match process.receive(deadline)? {
            Some(ProcessMessage::Listening(ports)) => process.ports = ports,
            Some(ProcessMessage::Ended(end)) => {
                return Err(ProcessError::Ended(ended(&end.reason)));
            }
            None if Instant::now() >= deadline => return Err(ProcessError::Late),
            None => {
                let status = process.finish(deadline);
                return Err(ProcessError::Ended(ended(&ending(status))));
            }
        }
        Ok(process)
    }

    /// The ports on which it listens.
    #[must_use]
    pub fn ports(&self) -> ComputePorts {
        self.ports
    }

    /// Makes it take over leases, and connect to the other nodes of the VM.
    ///
    /// # Errors
    ///
    /// When it has ended.
    pub fn connect(&mut self, connect: &Connect) -> Result<(), ProcessError> {
        self.send(connect)
    }

    fn send(&mut self, value: &impl serde::Serialize) -> Result<(), ProcessError> {
        match &mut self.input {
            // Short enough for the pipe of a process that does not read.
            Some(input) => send_line(input, value).map_err(system("instruct")),
            None => Err(ProcessError::Protocol),
        }
    }

    /// Waits until the process sends something or ends, one of `others` is readable, or the time
    /// has come.
    ///
    /// # Errors
    ///
    /// When descriptors cannot be watched.
    pub fn wait(&self, others: &[BorrowedFd<'_>], until: Option<Instant>) -> io::Result<Event> {
        loop {
            let time = until.map(|until| until.saturating_duration_since(Instant::now()));
            let timeout = time.and_then(|time| Timespec::try_from(time).ok());
            let mut fds = vec![PollFd::new(&self.output, PollFlags::IN)];
            let others = others.iter();
            fds.extend(others.map(|other| PollFd::from_borrowed_fd(*other, PollFlags::IN)));
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) => return Ok(Event::Late),
                Ok(_) if fds[0].revents().is_empty() => return Ok(Event::Other),
                Ok(_) => return Ok(Event::Process),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns the next message of the process; `None` when it sends no more, or not in time.
    ///
    /// # Errors
    ///
    /// When it does not keep to its protocol.
    pub fn receive(&mut self, deadline: Instant) -> Result<Option<ProcessMessage>, ProcessError> {
        loop {
            if let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
                let rest = self.line.split_off(end + 1);
                let line = std::mem::replace(&mut self.line, rest);
                let message = serde_json::from_slice(&line);
                return message.map(Some).map_err(|_| ProcessError::Protocol);
            }
            if self.line.len() > LINE_BYTES_MAX {
                return Err(ProcessError::Protocol);
            }
            match self.wait(&[], Some(deadline)).map_err(system("watch"))? {
                Event::Process => {}
                Event::Other | Event::Late => return Ok(None),
            }
            let mut bytes = [0; 512];
            match io::Read::read(&mut self.output, &mut bytes) {
                Ok(0) => return Ok(None),
                Ok(count) => self.line.extend(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(system("read from")(error)),
            }
        }
    }

    /// Makes the process end, if it has not, and ends it at the deadline.
    pub fn finish(&mut self, deadline: Instant) -> io::Result<ExitStatus> {
        drop(self.input.take());
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).ok();
            let mut fds = [PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN)];
            match poll(&mut fds, timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(count) if count > 0 => break,
                _ => {
                    self.child.kill()?;
                    break;
                }
            }
        }
        self.child.wait()
    }

    /// Returns what the process sent at its end, or how it ended. Waits for it until the deadline, and then
    /// ends it.
    pub fn end(&mut self, deadline: Instant) -> ComputeEnd {
        let reported = loop {
            match self.receive(deadline) {
                Ok(Some(ProcessMessage::Ended(end))) => break Some(end),
                Ok(Some(ProcessMessage::Listening(_))) => {}
                Ok(None) | Err(_) => break None,
            }
        };
        let status = self.finish(deadline);
        reported.unwrap_or_else(|| ComputeEnd {
            reason: ended(&ending(status)),
        })
    }
}

impl Drop for VmProcess {
    fn drop(&mut self) {
        // Without effect on one that has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ended(how: &str) -> String {
    format!("ended: {how}")
}

fn ending(status: io::Result<ExitStatus>) -> String {
    match status.map(|status| (status.code(), status.signal())) {
        Ok((Some(code), _)) => format!("exit code {code}"),
        Ok((None, Some(signal))) => format!("signal {signal}"),
        Ok((None, None)) => "no exit code".to_owned(),
        Err(error) => error.to_string(),
    }
}
