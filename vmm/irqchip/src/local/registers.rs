//! The registers of a local APIC, by their number: the offset in the page of xAPIC mode divided by
//! 16, which is the offset from MSR 0x800 of x2APIC mode (SDM tables 11-1 and 11-6).

use super::{Effect, FIRST_VECTOR, LocalApic, Mode};
use crate::message::{Message, Trigger, low_byte, low_word};

pub(super) const ID: u32 = 0x02;
pub(super) const VERSION: u32 = 0x03;
pub(super) const TASK_PRIORITY: u32 = 0x08;
pub(super) const ARBITRATION_PRIORITY: u32 = 0x09;
pub(super) const PROCESSOR_PRIORITY: u32 = 0x0a;
pub(super) const END_OF_INTERRUPT: u32 = 0x0b;
pub(super) const LOGICAL_DESTINATION: u32 = 0x0d;
pub(super) const DESTINATION_FORMAT: u32 = 0x0e;
pub(super) const SPURIOUS: u32 = 0x0f;
pub(super) const IN_SERVICE: u32 = 0x10;
pub(super) const BY_LEVEL: u32 = 0x18;
pub(super) const REQUESTED: u32 = 0x20;
pub(super) const ERRORS: u32 = 0x28;
pub(super) const COMMAND: u32 = 0x30;
pub(super) const COMMAND_HIGH: u32 = 0x31;
pub(super) const TABLE: u32 = 0x32;
pub(super) const TABLE_END: u32 = 0x37;
pub(super) const INITIAL_COUNT: u32 = 0x38;
pub(super) const CURRENT_COUNT: u32 = 0x39;
pub(super) const DIVIDE: u32 = 0x3e;
pub(super) const SELF_IPI: u32 = 0x3f;

/// An integrated local APIC whose table has 6 entries. End-of-interrupt broadcasts cannot be
/// suppressed.
const VERSION_VALUE: u32 = 0x14 | 5 << 16;

pub(crate) const SVR_ENABLED: u32 = 1 << 8;
/// The writable bits: vector, enabled, focus.
pub(crate) const SVR_BITS: u32 = 0x3ff;
pub(crate) const DFR_FLAT: u32 = u32::MAX;
const DFR_RESERVED: u32 = 0x0fff_ffff;

pub(crate) const LVT_TIMER: usize = 0;
pub(crate) const LVT_LINT0: usize = 3;
pub(crate) const LVT_LINT1: usize = 4;
pub(crate) const LVT_ERROR: usize = 5;
pub(crate) const LVT_MASKED: u32 = 1 << 16;
pub(crate) const LVT_PERIODIC: u32 = 1 << 17;
/// The writable bits of each entry of the table (SDM figure 11-8). The timer has no mode with a
/// deadline.
pub(crate) const LVT_BITS: [u32; 6] = [0x3_00ff, 0x1_07ff, 0x1_07ff, 0x1_a7ff, 0x1_a7ff, 0x1_00ff];

pub(super) const ESR_SEND_VECTOR: u32 = 1 << 5;
pub(crate) const ESR_RECEIVE_VECTOR: u32 = 1 << 6;
pub(super) const ESR_REGISTER: u32 = 1 << 7;
/// All errors that can be.
pub(crate) const ESR_BITS: u32 = 0xe0;

/// Delivery status and reserved bits of the interrupt command register read as 0.
pub(crate) const ICR_BITS: u64 = 0xffff_ffff_000c_cfff;

impl LocalApic {
    /// Puts the inputs LINT0 and LINT1 as firmware does: interrupts of an 8259, and the
    /// non-maskable interrupt.
    pub fn set_up_inputs(&mut self) {
        self.table[LVT_LINT0] |= 0x700;
        self.table[LVT_LINT1] |= 0x400;
    }

