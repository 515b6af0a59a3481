//! The ACPI fixed hardware through which a guest powers off and restarts, and the power button.
//!
//! ACPI specification 6.5, sections 4.8.2.2.1 (fixed power button), 4.8.3.1 (PM1 event), 4.8.3.2
//! (PM1 control) and 4.8.3.6 (reset register).

use std::sync::{Arc, Mutex};

use crate::bus::{BusDevice, read_bytes, write_bytes};
use crate::event::{MachineEvent, MachineEvents};
use crate::trigger::InterruptLine;

/// Offset of the PM1a event block: status (2 bytes), then enable (2 bytes).
pub const PM1_EVENT_OFFSET: u64 = 0;
/// Offset of the PM1a control register (2 bytes).
pub const PM1_CONTROL_OFFSET: u64 = 4;
/// Number of ports of the whole block.
pub const PM_REGISTERS_LEN: u64 = 6;

/// The SLP_TYP value that means S5 (soft off) on this machine; `\_S5` in the DSDT names it.
pub const S5_SLEEP_TYPE: u8 = 5;

/// PM1 status and PM1 enable: the power button.
const POWER_BUTTON: u16 = 1 << 8;

/// PM1 control: ACPI mode is enabled. No other mode exists here, so the bit is always set.
const SCI_EN: u16 = 1 << 0;
const SLP_TYP_SHIFT: u32 = 10;
const SLP_TYP_MASK: u16 = 0b111 << SLP_TYP_SHIFT;
/// PM1 control: enter the sleep state in SLP_TYP. Write-only.
const SLP_EN: u16 = 1 << 13;

#[derive(Debug, Default)]
struct Pm1 {
    status: u16,
    enable: u16,
    control: u16,
    /// Current level of the interrupt line.
    raised: bool,
}

/// PM1a event and control blocks. Entering S5 requests a shutdown of the machine; other sleep
/// states are not announced and are ignored. The only fixed event is the power button; its
/// interrupt line is raised while its bits in the status and enable registers are both set.
#[derive(Debug)]
pub struct PmRegisters {
    registers: Mutex<Pm1>,
    events: MachineEvents,
    interrupt: Arc<dyn InterruptLine>,
}

impl PmRegisters {
    /// Creates registers that report a power-off to `events` and raise `interrupt` for their own
    /// events.
    pub fn new(events: MachineEvents, interrupt: Arc<dyn InterruptLine>) -> Self {
        Self {
            registers: Mutex::new(Pm1::default()),
            events,
            interrupt,
        }
    }

    /// Presses the power button. Returns false, without effect, if the guest has not enabled the
    /// event and would not notice.
    pub fn press_power_button(&self) -> bool {
        let mut registers = crate::lock(&self.registers);
        if registers.enable & POWER_BUTTON == 0 {
            return false;
        }
        registers.status |= POWER_BUTTON;
        self.update_interrupt(&mut registers);
        true
    }

    /// Called under the lock, so that the line follows the newest registers.
    fn update_interrupt(&self, registers: &mut Pm1) {
        let raised = registers.status & registers.enable & POWER_BUTTON != 0;
        if registers.raised != raised {
            registers.raised = raised;
            self.interrupt.set(raised);
        }
    }
}

/// `word` with the byte at `index` (0 or 1) replaced.
fn with_byte(word: u16, index: u64, byte: u8) -> u16 {
    let [low, high] = word.to_le_bytes();
    match index {
        0 => u16::from_le_bytes([byte, high]),
        _ => u16::from_le_bytes([low, byte]),
    }
}

impl BusDevice for PmRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let registers = crate::lock(&self.registers);
        read_bytes(offset, data, |at| {
            let word = match at / 2 {
                0 => registers.status,
                1 => registers.enable,
                2 => registers.control | SCI_EN,
                _ => return 0xff,
            };
            let [low, high] = word.to_le_bytes();
            if at % 2 == 0 { low } else { high }
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut registers = crate::lock(&self.registers);
        write_bytes(offset, data, |at, byte| match at / 2 {
            // Status bits are cleared by writing ones.
            0 => registers.status &= !with_byte(0, at % 2, byte),
            1 => registers.enable = with_byte(registers.enable, at % 2, byte),
            2 => {
                let value = with_byte(registers.control, at % 2, byte);
                registers.control = value & !SLP_EN;
                let sleep_type = (value & SLP_TYP_MASK) >> SLP_TYP_SHIFT;
                if value & SLP_EN != 0 && sleep_type == u16::from(S5_SLEEP_TYPE) {
                    self.events.signal(MachineEvent::Shutdown);
                }
            }
            _ => {}
        });
        self.update_interrupt(&mut registers);
    }
}

/// The bit of [`ResetRegister`] that resets the CPU; that of port 0xcf9 of common chipsets.
const RESET_CPU: u8 = 1 << 2;
/// The value that the FADT asks the guest to write.
pub const RESET_VALUE: u8 = 0x06;

