//! A node that runs vCPUs of a machine, and nothing else of it.

use std::sync::mpsc::{self, Receiver as Commands, SyncSender, TrySendError};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use devices::{Bus, MachineEvents};
use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use ssi_hv_nodes::{Link, Message, NodeNumber, Receiver, Space, Start};
use vm_memory::GuestMemoryMmap;

use super::compare::Answered;
use super::periodic::{Clock, Periodic};
use super::remote::{RemoteBus, ToPrimary, from_message, of_error};
use super::seats::{Maker, Seats};
use super::serve::Board;
use super::time::{Correction, HostCounter, NodeTime};
use super::{Nodes, NodesConfig, Reporter, connect};
use crate::config::Irqchip;
use crate::error::MachineError;
use crate::host_cpu::is_emulated;
use crate::irqchip::InterruptController;
use crate::lifecycle::control::Control;
use crate::lifecycle::ending;
use crate::lifecycle::shared::Shared;
use crate::outcome::Outcome;
use crate::vcpu::model::{CpuModel, from_entry, lacks};
use crate::vcpu::packages::Packages;
use crate::vcpu::state::{HostFacts, MsrNames};
use crate::vcpu::{Vcpu, cpuid, tsc};
use crate::{kvm, memory, paging};

/// How long the primary may take to load the guest and to greet.
const START_TIME_MAX: Duration = Duration::from_secs(120);
/// How long the primary may take to end the connection after the end of the run.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(40);
/// Commands of the primary that wait.
const COMMANDS_MAX: usize = 64;

/// What a node is given to run its vCPUs of a machine.
#[derive(Debug)]
pub struct SecondaryConfig {
    /// The nodes, without the owners of vCPUs: the primary knows them.
    pub nodes: NodesConfig,
    /// The primary.
    pub primary: NodeNumber,
    /// Most vCPUs of the machine that this node runs; twice as many while some change places.
    pub cpus_max: u8,
    /// CPUs of the host, one per vCPU of the machine in order: its thread is pinned there.
    pub pinning: Vec<u32>,
    /// What to add to this host's time stamp counter to get that of the primary's host: 0 on the
    /// same host.
    pub tsc_difference: u64,
    /// This host's time stamp counter.
    pub counter: HostCounter,
    /// Makes the reports of this node to the primary.
    pub reporter: Box<dyn Reporter>,
}

/// This node's part of a machine, whose primary is another node.
#[derive(Debug)]
pub struct Secondary {
    config: SecondaryConfig,
    primary: Arc<Link>,
    /// The primary's comes first.
    receivers: Vec<Receiver>,
    links: Vec<Arc<Link>>,
    shared: Arc<OnceLock<Arc<Shared>>>,
}

/// Ends a [`Secondary`] from any thread.
#[derive(Clone, Debug)]
pub struct SecondaryHandle {
    primary: Arc<Link>,
    shared: Arc<OnceLock<Arc<Shared>>>,
}

impl SecondaryHandle {
    /// Ends the run because what serves the guest's memory has failed. Does not wait.
    pub fn fail(&self, error: MachineError) {
        match self.shared.get() {
            Some(shared) => shared.control.end(Err(error)),
            None => {
                self.primary.send(&Message::End(of_error(&error)));
                self.primary.close();
            }
        }
    }
}

/// What the primary's receiving thread has the main thread do.
enum Command {
    /// Report when all vCPUs wait since this pause.
    Pause(u32),
    /// A comparison with the primary's clock is done.
    Compared,
    /// The run has ended.
    End,
}

impl Secondary {
    /// Greets the other nodes.
    ///
    /// # Errors
    ///
    /// When the primary is not among them, or a connection cannot be used.
    pub fn new(mut config: SecondaryConfig) -> Result<Self, MachineError> {
        let mut connections = std::mem::take(&mut config.nodes.connections);
        connections.sort_by_key(|(peer, _)| *peer != config.primary);
        if connections.first().map(|(peer, _)| *peer) != Some(config.primary) {
            let reason = format!("there is no connection to node {}", config.primary);
            return Err(MachineError::Nodes { reason });
        }
        let connect = |(peer, stream)| connect(&config.nodes, peer, stream);
        let (links, receivers) = connections
            .into_iter()
            .map(connect)
            .collect::<Result<(Vec<_>, Vec<_>), _>>()?;
        Ok(Self {
            primary: Arc::clone(&links[0]),
            links,
            receivers,
            config,
            shared: Arc::default(),
        })
    }

