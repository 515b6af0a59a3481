//! The node of the benchmark: `ssi-hv node` in a process of its own.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use crossbeam_channel::{Sender, bounded};
use ssi_hv::cluster::ready;
use ssi_hv::size::ByteSize;

use crate::commands::bench::usage::{Memory, processor_time_of, threads_of};

/// Longest wait for the node to listen.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// Longest wait for its end.
const END_TIME_MAX: Duration = Duration::from_secs(60);
/// Interval of looks whether it has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Interval of signs that this process is there, within the node's longest lease.
const SIGN_INTERVAL: Duration = Duration::from_secs(10);

/// What the node uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    pub(super) memory: Memory,
    pub(super) threads: u64,
    pub(super) processor_time: Duration,
}

/// The process. It ends with this value.
#[derive(Debug)]
pub(super) struct Node {
    child: Child,
    address: SocketAddr,
    /// Dropped to end the node.
    signs: Option<Sender<()>>,
}

impl Node {
    /// Starts it, with the certificate in a directory if there is one.
    pub(super) fn start(lent: ByteSize, credentials: Option<&Path>) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's file")?;
        let mut command = Command::new(program);
        command
            .args([
                "node",
                "--end-with-stdin",
                "--log-level",
                "error",
                "--rdma-device",
                "none",
            ])
            .args([
                "--listen",
                "127.0.0.1:0",
                "--memory",
                &format!("{}M", lent.bytes() >> 20),
            ]);
        if let Some(directory) = credentials {
            command.arg("--credentials").arg(directory);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a node")?;
        let input = child.stdin.take();
        let output = child.stdout.take();
        let mut node = Self {
            child,
            address: ([127, 0, 0, 1], 0).into(),
            signs: None,
        };
        let (sender, lines) = bounded(1);
        let output = output.context("a pipe from the node")?;
        std::thread::Builder::new().spawn(move || {
            // To its end, so that it never waits for room in the pipe.
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(address) = ready::read_listening(&line) {
                    let _ = sender.send(address);
                }
            }
        })?;
        node.signs = Some(give_signs(input.context("a pipe to the node")?)?);
        let seconds = START_TIME_MAX.as_secs();
        let address = lines.recv_timeout(START_TIME_MAX);
        node.address = address
            .with_context(|| format!("the node ended, or did not listen within {seconds} s"))?;
        Ok(node)
    }

    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn usage(&self) -> Result<Usage> {
        let process = self.child.id().to_string();
        Ok(Usage {
            memory: Memory::of(&process)?,
            threads: threads_of(&process)?,
            processor_time: processor_time_of(&process)?,
        })
    }

    /// Ends it.
    pub(super) fn end(mut self) -> Result<()> {
        drop(self.signs.take());
        let deadline = Instant::now() + END_TIME_MAX;
        loop {
            if let Some(status) = self.child.try_wait().context("cannot wait for the node")? {
                ensure!(status.success(), "the node ended with {status}");
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!("the node did not end within {} s", END_TIME_MAX.as_secs());
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// Gives signs on a pipe until the result is dropped: then the node ends.
fn give_signs(mut input: ChildStdin) -> Result<Sender<()>> {
    let (sender, ended) = bounded::<()>(0);
    std::thread::Builder::new().spawn(move || {
        while ended.recv_timeout(SIGN_INTERVAL) == Err(crossbeam_channel::RecvTimeoutError::Timeout)
        {
            if input.write_all(b"\n").is_err() {
                return;
            }
        }
    })?;
    Ok(sender)
}

impl Drop for Node {
    fn drop(&mut self) {
        // It has ended unless this process failed.
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
