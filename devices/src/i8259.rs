//! A pair of 8259 interrupt controllers that are there and never interrupt.
//!
//! A machine whose I/O APIC is in user space has no use for them. A kernel that finds none gives no
//! numbers to ISA interrupts, and drivers that use these numbers without ACPI fail. So the masks
//! can be written and read, which is how a kernel finds the controllers, and nothing is connected.

use std::sync::Mutex;

use crate::bus::{BusDevice, read_bytes, write_bytes};

/// First port of the first controller.
pub const I8259_FIRST_PORT: u64 = 0x20;
/// First port of the second controller.
pub const I8259_SECOND_PORT: u64 = 0xa0;
/// Number of ports of each.
pub const I8259_LEN: u64 = 2;

/// Command: begins an initialization, of which the next words go to the data port.
const ICW1: u8 = 1 << 4;
const ICW1_HAS_ICW4: u8 = 1 << 0;
const ICW1_SINGLE: u8 = 1 << 1;

#[derive(Debug, Default)]
struct Registers {
    mask: u8,
    /// Words of an initialization that are yet to come.
    words_left: u8,
}

/// One of the two controllers.
#[derive(Debug, Default)]
pub struct I8259 {
    registers: Mutex<Registers>,
}

impl BusDevice for I8259 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let registers = crate::lock(&self.registers);
        // The command port shows requests, of which there are none.
        read_bytes(offset, data, |at| if at == 1 { registers.mask } else { 0 });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut registers = crate::lock(&self.registers);
        write_bytes(offset, data, |at, byte| match at {
            0 if byte & ICW1 != 0 => {
                registers.mask = 0;
                registers.words_left =
                    1 + u8::from(byte & ICW1_SINGLE == 0) + u8::from(byte & ICW1_HAS_ICW4 != 0);
            }
            1 if registers.words_left > 0 => registers.words_left -= 1,
            1 => registers.mask = byte,
            _ => {}
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(chip: &I8259) -> u8 {
        let mut data = [0];
        chip.read(1, &mut data);
        data[0]
    }

    #[test]
    fn the_mask_is_what_was_written_and_no_word_of_the_initialization() {
        let chip = I8259::default();
        chip.write(1, &[0xfb]);
        assert_eq!(mask(&chip), 0xfb);
        chip.write(0, &[0x11]);
        for word in [0x30, 0x04, 0x03] {
            chip.write(1, &[word]);
            assert_eq!(mask(&chip), 0);
        }
        chip.write(1, &[0xff]);
        assert_eq!(mask(&chip), 0xff);
        // An end of interrupt is a command without effect.
        chip.write(0, &[0x20]);
        assert_eq!(mask(&chip), 0xff);
    }
}