    /// A handle to it.
    #[must_use]
    pub fn handle(&self) -> SecondaryHandle {
        SecondaryHandle {
            primary: Arc::clone(&self.primary),
            shared: Arc::clone(&self.shared),
        }
    }

    /// Creates this node's vCPUs as the primary says, and runs them until the run ends. Returns how
    /// it ended, after the primary has ended the connection: until then it may need this node's part
    /// of the memory. `memory` is the same as the primary's, with the same regions.
    ///
    /// # Errors
    ///
    /// Fails when a host cannot run the machine, or the primary is lost.
    pub fn run(mut self, memory: GuestMemoryMmap) -> Result<Outcome, MachineError> {
        let until = Instant::now() + START_TIME_MAX;
        let receiver = &mut self.receivers[0];
        receiver.greet(until)?;
        let start = match receiver.next(Some(until))? {
            Some(Message::Start(start)) => start,
            Some(Message::End(end)) => {
                return from_message(end, self.primary.peer(), self.config.nodes.me);
            }
            _ => return Err(receiver.broken("it does not start the VM").into()),
        };
        let primary = Arc::clone(&self.primary);
        let built = Built::new(&mut self, memory, start).inspect_err(|error| {
            primary.send(&Message::End(of_error(error)));
        })?;
        // Set once, here.
        let _ = self.shared.set(Arc::clone(&built.shared));
        built.run(self)
    }
}

/// The vCPUs of this node.
struct Built {
    shared: Arc<Shared>,
    board: Board,
    vcpus: Vec<Vcpu>,
    correction: Correction,
}

