//! The port through which a guest's kernel reports a panic ("pvpanic": QEMU, docs/specs/pvpanic).

use crate::bus::{BusDevice, write_bytes};
use crate::event::{MachineEvent, MachineEvents};

/// The port number.
pub const PANIC_PORT: u64 = 0x505;
/// The ACPI id by which Linux finds the device.
pub const PANIC_ACPI_ID: &str = "QEMU0001";

/// The kernel has panicked, and nothing in the guest handles it.
const PANICKED: u8 = 1 << 0;

/// Reads return the known events; a write of [`PANICKED`] ends the run. A kernel that boots a crash
/// kernel reports another bit and continues.
#[derive(Debug)]
pub struct PanicPort {
    events: MachineEvents,
}

impl PanicPort {
    /// Creates a port that reports to `events`.
    pub fn new(events: MachineEvents) -> Self {
        Self { events }
    }
}

impl BusDevice for PanicPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let (0, Some(first)) = (offset, data.first_mut()) {
            *first = PANICKED;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        write_bytes(offset, data, |at, byte| {
            if at == 0 && byte & PANICKED != 0 {
                self.events.signal(MachineEvent::Panic);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_panic_is_told_once_and_another_event_is_not_one() {
        let events = MachineEvents::new().unwrap();
        let port = PanicPort::new(events.clone());
        let mut known = [0];
        port.read(0, &mut known);
        assert_eq!(known, [1]);
        port.write(0, &[2]);
        port.write(1, &[1]);
        assert_eq!(events.get(), None);
        port.write(0, &[3]);
        assert_eq!(events.get(), Some(MachineEvent::Panic));
    }

    proptest! {
        #[test]
        fn any_access_is_survived(offset: u64, data: Vec<u8>) {
            let port = PanicPort::new(MachineEvents::new().unwrap());
            port.write(offset >> 1, &data);
            port.read(offset >> 1, &mut data.clone());
        }
    }
}
