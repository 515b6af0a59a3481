//! A machine whose vCPUs are on several nodes, each with a KVM of its own.
//!
//! The primary has the devices, the I/O APIC and the life cycle. Every node has the vCPUs that it
//! owns, with their local APICs. Interrupts go from the thread that raises them over the link to the
//! node of their vCPU, whose receiving thread posts them there. Accesses to devices go to the
//! primary, and the vCPU waits for the answer.
//!
//! For [`Control`](crate::lifecycle::control::Control) of the primary each other node is one more
//! vCPU that pauses and ends.

mod clock;
mod compare;
mod periodic;
pub(crate) mod primary;
mod remote;
mod secondary;
mod serve;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ssi_hv_irqchip::{Routing, Target};
use ssi_hv_nodes::{Link, LinkConfig, Message, NodeNumber, Receiver, Stream, VmId};

pub use ssi_hv_nodes::REPORT_BYTES_MAX;

use crate::error::MachineError;
use crate::lifecycle::control::Follower;
use crate::lifecycle::kick::VcpuThread;
pub use clock::{ClockDifference, measure_clock, serve_clock};
pub use compare::ClockSample;
use remote::{RemoteNode, RemoteTarget};
pub use secondary::{Secondary, SecondaryConfig, SecondaryHandle};

/// The nodes of a machine, and this node's connections to the others.
#[derive(Debug)]
pub struct NodesConfig {
    /// Names the VM, so that no connection of another one is taken for its.
    pub vm: VmId,
    /// This node.
    pub me: NodeNumber,
    /// The node of each vCPU. The first is the primary's.
    pub owners: Vec<NodeNumber>,
    /// A connection to each other node.
    pub connections: Vec<(NodeNumber, Box<dyn Stream>)>,
    /// A node that is silent for so long is lost.
    pub silence_max: Duration,
    /// On the primary: takes what the other nodes report.
    pub observer: Option<Arc<dyn Observer>>,
}

/// Takes the reports of other nodes, on the threads that deliver interrupts: it only keeps them.
pub trait Observer: fmt::Debug + Send + Sync {
    /// A node reports, in the form in which its [`Reporter`] has it.
    fn reported(&self, node: NodeNumber, report: Vec<u8>);
}

/// Makes the reports of a node.
pub trait Reporter: fmt::Debug + Send {
    /// What the node does now, at most [`REPORT_BYTES_MAX`] bytes.
    fn report(&self, facts: &NodeFacts) -> Vec<u8>;
}

/// What a node knows of itself, apart from its memory.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    /// Its vCPUs that run.
    pub vcpus: Vec<VcpuThread>,
    /// The newest comparison with the primary's clock.
    pub clock: Option<ClockSample>,
}

/// What a node knows of the others.
#[derive(Debug)]
pub(crate) struct Nodes {
    me: NodeNumber,
    owners: Vec<NodeNumber>,
    links: Vec<Arc<Link>>,
    observer: Option<Arc<dyn Observer>>,
    /// The link to the primary, unless this is it.
    primary: Option<Arc<Link>>,
}

impl Nodes {
    /// The node of each vCPU.
    pub fn owners(&self) -> &[NodeNumber] {
        &self.owners
    }

    /// Whether a vCPU is on this node.
    pub fn is_here(&self, cpu: u8) -> bool {
        self.is_of(self.me, cpu)
    }

    /// Whether a vCPU is on that node.
    pub fn is_of(&self, node: NodeNumber, cpu: u8) -> bool {
        self.owners.get(usize::from(cpu)) == Some(&node)
    }

    /// Where to post events for a vCPU of another node.
    pub fn target(&self, cpu: usize) -> Option<Arc<dyn Target>> {
        let owner = *self.owners.get(cpu)?;
        let link = self.links.iter().find(|link| link.peer() == owner)?;
        let cpu = u8::try_from(cpu).ok()?;
        Some(Arc::new(RemoteTarget::new(Arc::clone(link), cpu)))
    }

    /// Announces the state of a local APIC of this node. Returns when all nodes have it.
    pub fn announce(&self, cpu: usize, routing: Routing) {
        let Ok(cpu) = u8::try_from(cpu) else { return };
        for link in &self.links {
            // Without an answer the run ends.
            let _ = link.call(|call| Message::Routing { call, cpu, routing });
        }
    }

    /// Passes the end of a level-triggered interrupt to the primary; false if that is this node.
    pub fn forward_end_of_interrupt(&self, vector: u8) -> bool {
        let message = Message::EndOfInterrupt { vector };
        self.primary
            .as_ref()
            .map(|link| link.send(&message))
            .is_some()
    }
}

/// The connections of a node, before their threads run.
#[derive(Debug)]
pub(crate) struct Connections {
    nodes: Arc<Nodes>,
    receivers: Vec<Receiver>,
}

/// Makes links of connections.
fn connect(
    config: &NodesConfig,
    peer: NodeNumber,
    stream: Box<dyn Stream>,
) -> Result<(Arc<Link>, Receiver), MachineError> {
    let link = LinkConfig {
        vm: config.vm,
        me: config.me,
        peer,
        silence_max: config.silence_max,
    };
    Link::new(link, stream).map_err(MachineError::host("prepare a connection to another node"))
}

impl Connections {
    /// The connections of the primary of a machine with `cpus` vCPUs.
    pub fn of_primary(mut config: NodesConfig, cpus: u8) -> Result<Self, MachineError> {
        let connections = std::mem::take(&mut config.connections);
        let connect = |(peer, stream)| connect(&config, peer, stream);
        let (links, receivers) = connections
            .into_iter()
            .map(connect)
            .collect::<Result<(Vec<_>, Vec<_>), _>>()?;
        let nodes = Nodes {
            me: config.me,
            owners: config.owners,
            links,
            observer: config.observer,
            primary: None,
        };
        nodes.check(cpus)?;
        if !nodes.is_here(0) {
            let reason = "the first vCPU is not on the primary".to_owned();
            return Err(MachineError::Nodes { reason });
        }
        Ok(Self {
            nodes: Arc::new(nodes),
            receivers,
        })
    }

    pub fn nodes(&self) -> Arc<Nodes> {
        Arc::clone(&self.nodes)
    }

    /// The other nodes as parts of a machine that pause and end with it.
    pub fn followers(&self) -> Vec<Arc<dyn Follower>> {
        let links = self.nodes.links.iter();
        links
            .map(|link| Arc::new(RemoteNode(Arc::clone(link))) as _)
            .collect()
    }
}

impl Nodes {
    /// Checks that each vCPU of a machine is on a node that is there.
    fn check(&self, cpus: u8) -> Result<(), MachineError> {
        let wrong = |reason| Err(MachineError::Nodes { reason });
        if self.owners.len() != usize::from(cpus) {
            let named = self.owners.len();
            return wrong(format!("{named} of {cpus} vCPUs are on a node"));
        }
        let is_there = |owner: &NodeNumber| {
            *owner == self.me || self.links.iter().any(|link| link.peer() == *owner)
        };
        match self.owners.iter().find(|owner| !is_there(owner)) {
            Some(owner) => wrong(format!("there is no connection to node {owner}")),
            None => Ok(()),
        }
    }
}
