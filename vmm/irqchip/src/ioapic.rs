//! The I/O APIC: 24 inputs, each with an entry that says which interrupt it makes (82093AA).
//!
//! As in KVM's, the polarity of an input is ignored: a line is raised when its device asks.

use crate::message::{DeliveryMode, Message, Trigger, low_byte, low_word};

/// Bytes of its registers.
pub const IOAPIC_LEN: u64 = 0x100;
/// How many inputs it has.
pub const PINS: usize = 24;

/// The offsets of the two registers through which the others are reached (3.1).
const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;

/// Numbers of the registers behind the window (3.2).
const ID: u8 = 0x00;
const VERSION: u8 = 0x01;
const ARBITRATION: u8 = 0x02;
const REDIRECTION: u8 = 0x10;

/// Version 0x11, which has no register for the end of an interrupt, and the last entry's number.
const VERSION_VALUE: u32 = 0x11 | 23 << 16;
const ID_BITS: u32 = 0x0f00_0000;

/// The entry waits for the end of the interrupt that it has sent. Set by the I/O APIC alone.
pub(crate) const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
pub(crate) const MASKED: u64 = 1 << 16;
/// What the guest can write: all but delivery status, remote IRR and reserved bits.
pub(crate) const WRITABLE: u64 = 0xff00_0000_0001_afff;

/// An I/O APIC. What it sends goes to the function that each call is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoApic {
    pub(crate) id: u32,
    pub(crate) select: u8,
    pub(crate) entries: [u64; PINS],
    /// A bit for each line that is raised.
    pub(crate) raised: u32,
}

impl Default for IoApic {
    fn default() -> Self {
        Self {
            id: 0,
            select: 0,
            entries: [MASKED; PINS],
            raised: 0,
        }
    }
}

