//! Watches over a run from outside: signals, donors that leave and come back, a pager that
//! fails. Ends the machine in order, or the process when that does not end in time.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use memory_fabric::fabric::{FabricEvent, FabricObserver};
use memory_fabric::link::LinkEvent;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use ssi_hv::config::RunConfig;
use ssi_hv::exit::ExitCode;
use ssi_hv::machine::{CONSOLE_DRAIN_TIME_MAX, MachineHandle, STOP_TIME_MAX, restore_terminal};
use ssi_hv::report::{Host, Report, ReportFile};
use ssi_hv::status::VmState;

/// How long the process may take to end after it was told to: the machine's own limits, and as
/// much again for reports and leases.
const END_TIME_MAX: Duration = STOP_TIME_MAX
    .saturating_add(CONSOLE_DRAIN_TIME_MAX)
    .saturating_mul(2);

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
    errors: Vec<String>,
    /// Donors that cannot be reached now.
    away: u32,
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
        if let Some(seconds) = config.timeout_seconds {
            let supervisor = Arc::clone(&supervisor);
            std::thread::Builder::new()
                .name("timeout".into())
                .spawn(move || supervisor.end_after(seconds))?;
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
                        // A second time: at once.
                        restore_terminal();
                        std::process::exit(code.code().into());
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
        if state.away > 0 {
            machine.pause();
        }
        if state.end.is_some() {
            return false;
        }
        state.machine = Some(machine);
        true
    }

    /// What the run is doing, and the errors so far.
    pub fn now(&self) -> (VmState, Vec<String>) {
        let state = self.lock();
        let doing = if state.end.is_some() || state.finished {
            VmState::Ending
        } else if state.machine.is_none() {
            VmState::Starting
        } else if state.away > 0 {
            VmState::Paused
        } else {
            VmState::Running
        };
        (doing, state.errors.clone())
    }

    /// The run has ended by itself or as it was told. Gives why it was told, and the errors
    /// seen on the way.
    pub fn finish(&self) -> (Option<End>, Vec<String>) {
        let mut state = self.lock();
        state.finished = true;
        self.changed.notify_all();
        (state.end.clone(), std::mem::take(&mut state.errors))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, event: FabricEvent) {
        match event {
            FabricEvent::Link(LinkEvent::Down { node, reason }) => {
                self.note(format!(
                    "donor {node} cannot be reached: {reason}; the guest is paused"
                ));
                let mut state = self.lock();
                state.away += 1;
                if let Some(machine) = &state.machine {
                    machine.pause();
                }
            }
            FabricEvent::Link(LinkEvent::Up { node }) => {
                tracing::warn!("donor {node} is back; the guest goes on");
                let mut state = self.lock();
                state.away = state.away.saturating_sub(1);
                if let (0, Some(machine)) = (state.away, &state.machine) {
                    machine.resume();
                }
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
    fn end_after(&self, seconds: u32) {
        let limit = Duration::from_secs(seconds.into());
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
                    "the guest has not ended within --timeout {seconds}; it was stopped"
                )),
            });
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
        // A machine that does not run yet has nothing to be ended in order.
        let limit = if state.machine.is_some() {
            END_TIME_MAX
        } else {
            Duration::ZERO
        };
        let deadline = Instant::now() + limit;
        let (state, _) = self
            .changed
            .wait_timeout_while(state, deadline - Instant::now(), |state| !state.finished)
            .unwrap_or_else(PoisonError::into_inner);
        if state.finished {
            return;
        }
        let Some(end) = state.end.clone() else { return };
        let code = if self.exec {
            end.code.with_exec()
        } else {
            end.code
        };
        restore_terminal();
        if let Some(report) = &self.report {
            let mut text = Report::new(Host::detect());
            text.errors = state.errors.iter().chain(&end.error).cloned().collect();
            text.outcome = end.code.name().to_owned();
            text.exit_code = code.code();
            if let Err(error) = report.write(&text) {
                eprintln!("ssi-hv: error: {:#}", anyhow!(error));
            }
        }
        if let Some(error) = &end.error {
            eprintln!("ssi-hv: error: {error}");
        }
        std::process::exit(code.code().into());
    }
}