impl Built {
    fn new(
        secondary: &mut Secondary,
        memory: GuestMemoryMmap,
        start: Start,
    ) -> Result<Self, MachineError> {
        let config = &secondary.config;
        let size = memory::check_memory(&memory, start.hotplug_bytes)?;
        if size.total != start.memory_bytes {
            let reason = format!(
                "this node has {} bytes of memory, not {}",
                size.total, start.memory_bytes
            );
            return Err(MachineError::Nodes { reason });
        }
        let cpus = u8::try_from(start.owners.len()).unwrap_or(u8::MAX);
        let links = secondary.links.clone();
        let primary = Some(Arc::clone(&secondary.primary));
        let nodes = Arc::new(Nodes {
            halts: config.nodes.halts.clone(),
            cpus_max: config.cpus_max,
            ..Nodes::new(config.nodes.me, &start.owners, links, primary, None)
        });
        nodes.check(cpus)?;
        let (here, most) = (nodes.here(), usize::from(config.cpus_max));
        if here > most {
            let reason = format!("{here} vCPUs are to run on this node, and it lends {most} CPUs");
            return Err(MachineError::Nodes { reason });
        }
        paging::check()?;
        let kvm = kvm::open_kvm()?;
        let here = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(MachineError::kvm("report its CPU features"))?;
        // The primary has checked its own.
        if let Some(bits) = cpuid::physical_address_bits(here.as_slice()) {
            memory::check_address_bits(size, bits)?;
            memory::check_hotplug_bits(size, start.hotplug_bytes, bits)?;
        }
        let supported: Vec<_> = start.cpuid.iter().map(from_entry).collect();
        if is_emulated() && !start.emulated {
            let reason =
                "this host's CPUs are emulated, and show a guest no XSAVE; the primary's do";
            return Err(MachineError::Nodes {
                reason: reason.to_owned(),
            });
        }
        if let Some((leaf, missing)) = lacks(here.as_slice(), &supported, start.emulated) {
            let reason = format!(
                "this host's CPU lacks features {missing:x?} of CPUID leaf {leaf:#x} of the primary's"
            );
            return Err(MachineError::Nodes { reason });
        }
        let (rate, scales) = (tsc::Clock::of_new(&kvm)?.khz, tsc::can_scale(&kvm));
        let counter = config
            .counter
            .clone()
            .with_rates(rate, start.tsc_khz, scales);
        let counter = counter.map_err(|error| MachineError::Nodes {
            reason: error.to_string(),
        })?;
        let time = Arc::new(NodeTime::of_node(counter, config.tsc_difference)?);
        let vm = Arc::new(kvm::create_vm(&kvm)?);
        kvm::map_memory(&vm, &memory)?;
        let followers = vec![Arc::new(ToPrimary(Arc::clone(&secondary.primary))) as _];
        let control = Control::with_followers(cpus.into(), followers)
            .map_err(MachineError::host("prepare for the control of vCPUs"))?;
        let interrupts =
            InterruptController::new(Irqchip::User, &vm, &control, Some(Arc::clone(&nodes)))?;
        let InterruptController::User(chip) = &interrupts else {
            let reason = "no interrupt controller reaches other hosts".to_owned();
            return Err(MachineError::Nodes { reason });
        };
        let chip = Arc::clone(chip);
        let maker = Maker {
            model: CpuModel {
                supported,
                cpus,
                packages: Packages::with_id_bits(cpus, start.package_id_bits),
                emulated: start.emulated,
                nodes: Some(Arc::clone(&nodes)),
                halts_in_guest: false,
                machine_check: None,
            },
            vm: Arc::clone(&vm),
            interrupts,
            pinning: config.pinning.clone(),
            clock: tsc::Clock {
                khz: start.tsc_khz,
                offset: start.tsc_offset,
            },
            host: HostFacts {
                msrs: MsrNames::of(&kvm)?,
                tsc_khz: start.tsc_khz,
            },
            time: Arc::clone(&time),
        };
        let seats = Seats::new(maker, &nodes, control.kicks());
        let vcpus = seats.vcpus()?;
        let bus = |space| RemoteBus {
            link: Arc::clone(&secondary.primary),
            space,
        };
        let (mut ports, mut mmio) = (Bus::port_io(), Bus::mmio());
        ports.insert(0, 0x1_0000, Arc::new(bus(Space::Ports)))?;
        mmio.insert(0, u64::MAX, Arc::new(bus(Space::Memory)))?;
        let events =
            MachineEvents::new().map_err(MachineError::host("create an event descriptor"))?;
        let shared = Arc::new(Shared {
            ports,
            mmio,
            events,
            control,
            transports: Vec::new(),
            _vm: vm,
            memory,
            memory_errors: None,
        });
        let board = Board {
            nodes,
            chip,
            seats: Arc::new(seats),
            shared: Arc::clone(&shared),
        };
        let correction = Correction::new(time, start.tsc_khz, shared.control.kicks());
        Ok(Self {
            shared,
            board,
            vcpus,
            correction,
        })
    }

