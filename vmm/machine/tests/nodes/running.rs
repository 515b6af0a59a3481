//! A guest whose second vCPU is on another node, in one process.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use fabric_sharing::{Halts, SharedMemory};
use ssi_hv_machine::{
    ConsoleConfig, HaltObserver, HostCounter, Irqchip, Machine, MachineError, MachineHandle,
    NodeFacts, NodesConfig, Outcome, Reporter, Secondary, SecondaryConfig,
};
use tiny_guests::apic::X2APIC_FLAG;
use tiny_guests::nodes::ROUNDS;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::mesh;
use crate::support::{ConsoleSender, machine_config, wait_for};

/// No step takes longer on a host that works, however loaded.
pub const LIMIT: Duration = Duration::from_secs(120);
pub const SILENCE_MAX: Duration = Duration::from_secs(20);

/// The guest's memory on one node.
pub fn memory_of(node: &SharedMemory) -> GuestMemoryMmap {
    let memory = node.memory();
    // SAFETY: the view is mapped while `node` lives, which the tests drop after the machine.
    let region = unsafe {
        MmapRegionBuilder::new(memory.bytes())
            .with_raw_mmap_pointer(memory.guest_view())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .build()
    };
    let region = GuestRegionMmap::new(region.unwrap(), GuestAddress(0)).unwrap();
    GuestMemoryMmap::from_regions(vec![region]).unwrap()
}

/// What a node's vCPUs do not hold while they are halted.
#[derive(Debug)]
struct Idle(Arc<Halts>);

impl HaltObserver for Idle {
    fn halted(&self) {
        self.0.halted();
    }
}

/// Both ends of a connection over loopback.
pub fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (there, _) = listener.accept().unwrap();
    (here, there)
}

fn nodes_config(
    me: u8,
    peer: u8,
    owners: &[u8],
    stream: TcpStream,
    memory: &SharedMemory,
) -> NodesConfig {
    NodesConfig {
        vm: *b"a test's machine",
        me,
        owners: owners.to_vec(),
        connections: vec![(peer, Box::new(stream))],
        silence_max: SILENCE_MAX,
        observer: None,
        barrier: None,
        halts: Some(Arc::new(Idle(Arc::clone(memory.halts())))),
        late: Vec::new(),
    }
}

/// Reports nothing, and keeps what could be reported.
#[derive(Clone, Debug, Default)]
pub struct Kept(pub Arc<Mutex<NodeFacts>>);

impl Reporter for Kept {
    fn report(&self, facts: &NodeFacts) -> Vec<u8> {
        *self.0.lock().unwrap() = facts.clone();
        Vec::new()
    }
}

/// A guest whose second vCPU is on another node, in this process.
pub struct Running {
    pub nodes: Vec<SharedMemory>,
    pub handle: MachineHandle,
    pub said: Receiver<u8>,
    pub end: Receiver<Result<Outcome, MachineError>>,
    pub secondary: Receiver<Result<Outcome, MachineError>>,
    /// What the second node reported last.
    pub kept: Kept,
}

impl Running {
    pub fn start(code: &[u8], x2apic: bool, rounds: u32) -> Self {
        let counter = |_| HostCounter::default();
        Self::with_counter(counter, &[0, 1], code, x2apic, rounds)
    }

    pub fn with_counter(
        of_node: impl FnOnce(GuestMemoryMmap) -> HostCounter,
        owners: &[u8],
        code: &[u8],
        x2apic: bool,
        rounds: u32,
    ) -> Self {
        Self::over(connection(), of_node, owners, code, x2apic, rounds)
    }

    /// The nodes have the ends of a connection. `of_node` gives the counter of the second node's host for
    /// the guest's memory there; each vCPU has an owner.
    pub fn over(
        (here, there): (TcpStream, TcpStream),
        of_node: impl FnOnce(GuestMemoryMmap) -> HostCounter,
        owners: &[u8],
        code: &[u8],
        x2apic: bool,
        rounds: u32,
    ) -> Self {
        let nodes = mesh::nodes(2, 2, usize::MAX);
        let kept = Kept::default();
        let config = SecondaryConfig {
            nodes: nodes_config(1, 0, &[], there, &nodes[1]),
            primary: 0,
            cpus_max: u8::MAX,
            pinning: Vec::new(),
            tsc_difference: 0,
            counter: of_node(memory_of(&nodes[1])),
            reporter: Box::new(kept.clone()),
        };
        let of_secondary = memory_of(&nodes[1]);
        let (sender, secondary) = mpsc::channel();
        thread::spawn(move || {
            let run = Secondary::new(config).and_then(|secondary| secondary.run(of_secondary));
            sender.send(run)
        });

        let memory = memory_of(&nodes[0]);
        memory
            .write_obj(u8::from(x2apic), GuestAddress(X2APIC_FLAG))
            .unwrap();
        memory.write_obj(rounds, GuestAddress(ROUNDS)).unwrap();
        let mut kernel = tempfile::NamedTempFile::new().unwrap();
        kernel.write_all(&tiny_guests::elf(code)).unwrap();
        let cpus = u8::try_from(owners.len()).unwrap();
        let config = machine_config(kernel.path(), cpus, Irqchip::User);
        let (sender, said) = mpsc::channel();
        let console = ConsoleConfig::output_only(Box::new(ConsoleSender(sender)));
        let others = nodes_config(0, 1, owners, here, &nodes[0]);
        let machine = Machine::with_nodes(&config, memory, console, others).unwrap();
        let handle = machine.handle();
        let (sender, end) = mpsc::channel();
        thread::spawn(move || sender.send(machine.run()));
        Self {
            nodes,
            handle,
            said,
            end,
            secondary,
            kept,
        }
    }

    /// The faults of each node so far.
    pub fn faults(&self) -> Vec<u64> {
        let nodes = self.nodes.iter();
        nodes.map(|node| node.stats().faults.get()).collect()
    }

    pub fn wait_for(&self, byte: u8) {
        if let Err(said) = wait_for(&self.said, byte, LIMIT) {
            let ends = [&self.end, &self.secondary].map(|end| end.recv_timeout(SILENCE_MAX));
            panic!("it only said {said}, and ended as {ends:?}");
        }
    }

    /// How it ended on both nodes, and all that it said since the last wait.
    pub fn finish(self, limit: Duration) -> (Outcome, Outcome, String) {
        let ends = [&self.end, &self.secondary].map(|end| end.recv_timeout(limit));
        let said = String::from_utf8_lossy(&self.said.try_iter().collect::<Vec<_>>()).into_owned();
        let ends = ends.map(|end| {
            let end = end.unwrap_or_else(|_| panic!("it does not end, and has said {said:?}"));
            end.expect("the host can run it")
        });
        let [primary, secondary] = ends;
        (primary, secondary, said)
    }
}
