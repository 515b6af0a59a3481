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
mod moves;
mod periodic;
pub(crate) mod primary;
mod remote;
pub(crate) mod seat;
pub(crate) mod seats;
mod secondary;
mod serve;
mod survey;
pub(crate) mod time;

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use devices::BootEvent;
use ssi_hv_irqchip::{Event, Routing};
use ssi_hv_nodes::place::{NotOwner, Place, Step, steps};
use ssi_hv_nodes::{Link, LinkConfig, Message, NodeNumber, Receiver, Stream, VmId};

pub use ssi_hv_nodes::{Barrier, REPORT_BYTES_MAX};

use crate::error::MachineError;
use crate::lifecycle::control::Follower;
use crate::lifecycle::kick::VcpuThread;
pub use clock::{ClockDifference, measure_clock, serve_clock};
pub use compare::ClockSample;
pub(crate) use moves::Mover;
use moves::Moves;
pub use moves::{MOVE_TIME_MAX, MoveError};
use remote::RemoteNode;
pub use secondary::{Secondary, SecondaryConfig, SecondaryHandle};
pub use survey::{ClockSurvey, HostClock, Surveyed};
pub use time::{HostCounter, OtherRate, TimeFacts, WhileStopped};

/// The nodes of a machine, and this node's connections to the others.
#[derive(Debug)]
pub struct NodesConfig {
    /// Names the VM, so that no connection of another one is taken for its.
    pub vm: VmId,
    /// This node.
    pub me: NodeNumber,
    /// The node that has a CPU for each vCPU. The first is the primary's.
    pub owners: Vec<NodeNumber>,
    /// On the primary: the nodes whose vCPUs begin there, and what the guest has to have reported
    /// before they move.
    pub late: Vec<(NodeNumber, BootEvent)>,
    /// A connection to each other node.
    pub connections: Vec<(NodeNumber, Box<dyn Stream>)>,
    /// A node that is silent for so long is lost.
    pub silence_max: Duration,
    /// On the primary: takes what the other nodes report.
    pub observer: Option<Arc<dyn Observer>>,
    /// What vCPUs wait for before they act on other nodes.
    pub barrier: Option<Arc<dyn Barrier>>,
    /// Learns when vCPUs of this node halt.
    pub halts: Option<Arc<dyn HaltObserver>>,
}

/// Learns that vCPUs have halted, so that other nodes get the memory that they used at once.
pub trait HaltObserver: fmt::Debug + Send + Sync {
    /// The vCPU of the calling thread has halted, until an interrupt comes. It must not wait.
    fn halted(&self);
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
    /// What is known of the time of its vCPUs.
    pub time: TimeFacts,
}

/// What a node knows of the others.
#[derive(Debug)]
pub(crate) struct Nodes {
    me: NodeNumber,
    /// Where each vCPU is. Read while events are posted there, so that none is on its way to the old
    /// place when the new one has been answered.
    places: RwLock<Box<[Place]>>,
    links: Vec<Arc<Link>>,
    observer: Option<Arc<dyn Observer>>,
    halts: Option<Arc<dyn HaltObserver>>,
    /// Most vCPUs that this node runs, apart from those that leave.
    cpus_max: u8,
    /// The link to the primary, unless this is it.
    primary: Option<Arc<Link>>,
    /// On the primary: the vCPUs that move.
    moves: Moves,
}

impl Nodes {
    fn new(
        me: NodeNumber,
        owners: &[NodeNumber],
        links: Vec<Arc<Link>>,
        primary: Option<Arc<Link>>,
        observer: Option<Arc<dyn Observer>>,
    ) -> Self {
        let place = |owner: &NodeNumber| Place::of(*owner, me);
        Self {
            me,
            places: RwLock::new(owners.iter().map(place).collect()),
            links,
            observer,
            halts: None,
            cpus_max: u8::MAX,
            primary,
            moves: Moves::default(),
        }
    }

    /// The vCPU of the calling thread has halted.
    pub fn halted(&self) {
        if let Some(halts) = &self.halts {
            halts.halted();
        }
    }

