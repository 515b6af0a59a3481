//! How a run ends, and that it does in time.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{END_TIME_MAX, End, START_END_TIME_MAX, State, Supervisor};
use crate::exit::ExitCode;
use crate::failure::describe;
use crate::machine::{DISK_TIME_MAX, MachineHandle};
use crate::report::Report;
use crate::{forced_end, host, logging};

/// How long the rest of a run may take whose guest has ended by itself, once something fails: output
/// may wait for a slow reader, and leases for a donor that does not answer.
const AFTER_GUEST_TIME_MAX: Duration = Duration::from_secs(120);

impl Supervisor {
    /// Ends the run, unless it is already ending, or its guest has ended.
    pub(super) fn end(&self, end: End) {
        let mut state = self.lock();
        if state.end.is_some() || state.finished {
            return;
        }
        let machine = state.machine.as_ref();
        let by_guest = machine.is_some_and(MachineHandle::was_ended_by_guest);
        if let (true, Some(error)) = (state.guest_ended || by_guest, &end.error) {
            if end.code == ExitCode::TimedOut {
                state.passed_limit = Some(end.clone());
            } else {
                tracing::warn!("{error}; the guest had ended before");
                state.errors.push(error.clone());
            }
            state.after_guest.get_or_insert(end);
            self.changed.notify_all();
            return;
        }
        state.end = Some(end);
        if let Some(machine) = &state.machine {
            machine.stop();
        }
        self.changed.notify_all();
    }

    /// The guest has ended by itself.
    pub fn guest_ended(&self) {
        self.lock().guest_ended = true;
    }

    /// Prepares for another boot after the machine and its donors' links were released. Returns
    /// false when the run is to end instead.
    pub fn prepare_restart(&self) -> bool {
        let mut state = self.lock();
        state.machine = None;
        state.away = 0;
        state.guest_ended = false;
        state.after_guest = None;
        // The limit is one of all boots.
        let passed = state.passed_limit.take();
        state.end = state.end.take().or(passed);
        state.end.is_none()
    }

    /// Records the end of the run. Returns the reason if it was requested, and the errors so far.
    pub fn finish(&self) -> (Option<End>, Vec<String>) {
        let mut state = self.lock();
        state.finished = true;
        self.changed.notify_all();
        let errors = std::mem::take(&mut state.errors);
        (state.end.clone(), errors.lines())
    }

    /// Ends the run after `--timeout`.
    pub(super) fn end_after(&self, limit: Duration) {
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

    /// Waits up to `limit` for the run to finish, and longer while a disk is busy; returns `None`
    /// when it has. Returns early if its end is requested meanwhile, which has another limit.
    fn late<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        limit: Duration,
        was_requested: bool,
    ) -> Option<MutexGuard<'a, State>> {
        let last = Instant::now() + limit + DISK_TIME_MAX;
        let is_same = |state: &State| state.end.is_some() == was_requested;
        loop {
            let left = limit.min(last.saturating_duration_since(Instant::now()));
            state = self
                .changed
                .wait_timeout_while(state, left, |state| !state.finished && is_same(state))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            if state.finished {
                return None;
            }
            if !is_same(&state) {
                return Some(state);
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

    /// Ends the process when the run does not end: a thread that waits for a page of a lost donor
    /// waits forever.
    pub(super) fn watch_end(&self) {
        let (state, end) = loop {
            let is_over = |state: &State| state.end.is_some() || state.after_guest.is_some();
            let state = self
                .changed
                .wait_while(self.lock(), |state| !is_over(state) && !state.finished)
                .unwrap_or_else(PoisonError::into_inner);
            if state.finished {
                return;
            }
            let is_requested = state.end.is_some();
            // A machine that does not run yet ends before its start, if nothing blocks it.
            let limit = if !is_requested {
                AFTER_GUEST_TIME_MAX
            } else if state.machine.is_some() {
                END_TIME_MAX
            } else {
                START_END_TIME_MAX
            };
            let Some(state) = self.late(state, limit, is_requested) else {
                return;
            };
            if state.end.is_some() != is_requested {
                continue;
            }
            let end = state.end.clone().or_else(|| state.after_guest.clone());
            // The guest may have been booted again.
            if let Some(end) = end {
                break (state, end);
            }
        };
        let mut errors = state.errors.clone().lines();
        // Unlocked, so that signals are still handled.
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
                    logging::report_failure(code, &describe(&error));
                }
            }
            if let Some(error) = &end.error {
                logging::report_failure(code, error);
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_ended_guest() -> Supervisor {
        let supervisor = Supervisor::default();
        supervisor.guest_ended();
        supervisor
    }

    #[test]
    fn what_fails_after_the_guest_has_ended_does_not_change_how() {
        let supervisor = of_ended_guest();
        supervisor.end_after(Duration::ZERO);
        let (end, errors) = supervisor.finish();
        assert!(end.is_none() && errors.is_empty(), "{end:?}, {errors:?}");
        let supervisor = of_ended_guest();
        supervisor.node_lost("node 1 is lost".to_owned());
        let (end, errors) = supervisor.finish();
        assert!(end.is_none(), "{end:?}");
        assert_eq!(errors, ["node 1 is lost"]);
        let supervisor = of_ended_guest();
        supervisor.kill();
        let (end, _) = supervisor.finish();
        assert_eq!(end.map(|end| end.code), Some(ExitCode::Terminated));
    }

    #[test]
    fn a_request_to_end_is_not_given_the_time_of_what_fails_after_the_guest() {
        let supervisor = of_ended_guest();
        supervisor.donor_lost("it does not answer".to_owned());
        // While the thread that watches the end waits for the rest of the run.
        supervisor.kill();
        let (sender, returned) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let state = supervisor.late(supervisor.lock(), AFTER_GUEST_TIME_MAX, false);
            let _ = sender.send(state.is_some());
        });
        assert_eq!(returned.recv_timeout(AFTER_GUEST_TIME_MAX / 2), Ok(true));
    }

    #[test]
    fn of_what_fails_between_two_boots_the_limit_of_time_ends_the_run() {
        let supervisor = of_ended_guest();
        supervisor.donor_lost("of the boot before".to_owned());
        assert!(supervisor.prepare_restart());
        supervisor.guest_ended();
        supervisor.end_after(Duration::ZERO);
        assert!(!supervisor.prepare_restart());
        let (end, errors) = supervisor.finish();
        assert_eq!(end.map(|end| end.code), Some(ExitCode::TimedOut));
        assert_eq!(errors, ["of the boot before"]);
    }

    #[test]
    fn a_guest_that_runs_ends_for_what_fails_first() {
        let supervisor = Supervisor::default();
        supervisor.node_lost("node 1 is lost".to_owned());
        supervisor.end_after(Duration::ZERO);
        let (end, _) = supervisor.finish();
        assert_eq!(end.map(|end| end.code), Some(ExitCode::NodeLost));
    }
}
