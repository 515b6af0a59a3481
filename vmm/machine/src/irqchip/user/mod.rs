//! Interrupt controllers in user space: the state machines of `ssi-hv-irqchip`, and the delivery of
//! their messages to vCPU threads.
//!
//! Each vCPU thread owns its local APIC ([`cpu::UserCpu`]); no other thread accesses it. Other
//! threads see the state that it publishes ([`Routing`]), and post to its inbox. The I/O APIC is
//! behind a lock, which is held while its messages are posted, so that they arrive in the order of
//! its states.

pub(crate) mod cpu;
mod pace;
pub(crate) mod registers;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use devices::{BusDevice, InterruptLine};
use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_INVAL, kvm_enable_cap};
use kvm_ioctls::{Cap, VmFd};
use ssi_hv_irqchip::{Event, Inbox, IoApic, LocalApic, Message, Routing, targets};

use crate::error::MachineError;
use crate::lifecycle::kick::Kick;
use crate::nodes::Nodes;

/// Makes KVM forward accesses to x2APIC registers to user space. Without in-kernel local APICs KVM
/// recognizes these registers and rejects accesses as invalid; the MSR filter is never consulted.
pub(super) fn prepare(vm: &VmFd) -> Result<(), MachineError> {
    if !vm.check_extension(Cap::X86UserSpaceMsr) {
        let name = "KVM_CAP_X86_USER_SPACE_MSR";
        return Err(MachineError::KvmCapability { name });
    }
    let mut capability = kvm_enable_cap {
        cap: KVM_CAP_X86_USER_SPACE_MSR,
        ..Default::default()
    };
    capability.args[0] = u64::from(KVM_MSR_EXIT_REASON_INVAL);
    vm.enable_cap(&capability).map_err(MachineError::kvm(
        "pass model-specific registers to user space",
    ))
}

/// The part of the interrupt controllers that the threads of a machine share.
#[derive(Debug)]
pub(crate) struct UserChip {
    io: Mutex<IoApic>,
    /// The published state of each local APIC, packed. Relaxed: a CPU that changes it has not
    /// reported its new address to any other CPU yet, and the messages themselves synchronize.
    routings: Vec<AtomicU64>,
    /// Of the vCPUs that are on this host, or may come here.
    inboxes: Vec<Arc<LocalTarget>>,
    /// Links to the other nodes, if there are any.
    nodes: Option<Arc<Nodes>>,
}

impl UserChip {
    /// Creates the controllers of a machine whose vCPUs are kicked by `kicks`, in order. vCPUs of
    /// other nodes are reached through `nodes`.
    pub fn new(kicks: &[Arc<Kick>], nodes: Option<Arc<Nodes>>) -> Self {
        let inboxes: Vec<_> = kicks
            .iter()
            .map(|kick| {
                Arc::new(LocalTarget {
                    inbox: Inbox::default(),
                    kick: Arc::clone(kick),
                })
            })
            .collect();
        // The state of every local APIC until its CPU changes it.
        let routing = new_local_apic(0).routing().pack();
        Self {
            io: Mutex::default(),
            routings: kicks.iter().map(|_| AtomicU64::new(routing)).collect(),
            inboxes,
            nodes,
        }
    }

    fn io(&self) -> MutexGuard<'_, IoApic> {
        // The state is valid wherever an operation could panic.
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, cpu: usize, routing: Routing) {
        if let Some(published) = self.routings.get(cpu) {
            published.store(routing.pack(), Ordering::Relaxed);
        }
    }

    /// Publishes the new state of a local APIC of this node. Returns when all nodes have received
    /// it.
    fn announce(&self, cpu: usize, routing: Routing) {
        self.publish(cpu, routing);
        if let Some(nodes) = &self.nodes {
            nodes.announce(cpu, routing);
        }
    }

    /// Records the published state of a local APIC of another node.
    pub fn learn(&self, cpu: u8, routing: Routing) {
        self.publish(cpu.into(), routing);
    }

    /// Delivers an event to a CPU of this node.
    pub fn deliver(&self, cpu: u8, event: Event) {
        self.deliver_to(cpu.into(), event);
    }

    fn deliver_to(&self, cpu: usize, event: Event) {
        if let Some(target) = self.inboxes.get(cpu) {
            target.post(event);
        }
    }

    /// Sends a message of CPU `sender`, or of a device.
    fn send(&self, message: &Message, sender: Option<usize>) {
        let Some(event) = Event::of(message) else {
            return;
        };
        let routings = self.routings.iter();
        let routings = routings.map(|word| Routing::unpack(word.load(Ordering::Relaxed)));
        let targets = targets(message, sender, routings);
        let here = |cpu| self.deliver_to(cpu, event);
        match &self.nodes {
            Some(nodes) => nodes.post(targets.iter(), event, here),
            None => targets.iter().for_each(here),
        }
    }

    /// Forwards the end of a level-triggered interrupt to the I/O APIC, which is that of the
    /// primary.
    pub fn end_of_interrupt(&self, vector: u8) {
        if let Some(nodes) = &self.nodes
            && nodes.forward_end_of_interrupt(vector)
        {
            return;
        }
        self.io()
            .end_of_interrupt(vector, &mut |message| self.send(&message, None));
    }

    fn set_line(&self, pin: usize, raised: bool) {
        self.io()
            .set_line(pin, raised, &mut |message| self.send(&message, None));
    }
}

impl BusDevice for UserChip {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.io().read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.io()
            .write(offset, data, &mut |message| self.send(&message, None));
    }
}

/// Returns the local APIC of CPU `index` as firmware leaves it.
fn new_local_apic(index: u8) -> LocalApic {
    let mut apic = LocalApic::new(index.into());
    apic.set_up_inputs();
    apic
}

/// A vCPU of this host as a destination of events.
#[derive(Debug)]
struct LocalTarget {
    inbox: Inbox,
    kick: Arc<Kick>,
}

impl LocalTarget {
    fn post(&self, event: Event) {
        if self.inbox.post(event) {
            self.kick.kick();
        }
    }
}

/// An input of the I/O APIC.
#[derive(Debug)]
pub(super) struct UserLine {
    pub chip: Arc<UserChip>,
    pub pin: usize,
}

impl InterruptLine for UserLine {
    fn set(&self, raised: bool) {
        self.chip.set_line(self.pin, raised);
    }
}
