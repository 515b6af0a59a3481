//! Moving vCPUs from one node to another, as the primary orders it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use devices::BootEvent;
use ssi_hv_nodes::{Message, NodeNumber};
use thiserror::Error;

use super::Nodes;
use super::seats::Seats;

/// How long to wait for a vCPU that moves, which leaves a request to a control socket time for the
/// rest. A vCPU that waits for a page moves when it has the page.
pub const MOVE_TIME_MAX: Duration = Duration::from_secs(8);

/// Why a vCPU does not move.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum MoveError {
    /// The machine has one node.
    #[error("the VM is on this host alone: start it with --node to move its vCPUs")]
    OneNode,
    /// There is no such vCPU.
    #[error("there is no vCPU {cpu}: the VM has {cpus}, numbered from 0")]
    NoCpu {
        /// The number that was given.
        cpu: u32,
        /// How many there are.
        cpus: u8,
    },
    /// There is no such node.
    #[error("there is no node {node}: the VM has {nodes}, numbered from 0, which is the primary")]
    NoNode {
        /// The number that was given.
        node: u32,
        /// How many there are.
        nodes: usize,
    },
    /// The node has a vCPU on each CPU that it lends.
    #[error("node {node} lends {lent} CPUs and runs as many vCPUs: move one of them away first")]
    NoCpuLent {
        /// The node.
        node: NodeNumber,
        /// How many CPUs it lends.
        lent: usize,
    },
    /// It moves already.
    #[error("vCPU {cpu} moves to node {to} already: wait until it is there")]
    Moves {
        /// The vCPU.
        cpu: u8,
        /// Where it moves to.
        to: NodeNumber,
    },
    /// The machine is paused.
    #[error("the VM is paused, and its vCPUs move only while it runs: resume it first")]
    Paused,
    /// It takes too long.
    #[error(
        "vCPU {cpu} has not moved to node {to} within {} s: it waits for a page, or the VM was \
         paused; it moves when it can",
        MOVE_TIME_MAX.as_secs()
    )]
    Late {
        /// The vCPU.
        cpu: u8,
        /// Where it moves to.
        to: NodeNumber,
    },
    /// The run has ended.
    #[error("the VM has ended")]
    Ended,
}

#[derive(Debug, Default)]
struct State {
    /// The vCPUs that move, and where to.
    moving: BTreeMap<u8, NodeNumber>,
    has_ended: bool,
}

/// The vCPUs that move.
#[derive(Debug, Default)]
pub(super) struct Moves {
    state: Mutex<State>,
    changed: Condvar,
}

impl Moves {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one insertion or removal.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A vCPU runs on its new node.
    pub fn arrived(&self, cpu: u8) {
        self.lock().moving.remove(&cpu);
        self.changed.notify_all();
    }

    /// No vCPU arrives any more.
    pub fn end(&self) {
        self.lock().has_ended = true;
        self.changed.notify_all();
    }

    fn wait(&self, cpu: u8, to: NodeNumber, until: Instant) -> Result<(), MoveError> {
        let moves = |state: &mut State| state.moving.contains_key(&cpu) && !state.has_ended;
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), left, moves);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match (state.has_ended, state.moving.contains_key(&cpu)) {
            (_, false) => Ok(()),
            (true, true) => Err(MoveError::Ended),
            (false, true) => Err(MoveError::Late { cpu, to }),
        }
    }
}

/// What an order to go to a node has done.
enum Ordered {
    /// The vCPU goes there.
    Goes,
    /// It is there already.
    IsThere,
}

/// Moves the vCPUs of a machine, on its primary.
#[derive(Debug)]
pub(crate) struct Mover {
    nodes: Arc<Nodes>,
    seats: Arc<Seats>,
    /// The node that has a CPU for each vCPU.
    lent: Vec<NodeNumber>,
    /// The nodes to which vCPUs move when this happens.
    late: Vec<(NodeNumber, BootEvent)>,
}

