//! The processes of the benchmark.

use std::io::{BufReader, Write as _};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use crossbeam_channel::{Receiver, bounded};

use super::protocol::{Answer, Command, Setup, hear, say};

/// Longest wait for a node's answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// What memory travels by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Carrier {
    Tcp,
    Tls,
    /// By the device with this address.
    Rdma(IpAddr),
}

struct Node {
    child: Child,
    input: ChildStdin,
    answers: Receiver<Result<Answer>>,
}

/// Nodes that share a memory. They end with this value.
pub(super) struct Nodes(Vec<Node>);

impl Nodes {
    /// Starts the processes, and connects them.
    pub(super) fn start(
        nodes: u8,
        blocks: u32,
        local_pages: usize,
        carrier: Carrier,
    ) -> Result<Self> {
        let tls = carrier == Carrier::Tls;
        let rdma = match carrier {
            Carrier::Rdma(address) => Some(address),
            Carrier::Tcp | Carrier::Tls => None,
        };
        let mut secret = [0; 32];
        getrandom::fill(&mut secret)
            .map_err(|error| anyhow::anyhow!("no random bytes: {error}"))?;
        let mut started = Self(Vec::new());
        let (mut addresses, mut certificates) = (Vec::new(), Vec::new());
        for me in 0..nodes {
            let setup = Setup {
                me,
                nodes,
                blocks,
                local_pages,
                secret,
                tls,
                rdma,
            };
            let mut node = Node::start()?;
            say(&mut node.input, &setup)?;
            started.0.push(node);
        }
        for node in &mut started.0 {
            match node.answer()? {
                Answer::Listening(address) => addresses.push(address),
                other => bail!("a node began with {other:?}"),
            }
            if tls {
                match node.answer()? {
                    Answer::Certificate(certificate) => certificates.push(certificate),
                    other => bail!("a node continued with {other:?}"),
                }
            }
        }
        started.all(&Command::Connect {
            addresses,
            certificates,
        })?;
        Ok(started)
    }

    /// Asks one node.
    pub(super) fn ask(&mut self, node: usize, command: &Command) -> Result<Answer> {
        let node = self.0.get_mut(node).context("no such node")?;
        say(&mut node.input, command)?;
        node.answer()
    }

    /// Asks all nodes at once.
    pub(super) fn all(&mut self, command: &Command) -> Result<Vec<Answer>> {
        for node in &mut self.0 {
            say(&mut node.input, command)?;
        }
        self.0.iter_mut().map(Node::answer).collect()
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }
}

impl Node {
    fn start() -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's file")?;
        let mut child = Process::new(program)
            .args(["bench", "coherence-node"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a node")?;
        let input = child.stdin.take().context("a pipe to the node")?;
        let output = child.stdout.take().context("a pipe from the node")?;
        let (sender, answers) = bounded(1);
        std::thread::Builder::new().spawn(move || {
            let mut output = BufReader::new(output);
            loop {
                let answer = hear(&mut output);
                let is_last = answer.is_err();
                if sender.send(answer).is_err() || is_last {
                    return;
                }
            }
        })?;
        Ok(Self {
            child,
            input,
            answers,
        })
    }

    fn answer(&mut self) -> Result<Answer> {
        let answer = self.answers.recv_timeout(ANSWER_TIME_MAX);
        let seconds = ANSWER_TIME_MAX.as_secs();
        answer.with_context(|| format!("a node did not answer within {seconds} s"))?
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in &mut self.0 {
            let _ = node.input.write_all(b"\"End\"\n");
            // It may wait for a page of a node that has ended.
            let _ = node.child.kill();
            let _ = node.child.wait();
        }
    }
}
