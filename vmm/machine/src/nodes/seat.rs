//! The place of one vCPU on this node: what waits for its thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ssi_hv_nodes::NodeNumber;

use super::Nodes;
use super::time::NodeTime;
use crate::lifecycle::kick::Kick;
use crate::vcpu::state::HostFacts;

/// What waits for the thread of a vCPU.
#[derive(Debug, Default)]
struct Waiting {
    has_thread: bool,
    /// The state in which the vCPU has come from another node.
    arrived: Option<Vec<u8>>,
    /// Where it shall go.
    order: Option<NodeNumber>,
}

/// The place of one vCPU on this node.
#[derive(Debug)]
pub(crate) struct Seat {
    nodes: Arc<Nodes>,
    host: HostFacts,
    time: Arc<NodeTime>,
    kick: Arc<Kick>,
    waiting: Mutex<Waiting>,
    /// Something waits. Sequentially consistent, as is the `immediate_exit` of the vCPU: this is
    /// stored before a kick, and loaded by the thread after it has cleared that.
    attention: AtomicBool,
}

impl Seat {
    /// The place of the vCPU that `kick` kicks.
    pub fn new(nodes: Arc<Nodes>, host: HostFacts, time: Arc<NodeTime>, kick: Arc<Kick>) -> Self {
        Self {
            nodes,
            host,
            time,
            kick,
            waiting: Mutex::default(),
            attention: AtomicBool::new(false),
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Waiting) -> T) -> T {
        // Each change is one assignment.
        let mut waiting: MutexGuard<'_, _> =
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = change(&mut waiting);
        let waits = waiting.arrived.is_some() || waiting.order.is_some();
        self.attention.store(waits, Ordering::SeqCst);
        changed
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Returns what this host knows of itself.
    pub fn host(&self) -> &HostFacts {
        &self.host
    }

    /// Returns the time of this node's vCPUs.
    pub fn time(&self) -> &NodeTime {
        &self.time
    }

    /// Records that the vCPU has a thread here. Returns whether it had one.
    pub fn has_thread_now(&self) -> bool {
        self.change(|waiting| std::mem::replace(&mut waiting.has_thread, true))
    }

    /// Gives the vCPU's thread the state in which it has come.
    pub fn arrive(&self, state: Vec<u8>) {
        self.change(|waiting| waiting.arrived = Some(state));
        self.kick.kick();
    }

    /// Orders the vCPU to go to another node. Returns false if it is not here, or there is no such
    /// node.
    pub fn order(&self, cpu: u8, to: NodeNumber) -> bool {
        if !self.nodes.is_here(cpu) || self.nodes.link(to).is_none() {
            return false;
        }
        self.change(|waiting| waiting.order = Some(to));
        self.kick.kick();
        true
    }

    /// Takes the state in which the vCPU has come.
    pub fn arrived(&self) -> Option<Vec<u8>> {
        if !self.attention.load(Ordering::SeqCst) {
            return None;
        }
        self.change(|waiting| waiting.arrived.take())
    }

    /// Returns where the vCPU shall go.
    pub fn ordered(&self) -> Option<NodeNumber> {
        if !self.attention.load(Ordering::SeqCst) {
            return None;
        }
        self.change(|waiting| waiting.order)
    }

    /// The order is carried out.
    pub fn left(&self) {
        self.change(|waiting| waiting.order = None);
    }
}
