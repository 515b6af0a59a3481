//! `ssi-hv top`: a live display of a running VM.
//!
//! The display is a [`View`], which has no knowledge of the terminal or the socket: it receives the
//! VM's answers and the pressed keys, and [`screen::draw`] draws it. `commands/top.rs` has the
//! rest.

mod format;
mod heat;
mod rates;
pub mod screen;
mod shared;

use std::collections::VecDeque;

use crate::status::heat::HeatStatus;
use crate::status::{VmState, VmStatus};
use rates::Rates;

/// Length of the history of fault rates: more than the widest screen shows.
const HISTORY_MAX: usize = 512;

/// Smallest supported width: the default of terminals.
pub const COLUMNS_MIN: u16 = 80;
/// See [`COLUMNS_MIN`].
pub const ROWS_MIN: u16 = 24;

/// A VM that can be selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Its process id.
    pub pid: u32,
    /// Its name; its process id if it has none.
    pub name: String,
}

/// Result of querying a VM.
#[derive(Clone, Debug)]
pub enum Seen {
    /// It answered, with a heat map only if requested.
    Status(Box<VmStatus>, Option<HeatStatus>),
    /// It runs but does not answer, with the reason.
    Silent(String),
    /// It has ended.
    Ended,
}

/// A key with a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Quits.
    Quit,
    /// Selects the next VM.
    Next,
    /// Selects the previous VM.
    Previous,
    /// Switches between heat map and numbers.
    Heat,
    /// Pauses or resumes updates.
    Hold,
    /// Scrolls the heat map up.
    Up,
    /// Scrolls the heat map down.
    Down,
}

/// The displayed state.
#[derive(Debug, Default)]
pub struct View {
    choices: Vec<Choice>,
    chosen: Option<u32>,
    status: Option<Box<VmStatus>>,
    heat: Option<HeatStatus>,
    rates: Option<Rates>,
    /// Remote faults per second, the newest last.
    history: VecDeque<u64>,
    /// The current problem, if any.
    problem: Option<String>,
    has_ended: bool,
    shows_heat: bool,
    is_held: bool,
    scrolled: u16,
    /// Whether colours may be used.
    colour: bool,
}

impl View {
    /// Creates an empty view, optionally in colours.
    #[must_use]
    pub fn new(choices: Vec<Choice>, colour: bool) -> Self {
        Self {
            chosen: choices.first().map(|choice| choice.pid),
            choices,
            colour,
            ..Self::default()
        }
    }

    /// Returns the process id of the displayed VM.
    #[must_use]
    pub const fn chosen(&self) -> Option<u32> {
        self.chosen
    }

    /// Returns whether the heat map is displayed.
    #[must_use]
    pub const fn shows_heat(&self) -> bool {
        self.shows_heat
    }

    /// Sets the running VMs. The displayed one stays, even after its end.
    pub fn list(&mut self, mut now: Vec<Choice>) {
        let shown = self.choices.iter().find(|c| Some(c.pid) == self.chosen);
        if let Some(shown) = shown
            && !now.iter().any(|choice| choice.pid == shown.pid)
        {
            now.push(shown.clone());
            now.sort_by_key(|choice| choice.pid);
        }
        self.choices = now;
    }

    /// Processes the result of querying the process `pid`.
    pub fn see(&mut self, pid: u32, seen: Seen) {
        // An answer of the VM displayed before, or during a pause.
        if Some(pid) != self.chosen || (self.is_held && !matches!(seen, Seen::Ended)) {
            return;
        }
        match seen {
            Seen::Status(status, heat) => {
                let restarts = |status: &VmStatus| status.boot.restarts;
                if self.status.as_deref().map(restarts) != Some(restarts(&status)) {
                    // Those of the boot before do not belong to the new counters.
                    self.rates = None;
                    self.history.clear();
                }
                let rates = self
                    .status
                    .as_ref()
                    .and_then(|before| Rates::between(before, &status));
                if let Some(rates) = &rates {
                    self.history.push_back(rates::whole(rates.remote));
                    let surplus = self.history.len().saturating_sub(HISTORY_MAX);
                    self.history.drain(..surplus);
                }
                // Two answers at the same time yield no rates.
                self.rates = rates.or(self.rates.take());
                self.status = Some(status);
                self.heat = heat.or(self.heat.take());
                self.problem = None;
            }
            Seen::Silent(why) => self.problem = Some(why),
            Seen::Ended => {
                self.has_ended = true;
                self.problem = Some(self.end());
            }
        }
    }

    /// Describes the end of the VM. Its exit code is known only to its parent.
    fn end(&self) -> String {
        let mut text = match self.status.as_ref().map(|status| status.state) {
            Some(VmState::Ending) => "The VM has ended on request".to_owned(),
            _ => "The VM has ended".to_owned(),
        };
        if let Some(error) = self.status.as_ref().and_then(|status| status.errors.last()) {
            text += "; last error: ";
            text += error;
        }
        text
    }

    /// Processes a key. Returns false to quit.
    pub fn press(&mut self, key: Key) -> bool {
        match key {
            Key::Quit => return false,
            Key::Next => self.choose(1),
            Key::Previous => self.choose(self.choices.len().saturating_sub(1)),
            Key::Heat => {
                self.shows_heat = !self.shows_heat;
                self.scrolled = 0;
            }
            Key::Hold => self.is_held = !self.is_held,
            Key::Up => self.scrolled = self.scrolled.saturating_sub(1),
            Key::Down => self.scrolled = self.scrolled.saturating_add(1),
        }
        true
    }

    fn choose(&mut self, steps: usize) {
        if self.choices.len() < 2 {
            return;
        }
        let now = self.choices.iter().position(|c| Some(c.pid) == self.chosen);
        let next = now.map_or(0, |now| (now + steps) % self.choices.len());
        *self = Self {
            chosen: Some(self.choices[next].pid),
            choices: std::mem::take(&mut self.choices),
            shows_heat: self.shows_heat,
            colour: self.colour,
            ..Self::default()
        };
    }
}

#[cfg(test)]
mod tests;
