//! Interrupt controllers in user space: the state machines of `ssi-hv-irqchip`, and the way of
//! their messages to the threads of vCPUs.
//!
//! Each vCPU thread owns its local APIC ([`cpu::UserCpu`]); nothing else touches it. Others know of
//! it what it publishes ([`Routing`]), and reach it by its inbox. The I/O APIC is behind a lock,
//! which is held while its messages are posted, so that they come in the order of its states.

pub(crate) mod cpu;
mod registers;
mod sys;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use devices::{BusDevice, InterruptLine};
use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_INVAL, kvm_enable_cap};
use kvm_ioctls::{Cap, VmFd};
use ssi_hv_irqchip::{Event, Inbox, IoApic, Message, Routing, Target, targets};

use crate::error::MachineError;
use crate::lifecycle::kick::Kick;

/// Makes KVM pass the registers of x2APIC mode to user space. Without local APICs of its own it
/// knows the registers, and refuses them as invalid; the filter of model-specific registers never
/// sees them.
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

/// What the threads of a machine share of its interrupt controllers.
#[derive(Debug)]
pub(crate) struct UserChip {
    io: Mutex<IoApic>,
    /// What each local APIC publishes, packed. Relaxed: a CPU that changes it has not told anyone of
    /// its new address yet, and the messages themselves synchronize.
    routings: Vec<AtomicU64>,
    targets: Vec<Arc<dyn Target>>,
    inboxes: Vec<Arc<LocalTarget>>,
}

impl UserChip {
    /// The controllers of a machine whose vCPUs are kicked by `kicks`, in order.
    pub fn new(kicks: &[Arc<Kick>]) -> Self {
        let inboxes: Vec<_> = kicks
            .iter()
            .map(|kick| {
                Arc::new(LocalTarget {
                    inbox: Inbox::default(),
                    kick: Arc::clone(kick),
                })
            })
            .collect();
        Self {
            io: Mutex::default(),
            routings: kicks.iter().map(|_| AtomicU64::new(0)).collect(),
            targets: inboxes.iter().map(|inbox| Arc::clone(inbox) as _).collect(),
            inboxes,
        }
    }

    fn io(&self) -> MutexGuard<'_, IoApic> {
        // Each operation leaves a valid state wherever it would panic.
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, cpu: usize, routing: Routing) {
        if let Some(published) = self.routings.get(cpu) {
            published.store(routing.pack(), Ordering::Relaxed);
        }
    }

    /// Sends a message from CPU `sender`, or from a device.
    fn send(&self, message: &Message, sender: Option<usize>) {
        let Some(event) = Event::of(message) else {
            return;
        };
        let routings = self.routings.iter();
        let routings = routings.map(|word| Routing::unpack(word.load(Ordering::Relaxed)));
        for cpu in targets(message, sender, routings).iter() {
            if let Some(target) = self.targets.get(cpu) {
                target.post(event);
            }
        }
    }

    /// A CPU has ended a level-triggered interrupt.
    fn end_of_interrupt(&self, vector: u8) {
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

/// A vCPU of this host.
#[derive(Debug)]
struct LocalTarget {
    inbox: Inbox,
    kick: Arc<Kick>,
}

impl Target for LocalTarget {
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
