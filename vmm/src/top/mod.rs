//! `ssi-hv top`: a running VM as a picture that moves.
//!
//! What is shown is a [`View`], which knows neither terminal nor socket: it is told what came from
//! the VM and which keys were pressed, and [`screen::draw`] draws it. `commands/top.rs` has the rest.

mod format;
mod heat;
mod rates;
pub mod screen;

use std::collections::VecDeque;

use crate::status::heat::HeatStatus;
use crate::status::{VmState, VmStatus};
use rates::Rates;

/// Fault rates that are remembered: more than the widest screen shows.
const HISTORY_MAX: usize = 512;

/// The size below which nothing is drawn: what terminals begin with.
pub const COLUMNS_MIN: u16 = 80;
/// See [`COLUMNS_MIN`].
pub const ROWS_MIN: u16 = 24;

/// A VM that can be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Its process.
    pub pid: u32,
    /// Its name; the process where it has none.
    pub name: String,
}

/// What came of looking at a VM.
#[derive(Clone, Debug)]
pub enum Seen {
    /// It answered; the map only now and then.
    Status(Box<VmStatus>, Option<HeatStatus>),
    /// It is there and does not say how it does, and why.
    Silent(String),
    /// It has ended.
    Ended,
}

/// A key that means something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Ends it.
    Quit,
    /// The next VM.
    Next,
    /// The one before.
    Previous,
    /// Heat map or numbers.
    Heat,
    /// Lets the picture stand still, or go on.
    Hold,
    /// Towards the begin of the heat map.
    Up,
    /// Towards its end.
    Down,
}

/// What is shown.
#[derive(Debug, Default)]
pub struct View {
    choices: Vec<Choice>,
    chosen: Option<u32>,
    status: Option<Box<VmStatus>>,
    heat: Option<HeatStatus>,
    rates: Option<Rates>,
    /// Remote faults a second, the newest last.
    history: VecDeque<u64>,
    /// What is wrong, if something is.
    trouble: Option<String>,
    has_ended: bool,
    shows_heat: bool,
    is_held: bool,
    scrolled: u16,
    /// Whether colours may be used.
    colour: bool,
}

impl View {
    /// Nothing seen yet; without colours if those are not wanted.
    #[must_use]
    pub fn new(choices: Vec<Choice>, colour: bool) -> Self {
        Self {
            chosen: choices.first().map(|choice| choice.pid),
            choices,
            colour,
            ..Self::default()
        }
    }

    /// The process that is shown.
    #[must_use]
    pub const fn chosen(&self) -> Option<u32> {
        self.chosen
    }

    /// Whether the heat map is shown.
    #[must_use]
    pub const fn shows_heat(&self) -> bool {
        self.shows_heat
    }

    /// What runs now. One that is shown stays, also when it has ended.
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

    /// A look at the process `pid`.
    pub fn see(&mut self, pid: u32, seen: Seen) {
        // An answer for the VM that was shown before, or while the picture is to stand still.
        if Some(pid) != self.chosen || (self.is_held && !matches!(seen, Seen::Ended)) {
            return;
        }
        match seen {
            Seen::Status(status, heat) => {
                let rates = self
                    .status
                    .as_ref()
                    .and_then(|before| Rates::between(before, &status));
                if let Some(rates) = &rates {
                    self.history.push_back(rates::whole(rates.remote));
                    let surplus = self.history.len().saturating_sub(HISTORY_MAX);
                    self.history.drain(..surplus);
                }
                // Two looks in one instant tell nothing new of rates.
                self.rates = rates.or(self.rates.take());
                self.status = Some(status);
                self.heat = heat.or(self.heat.take());
                self.trouble = None;
            }
            Seen::Silent(why) => self.trouble = Some(why),
            Seen::Ended => {
                self.has_ended = true;
                self.trouble = Some(self.end());
            }
        }
    }

    /// What is known of the end. The exit code is between the process and its parent.
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

    /// A key was pressed. False when that is the end.
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