    fn places(&self) -> RwLockReadGuard<'_, Box<[Place]>> {
        // A place is replaced as a whole.
        self.places.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, cpu: u8, change: impl FnOnce(&mut Place) -> T) -> Option<T> {
        let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
        places.get_mut(usize::from(cpu)).map(change)
    }

    /// The node that each vCPU is on, or moves to.
    pub fn owners(&self) -> Vec<NodeNumber> {
        let places = self.places();
        places.iter().map(|place| place.owner(self.me)).collect()
    }

    /// How many vCPUs are on this node, or come here.
    fn here(&self) -> usize {
        let places = self.places();
        let owners = places.iter().map(|place| place.owner(self.me));
        owners.filter(|owner| *owner == self.me).count()
    }

    /// How many vCPUs the machine has, on all nodes.
    pub fn cpus(&self) -> u8 {
        u8::try_from(self.places().len()).unwrap_or(u8::MAX)
    }

    /// Whether a vCPU is on this node, or comes here.
    pub fn is_here(&self, cpu: u8) -> bool {
        self.is_of(self.me, cpu)
    }

    /// Whether a vCPU is on that node, or this node and comes here.
    pub fn is_of(&self, node: NodeNumber, cpu: u8) -> bool {
        let places = self.places();
        let place = places.get(usize::from(cpu));
        place.is_some_and(|place| place.owner(self.me) == node)
    }

    fn link(&self, node: NodeNumber) -> Option<&Arc<Link>> {
        self.links.iter().find(|link| link.peer() == node)
    }

    /// Posts an event to vCPUs of all nodes: by `here` to those of this one, and to those of each other
    /// node at once.
    pub fn post(
        &self,
        cpus: impl Iterator<Item = usize> + Clone,
        event: Event,
        here: impl FnMut(usize),
    ) {
        let mut places = self.places();
        let is_elsewhere = |cpu: usize| {
            let place = places.get(cpu);
            place.is_some_and(|place| place.owner(self.me) != self.me)
        };
        if cpus.clone().any(is_elsewhere) {
            // Without the lock: it may take as long as memory is out of reach, and who learns that a
            // vCPU moves would wait, with all that come after.
            drop(places);
            self.wait_for_stores();
            places = self.places();
        }
        let of = |node: NodeNumber| {
            let owner = |cpu: &usize| places.get(*cpu).map(|place| place.owner(self.me));
            cpus.clone().filter(move |cpu| owner(cpu) == Some(node))
        };
        of(self.me).for_each(here);
        for link in &self.links {
            let theirs = of(link.peer()).filter_map(|cpu| u8::try_from(cpu).ok());
            link.post(theirs, event);
        }
    }

    /// Waits until other nodes see what vCPUs of this one have stored.
    fn wait_for_stores(&self) {
        // That of all links is the same.
        if let Some(link) = self.links.first() {
            link.wait_for_barrier();
        }
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

    /// Gives a vCPU of this node, which does not run, to node `to`: `state` gives its state with all
    /// events that were posted here. Returns false when a node does not answer, because the run ends.
    pub fn give_away(
        &self,
        cpu: u8,
        to: NodeNumber,
        state: impl FnOnce() -> Result<Vec<u8>, MachineError>,
    ) -> Result<bool, MachineError> {
        let mut state = Some(state);
        for step in steps(to, self.links.iter().map(|link| link.peer())) {
            match step {
                Step::Notify(node) => {
                    let answer = self
                        .link(node)
                        .and_then(|link| link.call(|call| Message::Moved { call, cpu, to }));
                    if answer.is_none() {
                        return Ok(false);
                    }
                }
                Step::Switch => {
                    self.change(cpu, |place| *place = Place::At(to));
                }
                Step::Give => {
                    if let (Some(state), Some(link)) = (state.take(), self.link(to)) {
                        let state = state()?;
                        link.send(&Message::Vcpu { cpu, state });
                    }
                }
            }
        }
        Ok(true)
    }

    /// Node `from` gives a vCPU to node `to`.
    fn notified(&self, cpu: u8, from: NodeNumber, to: NodeNumber) -> Result<(), Refused> {
        if to != self.me && self.link(to).is_none() {
            return Err(Refused::NoNode(to));
        }
        // Those that leave may not have been ordered to yet, as far as this node knows.
        if to == self.me && self.here() >= 2 * usize::from(self.cpus_max) {
            return Err(Refused::NoneLent(self.cpus_max));
        }
        let changed = self.change(cpu, |place| place.notified(self.me, from, to));
        changed
            .ok_or(Refused::NoCpu(cpu))?
            .map_err(Refused::NotOwner)
    }

    /// The state of a vCPU has come from node `from`.
    fn came(&self, cpu: u8, from: NodeNumber) -> Result<(), Refused> {
        let came = self.change(cpu, |place| place.came(from));
        came.ok_or(Refused::NoCpu(cpu))?.map_err(Refused::NotOwner)
    }

    /// A vCPU that has come here runs.
    pub fn arrived(&self, cpu: u8) {
        match &self.primary {
            Some(primary) => primary.send(&Message::Arrived { cpu }),
            None => self.moves.arrived(cpu),
        }
    }
}

