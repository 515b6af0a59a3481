//! States that are saved, and restored here or on another host.

use thiserror::Error;

use crate::ioapic::{IoApic, PINS, REMOTE_IRR, WRITABLE};
use crate::local::registers::{ESR_BITS, ICR_BITS, LVT_BITS, SVR_BITS};
use crate::local::timer::Timer;
use crate::local::{LocalApic, Mode};
use crate::vectors::Vectors;

/// The version of the states below.
pub const STATE_VERSION: u32 = 1;

/// Why a saved state is not restored.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum InvalidState {
    /// It was saved by another version.
    #[error("the saved state has version {found}, this program reads {STATE_VERSION}")]
    Version {
        /// The version of the state.
        found: u32,
    },
    /// A register has a value that no guest can give it.
    #[error("the saved register {register} has the value {value:#x}, which it cannot have")]
    Register {
        /// The name of the register.
        register: &'static str,
        /// Its value.
        value: u64,
    },
}

/// The state of a local APIC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the register of its name")]
pub struct LocalApicState {
    /// [`STATE_VERSION`] when it was saved.
    pub version: u32,
    pub id: u32,
    /// Bits 11:10 of IA32_APIC_BASE.
    pub mode: u8,
    pub task_priority: u8,
    pub logical_destination: u32,
    pub destination_format: u32,
    pub spurious: u32,
    pub in_service: [u32; 8],
    pub trigger_mode: [u32; 8],
    pub requested: [u32; 8],
    /// Errors that were not yet shown.
    pub errors: u32,
    pub error_status: u32,
    pub command: u64,
    pub vector_table: [u32; 6],
    pub initial_count: u32,
    pub divide: u32,
    /// Nanoseconds until the timer expires, counted from the moment of saving.
    pub expires_in_ns: Option<u64>,
}

/// The state of an I/O APIC.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the register of its name")]
pub struct IoApicState {
    /// [`STATE_VERSION`] when it was saved.
    pub version: u32,
    pub id: u32,
    pub select: u8,
    pub redirection: [u64; PINS],
    /// A bit for each line that is raised.
    pub raised: u32,
}

fn check_version(found: u32) -> Result<(), InvalidState> {
    if found == STATE_VERSION {
        Ok(())
    } else {
        Err(InvalidState::Version { found })
    }
}

/// Checks that a register has no bits beside `bits`.
fn check(
    register: &'static str,
    value: impl Into<u64>,
    bits: impl Into<u64>,
) -> Result<(), InvalidState> {
    let value = value.into();
    if value & !bits.into() == 0 {
        Ok(())
    } else {
        Err(InvalidState::Register { register, value })
    }
}

impl LocalApic {
    /// Its state at time `now`.
    #[must_use]
    pub fn save(&self, now: u64) -> LocalApicState {
        LocalApicState {
            version: STATE_VERSION,
            id: self.id,
            mode: match self.mode {
                Mode::Disabled => 0,
                Mode::XApic => 2,
                Mode::X2Apic => 3,
            },
            task_priority: self.task_priority,
            logical_destination: self.logical,
            destination_format: self.format,
            spurious: self.spurious,
            in_service: self.in_service.0,
            trigger_mode: self.by_level.0,
            requested: self.requested.0,
            errors: self.errors,
            error_status: self.errors_shown,
            command: self.command,
            vector_table: self.table,
            initial_count: self.timer.initial,
            divide: self.timer.divide,
            expires_in_ns: self.timer.expires.map(|at| at.saturating_sub(now)),
        }
    }

    /// The local APIC that was saved, from time `now` on.
    ///
    /// # Errors
    ///
    /// When the version differs, or a register has bits that are reserved.
    pub fn restore(state: &LocalApicState, now: u64) -> Result<Self, InvalidState> {
        check_version(state.version)?;
        check("mode", state.mode, 3_u8)?;
        check(
            "logical destination",
            state.logical_destination,
            0xff00_0000_u32,
        )?;
        check("spurious vector", state.spurious, SVR_BITS)?;
        check("errors", state.errors | state.error_status, ESR_BITS)?;
        check("interrupt command", state.command, ICR_BITS)?;
        check("divide configuration", state.divide, 0b1011_u32)?;
        for (entry, bits) in state.vector_table.iter().zip(LVT_BITS) {
            check("local vector table", *entry, bits)?;
        }
        // Vectors of exceptions are never requested.
        for (name, set) in [
            ("in service", state.in_service),
            ("interrupt request", state.requested),
        ] {
            check(name, set[0], 0xffff_0000_u32)?;
        }
        let timer = Timer {
            initial: state.initial_count,
            divide: state.divide,
            expires: state.expires_in_ns.map(|left| now.saturating_add(left)),
        };
        Ok(Self {
            id: state.id,
            mode: Mode::of_base(u64::from(state.mode) << 10),
            task_priority: state.task_priority,
            logical: state.logical_destination,
            format: state.destination_format | 0x0fff_ffff,
            spurious: state.spurious,
            in_service: Vectors(state.in_service),
            by_level: Vectors(state.trigger_mode),
            requested: Vectors(state.requested),
            errors: state.errors,
            errors_shown: state.error_status,
            command: state.command,
            table: state.vector_table,
            timer,
        })
    }
}

impl IoApic {
    /// Its state.
    #[must_use]
    pub fn save(&self) -> IoApicState {
        IoApicState {
            version: STATE_VERSION,
            id: self.id,
            select: self.select,
            redirection: self.entries,
            raised: self.raised,
        }
    }

    /// The I/O APIC that was saved.
    ///
    /// # Errors
    ///
    /// When the version differs, or a register has bits that are reserved.
    pub fn restore(state: &IoApicState) -> Result<Self, InvalidState> {
        check_version(state.version)?;
        check("id", state.id, 0x0f00_0000_u32)?;
        check("lines", state.raised, (1_u32 << PINS) - 1)?;
        for entry in state.redirection {
            check("redirection", entry, WRITABLE | REMOTE_IRR)?;
        }
        Ok(Self {
            id: state.id,
            select: state.select,
            entries: state.redirection,
            raised: state.raised,
        })
    }
}
