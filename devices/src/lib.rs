//! Buses and device models of SSI-HV.
//!
//! A device is a few registers behind the [`BusDevice`] trait. The machine monitor inserts devices
//! into a [`Bus`] (one for I/O ports, one for memory-mapped registers), and forwards every access
//! that leaves the guest to the bus. This crate knows neither KVM nor, except for services of the
//! host, the memory fabric: interrupts leave through an [`EventFdTrigger`] or an [`InterruptLine`],
//! requests to power off or restart through [`MachineEvents`], and console bytes through
//! [`ConsoleOutput`].
//!
//! | device | where | purpose |
//! |---|---|---|
//! | [`SerialPort`] | ports 0x3f8..0x400 | 16550 console; a second one at 0x2f8 |
//! | [`I8042`] | ports 0x60 and 0x64 | restart by the keyboard controller |
//! | [`PmRegisters`] | 6 ports | ACPI PM1 blocks: power off by S5 |
//! | [`ResetRegister`] | 1 port | ACPI reset register |
//! | [`PmTimer`] | 4 ports | ACPI power-management timer |
//! | [`I8254`] | ports 0x40..0x44 and 0x61 | timer, of which channel 2 counts |
//! | [`I8259`] | ports 0x20..0x22 and 0xa0..0xa2 | interrupt controllers without inputs |
//! | [`CmosRtc`] | ports 0x70..0x72 | wall-clock time |
//! | [`BootTimer`] | port 0x5f4 | the guest reports that its init runs, and that it has booted |
//! | [`PanicPort`] | port 0x505 | the guest reports a kernel panic |
//! | [`virtio::Balloon`] | a page of [`virtio::MmioTransport`] | the guest reports free memory |
//! | [`virtio::Block`] | such a page | a disk |
//! | [`virtio::Net`] | such a page | a network card on a tap of the host |
//! | [`virtio::Vsock`] | such a page | sockets between guest and host |
//! | [`virtio::Console`] | such a page | a terminal on a socket of the host |
//! | [`virtio::Entropy`] | such a page | random numbers from the host |
//!
//! Principles:
//! - Every value that a guest can choose (offset, width, data) is legal: a device handles or
//!   ignores it, and never panics. Property tests check this for each device.
//! - Reads that no device handles return all ones, as on an ISA bus.
//! - Devices never end the process.

mod acpi_pm;
mod boot_timer;
mod bus;
mod console_output;
mod event;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod i8042;
mod i8254;
mod i8259;
mod panic_port;
mod pm_timer;
mod rtc;
mod serial;
mod sys;
mod trigger;
pub mod virtio;

pub use acpi_pm::{
    PM_REGISTERS_LEN, PM1_CONTROL_OFFSET, PM1_EVENT_OFFSET, PmRegisters, RESET_VALUE,
    ResetRegister, S5_SLEEP_TYPE,
};
pub use boot_timer::{
    BOOT_TIMER_INIT_REACHED, BOOT_TIMER_PORT, BOOT_TIMER_READY, BootEvent, BootTimer,
};
pub use bus::{Bus, BusDevice, BusError, BusRange};
pub use console_output::{CONSOLE_BUFFER_BYTES_MAX, ConsoleOutput};
pub use event::{MachineEvent, MachineEvents};
pub use i8042::{I8042, I8042_COMMAND_PORT, I8042_DATA_PORT};
pub use i8254::{I8254, I8254_LEN, I8254_PORT, SPEAKER_PORT};
pub use i8259::{I8259, I8259_FIRST_PORT, I8259_LEN, I8259_SECOND_PORT};
pub use panic_port::{PANIC_ACPI_ID, PANIC_PORT, PanicPort};
pub use pm_timer::{PM_TIMER_LEN, PM_TIMER_OFFSET, PmTimer};
pub use rtc::{CMOS_RTC_LEN, CMOS_RTC_PORT, CmosRtc, RTC_CENTURY_REGISTER};
pub use serial::{COM1_IRQ, COM1_PORT, COM2_IRQ, COM2_PORT, SERIAL_LEN, SerialPort};
pub use trigger::{EventFdTrigger, InterruptLine};

// A panic of another thread cannot have left registers half updated: register updates do not panic.
pub(crate) use fabric_host::lock;