impl IoApic {
    /// Reads `data.len()` bytes at `offset`.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let value = match offset {
            SELECT => self.select.into(),
            WINDOW => self.read_register(),
            _ => return,
        };
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    /// Writes `data` at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8], send: &mut dyn FnMut(Message)) {
        let mut bytes = [0; 4];
        for (to, from) in bytes.iter_mut().zip(data) {
            *to = *from;
        }
        match offset {
            SELECT => self.select = bytes[0],
            WINDOW => self.write_register(u32::from_le_bytes(bytes), send),
            _ => {}
        }
    }

    /// The entry that is selected, and whether its upper half is.
    fn selected(&self) -> Option<(usize, bool)> {
        let number = self.select.checked_sub(REDIRECTION)?;
        let pin = usize::from(number / 2);
        (pin < PINS).then_some((pin, number % 2 == 1))
    }

    fn read_register(&self) -> u32 {
        match (self.select, self.selected()) {
            (ID | ARBITRATION, _) => self.id,
            (VERSION, _) => VERSION_VALUE,
            (_, Some((pin, upper))) => low_word(self.entries[pin], if upper { 32 } else { 0 }),
            _ => 0,
        }
    }

    fn write_register(&mut self, value: u32, send: &mut dyn FnMut(Message)) {
        if self.select == ID {
            self.id = value & ID_BITS;
        }
        let Some((pin, upper)) = self.selected() else {
            return;
        };
        let old = self.entries[pin];
        let value = u64::from(value);
        let changed = if upper {
            old & 0xffff_ffff | value << 32
        } else {
            old & !0xffff_ffff | value
        };
        let mut entry = changed & WRITABLE | old & REMOTE_IRR;
        if entry & LEVEL == 0 {
            // An entry that is made edge-triggered waits for no end. Kernels do that to end an
            // interrupt on an I/O APIC without a register for it.
            entry &= !REMOTE_IRR;
        }
        self.entries[pin] = entry;
        self.send_level(pin, send);
    }

    /// Raises or lowers a line.
    pub fn set_line(&mut self, pin: usize, raised: bool, send: &mut dyn FnMut(Message)) {
        let Some(entry) = self.entries.get(pin) else {
            return;
        };
        let bit = 1 << pin;
        let was_raised = self.raised & bit != 0;
        if !raised {
            self.raised &= !bit;
            return;
        }
        self.raised |= bit;
        if entry & LEVEL != 0 {
            self.send_level(pin, send);
        } else if !was_raised && entry & MASKED == 0 {
            // Edges at a masked input are lost (3.2.4, bit 16).
            Message::from_redirection(*entry).into_iter().for_each(send);
        }
    }

    /// Sends a level-triggered interrupt if its line is raised and the last one has ended.
    fn send_level(&mut self, pin: usize, send: &mut dyn FnMut(Message)) {
        let entry = self.entries[pin];
        let is_raised = self.raised >> pin & 1 != 0;
        if entry & (LEVEL | MASKED | REMOTE_IRR) != LEVEL || !is_raised {
            return;
        }
        let Some(message) = Message::from_redirection(entry) else {
            return;
        };
        if message.mode.has_vector() {
            self.entries[pin] |= REMOTE_IRR;
            send(message);
        } else if message.mode == DeliveryMode::Nmi {
            // Always by an edge, whatever the entry says.
            let trigger = Trigger::Edge;
            send(Message { trigger, ..message });
        }
    }

    /// A CPU has ended the interrupt with this vector. An interrupt whose line is still raised is
    /// sent again.
    pub fn end_of_interrupt(&mut self, vector: u8, send: &mut dyn FnMut(Message)) {
        for pin in 0..PINS {
            let entry = &mut self.entries[pin];
            if *entry & REMOTE_IRR != 0 && low_byte(*entry) == vector {
                *entry &= !REMOTE_IRR;
                self.send_level(pin, send);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Destination;

    /// An I/O APIC, and what it has sent.
    #[derive(Default)]
    struct Bench {
        chip: IoApic,
        sent: Vec<Message>,
    }

    impl Bench {
        fn write(&mut self, register: u8, value: u32) {
            let Self { chip, sent } = self;
            chip.write(SELECT, &[register], &mut |message| sent.push(message));
            let value = value.to_le_bytes();
            chip.write(WINDOW, &value, &mut |message| sent.push(message));
        }

        fn read(&mut self, register: u8) -> u32 {
            self.chip.select = register;
            let mut data = [0; 4];
            self.chip.read(WINDOW, &mut data);
            u32::from_le_bytes(data)
        }

        fn line(&mut self, pin: usize, raised: bool) -> Vec<u8> {
            let sent = &mut self.sent;
            self.chip
                .set_line(pin, raised, &mut |message| sent.push(message));
            self.vectors()
        }

        fn end(&mut self, vector: u8) -> Vec<u8> {
            let sent = &mut self.sent;
            self.chip
                .end_of_interrupt(vector, &mut |message| sent.push(message));
            self.vectors()
        }

        fn vectors(&mut self) -> Vec<u8> {
            self.sent.drain(..).map(|message| message.vector).collect()
        }
    }

    /// The register of the lower half of an entry.
    const fn low(pin: u8) -> u8 {
        REDIRECTION + 2 * pin
    }

    #[test]
    fn registers_read_as_the_data_sheet_says() {
        let mut bench = Bench::default();
        assert_eq!(bench.read(VERSION), 0x0017_0011);
        bench.write(ID, 0xffff_ffff);
        assert_eq!(bench.read(ID), 0x0f00_0000);
        assert_eq!(bench.read(low(23)), 0x1_0000, "masked");
        bench.write(low(3), 0xffff_ffff);
        bench.write(low(3) + 1, 0xffff_ffff);
        assert_eq!(bench.read(low(3)), 0x1_afff);
        assert_eq!(bench.read(low(3) + 1), 0xff00_0000);
        assert_eq!(bench.read(0x40), 0, "behind the last entry");
        bench.write(0x40, 1);
        assert_eq!(bench.line(24, true), [0; 0], "no such line");
    }

    #[test]
    fn an_edge_is_sent_once_and_lost_while_masked() {
        let mut bench = Bench::default();
        assert_eq!(bench.line(4, true), [0; 0]);
        bench.line(4, false);
        bench.write(low(4) + 1, 2 << 24);
        bench.write(low(4), 0x31);
        assert!(bench.sent.is_empty());
        let Bench { chip, sent } = &mut bench;
        chip.set_line(4, true, &mut |message| sent.push(message));
        let message = bench.sent.pop().unwrap();
        assert_eq!(message.destination, Destination::Physical(2));
        assert_eq!((message.vector, message.trigger), (0x31, Trigger::Edge));
        assert_eq!(bench.line(4, true), [0; 0], "it is high already");
        bench.line(4, false);
        assert_eq!(bench.line(4, true), [0x31]);
        assert_eq!(bench.end(0x31), [0; 0]);
    }

    #[test]
    fn a_level_is_sent_again_after_its_end_while_it_is_raised() {
        let mut bench = Bench::default();
        bench.write(low(9), 0x8040);
        assert_eq!(bench.line(9, true), [0x40]);
        assert_eq!(bench.read(low(9)), 0xc040, "remote IRR");
        bench.line(9, false);
        assert_eq!(bench.line(9, true), [0; 0], "the first has not ended");
        assert_eq!(bench.end(0x41), [0; 0], "another interrupt");
        assert_eq!(bench.end(0x40), [0x40]);
        bench.line(9, false);
        assert_eq!(bench.end(0x40), [0; 0]);
        assert_eq!(bench.read(low(9)), 0x8040);
        assert_eq!(bench.line(9, true), [0x40]);
    }

    #[test]
    fn a_masked_level_is_sent_when_it_is_unmasked() {
        let mut bench = Bench::default();
        bench.write(low(9), 0x1_8040);
        assert_eq!(bench.line(9, true), [0; 0]);
        bench.write(low(9), 0x8040);
        assert_eq!(bench.vectors(), [0x40]);
        // Masked by the handler before the end, and unmasked after.
        bench.write(low(9), 0x1_8040);
        assert_eq!(bench.read(low(9)), 0x1_c040, "remote IRR is kept");
        assert_eq!(bench.end(0x40), [0; 0]);
        bench.write(low(9), 0x8040);
        assert_eq!(bench.vectors(), [0x40]);
    }

    #[test]
    fn remote_irr_is_cleared_by_a_change_to_edge_and_back() {
        let mut bench = Bench::default();
        bench.write(low(9), 0x8040);
        assert_eq!(bench.line(9, true), [0x40]);
        bench.line(9, false);
        bench.write(low(9), 0x1_0040);
        bench.write(low(9), 0x8040);
        assert_eq!(bench.vectors(), [0; 0]);
        assert_eq!(bench.line(9, true), [0x40]);
    }

    #[test]
    fn lines_with_one_vector_are_ended_together() {
        let mut bench = Bench::default();
        for pin in [16, 17] {
            bench.write(low(pin), 0x8050);
        }
        assert_eq!(bench.line(16, true), [0x50]);
        assert_eq!(bench.line(17, true), [0x50]);
        assert_eq!(bench.end(0x50), [0x50, 0x50]);
    }
}
