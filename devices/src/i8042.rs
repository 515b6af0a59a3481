//! The keyboard controller, reduced to its CPU reset.

use std::fmt;
use std::sync::Mutex;

use vm_superio::{I8042Device, Trigger};

use crate::bus::{BusDevice, read_bytes, write_bytes};
use crate::event::{MachineEvent, MachineEvents};

/// Data port of the keyboard controller; the command port is 4 higher.
pub const I8042_PORT: u64 = 0x60;
/// Number of ports from the data port to the command port.
pub const I8042_LEN: u64 = 5;

/// Reports a restart on the controller's reset command.
struct RebootTrigger(MachineEvents);

impl Trigger for RebootTrigger {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.signal(MachineEvent::Reboot);
        Ok(())
    }
}

/// A keyboard controller without a keyboard: command 0xfe at port 0x64 restarts the machine,
/// everything else is ignored, and reads return 0 (no data, input buffer empty).
pub struct I8042 {
    device: Mutex<I8042Device<RebootTrigger>>,
}

impl fmt::Debug for I8042 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("I8042").finish_non_exhaustive()
    }
}

impl I8042 {
    /// Creates a controller that reports restarts to `events`.
    pub fn new(events: MachineEvents) -> Self {
        Self {
            device: Mutex::new(I8042Device::new(RebootTrigger(events))),
        }
    }
}

impl BusDevice for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut device = crate::lock(&self.device);
        read_bytes(offset, data, |at| {
            u8::try_from(at).map_or(0xff, |at| device.read(at))
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut device = crate::lock(&self.device);
        write_bytes(offset, data, |at, byte| {
            if let Ok(at) = u8::try_from(at) {
                let Ok(()) = device.write(at, byte);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_reset_command_asks_for_a_reboot() {
        let events = MachineEvents::new().unwrap();
        let device = I8042::new(events.clone());
        device.write(4, &[0xaa]);
        device.write(0, &[0xfe]);
        assert_eq!(events.get(), None);
        device.write(4, &[0xfe]);
        assert_eq!(events.get(), Some(MachineEvent::Reboot));
    }

    proptest! {
        #[test]
        fn any_access_is_survived(offset: u64, data: Vec<u8>) {
            let device = I8042::new(MachineEvents::new().unwrap());
            // The bus adds at most the width to an offset inside its range.
            let offset = offset >> 1;
            device.write(offset, &data);
            device.read(offset, &mut data.clone());
        }
    }
}
