//! The local APIC of one CPU (SDM 11.4 to 11.9, and 11.12 for x2APIC mode).

pub(crate) mod access;
pub(crate) mod registers;
#[cfg(test)]
mod tests;
pub(crate) mod timer;

use crate::inbox::Posted;
use crate::message::{Message, Trigger};
use crate::routing::Routing;
use crate::vectors::Vectors;
use registers::{DFR_FLAT, ESR_RECEIVE_VECTOR, LVT_ERROR, LVT_MASKED, LVT_TIMER, SVR_ENABLED};
use timer::Timer;

/// How the registers are reached, by bits 11:10 of IA32_APIC_BASE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Not at all.
    Disabled,
    /// By a page of memory.
    XApic,
    /// By model-specific registers.
    X2Apic,
}

impl Mode {
    /// The mode that IA32_APIC_BASE has set.
    #[must_use]
    pub fn of_base(apic_base: u64) -> Self {
        match (apic_base >> 10) & 3 {
            2 => Self::XApic,
            3 => Self::X2Apic,
            _ => Self::Disabled,
        }
    }
}

/// What follows from a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing outside this local APIC.
    None,
    /// A message to other CPUs, or to this one.
    Send(Message),
    /// The handler of a level-triggered interrupt has ended: the I/O APIC must know.
    EndOfInterrupt(u8),
}

/// Vectors below this one are those of exceptions.
const FIRST_VECTOR: u8 = 16;

/// A local APIC. Times are nanoseconds of one clock that only goes forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalApic {
    pub(crate) id: u32,
    pub(crate) mode: Mode,
    pub(crate) task_priority: u8,
    /// The logical destination register of xAPIC mode; x2APIC mode derives it from the number.
    pub(crate) logical: u32,
    pub(crate) format: u32,
    pub(crate) spurious: u32,
    pub(crate) in_service: Vectors,
    pub(crate) by_level: Vectors,
    pub(crate) requested: Vectors,
    /// Errors since the last write of the error status register, and those that it shows.
    pub(crate) errors: u32,
    pub(crate) errors_shown: u32,
    pub(crate) command: u64,
    /// The local vector table: timer, thermal sensor, counters, LINT0, LINT1, errors.
    pub(crate) table: [u32; 6],
    pub(crate) timer: Timer,
}

impl LocalApic {
    /// The local APIC with number `id`, as it is after a reset, in xAPIC mode.
    #[must_use]
    pub fn new(id: u32) -> Self {
        Self {
            id,
            mode: Mode::XApic,
            task_priority: 0,
            logical: 0,
            format: DFR_FLAT,
            spurious: 0xff,
            in_service: Vectors::default(),
            by_level: Vectors::default(),
            requested: Vectors::default(),
            errors: 0,
            errors_shown: 0,
            command: 0,
            table: [LVT_MASKED; 6],
            timer: Timer::default(),
        }
    }

    /// Resets all but the number and the mode, as an INIT does (SDM 11.4.7.3).
    pub fn reset(&mut self) {
        *self = Self {
            mode: self.mode,
            ..Self::new(self.id)
        };
    }

    /// The mode.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Changes the mode to that of IA32_APIC_BASE. A disabled one loses its state (SDM 11.4.3).
    pub fn set_mode(&mut self, mode: Mode) {
        if mode == Mode::Disabled && self.mode != mode {
            self.reset();
        }
        self.mode = mode;
    }

    /// What other CPUs must know to send to this one.
    #[must_use]
    pub fn routing(&self) -> Routing {
        Routing {
            logical: self.logical_destination(),
            clusters: self.mode == Mode::XApic && self.format >> 28 == 0,
            x2apic: self.mode == Mode::X2Apic,
            enabled: self.is_enabled(),
        }
    }

    fn logical_destination(&self) -> u32 {
        match self.mode {
            Mode::X2Apic => (self.id >> 4) << 16 | 1 << (self.id & 15),
            _ => self.logical,
        }
    }

