//! Watches over a run from outside: signals, donors that leave and come back, a pager that
//! fails. Ends the machine in order, or the process when that does not end in time.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::config::RunConfig;
use crate::exit::ExitCode;
use crate::forced_end::{self, FORCED_END_TIME_MAX};
use crate::host;
use crate::logging;
use crate::machine::{CONSOLE_DRAIN_TIME_MAX, DISK_TIME_MAX, MachineHandle, STOP_TIME_MAX};
use crate::report::{Report, ReportFile};
use crate::status::VmState;
use anyhow::anyhow;
use memory_fabric::fabric::{FabricEvent, FabricObserver};
use memory_fabric::link::LinkEvent;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::errors::Errors;

/// How long the process may take to end after it was told to: the machine's own limits, and as
/// much again for reports and leases.
const END_TIME_MAX: Duration = STOP_TIME_MAX
    .saturating_add(CONSOLE_DRAIN_TIME_MAX)
    .saturating_mul(2);

/// How long it may take at the most: while a disk is at work, and in the end by force.
pub const LATE_END_TIME_MAX: Duration = END_TIME_MAX
    .saturating_add(DISK_TIME_MAX)
    .saturating_add(FORCED_END_TIME_MAX);

/// The same of a run that is not further than its start, which may be waiting for a donor.
const START_END_TIME_MAX: Duration = Duration::from_secs(1);

/// Why a run is ended from outside.
#[derive(Clone, Debug)]
pub struct End {
    /// The exit code it leads to.
    pub code: ExitCode,
    /// What to tell the user; nothing when it was the user who ended it.
    pub error: Option<String>,
}

/// What is known of the run, by all who watch it.
#[derive(Debug, Default)]
struct State {
    machine: Option<MachineHandle>,
    end: Option<End>,
    finished: bool,
    errors: Errors,
    /// Donors that cannot be reached now.
    away: u32,
    /// Whether somebody has paused the guest.
    held: bool,
}

/// What a run is doing.
#[derive(Clone, Debug)]
pub struct Now {
    /// What the guest is doing.
    pub state: VmState,
    /// Whether somebody has paused it.
    pub held: bool,
    /// The errors so far.
    pub errors: Errors,
}

/// Why a run does not do what it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotDone {
    /// It ends.
    Ending,
    /// Its processors do not run yet.
    Starting,
    /// Something in it does not stand still in time.
    Late,
    /// The guest does not listen to its power button.
    NoButton,
}

impl State {
    fn doing(&self) -> VmState {
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

    fn not_ending(&self) -> Result<(), NotDone> {
        match self.doing() {
            VmState::Ending => Err(NotDone::Ending),
            _ => Ok(()),
        }
    }

    /// Resumes the machine, unless something else keeps it paused.
    fn go_on(&self) {
        if let (VmState::Running, Some(machine)) = (self.doing(), &self.machine) {
            machine.resume();
        }
    }

    /// What follows from a donor's return.
    fn prospect(&self) -> &'static str {
        match (self.away, self.held) {
            (0, false) => "resumes",
            (0, true) => "stays paused until it is resumed",
            _ => "stays paused for another one",
        }
    }
}

/// Watches over one run.
#[derive(Debug, Default)]
pub struct Supervisor {
    state: Mutex<State>,
    changed: Condvar,
    report: Option<ReportFile>,
    /// The exit code is that of a command in the guest.
    exec: bool,
}

