//! How a process becomes a compute node of a VM.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memory_fabric::compute::{
    Channel, DonorDepot, Halts, Layout, Listeners, Membership, SharedGuest, SharingError,
    TableFences, VmSecret,
};
use memory_fabric::guest_memory::GuestMemory;
use vm_memory::GuestAddress;

use super::secure_link::SecureLink;
use crate::machine::{
    Barrier, ClockDifference, HaltObserver, MachineError, NodeStream, NodesConfig, measure_clock,
    serve_clock,
};

/// A node that is silent for so long is lost.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long another node may take for one exchange before the VM starts.
const EXCHANGE_TIME_MAX: Duration = Duration::from_secs(5);
/// The place of the primary.
const PRIMARY: u8 = 0;

/// Why a process does not become a compute node.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The memory is not shared.
    #[error(transparent)]
    Sharing(#[from] SharingError),
    /// A connection cannot be used.
    #[error("the connection to node {node} cannot be used")]
    Connection {
        /// The place of the node.
        node: u8,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The clocks of two hosts were not compared.
    #[error("node {node} did not compare its clock with this host's")]
    Clock {
        /// The place of the node.
        node: u8,
        /// Why not.
        #[source]
        source: MachineError,
    },
}

impl JoinError {
    /// The place of the node that is the cause, if one is.
    #[must_use]
    pub fn node(&self) -> Option<u8> {
        match self {
            Self::Sharing(error) => error.node,
            Self::Connection { node, .. } | Self::Clock { node, .. } => Some(*node),
        }
    }
}

/// The guest's memory on this node, which nothing has touched.
#[derive(Debug)]
pub struct Shared {
    /// The memory.
    pub memory: Arc<GuestMemory>,
    /// The donors of this node, if it has any.
    pub depot: Option<DonorDepot>,
}

impl From<Arc<GuestMemory>> for Shared {
    fn from(memory: Arc<GuestMemory>) -> Self {
        let depot = None;
        Self { memory, depot }
    }
}

/// A compute node that is connected to the others.
#[derive(Debug)]
pub struct Joined {
    /// The memory.
    pub shared: SharedGuest,
    /// The connections; on the primary, with `owners`.
    pub nodes: NodesConfig,
    /// How this host's clock differs from the primary's; `None` on the primary.
    pub clock: Option<ClockDifference>,
}

/// Changes of merged page tables reach all nodes before a vCPU acts on one.
#[derive(Debug)]
struct Tables(Arc<TableFences>);

impl Barrier for Tables {
    fn wait(&self) {
        self.0.wait();
    }
}

/// What a halted vCPU used goes to other nodes at once.
#[derive(Debug)]
struct Idle(Arc<Halts>);

impl HaltObserver for Idle {
    fn halted(&self) {
        self.0.halted();
    }
}

impl Joined {
    /// Connects to the other nodes, shares `guest` with them, and compares the clocks.
    ///
    /// # Errors
    ///
    /// When a node is not there in time or does not fit, or this host lacks something.
    pub fn connect(
        membership: Membership,
        listeners: Listeners,
        guest: impl Into<Shared>,
        owners: Vec<u8>,
        failed: impl FnOnce(SharingError) + Send + 'static,
    ) -> Result<Self, JoinError> {
        let (me, vm) = (membership.me, membership.vm);
        let Shared { memory, depot } = guest.into();
        let (shared, streams) = SharedGuest::start(membership, listeners, memory, depot, failed)?;
        let mut clock = None;
        let mut nodes = NodesConfig {
            vm,
            me,
            owners,
            connections: Vec::new(),
            silence_max: SILENCE_MAX,
            observer: None,
            barrier: Some(Arc::new(Tables(Arc::clone(shared.fences())))),
            halts: Some(Arc::new(Idle(Arc::clone(shared.halts())))),
            late: Vec::new(),
        };
        for (node, mut channel) in streams {
            let exchange = Exchange(&mut channel);
            let compared = match (me, node) {
                (PRIMARY, _) => serve_clock(exchange),
                (_, PRIMARY) => measure_clock(exchange).map(|found| clock = Some(found)),
                _ => Ok(()),
            };
            compared.map_err(|source| JoinError::Clock { node, source })?;
            let stream: Box<dyn NodeStream> = match channel {
                Channel::Plain(stream) => Box::new(stream),
                Channel::Secure(stream) => {
                    let link = SecureLink::new(stream);
                    Box::new(link.map_err(|source| JoinError::Connection { node, source })?)
                }
            };
            nodes.connections.push((node, stream));
        }
        Ok(Self {
            shared,
            nodes,
            clock,
        })
    }
}

/// A connection whose calls wait, for a limited time.
struct Exchange<'a>(&'a mut Channel);

impl Read for Exchange<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read_by(bytes, Instant::now() + EXCHANGE_TIME_MAX)
    }
}

impl Write for Exchange<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let deadline = Instant::now() + EXCHANGE_TIME_MAX;
        self.0.write_all_by(bytes, deadline)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Ranges of guest memory as [`Membership`] has them.
#[must_use]
pub fn byte_ranges(ranges: &[(GuestAddress, u64)]) -> Vec<Range<u64>> {
    let bytes = |(start, bytes): &(GuestAddress, u64)| start.0..start.0 + bytes;
    ranges.iter().map(bytes).collect()
}

/// Which memory has its home at which node, as a request for vCPUs says it.
#[must_use]
pub const fn layout(in_order: bool) -> Layout {
    match in_order {
        true => Layout::InOrder,
        false => Layout::Mixed,
    }
}

/// An id and a secret for a new VM.
///
/// # Errors
///
/// When the kernel gives no random numbers.
pub fn random_vm() -> io::Result<([u8; 16], VmSecret)> {
    let (mut vm, mut secret) = ([0; 16], [0; 32]);
    getrandom::fill(&mut vm)?;
    getrandom::fill(&mut secret)?;
    Ok((vm, VmSecret(secret)))
}