    /// Reads a register; `None` if there is no such one, or it cannot be read.
    pub(super) fn read_register(&mut self, register: u32, now: u64) -> Option<u32> {
        let word = |set: &crate::Vectors| {
            let index = usize::try_from(register & 7).unwrap_or(0);
            set.0[index]
        };
        Some(match register {
            ID if self.mode == Mode::X2Apic => self.id,
            ID => self.id << 24,
            VERSION => VERSION_VALUE,
            TASK_PRIORITY => self.task_priority.into(),
            // Of buses that no processor has had since the Pentium.
            ARBITRATION_PRIORITY => 0,
            PROCESSOR_PRIORITY => self.processor_priority().into(),
            LOGICAL_DESTINATION => self.logical_destination(),
            DESTINATION_FORMAT => self.format,
            SPURIOUS => self.spurious,
            IN_SERVICE..BY_LEVEL => word(&self.in_service),
            BY_LEVEL..REQUESTED => word(&self.by_level),
            REQUESTED..ERRORS => word(&self.requested),
            ERRORS => self.errors_shown,
            COMMAND => low_word(self.command, 0),
            COMMAND_HIGH => low_word(self.command, 32),
            TABLE..=TABLE_END => self.table[Self::entry(register)],
            INITIAL_COUNT => self.timer.initial,
            CURRENT_COUNT => {
                self.run_timer(now);
                self.timer.current(now)
            }
            DIVIDE => self.timer.divide,
            _ => return None,
        })
    }

    /// Writes a register; `None` if there is no such one, or it cannot be written.
    pub(super) fn write_register(&mut self, register: u32, value: u32, now: u64) -> Option<Effect> {
        match register {
            // The number of a processor cannot be changed, as on all newer ones.
            ID => {}
            TASK_PRIORITY => self.task_priority = low_byte(value.into()),
            END_OF_INTERRUPT => return Some(self.end_of_interrupt()),
            LOGICAL_DESTINATION => self.logical = value & 0xff00_0000,
            DESTINATION_FORMAT => self.format = value | DFR_RESERVED,
            SPURIOUS => self.write_spurious(value),
            ERRORS => {
                self.errors_shown = self.errors;
                self.errors = 0;
            }
            COMMAND => {
                self.command = (self.command & !0xffff_ffff | u64::from(value)) & ICR_BITS;
                return Some(self.send());
            }
            COMMAND_HIGH => self.command = self.command & 0xffff_ffff | u64::from(value) << 32,
            TABLE..=TABLE_END => {
                // What it did until now.
                self.run_timer(now);
                let index = Self::entry(register);
                let forced = if self.spurious & SVR_ENABLED == 0 {
                    LVT_MASKED
                } else {
                    0
                };
                self.table[index] = value & LVT_BITS[index] | forced;
            }
            INITIAL_COUNT => {
                self.run_timer(now);
                self.timer.start(value, now);
            }
            DIVIDE => {
                self.run_timer(now);
                self.timer.set_divide(value, now);
            }
            _ => return None,
        }
        Some(Effect::None)
    }

    fn entry(register: u32) -> usize {
        usize::try_from(register - TABLE).unwrap_or(0)
    }

    fn write_spurious(&mut self, value: u32) {
        self.spurious = value & SVR_BITS;
        if value & SVR_ENABLED == 0 {
            // SDM 11.4.7.2: the masks are set and cannot be cleared.
            for entry in &mut self.table {
                *entry |= LVT_MASKED;
            }
        }
    }

    /// Sends what the command register says.
    pub(super) fn send(&mut self) -> Effect {
        let is_x2apic = self.mode == Mode::X2Apic;
        let Some(message) = Message::from_icr(self.command, is_x2apic, self.id) else {
            return Effect::None;
        };
        if message.mode.has_vector() && message.vector < FIRST_VECTOR {
            self.report(ESR_SEND_VECTOR);
            return Effect::None;
        }
        Effect::Send(message)
    }

    /// An interrupt of this CPU to itself, by the register of x2APIC mode for that.
    pub(super) fn interrupt_self(&mut self, vector: u8) {
        if vector < FIRST_VECTOR {
            return self.report(ESR_SEND_VECTOR);
        }
        self.command = u64::from(vector) | 1 << 18;
        self.accept(vector, Trigger::Edge);
    }

    /// Records an access to a register that does not exist.
    pub(super) fn no_such_register(&mut self) {
        self.report(ESR_REGISTER);
    }
}
