//! The nodes of a cluster: started in parallel, awaited, and stopped.

use std::collections::VecDeque;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use memory_fabric::fabric::{Fingerprint, TransportKind};
use ssi_hv::cluster::{Cluster, Node, command_line, ready};
use ssi_hv::config::address::HostPort;
use ssi_hv::exit::ExitCode;
use ssi_hv::logging::{LogFormat, Verbosity};
use ssi_hv::progress::Progress;

use super::child::{Outputs, Running, ending};
use super::events::{Event, EventSender};
use super::heartbeat::Heartbeat;
use super::namespace::Namespace;
use super::{Up, flags_of_nodes, own_program};
use crate::commands::Failure;

/// Deadline for a node to listen: ssh may have to resolve a host and log in.
const START_TIME_MAX: Duration = Duration::from_secs(60);
/// Deadline for a node to end after a signal.
const END_TIME_MAX: Duration = Duration::from_secs(15);
/// Number of last lines quoted from a node that does not start.
const LINES_QUOTED: usize = 3;
/// Prefix of our own error messages, which a quotation omits.
const ERROR_PREFIX: &str = "ssi-hv: error: ";

/// Address of a node, and its fingerprint for UDP.
pub type Reached = (HostPort, Option<Fingerprint>);

/// The nodes.
#[derive(Debug)]
pub struct Nodes<'a> {
    cluster: &'a Cluster,
    verbosity: Verbosity,
    heartbeat: Heartbeat,
    /// Those that were started.
    started: Vec<Started>,
}

/// A started node.
#[derive(Debug)]
struct Started {
    at: Instant,
    /// `None` after its end.
    running: Option<Running>,
    /// The address on which it listens.
    address: Option<HostPort>,
    fingerprint: Option<Fingerprint>,
    /// Whether the wait for it is over.
    ready: bool,
    /// Its last lines on stderr, until it is ready.
    last_lines: VecDeque<String>,
}

impl<'a> Nodes<'a> {
    /// Creates the nodes without starting them.
    pub fn new(cluster: &'a Cluster, verbosity: Verbosity) -> Result<Self, Failure> {
        let leases = cluster.nodes.iter().map(|node| node.config.lease_seconds);
        let shortest = Duration::from_secs(leases.min().unwrap_or(1).into());
        Ok(Self {
            cluster,
            verbosity,
            heartbeat: Heartbeat::start(shortest).context("cannot start a thread")?,
            started: Vec::new(),
        })
    }

    /// Starts all of them.
    pub fn start(&mut self, events: &EventSender) -> Result<(), Failure> {
        for (index, node) in self.cluster.nodes.iter().enumerate() {
            tracing::info!("node {}: starts {}", node.name, node.placement());
            let running = self
                .start_one(index, node, events)
                .map_err(|failure| not_started(node, failure))?;
            self.started.push(Started {
                at: Instant::now(),
                running: Some(running),
                address: None,
                fingerprint: None,
                ready: false,
                last_lines: VecDeque::new(),
            });
        }
        Ok(())
    }

