//! How a CPU reaches the registers: a page of memory, or model-specific registers.

use super::registers::{
    ARBITRATION_PRIORITY, COMMAND, COMMAND_HIGH, DESTINATION_FORMAT, DIVIDE, END_OF_INTERRUPT,
    ERRORS, ICR_BITS, INITIAL_COUNT, LVT_BITS, SELF_IPI, SPURIOUS, SVR_BITS, TABLE, TABLE_END,
    TASK_PRIORITY,
};
use super::{Effect, LocalApic, Mode};
use crate::message::{low_byte, low_word};

/// Bytes of the page with the registers in xAPIC mode.
pub const PAGE_LEN: u64 = 0x1000;
/// The first of the model-specific registers of x2APIC mode.
pub const FIRST_MSR: u32 = 0x800;
/// The last of them.
pub const LAST_MSR: u32 = 0x8ff;

/// An access for which the CPU raises a general protection exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidAccess;

impl LocalApic {
    /// Reads `data.len()` bytes at `offset` of the page. Outside registers there are zeroes.
    pub fn read_page(&mut self, offset: u64, data: &mut [u8], now: u64) {
        data.fill(0);
        let (register, within) = place(offset);
        // A register has 4 bytes of its 16 (SDM 11.4.1).
        let wanted = within..within + data.len();
        if wanted.end > 4 {
            return;
        }
        match self.read_register(register, now) {
            Some(value) => data.copy_from_slice(&value.to_le_bytes()[wanted]),
            None => self.no_such_register(),
        }
    }

    /// Writes `data` at `offset` of the page. Only whole registers can be written.
    pub fn write_page(&mut self, offset: u64, data: &[u8], now: u64) -> Effect {
        let (register, within) = place(offset);
        let (0, Ok(bytes)) = (within, data.try_into()) else {
            return Effect::None;
        };
        let value = u32::from_le_bytes(bytes);
        match self.write_register(register, value, now) {
            Some(effect) => effect,
            None => {
                // Writes of what can only be read are ignored.
                if self.read_register(register, now).is_none() {
                    self.no_such_register();
                }
                Effect::None
            }
        }
    }

    /// Reads a model-specific register from [`FIRST_MSR`] to [`LAST_MSR`].
    ///
    /// # Errors
    ///
    /// For registers that cannot be read, and outside x2APIC mode.
    pub fn read_msr(&mut self, msr: u32, now: u64) -> Result<u64, InvalidAccess> {
        let register = self.of_msr(msr)?;
        match register {
            COMMAND => Ok(self.command),
            ARBITRATION_PRIORITY | DESTINATION_FORMAT | COMMAND_HIGH => Err(InvalidAccess),
            _ => {
                let value = self.read_register(register, now);
                value.map(u64::from).ok_or(InvalidAccess)
            }
        }
    }

    /// Writes a model-specific register from [`FIRST_MSR`] to [`LAST_MSR`].
    ///
    /// # Errors
    ///
    /// For registers that cannot be written, for values with reserved bits, and outside x2APIC
    /// mode.
    pub fn write_msr(&mut self, msr: u32, value: u64, now: u64) -> Result<Effect, InvalidAccess> {
        let register = self.of_msr(msr)?;
        let writable: u64 = match register {
            COMMAND => ICR_BITS,
            TASK_PRIORITY | SELF_IPI => 0xff,
            // These two take nothing but 0.
            END_OF_INTERRUPT | ERRORS => 0,
            SPURIOUS => SVR_BITS.into(),
            // The delivery status and the remote IRR can be written back as they were read.
            TABLE..=TABLE_END => {
                let index = usize::try_from(register - TABLE).unwrap_or(0);
                u64::from(LVT_BITS[index]) | 0x5000
            }
            INITIAL_COUNT => 0xffff_ffff,
            DIVIDE => 0b1011,
            _ => return Err(InvalidAccess),
        };
        if value & !writable != 0 {
            return Err(InvalidAccess);
        }
        match register {
            COMMAND => {
                self.command = value;
                Ok(self.send())
            }
            SELF_IPI => {
                self.interrupt_self(low_byte(value));
                Ok(Effect::None)
            }
            _ => self
                .write_register(register, low_word(value, 0), now)
                .ok_or(InvalidAccess),
        }
    }

    fn of_msr(&self, msr: u32) -> Result<u32, InvalidAccess> {
        if self.mode != Mode::X2Apic || !(FIRST_MSR..=LAST_MSR).contains(&msr) {
            return Err(InvalidAccess);
        }
        Ok(msr - FIRST_MSR)
    }
}

/// The register at an offset of the page, and the byte within it.
fn place(offset: u64) -> (u32, usize) {
    let register = u32::try_from(offset / 16).unwrap_or(u32::MAX);
    (register, usize::try_from(offset % 16).unwrap_or(0))
}
