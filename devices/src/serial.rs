//! The 16550 serial port that is the guest's console.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use vm_superio::Serial;
use vm_superio::serial::SerialEvents;
use vmm_sys_util::eventfd::EventFd;

use crate::bus::{BusDevice, read_bytes, write_bytes};
use crate::console_output::ConsoleOutput;
use crate::trigger::EventFdTrigger;

/// First port of COM1.
pub const COM1_PORT: u64 = 0x3f8;
/// Interrupt of COM1.
pub const COM1_IRQ: u32 = 4;
/// First port of COM2.
pub const COM2_PORT: u64 = 0x2f8;
/// Interrupt of COM2.
pub const COM2_IRQ: u32 = 3;
/// Ports of a 16550.
pub const SERIAL_LEN: u64 = 8;

/// Transmit register (while the divisor latch is closed).
const DATA_OFFSET: u64 = 0;
/// Modem control register, which has the loop-back bit.
const MODEM_CONTROL_OFFSET: u64 = 4;

/// The transmit side: a writer that never blocks.
struct Transmit(ConsoleOutput);

impl Write for Transmit {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        for byte in buf {
            self.0.push(*byte);
        }
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Notifies the input pump that the port can accept more.
struct RoomForInput(Arc<EventFd>);

impl SerialEvents for RoomForInput {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // A full counter signals as well as one more.
        let _ = self.0.write(1);
    }
}

/// A 16550. Bytes that the guest transmits go to a [`ConsoleOutput`], bytes passed to
/// [`receive`](Self::receive) are read by the guest, and the interrupt is an [`EventFdTrigger`].
pub struct SerialPort {
    serial: Mutex<Serial<EventFdTrigger, RoomForInput, Transmit>>,
    output: ConsoleOutput,
    room: Arc<EventFd>,
}

impl fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialPort").finish_non_exhaustive()
    }
}

impl SerialPort {
    /// Creates a port with interrupt `interrupt` that transmits to `output`.
    ///
    /// # Errors
    ///
    /// Fails when the process is out of descriptors.
    pub fn new(interrupt: EventFdTrigger, output: ConsoleOutput) -> io::Result<Self> {
        let room = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        let serial = Serial::with_events(
            interrupt,
            RoomForInput(Arc::clone(&room)),
            Transmit(output.clone()),
        );
        Ok(Self {
            serial: Mutex::new(serial),
            output,
            room,
        })
    }

    /// Queues `input` for the guest and returns how many bytes were accepted: those for which the
    /// port had room, and none while the guest has enabled loop-back.
    pub fn receive(&self, input: &[u8]) -> usize {
        let mut serial = crate::lock(&self.serial);
        if serial.fifo_capacity() == 0 {
            return 0;
        }
        serial.enqueue_raw_bytes(input).unwrap_or_else(|error| {
            tracing::warn!(%error, "console input is dropped");
            input.len()
        })
    }

    /// Becomes readable when the guest has read everything that [`receive`](Self::receive)
    /// accepted, or has changed what may prevent the port from accepting more.
    pub fn room_event_fd(&self) -> &EventFd {
        &self.room
    }
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut serial = crate::lock(&self.serial);
        read_bytes(offset, data, |at| {
            u8::try_from(at).map_or(0xff, |at| serial.read(at))
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        write_bytes(offset, data, |at, byte| {
            if at == DATA_OFFSET {
                // Not under the lock of the port: its input must not wait for its output.
                self.output.wait_for_room();
            }
            let Ok(register) = u8::try_from(at) else {
                return;
            };
            if let Err(error) = crate::lock(&self.serial).write(register, byte) {
                tracing::warn!(%error, "writing a serial register failed");
            }
            if at == MODEM_CONTROL_OFFSET {
                let _ = self.room.write(1);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Write for Captured {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(buf);
            Ok(buf.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn port() -> (SerialPort, EventFdTrigger, Captured) {
        let captured = Captured::default();
        let interrupt = EventFdTrigger::new().unwrap();
        let output = ConsoleOutput::spawn(Box::new(captured.clone())).unwrap();
        let port = SerialPort::new(interrupt.clone(), output).unwrap();
        (port, interrupt, captured)
    }

    #[test]
    fn what_the_guest_transmits_is_written() {
        let (port, _, captured) = port();
        for byte in b"hello" {
            port.write(DATA_OFFSET, &[*byte]);
        }
        assert_eq!(port.output.close(Duration::from_secs(10)), 0);
        assert_eq!(*captured.0.lock().unwrap(), b"hello");
    }

    #[test]
    fn input_interrupts_the_guest_and_room_is_signalled_when_it_was_read() {
        let (port, interrupt, _) = port();
        port.write(1, &[1]); // enable the receive interrupt
        let taken = port.receive(&[b'a'; 100]);
        assert_eq!(taken, 64, "the size of the FIFO");
        assert_eq!(port.receive(b"b"), 0);
        assert!(interrupt.event_fd().read().is_ok());
        assert!(port.room_event_fd().read().is_err());
        let mut data = [0];
        for _ in 0..taken {
            port.read(DATA_OFFSET, &mut data);
            assert_eq!(data, [b'a']);
        }
        assert!(port.room_event_fd().read().is_ok());
        assert_eq!(port.receive(b"b"), 1);
    }

    #[test]
    fn input_waits_while_the_port_is_looped_back() {
        let (port, _, _) = port();
        port.write(MODEM_CONTROL_OFFSET, &[0x10]);
        port.room_event_fd().read().unwrap();
        assert_eq!(port.receive(b"a"), 0);
        port.write(MODEM_CONTROL_OFFSET, &[0x08]);
        assert!(port.room_event_fd().read().is_ok());
        assert_eq!(port.receive(b"a"), 1);
    }

    proptest! {
        #[test]
        fn any_accesses_are_survived(
            accesses in proptest::collection::vec((any::<bool>(), 0u64..12, any::<[u8; 4]>()), 0..64),
            offset: u64,
        ) {
            let (port, _, _) = port();
            for (write, offset, mut data) in accesses {
                if write {
                    port.write(offset, &data);
                    port.receive(&data);
                } else {
                    port.read(offset, &mut data);
                }
            }
            port.write(offset >> 1, &[0; 8]);
            port.read(offset >> 1, &mut [0; 8]);
            port.output.close(Duration::ZERO);
        }
    }
}
