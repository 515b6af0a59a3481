//! The keyboard controller, reduced to its CPU reset.

use std::fmt;
use std::sync::{Arc, Mutex};

use vm_superio::{I8042Device, Trigger};

use crate::bus::{BusDevice, read_bytes, write_bytes};
use crate::event::{MachineEvent, MachineEvents};

/// Data port of the keyboard controller. The ports up to its command port belong to other devices.
pub const I8042_DATA_PORT: u64 = 0x60;
/// Command port of the keyboard controller.
pub const I8042_COMMAND_PORT: u64 = 0x64;

/// Registers of the controller.
const DATA: u8 = 0;
const COMMAND: u8 = 4;

/// Reports a restart on the controller's reset command.
struct RebootTrigger(MachineEvents);

impl Trigger for RebootTrigger {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.signal(MachineEvent::Reboot);
        Ok(())
    }
}

/// A port of a keyboard controller without a keyboard: command 0xfe at port 0x64 restarts the
/// machine, everything else is ignored, and reads return 0 (no data, input buffer empty).
pub struct I8042 {
    device: Arc<Mutex<I8042Device<RebootTrigger>>>,
    register: u8,
}

impl fmt::Debug for I8042 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("I8042")
            .field("register", &self.register)
            .finish_non_exhaustive()
    }
}

impl I8042 {
    /// Creates a controller that reports restarts to `events`; returns its data port and its command
    /// port.
    pub fn ports(events: MachineEvents) -> [Self; 2] {
        let device = Arc::new(Mutex::new(I8042Device::new(RebootTrigger(events))));
        [DATA, COMMAND].map(|register| Self {
            device: Arc::clone(&device),
            register,
        })
    }
}

impl BusDevice for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut device = crate::lock(&self.device);
        read_bytes(offset, data, |at| match at {
            0 => device.read(self.register),
            _ => 0xff,
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut device = crate::lock(&self.device);
        write_bytes(offset, data, |at, byte| {
            if at == 0 {
                let Ok(()) = device.write(self.register, byte);
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
        let [data, command] = I8042::ports(events.clone());
        command.write(0, &[0xaa]);
        data.write(0, &[0xfe]);
        assert_eq!(events.get(), None);
        let mut read = [0xff];
        for port in [&data, &command] {
            port.read(0, &mut read);
            assert_eq!(read, [0]);
        }
        command.write(0, &[0xfe]);
        assert_eq!(events.get(), Some(MachineEvent::Reboot));
    }

    proptest! {
        #[test]
        fn any_access_is_survived(offset: u64, data: Vec<u8>) {
            // The bus adds at most the width to an offset inside its range.
            let offset = offset >> 1;
            for port in I8042::ports(MachineEvents::new().unwrap()) {
                port.write(offset, &data);
                port.read(offset, &mut data.clone());
            }
        }
    }
}