impl Mover {
    pub fn new(
        nodes: Arc<Nodes>,
        seats: Arc<Seats>,
        lent: Vec<NodeNumber>,
        late: Vec<(NodeNumber, BootEvent)>,
    ) -> Self {
        Self {
            nodes,
            seats,
            lent,
            late,
        }
    }

    /// The guest boots: orders the vCPUs that have waited for that here to go to their
    /// nodes. Does not wait. One that a command has moved before stays where it is.
    pub fn booted(&self, event: BootEvent) {
        let what = match event {
            BootEvent::Init => "the guest's init runs",
            BootEvent::Ready => "the guest has booted",
        };
        let me = self.nodes.me;
        let owners = self.owners();
        for (cpu, (to, owner)) in (0..).zip(self.lent.iter().zip(owners)) {
            if owner != me || !self.late.contains(&(*to, event)) {
                continue;
            }
            match self.order(cpu, *to) {
                Ok(_) => tracing::info!(cpu, node = to, "{what}: a vCPU moves"),
                Err(error) => tracing::warn!("vCPU {cpu} stays on this host: {error}"),
            }
        }
    }

    /// Returns whether vCPUs move when this happens.
    pub fn awaits(&self, event: BootEvent) -> bool {
        self.late.iter().any(|(_, awaited)| *awaited == event)
    }

    /// Returns the node that each vCPU is on, or moves to.
    pub fn owners(&self) -> Vec<NodeNumber> {
        self.nodes.owners()
    }

    /// Moves a vCPU to a node, and waits until it is there. Without effect if it is there already.
    pub fn move_vcpu(&self, cpu: u32, node: u32) -> Result<(), MoveError> {
        let cpus = self.nodes.cpus();
        let number = u8::try_from(cpu).ok().filter(|cpu| *cpu < cpus);
        let cpu = number.ok_or(MoveError::NoCpu { cpu, cpus })?;
        let me = self.nodes.me;
        let is_there = |to: &NodeNumber| *to == me || self.nodes.link(*to).is_some();
        let to = u8::try_from(node).ok().filter(is_there);
        let nodes = self.nodes.links.len() + 1;
        let to = to.ok_or(MoveError::NoNode { node, nodes })?;
        let until = Instant::now() + MOVE_TIME_MAX;
        match self.order(cpu, to)? {
            Ordered::Goes => self.nodes.moves.wait(cpu, to, until),
            Ordered::IsThere => Ok(()),
        }
    }

    /// Orders a vCPU to go to a node, and does not wait.
    fn order(&self, cpu: u8, to: NodeNumber) -> Result<Ordered, MoveError> {
        let me = self.nodes.me;
        let mut state = self.nodes.moves.lock();
        if state.has_ended {
            return Err(MoveError::Ended);
        }
        if let Some(to) = state.moving.get(&cpu) {
            return Err(MoveError::Moves { cpu, to: *to });
        }
        let owners = self.owners();
        let owner = owners.get(usize::from(cpu)).copied().unwrap_or(me);
        if owner == to {
            return Ok(Ordered::IsThere);
        }
        // The primary's vCPUs share its CPUs with its devices anyway.
        let lent = self.lent.iter().filter(|node| **node == to).count();
        let here = || (0..).zip(&owners);
        let goes_to = |other: u8, owner| *state.moving.get(&other).unwrap_or(owner) == to;
        let stay = here().filter(|&(other, owner)| goes_to(other, owner));
        // Also those that leave and are not gone: the node takes twice as many as it lends CPUs.
        let all = here().filter(|&(other, owner)| *owner == to || goes_to(other, owner));
        if to != me && (stay.count() >= lent || all.count() >= 2 * lent) {
            return Err(MoveError::NoCpuLent { node: to, lent });
        }
        state.moving.insert(cpu, to);
        let ordered = match self.nodes.link(owner) {
            Some(link) => {
                link.send(&Message::Move { cpu, to });
                true
            }
            None => self.seats.order(cpu, to),
        };
        if !ordered {
            state.moving.remove(&cpu);
            return Err(MoveError::Ended);
        }
        Ok(Ordered::Goes)
    }
}
