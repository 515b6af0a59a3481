//! Guests of a few instructions whose vCPUs are on several nodes, on the real KVM of the host. A
//! test whose host has no KVM says `SKIPPED` and does nothing.

#[path = "../../../../memory-fabric/sharing/tests/native/mesh.rs"]
mod mesh;
mod moves;
#[path = "../support/mod.rs"]
mod support;
mod time;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fabric_sharing::{Halts, SharedMemory};
use ssi_hv_machine::{
    ConsoleConfig, HaltObserver, HostCounter, Irqchip, Machine, MachineError, MachineHandle,
    NodeFacts, NodesConfig, Outcome, Reporter, Secondary, SecondaryConfig,
};
use tiny_guests::apic::X2APIC_FLAG;
use tiny_guests::nodes::{
    ROUNDS, interrupts_between_nodes, slow_ticks_on_two_nodes, work_on_two_nodes,
};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use support::{ConsoleSender, kvm_is_there, machine_config, wait_for};

/// No step takes longer on a host that works, however loaded.
const LIMIT: Duration = Duration::from_secs(120);
const SILENCE_MAX: Duration = Duration::from_secs(20);

/// The guest's memory on one node.
fn memory_of(node: &SharedMemory) -> GuestMemoryMmap {
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

fn nodes_config(
    me: u8,
    peer: u8,
    owners: &[u8],
    stream: UnixStream,
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
struct Kept(Arc<Mutex<NodeFacts>>);

impl Reporter for Kept {
    fn report(&self, facts: &NodeFacts) -> Vec<u8> {
        *self.0.lock().unwrap() = facts.clone();
        Vec::new()
    }
}

/// A guest whose second vCPU is on another node, in this process.
struct Running {
    nodes: Vec<SharedMemory>,
    handle: MachineHandle,
    said: Receiver<u8>,
    end: Receiver<Result<Outcome, MachineError>>,
    secondary: Receiver<Result<Outcome, MachineError>>,
    /// What the second node reported last.
    kept: Kept,
}

impl Running {
    fn start(code: &[u8], x2apic: bool, rounds: u32) -> Self {
        let counter = |_| HostCounter::default();
        Self::with_counter(counter, &[0, 1], code, x2apic, rounds)
    }

    /// `of_node` gives the counter of the second node's host for the guest's memory there; each vCPU has
    /// an owner.
    fn with_counter(
        of_node: impl FnOnce(GuestMemoryMmap) -> HostCounter,
        owners: &[u8],
        code: &[u8],
        x2apic: bool,
        rounds: u32,
    ) -> Self {
        let nodes = mesh::nodes(2, 2, usize::MAX);
        let (here, there) = UnixStream::pair().unwrap();
        let kept = Kept::default();
        let config = SecondaryConfig {
            nodes: nodes_config(1, 0, &[], there, &nodes[1]),
            primary: 0,
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

    fn wait_for(&self, byte: u8) {
        if let Err(said) = wait_for(&self.said, byte, LIMIT) {
            let ends = [&self.end, &self.secondary].map(|end| end.recv_timeout(SILENCE_MAX));
            panic!("it only said {said}, and ended as {ends:?}");
        }
    }

    /// How it ended on both nodes, and all that it said since the last wait.
    fn finish(self, limit: Duration) -> (Outcome, Outcome, String) {
        let ends = [&self.end, &self.secondary].map(|end| end.recv_timeout(limit));
        let said = String::from_utf8_lossy(&self.said.try_iter().collect::<Vec<_>>()).into_owned();
        for node in &self.nodes {
            println!("{:?}", node.stats());
        }
        let ends = ends.map(|end| {
            let end = end.unwrap_or_else(|_| panic!("it does not end, and has said {said:?}"));
            end.expect("the host can run it")
        });
        let [primary, secondary] = ends;
        (primary, secondary, said)
    }
}

fn works(x2apic: bool) {
    if !kvm_is_there() {
        return;
    }
    let running = Running::start(work_on_two_nodes::code(), x2apic, 0);
    running.wait_for(b'b');
    assert!(running.handle.press_power_button());
    let (primary, secondary, said) = running.finish(LIMIT);
    assert_eq!(said, "lk");
    assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
}

#[test]
fn two_cpus_on_two_nodes_work_together() {
    works(false);
}

#[test]
fn two_cpus_on_two_nodes_work_together_in_x2apic_mode() {
    works(true);
}

#[test]
fn a_program_runs_although_ticks_are_due_before_their_handler_has_ended() {
    if !kvm_is_there() {
        return;
    }
    let running = Running::start(slow_ticks_on_two_nodes::code(), true, 0);
    let begin = Instant::now();
    let (primary, secondary, said) = running.finish(LIMIT);
    println!("{:?}", begin.elapsed());
    assert_eq!(said, "k");
    assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
}

/// Each CPU interrupts the other as often, with a non-maskable interrupt before every eighth.
fn interrupts(x2apic: bool, rounds: u32) {
    if !kvm_is_there() {
        return;
    }
    let running = Running::start(interrupts_between_nodes::code(), x2apic, rounds);
    let begin = Instant::now();
    // A round takes a few milliseconds on a machine that is busy.
    let limit = LIMIT + Duration::from_millis(10) * rounds;
    let (primary, secondary, said) = running.finish(limit);
    println!("{rounds} interrupts each way in {:?}", begin.elapsed());
    assert_eq!(said, "k");
    assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
}

#[test]
fn no_interrupt_between_nodes_is_lost() {
    interrupts(false, 2000);
}

#[test]
fn no_interrupt_between_nodes_is_lost_in_x2apic_mode() {
    interrupts(true, 2000);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn no_interrupt_of_a_hundred_thousand_is_lost() {
    interrupts(false, 100_000);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn no_interrupt_of_a_hundred_thousand_is_lost_in_x2apic_mode() {
    interrupts(true, 100_000);
}
