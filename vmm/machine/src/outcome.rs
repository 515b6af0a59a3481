//! How a run ends.

use devices::MachineEvent;

/// The result of a run, from the guest's point of view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest has powered off.
    Shutdown,
    /// The guest has requested a restart.
    Reboot,
    /// The guest cannot continue: a triple fault, a state that KVM cannot run, or a panic that its
    /// kernel reported. The text has the reason, and the vCPU and its instruction pointer if they
    /// are known.
    Crash(String),
    /// [`MachineHandle::stop`] was called, or the user typed the escape sequence.
    Stopped,
}

impl From<MachineEvent> for Outcome {
    fn from(event: MachineEvent) -> Self {
        match event {
            MachineEvent::Shutdown => Self::Shutdown,
            MachineEvent::Reboot => Self::Reboot,
            MachineEvent::Panic => Self::Crash("its kernel panicked".into()),
        }
    }
}