/// A one-byte register that restarts the machine when bit 2 is written.
#[derive(Debug)]
pub struct ResetRegister {
    events: MachineEvents,
}

impl ResetRegister {
    /// Creates a register that reports restarts to `events`.
    pub fn new(events: MachineEvents) -> Self {
        Self { events }
    }
}

impl BusDevice for ResetRegister {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        write_bytes(offset, data, |at, byte| {
            if at == 0 && byte & RESET_CPU != 0 {
                self.events.signal(MachineEvent::Reboot);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use proptest::prelude::*;

    use super::*;

    /// An interrupt line that records its level.
    #[derive(Debug, Default)]
    struct Line(AtomicBool);

    impl InterruptLine for Line {
        fn set(&self, raised: bool) {
            let before = self.0.swap(raised, Ordering::Relaxed);
            assert_ne!(before, raised, "the line is set to the level that it has");
        }
    }

    fn registers(events: &MachineEvents) -> (PmRegisters, Arc<Line>) {
        let line = Arc::new(Line::default());
        (PmRegisters::new(events.clone(), line.clone()), line)
    }

    #[test]
    fn a_pressed_button_raises_the_line_until_the_guest_has_seen_it() {
        const ENABLE_OFFSET: u64 = PM1_EVENT_OFFSET + 2;
        let events = MachineEvents::new().unwrap();
        let (device, line) = registers(&events);
        let raised = || line.0.load(Ordering::Relaxed);
        assert!(!device.press_power_button(), "the event is not enabled yet");
        assert_eq!(read_word(&device, PM1_EVENT_OFFSET), 0);
        device.write(ENABLE_OFFSET, &POWER_BUTTON.to_le_bytes());
        assert!(!raised(), "an earlier press is discarded");
        for _ in 0..2 {
            assert!(device.press_power_button());
            assert!(device.press_power_button());
            assert!(raised());
            assert_eq!(read_word(&device, PM1_EVENT_OFFSET), POWER_BUTTON);
            // Zeroes do not clear it, and neither does a write to the adjacent byte.
            device.write(PM1_EVENT_OFFSET, &[0xff]);
            device.write(PM1_EVENT_OFFSET, &[0, 0]);
            assert!(raised());
            device.write(PM1_EVENT_OFFSET + 1, &[1]);
            assert!(!raised());
            assert_eq!(read_word(&device, PM1_EVENT_OFFSET), 0);
        }
        assert!(device.press_power_button());
        device.write(ENABLE_OFFSET, &[0, 0]);
        assert!(!raised(), "masked");
        device.write(ENABLE_OFFSET, &POWER_BUTTON.to_le_bytes());
        assert!(raised(), "still set");
        assert_eq!(events.get(), None);
    }

    fn read_word(device: &PmRegisters, offset: u64) -> u16 {
        let mut data = [0; 2];
        device.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    #[test]
    fn sleeping_in_s5_asks_for_a_shutdown_when_slp_en_is_written() {
        let events = MachineEvents::new().unwrap();
        let (device, _) = registers(&events);
        let s5 = u16::from(S5_SLEEP_TYPE) << SLP_TYP_SHIFT;
        device.write(PM1_CONTROL_OFFSET, &s5.to_le_bytes());
        assert_eq!(events.get(), None);
        assert_eq!(read_word(&device, PM1_CONTROL_OFFSET), s5 | SCI_EN);
        device.write(PM1_CONTROL_OFFSET, &(s5 | SLP_EN).to_le_bytes());
        assert_eq!(events.get(), Some(MachineEvent::Shutdown));
        // SLP_EN reads as zero.
        assert_eq!(read_word(&device, PM1_CONTROL_OFFSET), s5 | SCI_EN);
    }

    #[test]
    fn other_sleep_states_are_ignored() {
        let events = MachineEvents::new().unwrap();
        let (device, _) = registers(&events);
        for sleep_type in (0..8u16).filter(|t| *t != u16::from(S5_SLEEP_TYPE)) {
            let value = (sleep_type << SLP_TYP_SHIFT) | SLP_EN;
            device.write(PM1_CONTROL_OFFSET, &value.to_le_bytes());
        }
        assert_eq!(events.get(), None);
    }

    #[test]
    fn the_reset_value_asks_for_a_reboot() {
        let events = MachineEvents::new().unwrap();
        let device = ResetRegister::new(events.clone());
        device.write(0, &[0x02]);
        assert_eq!(events.get(), None);
        device.write(0, &[RESET_VALUE]);
        assert_eq!(events.get(), Some(MachineEvent::Reboot));
    }

    proptest! {
        #[test]
        fn any_access_is_survived(offset: u64, data: Vec<u8>) {
            let events = MachineEvents::new().unwrap();
            let offset = offset >> 1;
            for device in [
                &registers(&events).0 as &dyn BusDevice,
                &ResetRegister::new(events.clone()),
            ] {
                device.write(offset, &data);
                device.write(offset % 8, &data);
                device.read(offset, &mut data.clone());
                device.read(offset % 8, &mut data.clone());
            }
        }
    }
}