impl Supervisor {
    /// Starts to watch the run of this configuration. Should the process have to be ended by
    /// force, a report is left.
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
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let of_signals = Arc::clone(&supervisor);
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let mut told = false;
                for signal in signals.forever() {
                    let code = if signal == SIGINT {
                        ExitCode::Interrupted
                    } else {
                        ExitCode::Terminated
                    };
                    if told {
                        forced_end::at_once(code);
                    }
                    told = true;
                    // When the run is ending already, why it does is what counts.
                    of_signals.end(End { code, error: None });
                }
            })?;
        let of_time = Arc::clone(&supervisor);
        std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || of_time.watch_end())?;
        Ok(supervisor)
    }

    /// Takes the events of the fabric.
    pub fn observer(self: &Arc<Self>) -> FabricObserver {
        let supervisor = Arc::clone(self);
        Arc::new(move |event| supervisor.take(event))
    }

    /// From now on the machine is paused, resumed and stopped as it is called for. False when
    /// the run is to end already.
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

    /// The machine is gone, with its donors' links, and another one follows. False when the run is to
    /// end instead.
    pub fn begin_anew(&self) -> bool {
        let mut state = self.lock();
        state.machine = None;
        state.away = 0;
        state.end.is_none()
    }

    /// What the run is doing.
    pub fn now(&self) -> Now {
        let state = self.lock();
        Now {
            state: state.doing(),
            held: state.held,
            errors: state.errors.clone(),
        }
    }

    /// Pauses the guest, and waits up to `limit` until it stands still. If it does not, the pause
    /// stays asked for.
    pub fn hold(&self, limit: Duration) -> Result<VmState, NotDone> {
        let machine = {
            let mut state = self.lock();
            state.not_ending()?;
            state.held = true;
            if let Some(machine) = &state.machine {
                machine.pause();
            }
            state.machine.clone()
        };
        // One that is not there yet begins paused.
        if machine.is_some_and(|machine| !machine.wait_until_paused(limit)) {
            return Err(NotDone::Late);
        }
        Ok(self.now().state)
    }

    /// Lets the guest go on, as far as its donors are there.
    pub fn release(&self) -> Result<VmState, NotDone> {
        let mut state = self.lock();
        state.not_ending()?;
        state.held = false;
        state.go_on();
        Ok(state.doing())
    }

    /// Presses the guest's power button. One that somebody has paused goes on, or it would not
    /// notice.
    pub fn press_power_button(&self) -> Result<VmState, NotDone> {
        let mut state = self.lock();
        state.not_ending()?;
        let machine = state.machine.as_ref().ok_or(NotDone::Starting)?;
        if !machine.press_power_button() {
            return Err(NotDone::NoButton);
        }
        state.held = false;
        state.go_on();
        Ok(state.doing())
    }

    /// Ends the run as SIGTERM does.
    pub fn kill(&self) {
        self.end(End {
            code: ExitCode::Terminated,
            error: None,
        });
    }

    /// The run has ended by itself or as it was told. Gives why it was told, and the errors
    /// seen on the way.
    pub fn finish(&self) -> (Option<End>, Vec<String>) {
        let mut state = self.lock();
        state.finished = true;
        self.changed.notify_all();
        let errors = std::mem::take(&mut state.errors);
        (state.end.clone(), errors.lines())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, event: FabricEvent) {
        match event {
            FabricEvent::Link(LinkEvent::Down { node, reason }) => {
                self.donor_went();
                self.note(format!(
                    "donor {node} cannot be reached: {reason}; the guest is paused"
                ));
            }
            FabricEvent::Link(LinkEvent::Up { node }) => {
                let prospect = self.donor_came();
                tracing::warn!("donor {node} is back; the guest {prospect}");
            }
            FabricEvent::Link(LinkEvent::Lost { node, reason }) => {
                let error = format!("guest memory on {node} is lost: {reason}");
                self.end(End {
                    code: ExitCode::DonorLost,
                    error: Some(error),
                });
            }
            FabricEvent::Failed(reason) => {
                let error = format!("the pager failed: {reason}");
                self.end(End {
                    code: ExitCode::HostError,
                    error: Some(error),
                });
            }
        }
    }

    fn donor_went(&self) {
        let mut state = self.lock();
        state.away += 1;
        if let Some(machine) = &state.machine {
            machine.pause();
        }
    }

    /// Gives what follows from it.
    fn donor_came(&self) -> &'static str {
        let mut state = self.lock();
        state.away = state.away.saturating_sub(1);
        state.go_on();
        state.prospect()
    }

    /// Warns of what went wrong, and keeps it for the report.
    pub fn note(&self, error: String) {
        tracing::warn!("{error}");
        self.lock().errors.push(error);
    }

    /// Ends the run, unless it ends already.
    fn end(&self, end: End) {
        let mut state = self.lock();
        if state.end.is_some() || state.finished {
            return;
        }
        state.end = Some(end);
        if let Some(machine) = &state.machine {
            machine.stop();
        }
        self.changed.notify_all();
    }

    /// Ends the run when it lasts for longer than `--timeout`.
    fn end_after(&self, limit: Duration) {
        let over = |state: &mut State| state.end.is_none() && !state.finished;
        let (state, waited) = self
            .changed
            .wait_timeout_while(self.lock(), limit, over)
            .unwrap_or_else(PoisonError::into_inner);
        drop(state);
        if waited.timed_out() {
            self.end(End {
                code: ExitCode::TimedOut,
                error: Some(format!(
                    "the guest has not ended within --timeout {}; it was stopped",
                    limit.as_secs()
                )),
            });
        }
    }

    /// Waits for the run to finish within `limit`, and longer while a disk is at work; `None` when it
    /// has.
    fn late<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        limit: Duration,
    ) -> Option<MutexGuard<'a, State>> {
        let last = Instant::now() + limit + DISK_TIME_MAX;
        loop {
            let left = limit.min(last.saturating_duration_since(Instant::now()));
            state = self
                .changed
                .wait_timeout_while(state, left, |state| !state.finished)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            if state.finished {
                return None;
            }
            let at_work = state
                .machine
                .as_ref()
                .is_some_and(MachineHandle::devices_at_work);
            if !at_work || Instant::now() >= last {
                return Some(state);
            }
        }
    }

    /// Ends the process when the run does not: a thread that waits for a page of a lost donor
    /// waits for ever.
    fn watch_end(&self) {
        let state = self.lock();
        let state = self
            .changed
            .wait_while(state, |state| state.end.is_none() && !state.finished)
            .unwrap_or_else(PoisonError::into_inner);
        if state.finished {
            return;
        }
        // What does not run yet ends when it is about to, if nothing is in its way.
        let limit = if state.machine.is_some() {
            END_TIME_MAX
        } else {
            START_END_TIME_MAX
        };
        let Some(state) = self.late(state, limit) else {
            return;
        };
        let Some(end) = state.end.clone() else { return };
        let mut errors = state.errors.clone().lines();
        // Signals are still heard.
        drop(state);
        let code = if self.exec {
            end.code.with_exec()
        } else {
            end.code
        };
        let report = self.report.clone();
        forced_end::after_last(code, move || {
            if let Some(report) = report {
                let mut text = Report::new(host::detect());
                errors.extend(end.error.clone());
                text.errors = errors;
                text.outcome = end.code.name().to_owned();
                text.exit_code = code.code();
                if let Err(error) = report.write(&text) {
                    logging::report_failure(code, &format!("{:#}", anyhow!(error)));
                }
            }
            if let Some(error) = &end.error {
                logging::report_failure(code, error);
            }
        })
    }
}