/// A message about a vCPU that its sender must not send.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("there is no vCPU {0}")]
    NoCpu(u8),
    #[error("this node lends {0} CPUs, and has twice as many vCPUs")]
    NoneLent(u8),
    #[error("there is no node {0}")]
    NoNode(NodeNumber),
    #[error(transparent)]
    NotOwner(NotOwner),
}

/// The connections of a node, before their threads run.
#[derive(Debug)]
pub(crate) struct Connections {
    nodes: Arc<Nodes>,
    receivers: Vec<Receiver>,
    /// The node that has a CPU for each vCPU.
    lent: Vec<NodeNumber>,
    /// The nodes whose vCPUs begin here, and what they wait for.
    late: Vec<(NodeNumber, BootEvent)>,
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
    let connected = Link::new(link, stream);
    let connected =
        connected.map_err(MachineError::host("prepare a connection to another node"))?;
    if let Some(barrier) = &config.barrier {
        connected.0.set_barrier(Arc::clone(barrier));
    }
    Ok(connected)
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
        let (lent, late) = (config.owners, config.late);
        let begins = |owner: &NodeNumber| match late.iter().any(|(node, _)| node == owner) {
            true => config.me,
            false => *owner,
        };
        let owners: Vec<_> = lent.iter().map(begins).collect();
        let nodes = Nodes::new(config.me, &lent, links, None, None);
        nodes.check(cpus)?;
        if !nodes.is_here(0) {
            let reason = "the first vCPU is not on the primary".to_owned();
            return Err(MachineError::Nodes { reason });
        }
        let nodes = Nodes {
            halts: config.halts,
            ..Nodes::new(config.me, &owners, nodes.links, None, config.observer)
        };
        Ok(Self {
            nodes: Arc::new(nodes),
            receivers,
            lent,
            late,
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
        let owners = self.owners();
        if owners.len() != usize::from(cpus) {
            let named = owners.len();
            return wrong(format!("{named} of {cpus} vCPUs are on a node"));
        }
        let is_there = |owner: &NodeNumber| *owner == self.me || self.link(*owner).is_some();
        match owners.iter().find(|owner| !is_there(owner)) {
            Some(owner) => wrong(format!("there is no connection to node {owner}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Says that a thread waits, and holds it.
    #[derive(Debug)]
    struct Held(Sender<()>, Mutex<Receiver<()>>);

    impl Barrier for Held {
        fn wait(&self) {
            self.0.send(()).expect("the test waits");
            let held = self.1.lock().expect("one waits");
            held.recv().expect("it is released");
        }
    }

    #[test]
    fn who_learns_that_a_vcpu_moves_does_not_wait_for_stores_of_others() {
        let ((waits, waiting), (release, held)) = (channel(), channel());
        let (stream, _other) = UnixStream::pair().expect("sockets");
        let config = LinkConfig {
            vm: [0; 16],
            me: 1,
            peer: 0,
            silence_max: Duration::from_secs(10),
        };
        let (link, _receiver) = Link::new(config, Box::new(stream)).expect("a link");
        link.set_barrier(Arc::new(Held(waits, Mutex::new(held))));
        let nodes = &Nodes::new(1, &[0, 0, 1], vec![link], None, None);
        std::thread::scope(|scope| {
            let here = |cpu| assert_eq!(cpu, 2);
            // One that is here needs no wait.
            nodes.post([2].into_iter(), Event::Nmi, here);
            scope.spawn(move || nodes.post([0, 2].into_iter(), Event::Nmi, here));
            waiting.recv().expect("it waits");
            let (learnt, has_learnt) = channel();
            scope.spawn(move || learnt.send(nodes.notified(1, 0, 1).is_ok()));
            let has_learnt = has_learnt.recv_timeout(Duration::from_secs(10));
            // Before the check, so that no thread is left waiting if it fails.
            release.send(()).expect("it waits");
            assert_eq!(has_learnt, Ok(true));
        });
    }

    #[test]
    fn no_more_vcpus_come_than_a_node_lends_cpus_and_as_many_while_some_leave() {
        let nodes = Nodes {
            cpus_max: 1,
            ..Nodes::new(1, &[0; 4], Vec::new(), None, None)
        };
        for cpu in 0..2 {
            nodes.notified(cpu, 0, 1).expect("lent");
        }
        let refused = nodes.notified(2, 0, 1).expect_err("none is lent");
        assert!(refused.to_string().contains("lends 1 CPUs"), "{refused}");
        assert_eq!(nodes.here(), 2);
        let nodes = Nodes::new(1, &[0; 4], Vec::new(), None, None);
        assert!((0..4).all(|cpu| nodes.notified(cpu, 0, 1).is_ok()));
    }
}