    fn is_enabled(&self) -> bool {
        self.mode != Mode::Disabled && self.spurious & SVR_ENABLED != 0
    }

    /// Takes the interrupts that were posted.
    pub fn accept_posted(&mut self, posted: &Posted) {
        let mut each = |vectors: &Vectors, trigger| {
            let mut left = *vectors;
            while let Some(vector) = left.highest() {
                left.remove(vector);
                self.accept(vector, trigger);
            }
        };
        each(&posted.edge, Trigger::Edge);
        each(&posted.level, Trigger::Level);
    }

    /// Takes an interrupt, which waits until its priority allows it. One that is disabled takes
    /// none.
    pub fn accept(&mut self, vector: u8, trigger: Trigger) {
        if !self.is_enabled() {
            return;
        }
        if vector < FIRST_VECTOR {
            return self.report(ESR_RECEIVE_VECTOR);
        }
        self.requested.insert(vector);
        match trigger {
            Trigger::Edge => self.by_level.remove(vector),
            Trigger::Level => self.by_level.insert(vector),
        }
    }

    /// Records an error, and interrupts if the table says so (SDM 11.5.3).
    fn report(&mut self, error: u32) {
        self.errors |= error;
        let entry = self.table[LVT_ERROR];
        let vector = crate::message::low_byte(entry.into());
        // An illegal vector here would be an error again, without end.
        if entry & LVT_MASKED == 0 && vector >= FIRST_VECTOR && self.is_enabled() {
            self.requested.insert(vector);
            self.by_level.remove(vector);
        }
    }

    /// The task priority (CR8 has its upper half).
    #[must_use]
    pub fn task_priority(&self) -> u8 {
        self.task_priority
    }

    /// Takes a new value of CR8. The lower half of the task priority register, which CR8 does not
    /// have, becomes 0 when the upper half changes.
    pub fn set_cr8(&mut self, cr8: u8) {
        if self.task_priority >> 4 != cr8 & 0xf {
            self.task_priority = cr8 << 4;
        }
    }

    /// The processor priority: that of the task or of the interrupt being served (SDM 11.8.3.1).
    #[must_use]
    pub fn processor_priority(&self) -> u8 {
        let serving = self.in_service.highest().unwrap_or(0);
        if self.task_priority >> 4 >= serving >> 4 {
            self.task_priority
        } else {
            serving & 0xf0
        }
    }

    /// The vector that the CPU is to serve next, if its priority is above the processor's.
    #[must_use]
    pub fn pending(&self) -> Option<u8> {
        let vector = self.requested.highest()?;
        (vector >> 4 > self.processor_priority() >> 4).then_some(vector)
    }

    /// Gives the pending vector to the CPU, which serves it now.
    pub fn acknowledge(&mut self) -> Option<u8> {
        let vector = self.pending()?;
        self.requested.remove(vector);
        self.in_service.insert(vector);
        Some(vector)
    }

    /// Ends the interrupt with the highest priority in service; its vector if it was triggered by a
    /// level.
    fn end_of_interrupt(&mut self) -> Effect {
        let Some(vector) = self.in_service.highest() else {
            return Effect::None;
        };
        self.in_service.remove(vector);
        if self.by_level.contains(vector) {
            Effect::EndOfInterrupt(vector)
        } else {
            Effect::None
        }
    }

    /// When the timer will interrupt; `None` if it will not.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        let is_masked = self.table[LVT_TIMER] & LVT_MASKED != 0;
        self.timer.expires.filter(|_| !is_masked)
    }

    /// Raises the timer's interrupt if its time has come.
    pub fn run_timer(&mut self, now: u64) {
        let entry = self.table[LVT_TIMER];
        let is_periodic = entry & registers::LVT_PERIODIC != 0;
        if self.timer.expire(is_periodic, now) && entry & LVT_MASKED == 0 {
            self.accept(crate::message::low_byte(entry.into()), Trigger::Edge);
        }
    }
}
