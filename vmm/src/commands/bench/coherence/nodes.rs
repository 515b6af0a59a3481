//! The processes of the benchmark.

use std::io::BufReader;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use crossbeam_channel::{Receiver, bounded};
use memory_fabric::BLOCK_BYTES;
use memory_fabric::compute::{ComputeTable, VmSecret, member};

use super::protocol::{Answer, Command, Request, Setup, UsedDonor, hear, say};
use crate::commands::bench::placement;

/// Longest wait for a node's answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// Longest wait for all nodes to be ready to be killed.
const HUSH_TIME_MAX: Duration = Duration::from_secs(2);

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

/// A memory that nodes share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    /// Its size, blocks of 2 MiB.
    pub(super) blocks: u32,
    /// What each node lends of it.
    pub(super) lent_bytes: Vec<u64>,
    pub(super) carrier: Carrier,
    /// The donor of each of the first nodes, whose loan is in what that node lends.
    pub(super) donors: Vec<UsedDonor>,
}

impl Shared {
    /// A memory for which each of the nodes lends enough alone, so that nothing is evicted, and whose
    /// blocks have their homes on the nodes in turns.
    pub(super) fn whole(nodes: u8, blocks: usize, carrier: Carrier) -> Result<Self> {
        let blocks = u32::try_from(blocks.next_multiple_of(nodes.into()))?;
        let lent = u64::from(blocks) * BLOCK_BYTES;
        Ok(Self {
            blocks,
            lent_bytes: vec![lent; nodes.into()],
            carrier,
            donors: Vec::new(),
        })
    }
}

impl Nodes {
    /// Starts the processes, and connects them.
    pub(super) fn start(shared: &Shared) -> Result<Self> {
        let rdma = match shared.carrier {
            Carrier::Rdma(address) => Some(address),
            Carrier::Tcp | Carrier::Tls => None,
        };
        let mut secret = VmSecret([0; 32]);
        getrandom::fill(&mut secret.0)
            .map_err(|error| anyhow::anyhow!("no random bytes: {error}"))?;
        let mut started = Self(Vec::new());
        let cpus = placement::of_nodes(shared.lent_bytes.len())?;
        for (me, cpus) in (0u8..).zip(cpus) {
            let setup = Setup {
                me,
                cpus,
                blocks: shared.blocks,
                secret,
                tls: shared.carrier == Carrier::Tls,
                rdma,
                donor: shared.donors.get(usize::from(me)).copied(),
            };
            let mut node = Node::start()?;
            say(&mut node.input, &setup)?;
            started.0.push(node);
        }
        let address = rdma.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let mut table = Vec::new();
        for (node, lent) in started.0.iter_mut().zip(&shared.lent_bytes) {
            match node.answer()? {
                Answer::Ports(ports) => table.push(member(address, ports, *lent)),
                other => bail!("a node began with {other:?}"),
            }
        }
        started.all(&Command::Connect(ComputeTable(table)))?;
        Ok(started)
    }

    /// Asks one node.
    pub(super) fn ask(&mut self, node: usize, command: &Command) -> Result<Answer> {
        let node = self.0.get_mut(node).context("no such node")?;
        say(&mut node.input, &Request::Do(command.clone()))?;
        node.answer()
    }

    /// Asks all nodes at once.
    pub(super) fn all(&mut self, command: &Command) -> Result<Vec<Answer>> {
        self.each(|_| command.clone())
    }

    /// Asks each node something else at once.
    pub(super) fn each(&mut self, command: impl Fn(usize) -> Command) -> Result<Vec<Answer>> {
        for (place, node) in self.0.iter_mut().enumerate() {
            say(&mut node.input, &Request::Do(command(place)))?;
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
                let answer =
                    answer.and_then(|heard| heard.context("a node of the benchmark ended"));
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
        // A node whose peers are gone would report that.
        for node in &mut self.0 {
            let _ = say(&mut node.input, &Request::Hush);
        }
        let deadline = Instant::now() + HUSH_TIME_MAX;
        for node in &self.0 {
            // What it was asked before may be answered first. One that has ended answers nothing.
            while let Ok(Ok(answer)) = node.answers.recv_deadline(deadline)
                && !matches!(answer, Answer::Hushed)
            {}
        }
        // All of them first: one may wait for a page of another.
        for node in &mut self.0 {
            let _ = node.child.kill();
        }
        for node in &mut self.0 {
            let _ = node.child.wait();
        }
    }
}
