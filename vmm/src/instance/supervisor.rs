//! Supervises a run: signals, donors that disconnect and return, failures of the pager. Stops the
//! machine in order, or ends the process when that takes too long.

mod ends;

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use memory_fabric::NodeId;
use memory_fabric::fabric::{FabricEvent, FabricObserver, LostMemory};
use memory_fabric::link::LinkEvent;
use memory_fabric::page::PAGE_SHIFT;
use signal_hook::consts::{SIGINT, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use super::errors::Errors;
use super::{drains, rebalance};
use crate::config::RunConfig;
use crate::control_socket::changes::Changes;
use crate::exit::ExitCode;
use crate::forced_end::{self, FORCED_END_TIME_MAX};
use crate::machine::{CONSOLE_DRAIN_TIME_MAX, DISK_TIME_MAX, MachineHandle, STOP_TIME_MAX};
use crate::report::ReportFile;
use crate::signals;
use crate::size::ByteSize;
use crate::status::VmState;

/// Deadline of the process to end after a request: the machine's own limits, and the same again for
/// reports and leases.
const END_TIME_MAX: Duration = STOP_TIME_MAX
    .saturating_add(CONSOLE_DRAIN_TIME_MAX)
    .saturating_mul(2);

/// Upper bound of that time: while a disk is busy, and finally by force.
pub const LATE_END_TIME_MAX: Duration = END_TIME_MAX
    .saturating_add(DISK_TIME_MAX)
    .saturating_add(FORCED_END_TIME_MAX);

/// The same for a run that is still starting, which may be waiting for a donor.
const START_END_TIME_MAX: Duration = Duration::from_secs(1);

/// Why a run is ended from outside.
#[derive(Clone, Debug)]
pub struct End {
    /// The resulting exit code.
    pub code: ExitCode,
    /// The message for the user; `None` when the user ended it.
    pub error: Option<String>,
}

/// State of the run, shared by all threads that supervise it.
#[derive(Debug, Default)]
struct State {
    machine: Option<MachineHandle>,
    end: Option<End>,
    /// The guest has ended by itself; what fails from then on does not change how.
    guest_ended: bool,
    /// The first failure since then.
    after_guest: Option<End>,
    /// `--timeout` has passed since then.
    passed_limit: Option<End>,
    finished: bool,
    errors: Errors,
    /// Number of donors that are unreachable.
    away: u32,
    /// Whether a user has paused the guest.
    held: bool,
}

/// Current state of a run.
#[derive(Clone, Debug)]
pub struct Now {
    /// State of the guest.
    pub state: VmState,
    /// Whether a user has paused it.
    pub held: bool,
    /// The errors so far.
    pub errors: Errors,
}

/// Why a pause, a resume or a press of the power button has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationError {
    /// The VM is ending.
    Ending,
    /// The vCPUs do not run yet.
    Starting,
    /// The vCPUs and devices did not pause in time.
    Late,
    /// The guest does not listen to its power button.
    NoButton,
}

impl State {
    fn vm_state(&self) -> VmState {
        if self.end.is_some() || self.finished {
            VmState::Ending
        } else if self.machine.is_none() && !self.held {
            VmState::Starting
        } else if self.away > 0 || self.held {
            VmState::Paused
        } else {
            VmState::Running
        }
    }

    fn not_ending(&self) -> Result<(), OperationError> {
        match self.vm_state() {
            VmState::Ending => Err(OperationError::Ending),
            _ => Ok(()),
        }
    }

    /// Resumes the machine, unless something else keeps it paused.
    fn resume_machine(&self) {
        if let (VmState::Running, Some(machine)) = (self.vm_state(), &self.machine) {
            machine.resume();
        }
    }

    /// Describes the effect of a donor's return.
    fn prospect(&self) -> &'static str {
        match (self.away, self.held) {
            (0, false) => "resumes",
            (0, true) => "stays paused until it is resumed",
            _ => "stays paused for another one",
        }
    }
}