    fn start_one(
        &self,
        index: usize,
        node: &Node,
        events: &EventSender,
    ) -> Result<Running, Failure> {
        let flags = flags_of_nodes(self.verbosity);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut namespace = None;
        let mut command = match &node.place.ssh {
            Some(destination) => {
                let (program, words) = command_line::by_ssh(node, destination, &flags)?;
                let mut command = Command::new(program);
                command.args(words);
                command
            }
            None => {
                let mut node = node.clone();
                if node.place.namespace {
                    let made = Namespace::create(index)?;
                    // Port 0 is passed unchanged, since the namespace is not shared.
                    let listen = format!("{}:{}", made.address, node.config.listen.port());
                    node.config.listen = listen.parse()?;
                    node.config.insecure = true;
                    namespace = Some(made);
                }
                let mut command = match &node.place.program {
                    Some(program) => Command::new(program),
                    None => own_program()?,
                };
                command
                    .args(command_line::node_arguments(&node)?)
                    .args(flags);
                command
            }
        };
        if let Some(namespace) = &namespace {
            namespace.enter(&mut command)?;
        }
        // Ctrl-C is only for this process: a node ends after its VM.
        command.process_group(0).stdin(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let mut running = Running::start(&mut command, Outputs::Events, index, events)
            .with_context(|| format!("cannot start {program}"))?;
        if let Some(pipe) = running.take_stdin() {
            self.heartbeat.add(pipe).context("cannot use a pipe")?;
        }
        Ok(running)
    }

    /// Waits until all of them listen, and returns their addresses; `None` when this process is
    /// asked to end.
    pub fn await_ready(&mut self, up: &mut Up<'_>) -> Result<Option<Vec<Reached>>, Failure> {
        let deadline = Instant::now() + START_TIME_MAX;
        let steps = u64::try_from(self.started.len()).unwrap_or(u64::MAX);
        let progress = Progress::begin("starting nodes", steps, &self.names(|node| !node.ready));
        while self.started.iter().any(|node| !node.ready) {
            match up.next(Some(deadline)) {
                Event::Said(index, line) => {
                    if self.heard(index, &line) {
                        progress.step();
                        progress.say(&self.names(|node| !node.ready));
                    }
                }
                Event::Ended(index) => return Err(self.ended_early(index)),
                Event::Signal(_) => return Ok(None),
                Event::Late => return Err(self.late()),
                other => self.take(other),
            }
        }
        let reached = self.started.iter().filter_map(|node| {
            let address = node.address.clone()?;
            Some((address, node.fingerprint))
        });
        Ok(Some(reached.collect()))
    }

    /// Processes a line of a node that is not ready; returns true when the node becomes ready.
    fn heard(&mut self, index: usize, line: &str) -> bool {
        // With credentials, names say who the nodes are.
        let by_fingerprint = self.cluster.vm.transport == TransportKind::Udp
            && self.cluster.vm.credentials.is_none();
        let (Some(node), Some(started)) =
            (self.cluster.nodes.get(index), self.started.get_mut(index))
        else {
            return false;
        };
        if started.ready {
            return false;
        }
        if let Some(address) = ready::read_listening(line) {
            started.address = Some(node.reached_at(address.into()));
        } else if let Some(shown) = ready::read_fingerprint(line) {
            // It came over a trusted channel.
            started.fingerprint = by_fingerprint.then_some(shown);
        }
        let Some(address) = &started.address else {
            return false;
        };
        if by_fingerprint && started.fingerprint.is_none() {
            return false;
        }
        started.ready = true;
        tracing::info!(
            "node {}: lends {}{} on {address}, after {:.1} s",
            node.name,
            node.config.memory,
            match node.config.cpus {
                0 => String::new(),
                cpus => format!(" and {cpus} vCPU(s)"),
            },
            started.at.elapsed().as_secs_f64()
        );
        for line in std::mem::take(&mut started.last_lines) {
            self.pass_on(index, &line);
        }
        true
    }

    /// Processes an event of a node when nothing waits for it.
    pub fn take(&mut self, event: Event) {
        match event {
            Event::Complained(index, line) => {
                let early = self.started.get_mut(index).filter(|node| !node.ready);
                match early {
                    Some(node) => {
                        node.last_lines.push_back(line);
                        if node.last_lines.len() > LINES_QUOTED {
                            node.last_lines.pop_front();
                        }
                    }
                    None => self.pass_on(index, &line),
                }
            }
            Event::Ended(index) => {
                if let Some(status) = self.status_of(index) {
                    tracing::warn!("node {}: ended with {}", self.name(index), ending(status));
                }
            }
            Event::Said(..) | Event::Signal(_) | Event::Late => {}
        }
    }

    /// Prints a message of a node unchanged, with the node's name.
    fn pass_on(&self, index: usize, line: &str) {
        if self.verbosity.log_format == LogFormat::Json {
            let node = self.name(index);
            match line.strip_prefix(ERROR_PREFIX) {
                Some(error) => tracing::error!(node, "{error}"),
                None => tracing::warn!(node, "{line}"),
            }
        } else {
            use std::io::Write as _;
            let text = format!("node {}: {line}\n", self.name(index));
            // Best effort: stderr may be closed.
            let _ = ssi_hv::stderr::Stderr::default().write_all(text.as_bytes());
        }
    }

    fn name(&self, index: usize) -> &str {
        self.cluster
            .nodes
            .get(index)
            .map_or("?", |node| node.name.as_str())
    }

    /// Returns the names of some of them.
    fn names(&self, wanted: impl Fn(&Started) -> bool) -> String {
        let nodes = self.started.iter().zip(&self.cluster.nodes);
        let names = nodes.filter(|(started, _)| wanted(started));
        let names: Vec<_> = names.map(|(_, node)| node.name.as_str()).collect();
        names.join(", ")
    }

    fn status_of(&mut self, index: usize) -> Option<ExitStatus> {
        let running = self.started.get_mut(index)?.running.take();
        running?.status().ok()
    }

    /// Returns the failure of a node that ended before the VM was started.
    fn ended_early(&mut self, index: usize) -> Failure {
        let status = self.status_of(index);
        let how = status.map_or_else(|| "no exit code".to_owned(), ending);
        let name = self.name(index);
        let error = if self.started.get(index).is_some_and(|node| node.ready) {
            // Its messages were printed at once.
            anyhow!("node {name} lent already, and ended with {how} before the VM was started")
        } else {
            let last = self.last_words(index);
            anyhow!("node {name} ended with {how} and has not started to lend: {last}")
        };
        Failure::new(ExitCode::DonorUnavailable, error)
    }

    fn late(&self) -> Failure {
        let waited = START_TIME_MAX.as_secs();
        let mut what = format!(
            "node(s) {} did not start to lend within {waited} s",
            self.names(|node| !node.ready)
        );
        if let Some(index) = self.started.iter().position(|node| !node.ready) {
            what += &format!(": {}", self.last_words(index));
        }
        Failure::new(ExitCode::DonorUnavailable, anyhow!(what))
    }

    fn last_words(&self, index: usize) -> String {
        let lines = self.started.get(index).map(|node| &node.last_lines);
        let lines: Vec<_> = lines
            .into_iter()
            .flatten()
            .map(|line| line.trim_start_matches(ERROR_PREFIX))
            .filter(|line| !line.is_empty())
            .collect();
        if lines.is_empty() {
            return "it said nothing".to_owned();
        }
        lines.join("; ")
    }

    /// Stops all that run, in order if they cooperate.
    pub fn stop(&mut self, up: &mut Up<'_>) {
        self.heartbeat.stop();
        let runs = |node: &Started| node.running.is_some();
        let count = self.started.iter().filter(|node| runs(node)).count();
        if count == 0 {
            return;
        }
        tracing::info!("stopping node(s) {}", self.names(runs));
        let steps = u64::try_from(count).unwrap_or(u64::MAX);
        let progress = Progress::begin("stopping nodes", steps, &self.names(runs));
        let deadline = Instant::now() + END_TIME_MAX;
        while self.started.iter().any(runs) {
            match up.next(Some(deadline)) {
                Event::Ended(index) => {
                    if let Some(status) = self.status_of(index) {
                        tracing::info!("node {}: ended with {}", self.name(index), ending(status));
                    }
                    progress.step();
                    progress.say(&self.names(runs));
                }
                Event::Late => break,
                other => self.take(other),
            }
        }
        drop(progress);
        for (node, started) in self.cluster.nodes.iter().zip(&mut self.started) {
            let Some(mut running) = started.running.take() else {
                continue;
            };
            let waited = END_TIME_MAX.as_secs();
            tracing::warn!(
                "node {}: did not end within {waited} s, and is killed",
                node.name
            );
            running.kill();
        }
    }
}

/// Returns the failure of a node's start.
fn not_started(node: &Node, failure: Failure) -> Failure {
    let context = format!("cannot start node {}", node.name);
    failure.in_context(ExitCode::DonorUnavailable, context)
}