    fn run(self, secondary: Secondary) -> Result<Outcome, MachineError> {
        let Secondary {
            config,
            primary,
            receivers,
            links,
            ..
        } = secondary;
        let Self {
            shared,
            board,
            vcpus,
            correction,
        } = self;
        let (sender, commands) = mpsc::sync_channel(COMMANDS_MAX);
        let mut periodic = Periodic::new(&shared, &primary, config.reporter, correction);
        let mut threads = Vec::new();
        let mut receivers = receivers.into_iter();
        let first = receivers.next();
        let started = first
            .into_iter()
            .map(|receiver| {
                let of_primary = OfPrimary {
                    commands: sender.clone(),
                    clock: Arc::clone(&periodic.clock),
                };
                spawn(receiver, &board, &shared, Some(of_primary))
            })
            .chain(receivers.map(|receiver| spawn(receiver, &board, &shared, None)))
            .try_for_each(|thread| {
                threads.push(thread?);
                Ok(())
            })
            .and_then(|()| {
                for vcpu in vcpus {
                    vcpu.spawn(Arc::clone(&shared))?;
                }
                Ok(())
            });
        match started {
            Ok(()) => primary.send(&Message::Started),
            Err(error) => shared.control.end(Err(error)),
        }
        drop(sender);
        obey(&commands, &mut periodic);
        ending::wait_for_threads(&shared);
        periodic.report_at_end();
        primary.send(&Message::Ended);
        // The primary ends the connection when nobody needs this node's memory any more.
        let of_primary = threads.first();
        let is_open = || of_primary.is_some_and(|thread| !thread.is_finished());
        let until = Instant::now() + CLOSE_TIME_MAX;
        while is_open() && Instant::now() < until {
            match commands.recv_timeout(until.saturating_duration_since(Instant::now())) {
                // All senders are gone when the receiving thread is.
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Ok(_) | Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
        for link in &links {
            link.close();
        }
        for thread in threads {
            let _ = thread.join();
        }
        let end = shared.control.take_end();
        end.unwrap_or(Ok(Outcome::Stopped))
    }
}

/// Does what the primary asks for, and what is done from time to time, until the run has ended.
fn obey(commands: &Commands<Command>, periodic: &mut Periodic) {
    let (shared, primary) = (Arc::clone(&periodic.shared), Arc::clone(&periodic.primary));
    while !shared.control.has_ended() {
        // A vCPU may end the run as well, which nobody sends a command for.
        match commands.recv_timeout(periodic.left()) {
            Ok(Command::Pause(mut number)) => {
                // Returns early when the pause is over, and then nobody waits for the answer.
                while !shared.control.has_ended() && shared.control.is_paused() {
                    if shared.control.wait_paused(periodic.left()) {
                        primary.send(&Message::Paused { number });
                        break;
                    }
                    periodic.run_if_due();
                    // Comparisons would fill the queue.
                    while let Ok(command) = commands.try_recv() {
                        match command {
                            Command::Pause(later) => number = later,
                            Command::Compared => {}
                            Command::End => return,
                        }
                    }
                }
            }
            Ok(Command::End) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
            Ok(Command::Compared) | Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        periodic.run_if_due();
    }
}

/// What the receiving thread of the primary has besides.
struct OfPrimary {
    commands: SyncSender<Command>,
    clock: Arc<Clock>,
}

/// Starts the receiving thread for a node, which is the primary if it is `of_primary`.
fn spawn(
    mut receiver: Receiver,
    board: &Board,
    shared: &Arc<Shared>,
    of_primary: Option<OfPrimary>,
) -> Result<JoinHandle<()>, MachineError> {
    let (board, shared) = (board.clone(), Arc::clone(shared));
    let link = Arc::clone(receiver.link());
    let thread = thread::Builder::new().name(format!("node{}", link.peer()));
    let run = move || {
        let greeted = match of_primary {
            // It has greeted before.
            Some(_) => Ok(()),
            None => receiver.greet(Instant::now() + START_TIME_MAX),
        };
        let peer = link.peer();
        if of_primary.is_some() {
            // Another node shows that it lives when it has its vCPUs, which may take longer. The
            // primary waits for that, and notices when that node is lost.
            receiver.expects_life();
        }
        let error = greeted.err().unwrap_or_else(|| {
            board.serve(&mut receiver, |message| {
                let Some(OfPrimary { commands, clock }) = &of_primary else {
                    return Err(message);
                };
                let command = match message {
                    Message::Pause { number } => {
                        shared.control.pause();
                        Command::Pause(number)
                    }
                    Message::Resume => {
                        shared.control.resume();
                        return Ok(());
                    }
                    Message::Move { cpu, to } => {
                        let ordered = board.seats.order(cpu, to);
                        return ordered.then_some(()).ok_or(message);
                    }
                    Message::ClockAnswer { number, ticks } => {
                        match clock.answered(number, ticks, &link) {
                            Answered::Unasked => return Err(message),
                            Answered::Ask(_) => return Ok(()),
                            Answered::Done(_) => Command::Compared,
                        }
                    }
                    Message::End(end) => {
                        shared.control.end(from_message(end, peer, board.nodes.me));
                        Command::End
                    }
                    message => return Err(message),
                };
                match commands.try_send(command) {
                    // The comparison is kept, and looked at when the main thread is next awake, as
                    // is the end.
                    Ok(()) | Err(TrySendError::Full(Command::Compared | Command::End)) => Ok(()),
                    // The main thread is slower only than a primary that does not wait for answers.
                    Err(_) => Err(Message::Pause { number: 0 }),
                }
            })
        });
        // Without effect if the run has ended.
        shared.control.end(Err(error.into()));
        link.end_calls();
    };
    thread
        .spawn(run)
        .map_err(MachineError::host("start a thread"))
}