/// Describes the loss of a donor that has the only copy of guest memory.
pub fn lost_memory(donor: NodeId, reason: &str) -> String {
    format!("guest memory on {donor} is lost: {reason}")
}

/// Supervises one run.
#[derive(Debug, Default)]
pub struct Supervisor {
    state: Mutex<State>,
    changed: Condvar,
    report: Option<ReportFile>,
    /// Whether the exit code is that of a command in the guest.
    exec: bool,
    /// Counts the visible changes of drains, over all boots.
    pub drain_changes: Changes,
}

impl Supervisor {
    /// Starts to supervise the run of this configuration. If the process has to be ended by force,
    /// a report is written.
    pub fn start(config: &RunConfig, report: Option<ReportFile>) -> io::Result<Arc<Self>> {
        let supervisor = Arc::new(Self {
            report,
            exec: config.exec.is_some(),
            ..Self::default()
        });
        if let Some(limit) = config.timeout {
            let supervisor = Arc::clone(&supervisor);
            std::thread::Builder::new()
                .name("timeout".into())
                .spawn(move || supervisor.end_after(limit))?;
        }
        // By default a write beyond a limit of file sizes ends the process; now it is an error of the
        // disk, console or report that is written.
        flag::register(SIGXFSZ, Arc::default())?;
        let mut signals = Signals::new(signals::ends())?;
        let of_signals = Arc::clone(&supervisor);
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let mut was_signalled = false;
                for signal in signals.forever() {
                    let code = if signal == SIGINT {
                        ExitCode::Interrupted
                    } else {
                        ExitCode::Terminated
                    };
                    if was_signalled {
                        forced_end::at_once(code);
                    }
                    was_signalled = true;
                    // If the run is already ending, the earlier reason counts.
                    of_signals.end(End { code, error: None });
                }
            })?;
        let of_time = Arc::clone(&supervisor);
        std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || of_time.watch_end())?;
        Ok(supervisor)
    }

    /// Returns the observer for events of the fabric.
    pub fn observer(self: &Arc<Self>) -> FabricObserver {
        let supervisor = Arc::clone(self);
        Arc::new(move |event| supervisor.take(event))
    }

    /// Starts to pause, resume and stop the machine as required. Returns false when the run is to
    /// end already.
    pub fn attend(&self, machine: MachineHandle) -> bool {
        let mut state = self.lock();
        if state.away > 0 || state.held {
            machine.pause();
        }
        if state.end.is_some() {
            return false;
        }
        state.machine = Some(machine);
        true
    }

    /// Returns the current state of the run.
    pub fn now(&self) -> Now {
        let state = self.lock();
        Now {
            state: state.vm_state(),
            held: state.held,
            errors: state.errors.clone(),
        }
    }

    /// Pauses the guest, and waits up to `limit` until it is paused. If it is not, the request
    /// stays in force.
    pub fn hold(&self, limit: Duration) -> Result<VmState, OperationError> {
        let machine = {
            let mut state = self.lock();
            state.not_ending()?;
            state.held = true;
            if let Some(machine) = &state.machine {
                machine.pause();
            }
            state.machine.clone()
        };
        // A machine that does not exist yet starts paused.
        if machine.is_some_and(|machine| !machine.wait_until_paused(limit)) {
            return Err(OperationError::Late);
        }
        Ok(self.now().state)
    }

    /// Resumes the guest, unless a donor is unreachable.
    pub fn release(&self) -> Result<VmState, OperationError> {
        let mut state = self.lock();
        state.not_ending()?;
        state.held = false;
        state.resume_machine();
        Ok(state.vm_state())
    }

    /// Presses the guest's power button. Resumes a guest that a user has paused, which could not
    /// react otherwise.
    pub fn press_power_button(&self) -> Result<VmState, OperationError> {
        let mut state = self.lock();
        state.not_ending()?;
        let machine = state.machine.as_ref().ok_or(OperationError::Starting)?;
        if machine.was_ended_by_guest() {
            // Its next boot has not begun, or the run ends soon.
            return Err(OperationError::Starting);
        }
        if !machine.press_power_button() {
            return Err(OperationError::NoButton);
        }
        state.held = false;
        state.resume_machine();
        Ok(state.vm_state())
    }

    /// Ends the run as SIGTERM does.
    pub fn kill(&self) {
        self.end(End {
            code: ExitCode::Terminated,
            error: None,
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the run because a node with vCPUs of the VM is lost.
    pub fn node_lost(&self, error: String) {
        self.end(End {
            code: ExitCode::NodeLost,
            error: Some(error),
        });
    }

    /// Ends the run because another node has lost a donor.
    pub fn donor_lost(&self, error: String) {
        self.end(End {
            code: ExitCode::DonorLost,
            error: Some(error),
        });
    }

    /// Ends the run because guest memory cannot be served any more.
    pub fn memory_failed(&self, reason: &str) {
        self.end(End {
            code: ExitCode::HostError,
            error: Some(format!("the pager failed: {reason}")),
        });
    }

    fn take(&self, event: FabricEvent) {
        match event {
            FabricEvent::Link(LinkEvent::Down { node, reason }) => {
                self.donor_unreachable();
                self.note(format!(
                    "donor {node} cannot be reached: {reason}; the guest is paused"
                ));
            }
            FabricEvent::Link(LinkEvent::Up { node }) => {
                let prospect = self.donor_reachable();
                tracing::warn!("donor {node} is back; the guest {prospect}");
            }
            FabricEvent::Link(LinkEvent::Lost { node, reason }) => {
                self.end(End {
                    code: ExitCode::DonorLost,
                    error: Some(lost_memory(node, &reason)),
                });
            }
            FabricEvent::Poisoned(lost) => self.memory_lost(&lost),
            FabricEvent::Degraded { node, reason } => self.note(format!(
                "donor {node} is not used any more: {reason}; the guest continues with the other \
                 copies or pieces, and some memory has fewer of them until they are restored"
            )),
            FabricEvent::AwaitedNoMore { node } => {
                let prospect = self.donor_reachable();
                tracing::warn!(
                    "others have the memory of donor {node}, which is not back; the guest {prospect}"
                );
            }
            FabricEvent::Repaired => {
                tracing::info!("all memory on donors has all its copies or pieces again");
            }
            FabricEvent::Drained(drain) => self.note_moved(drains::end_of(&drain)),
            FabricEvent::Rebalanced(state) => self.note_moved(rebalance::end_of(&state)),
            FabricEvent::Failed(reason) => self.memory_failed(&reason),
        }
    }

    /// Memory has moved between donors, or some of it has not.
    fn note_moved(&self, end: Result<String, String>) {
        match end {
            Ok(text) => tracing::info!("{text}"),
            Err(text) => self.note(text),
        }
        self.drain_changes.notify();
    }

    /// Continues without pages that were lost with a donor.
    fn memory_lost(&self, lost: &LostMemory) {
        let size = |pages: u64| ByteSize::from_bytes(pages << PAGE_SHIFT);
        let prospect = if lost.was_down {
            self.donor_reachable()
        } else {
            "continues"
        };
        self.note(format!(
            "guest memory on {} is lost: {}; {} pages ({}) of it had no other copy and are \
             poisoned, {} stay here beyond --local-memory; the guest {prospect}",
            lost.node,
            lost.reason,
            lost.lost_pages,
            size(lost.lost_pages),
            size(lost.kept_pages),
        ));
    }

    fn donor_unreachable(&self) {
        let mut state = self.lock();
        state.away += 1;
        if let Some(machine) = &state.machine {
            machine.pause();
        }
    }

    /// Returns the effect.
    fn donor_reachable(&self) -> &'static str {
        let mut state = self.lock();
        state.away = state.away.saturating_sub(1);
        state.resume_machine();
        state.prospect()
    }

    /// Logs an error as a warning, and keeps it for the report.
    pub fn note(&self, error: String) {
        tracing::warn!("{error}");
        self.lock().errors.push(error);
    }
}
